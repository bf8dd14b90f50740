// Keys, selections, and when an open page stands still. Everything here is also a link or a form: without it all works.
"use strict";
(() => {
  const typing = () => document.activeElement?.closest("input:not([type=checkbox]), select, textarea");
  const selecting = () => {
    const selection = document.getSelection();
    return selection && !selection.isCollapsed && document.getElementById("main").contains(selection.anchorNode);
  };
  const picked = () => document.querySelector("input[name=id]:checked");

  // A page that does not follow the database says so.
  const stale = (why) => {
    const note = document.getElementById("stale");
    document.body.classList.toggle("stale", Boolean(why));
    note.hidden = !why;
    note.textContent = why ? `Not up to date: ${why}` : "";
  };
  // A gateway says something every 15 s at least: one that has kept the connection and is silent is seen here.
  const SILENT_S = 40;
  let silence;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => stale(`the gateway says nothing for ${SILENT_S} s`), SILENT_S * 1000);
  };
  document.addEventListener("htmx:sse:after:connection", heard);
  const lost = (status) => {
    if (status === 401) window.location.reload(); // which leads to the form
    else stale(status ? `the gateway answers ${status}` : "the gateway does not answer");
  };
  document.addEventListener("htmx:sse:error", (event) => lost(event.detail.status));
  // The first connection is tried again here. An answer that is no stream does not belong onto the page.
  const again = (status) => {
    lost(status);
    setTimeout(() => {
      const main = document.getElementById("main");
      if (!main._htmx?.sse) htmx.ajax("GET", main.getAttribute("hx-sse:connect"), { source: main });
    }, 5000);
  };
  document.addEventListener("htmx:before:response", (event) => {
    const answer = event.detail.ctx.response;
    if (answer.headers.get("content-type")?.startsWith("text/event-stream")) return;
    event.preventDefault();
    again(answer.status);
  });
  document.addEventListener("htmx:error", () => again());

  // What somebody reads, types or selects stays where it is; the next news come with what was left out.
  document.addEventListener("htmx:sse:before:message", (event) => {
    const message = event.detail.message;
    heard();
    if (message.event === "failed") {
      stale(message.data);
    } else if (!message.event) {
      stale("");
      if (typing() || selecting() || picked()) event.preventDefault();
    }
  });

  const rows = () => [...document.querySelectorAll("table.rows tbody tr")];
  let at = null;
  const go = (step) => {
    const all = rows();
    if (!all.length) return;
    const now = all.findIndex((row) => row.id === at);
    const next = all[Math.min(Math.max(now + step, 0), all.length - 1)];
    all.forEach((row) => row.classList.toggle("at", row === next));
    at = next.id;
    next.scrollIntoView({ block: "nearest" });
    (next.querySelector("input[name=id]") || next.querySelector("a")).focus();
  };
  const current = () => document.getElementById(at ?? "");
  const keys = {
    "/": () => document.querySelector("[data-search]")?.focus(),
    j: () => go(1),
    k: () => go(-1),
    x: () => current()?.querySelector("input[name=id]")?.click(),
    r: () => picked() && document.querySelector("[data-key=r]")?.click(),
    Enter: () => document.activeElement?.matches("input[name=id]") && current()?.querySelector("a")?.click(),
    "?": () => document.getElementById("help").showModal(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing() || document.querySelector("dialog[open]")) return;
    const act = keys[event.key];
    if (!act || (event.key === "Enter" && !document.activeElement?.matches("input[name=id]"))) return;
    event.preventDefault();
    act();
  });
  document.addEventListener("change", (event) => {
    if (!event.target.matches("[data-all]")) return;
    document.querySelectorAll("input[name=id]").forEach((box) => { box.checked = event.target.checked; });
  });
  // A form that is on its way is not sent again: the browser would drop the first answer, which may have a token.
  const SENT_S = 10;
  let sent = new Set();
  window.addEventListener("pageshow", () => { sent = new Set(); });
  document.addEventListener("submit", (event) => {
    const form = event.target;
    const question = event.submitter?.dataset.confirm ?? form.dataset.confirm;
    if (sent.has(form) || (question && !window.confirm(question))) {
      event.preventDefault();
    } else if (form.method === "post") {
      sent.add(form);
      setTimeout(() => sent.delete(form), SENT_S * 1000);
    }
  });
})();
