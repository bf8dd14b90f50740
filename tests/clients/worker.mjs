// A worker of pgworkd for Node 18 or newer, without dependencies. The types in comments are TypeScript's, which checks
// this file as it is (tsc --allowJs --checkJs).
//
//   PGWORKD_URL=http://127.0.0.1:8080 PGWORKD_TOKEN=pgw_... PGWORKD_QUEUE=demo node worker.mjs
import { appendFileSync } from "node:fs";
import { hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";

/** @typedef {{id: string, queue: string, kind: string, payload: any, attempt: number}} Job */
/** @typedef {{assignment: string, job: Job, deadline_s: number | null}} Assignment */

/** Raised by a handler: a retry would not help. */
class PermanentError extends Error {}

/**
 * Handlers by kind: a payload in, a result out. `signal` is aborted when the run must stop.
 * @type {Record<string, (payload: any, signal: AbortSignal) => any>}
 */
const handlers = {
  echo: (payload) => payload,
  add: ({ a, b }) => ({ sum: a + b }),
  fail: ({ message }) => {
    throw new Error(message);
  },
  fail_for_good: ({ message }) => {
    throw new PermanentError(message);
  },
  tick: async ({ file, seconds }, signal) => {
    for (let left = Math.floor(seconds * 10); left > 0; left--) {
      signal.throwIfAborted();
      appendFileSync(file, `${process.uptime()} ${process.pid}\n`);
      await sleep(100);
    }
    return "ticked";
  },
};

const { PGWORKD_URL: url, PGWORKD_TOKEN: token, PGWORKD_QUEUE: queue = "demo" } = process.env;
const slots = Number(process.env.PGWORKD_SLOTS ?? 4);
const leaseMs = Number(process.env.PGWORKD_LEASE_S ?? 30) * 1000;
const marginMs = leaseMs / 10; // what runs is stopped this long before others may be given it

let worker = 0;
let secret = "";
let renewedAt = -Infinity; // when the last beat that was answered was sent; performance.now() is not set by anybody
let state = "run";
let stopping = false;
let claims = 0; // how many were sent: the number of the last one
let read = 0; // the last one whose answer was read, or given up
/** What this worker holds, each until its settle was answered. @type {Map<string, AbortController>} */
const held = new Map();
/** What was stopped because the lease might end. It has begun, so one more list that is answered has it. */
const dropped = new Set();
let claiming = new AbortController(); // of the long poll, which a signal ends
const wakeUp = new EventTarget();

/**
 * The status and the value of an answer; status 0: there was none.
 * @param {string} method @param {string} path @param {any} [body] @param {number} [limitMs] @param {AbortSignal} [signal]
 */
async function call(method, path, body, limitMs = 10_000, signal) {
  const limit = AbortSignal.timeout(limitMs);
  const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json", "Pgworkd-Secret": secret };
  const abort = new AbortController();
  const cut = () => abort.abort();
  limit.addEventListener("abort", cut);
  signal?.addEventListener("abort", cut);
  try {
    const request = { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal: abort.signal };
    const answer = await fetch(url + path, request);
    const text = await answer.text();
    if (answer.status === 401 || answer.status === 403) refused(text);
    return { status: answer.status, value: text ? JSON.parse(text) : null };
  } catch {
    return { status: 0, value: null };
  } finally {
    limit.removeEventListener("abort", cut);
    signal?.removeEventListener("abort", cut);
  }
}

/** The token is wrong, or does not allow this: nothing will work. @param {string} text */
function refused(text) {
  console.error("the token is refused:", text);
  process.exit(1);
}

async function register() {
  const body = { name: hostname(), queues: { [queue]: slots }, lease_s: leaseMs / 1000, version: "1" };
  for (;;) {
    const sentAt = performance.now();
    const { status, value } = await call("POST", "/v1/workers", body);
    if (status === 201) {
      [worker, secret, renewedAt, state] = [value.worker, value.secret, sentAt, "run"];
      return;
    }
    if (stopping) return;
    console.error("register:", status, value?.detail ?? "");
    await sleep(1000);
  }
}

/** Stops everything that runs: others may be given it soon, or have it. Nothing of it is settled. */
function abandonAll() {
  for (const [assignment, run] of held) {
    run.abort("gone");
    held.delete(assignment);
    dropped.add(assignment);
  }
}

/** Renews the lease, a few times per lease, and does what the answer says. */
async function beatForEver() {
  for (;;) {
    await sleep(leaseMs / 6);
    if (performance.now() - renewedAt > leaseMs - marginMs) abandonAll();
    const sentAt = performance.now();
    const said = stopping ? "stopping" : "running";
    const list = [...held.keys(), ...dropped];
    const body = { assignments: list, claim_id: read || null, state: said };
    const { status, value } = await call("POST", `/v1/workers/${worker}/beat`, body, leaseMs / 4);
    if (status === 200) {
      renewedAt = sentAt;
      if (value.listed) for (const assignment of list) dropped.delete(assignment);
      obey(value);
    } else if (status === 410) {
      abandonAll();
      dropped.clear();
      await register();
    }
  }
}

/** @param {{state: string, cancel: string[], gone?: string[]}} told */
function obey(told) {
  state = told.state;
  for (const assignment of told.cancel) held.get(assignment)?.abort("cancel");
  for (const assignment of told.gone ?? []) {
    held.get(assignment)?.abort("gone");
    held.delete(assignment);
  }
  if (state === "stop") stop();
}

/** @param {Assignment} assigned */
async function run({ assignment, job }) {
  const stopped = new AbortController();
  held.set(assignment, stopped);
  try {
    const handler = handlers[job.kind];
    if (!handler) throw new Error(`no handler for kind ${job.kind}`);
    const result = await handler(job.payload, stopped.signal);
    await settle(assignment, "complete", { result: result ?? null });
  } catch (error) {
    if (stopped.signal.reason === "cancel") await settle(assignment, "release", {});
    else await settle(assignment, "fail", failure(error));
  } finally {
    if (held.get(assignment) === stopped) held.delete(assignment);
    wakeUp.dispatchEvent(new Event("free"));
  }
}

/** @param {any} error */
function failure(error) {
  const [type, message] = [error?.constructor?.name ?? "Error", String(error?.message ?? error)];
  const retryable = !(error instanceof PermanentError);
  return { type, message, traceback: String(error?.stack ?? ""), retryable, retry_in_s: 1 };
}

/**
 * Settles until there is an answer: the same may be sent any number of times.
 * @param {string} assignment @param {string} how @param {any} body
 */
async function settle(assignment, how, body) {
  for (let pauseMs = 100; held.has(assignment); pauseMs = Math.min(2000, 2 * pauseMs)) {
    const { status, value } = await call("POST", `/v1/assignments/${assignment}/${how}`, body);
    if ((status === 413 || status === 422) && how === "complete")
      return settle(assignment, "fail", { type: "Unstorable", message: value?.detail ?? "" });
    if (status !== 0 && status !== 429 && status < 500) return; // also 409: another worker has the job by now
    await sleep(pauseMs * (0.5 + Math.random()));
  }
}

function stop() {
  stopping = true;
  claiming.abort();
  wakeUp.dispatchEvent(new Event("free"));
}

/** @param {number} ms */
async function freeOrLater(ms) {
  const over = new AbortController();
  const freed = new Promise((resolve) => wakeUp.addEventListener("free", resolve, { once: true }));
  await Promise.race([freed, sleep(ms, null, { signal: over.signal })]).catch(() => {});
  over.abort();
}

async function work() {
  await register();
  beatForEver();
  while (!stopping) {
    if (held.size >= slots || state !== "run" || performance.now() - renewedAt > leaseMs - marginMs) {
      await freeOrLater(1000);
      continue;
    }
    claiming = new AbortController();
    const claimer = worker;
    const body = { worker, queues: [queue], claim_id: ++claims, max: slots - held.size, wait_s: 20 };
    const { status, value } = await call("POST", "/v1/claims", body, 40_000, claiming.signal);
    if (status === 200) {
      // Else they are in no list, and go back; or the worker was presumed dead meanwhile, and others have them.
      const leased = worker === claimer && performance.now() - renewedAt < leaseMs - marginMs;
      if (leased) for (const assigned of value.assignments) run(assigned);
      read = claims;
      obey({ ...value, gone: [] });
    } else if (!stopping) {
      read = claims;
      await sleep(500); // 410: the next beat registers again
    }
  }
  while (held.size) await freeOrLater(1000);
  // Whatever has begun was settled, or is in a list.
  const known = claims && !dropped.size ? `?claim_id=${claims}` : "";
  await call("DELETE", `/v1/workers/${worker}${known}`);
  process.exit(0);
}

process.on("SIGTERM", stop);
process.on("SIGINT", stop);
await work();
