"""The values and the readiness of one daemon or gateway, read from other threads than its own, without locks.

All that is read is a plain number, or a dict that is copied in one step (`list(d.items())`); so a scrape neither waits
for the event loop nor slows it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Protocol

import anyio

from pgworkd.core.job import OUTCOMES
from pgworkd.engine.counters import KINDS_MAX, Counters
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.life.loop_watch import BLOCKED_S, LoopWatch
from pgworkd.engine.life.worker import WorkerLife
from pgworkd.metrics import own
from pgworkd.metrics.samples import Check, Labels, Samples, Value, durations

RESULTS = ("jobs", "empty", "failed")
BUILD: Labels = (version("pgworkd"), platform.python_version())


class Shown(Protocol):
    """A member of the fleet of which metrics and health are shown: a daemon, or a gateway."""

    @property
    def counters(self) -> Counters:
        """What has been counted."""

    @property
    def worker(self) -> WorkerLife:
        """The registration and the lease."""

    @property
    def loop_watch(self) -> LoopWatch:
        """The watch of the event loop."""

    @property
    def listening(self) -> bool:
        """True while notifications arrive."""

    @property
    def ready(self) -> anyio.Event:
        """Set when it works for the first time."""

    @property
    def stop_requested(self) -> anyio.Event:
        """Set when it is about to stop."""

    def status(self) -> str:
        """The state in one line, for people."""


class MemberSource:
    """Shows one member. `slots`: the queues that it serves, each with what runs and the concurrency in effect."""

    def __init__(self, member: Shown, slots: Callable[[], list[tuple[str, int, int]]]) -> None:
        self._member, self._slots = member, slots

    def samples(self) -> Samples:
        """The values now."""
        member, worker, slots = self._member, self._member.worker, self._slots()
        queues = [queue for queue, _, _ in slots]
        return {
            **_by_kind(member.counters, self.declared(set(queues))),
            **_by_process(member.counters, queues),
            "pgworkd_jobs_running": {(queue,): running for queue, running, _ in slots},
            "pgworkd_slots": {(queue,): concurrency for queue, _, concurrency in slots},
            "pgworkd_lease_remaining_seconds": {(): worker.lease_left_s},
            "pgworkd_database_up": {(): int(worker.database_answers)},
            "pgworkd_listening": {(): int(member.listening)},
            "pgworkd_loop_lag_seconds": {(): member.loop_watch.lag_s},
            "pgworkd_processes": {("wanted",): 1, ("answering",): 1},
            "pgworkd_build_info": {BUILD: 1},
            **own.of_process(),
        }

    def declared(self, queues: set[str]) -> list[tuple[str, str]]:
        """Queues, of these, and kinds that are shown before anything was counted."""
        return []

    def checks(self) -> list[Check]:
        """The conditions of readiness now."""
        member, worker = self._member, self._member.worker
        started, lag_s, left_s = member.ready.is_set(), member.loop_watch.lag_s, worker.lease_left_s
        stopping, refusals = member.stop_requested.is_set(), member.counters.refusals
        refused = "stopping" if stopping else refusals.text()
        waits = "" if started or stopping else member.status()
        reached = "was not reached within the lease" if left_s == 0 else refusals.text(unavailable=True)
        reached = reached or ("" if worker.database_answers else "did not answer the last heartbeat")
        schema = "is newer than this program: upgrade pgworkd" if worker.outdated else "fits"
        wake = "listening" if member.listening else "polling: notifications do not arrive"
        return [
            Check("database", not waits and not reached, waits or reached or "answers"),
            Check("schema", started and not worker.outdated, waits or schema),
            Check("lease", worker.lease_holds, waits or f"expires in {left_s:.1f} s unless renewed"),
            Check("loop", lag_s < BLOCKED_S, member.loop_watch.text() if lag_s >= BLOCKED_S else "runs"),
            Check("wake", started, waits or wake),
            Check("claims", started and not refused, refused or waits or "claims jobs"),
        ]

    def sick(self) -> str:
        """Why a restart would help; empty: it would not."""
        watch = self._member.loop_watch
        return watch.text() if watch.sick else ""


class DaemonSource(MemberSource):
    """Shows one daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._handlers = daemon.app.handlers
        super().__init__(
            daemon, lambda: [(queue, pool.running, pool.concurrency) for queue, pool in list(daemon.pools.items())]
        )

    def declared(self, queues: set[str]) -> list[tuple[str, str]]:
        """Kinds of the app, shown from the start: else a rate could not see the first job of each."""
        handlers = list(self._handlers.values())[:KINDS_MAX]
        return [(handler.queue, handler.kind) for handler in handlers if handler.queue in queues]


def _by_kind(counters: Counters, declared: list[tuple[str, str]]) -> Samples:
    started: dict[Labels, Value] = dict.fromkeys(declared, 0)
    finished: dict[Labels, Value] = {(*key, outcome): 0 for key in declared for outcome in OUTCOMES}
    runs: dict[Labels, Value] = {}
    waits: dict[Labels, Value] = {}
    lost: dict[Labels, Value] = {}
    for key, of_kind in list(counters.kinds.items()):
        queue, _ = key
        started[key] = of_kind.started
        runs[key], waits[key] = durations(of_kind.runs), durations(of_kind.waits)
        for outcome, count in list(of_kind.ended.items()):
            finished[(*key, outcome)] = count
        stale, before = of_kind.ended["stale"], lost.get((queue,), 0)
        lost[(queue,)] = stale if isinstance(before, tuple) else before + stale
    return {
        "pgworkd_jobs_started_total": started,
        "pgworkd_jobs_finished_total": finished,
        "pgworkd_job_run_seconds": runs,
        "pgworkd_job_wait_seconds": waits,
        "pgworkd_jobs_lost_total": lost,
    }


def _by_process(counters: Counters, queues: list[str]) -> Samples:
    claims: dict[Labels, Value] = {(queue, result): 0 for queue in queues for result in RESULTS}
    claims.update(list(counters.claims.items()))
    rescued: dict[Labels, Value] = {(queue,): 0 for queue in queues}
    rescued.update(((queue,), count) for queue, count in list(counters.rescued.items()))
    maintenance = list(counters.maintenance_s.items())
    return {
        "pgworkd_claims_total": claims,
        "pgworkd_claim_seconds": {(): durations(counters.claim_s)},
        "pgworkd_claims_refused_seconds": {(): counters.refusals.lasting_s},
        "pgworkd_settle_seconds": {(): durations(counters.settle_s)},
        "pgworkd_wake_seconds": {(): durations(counters.wake_s)},
        "pgworkd_jobs_rescued_total": rescued,
        "pgworkd_lease_fences_total": {(): counters.fences},
        "pgworkd_endpoint_answers_total": dict(list(counters.answers.items())),
        "pgworkd_endpoint_seconds": {(name,): durations(each) for name, each in list(counters.answer_s.items())},
        "pgworkd_maintenance_seconds": {(task,): durations(each) for task, each in maintenance},
    }
