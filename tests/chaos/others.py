"""Who else works in a run with gateways: a worker in another language, and push daemons with what they push to.

The foreign worker is that of the documentation, in JavaScript, with handlers that keep a history. The receiver of what
is pushed is in the driver's process, and is never killed: each of its runs belongs to the daemon that made the claim.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.history import History
from tests.kits.downstream import Downstream, answer_of, message_of, serving
from tests.kits.push import put_endpoint

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet

WORKER = Path(__file__).parent.parent / "clients" / "worker.mjs"
NODE = shutil.which("node")
FOREIGN, PUSHED = "foreign", "pushed"
"""The queues, and what kind of member serves each."""
SLOTS = 4
RECEIVER = "receiver"
QUEUES = "CHAOS_OTHERS"
"""In the environment of a producer: what queues there are beside those of the application."""
SORT = "CHAOS_SORT"
"""In the environment of a daemon: what sort it is."""
_HANDLERS = """const handlers = {
  plain: (payload, signal, job) => recorded(payload, signal, job),
  charge: (payload, signal, job) => recorded(payload, signal, job),
"""
_RECORDED = """class RuntimeError extends Error {}
/** @param {string} event @param {any} facts */
const note = (event, facts) => {
  const atS = Number(process.hrtime.bigint()) / 1e9;
  const file = `${process.env.CHAOS_DIR}/${process.env.CHAOS_NAME}.jsonl`;
  appendFileSync(file, JSON.stringify([atS, process.env.CHAOS_NAME, event, facts]) + "\\n");
};
/** No beat was answered for so long that everything is stopped. */
const isolated = () => {
  const now = Number(process.hrtime.bigint()) / 1e9;
  const since = now - (performance.now() - renewedAt) / 1000;
  note("isolated", { name: process.env.CHAOS_NAME, since_s: since, until_s: now });
};
/** By assignment. @type {Map<string, Job>} */
const jobs = new Map();
/** It was not settled: somebody else has it. @param {string} assignment */
const stale = (assignment) => {
  const job = jobs.get(assignment);
  note("job.stale", { job_id: job?.id, attempt: job?.attempt });
};
/** @param {any} payload @param {AbortSignal} signal @param {Job} job */
const recorded = async (payload, signal, job) => {
  const run = { job: job.id, attempt: job.attempt };
  note("start", { ...run, kind: job.kind });
  try {
    await sleep(payload.seconds * 1000, null, { signal });
    if (job.attempt <= (payload.fails ?? 0)) throw new RuntimeError("as it was told to");
  } catch (error) {
    note("end", { ...run, how: signal.aborted ? "CancelledError" : error.constructor.name });
    throw error;
  }
  note("end", { ...run, how: "ok" });
  return { attempt: job.attempt };
};
"""
_CHANGES = {
    "/** Raised by a handler: a retry": _RECORDED + "/** Raised by a handler: a retry",
    "const handlers = {\n": _HANDLERS,
    "handler(job.payload, stopped.signal)": "handler(job.payload, stopped.signal, job)",
    # a gateway admits no lease below 10 s; the database shortens it, as the name says
    "name: hostname(),": "name: `${process.env.CHAOS_NAME} lease ${leaseMs / 1000}`,",
    "lease_s: leaseMs / 1000,": "lease_s: 10,",
    '"run"];\n': '"run"];\n      note("daemon.ready", {});\n',
    "if (performance.now() - renewedAt > leaseMs - marginMs) abandonAll();": (
        "if (performance.now() - renewedAt > leaseMs - marginMs) { isolated(); abandonAll(); }"
    ),
    "held.set(assignment, stopped);": "held.set(assignment, stopped);\n  jobs.set(assignment, job);",
    "return; // also 409": "return status === 409 ? stale(assignment) : undefined; // also 409",
    "(0.5 + Math.random()));\n  }\n": "(0.5 + Math.random()));\n  }\n  stale(assignment);\n",
    "\nawait work();": '\nnote("born", {});\nawait work();',
}


def foreign_worker(directory: Path) -> list[str]:
    """The command of a foreign worker; its program is written to that directory."""
    text = WORKER.read_text()
    for right, changed in _CHANGES.items():
        assert right in text, right
        text = text.replace(right, changed, 1)
    (directory / "foreign.mjs").write_text(text)
    return [str(NODE), str(directory / "foreign.mjs")]


class Receiver:
    """What the endpoint of the queue leads to: it answers as the payloads say, and keeps a history."""

    def __init__(self, directory: Path) -> None:
        self._note = History(directory, RECEIVER).note

    async def take(self, request: bytes) -> bytes:
        """One request, which is one run."""
        data = message_of(request)["data"]
        run, payload = {"job": data["id"], "attempt": data["attempt"]}, data["payload"]
        self._note("start", **run, kind=data["kind"])
        await asyncio.sleep(payload["seconds"])
        fails = data["attempt"] <= payload.get("fails", 0)
        self._note("end", **run, how="RuntimeError" if fails else "ok")
        return answer_of(503) if fails else answer_of(200, {"attempt": data["attempt"]})


async def receive(fleet: Fleet, *, task_status: Any) -> None:
    """Takes what is pushed, until the end of the run."""
    async with serving(Downstream(Receiver(fleet.directory).take)) as down:
        async with fleet.connection() as db:
            await put_endpoint(db, PUSHED, down.url, PUSHED)
        task_status.started()
        await asyncio.sleep(float("inf"))


def members() -> Mapping[str, int]:
    """How many of each sort there are, beside the daemons of the application."""
    return {PUSHED: 2, FOREIGN: 2} if NODE else {PUSHED: 2}
