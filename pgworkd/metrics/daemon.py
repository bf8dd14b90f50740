"""The values and the readiness of one daemon, read from other threads than its own, without locks.

All that is read is a plain number, or a dict that is copied in one step (`list(d.items())`); so a scrape neither waits
for the event loop nor slows it.
"""

from __future__ import annotations

import platform
from importlib.metadata import version

from pgworkd.core.job import OUTCOMES
from pgworkd.engine.counters import KINDS_MAX, Counters
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.life.loop_watch import BLOCKED_S
from pgworkd.metrics.samples import Check, Labels, Samples, Value, durations

RESULTS = ("jobs", "empty", "failed")
BUILD: Labels = (version("pgworkd"), platform.python_version())


class DaemonSource:
    """Shows one daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def samples(self) -> Samples:
        """The values now."""
        daemon = self._daemon
        pools = list(daemon.pools.items())
        return {
            **_by_kind(daemon.counters, self._declared({queue for queue, _ in pools})),
            **_by_process(daemon.counters, [queue for queue, _ in pools]),
            "pgworkd_jobs_running": {(queue,): pool.running for queue, pool in pools},
            "pgworkd_slots": {(queue,): pool.concurrency for queue, pool in pools},
            "pgworkd_lease_remaining_seconds": {(): daemon.worker.lease_left_s},
            "pgworkd_database_up": {(): int(daemon.worker.database_answers)},
            "pgworkd_listening": {(): int(daemon.listening)},
            "pgworkd_loop_lag_seconds": {(): daemon.loop_watch.lag_s},
            "pgworkd_processes": {("wanted",): 1, ("answering",): 1},
            "pgworkd_build_info": {BUILD: 1},
        }

    def checks(self) -> list[Check]:
        """The conditions of readiness now."""
        daemon, worker = self._daemon, self._daemon.worker
        started, lag_s, left_s = daemon.ready.is_set(), daemon.loop_watch.lag_s, worker.lease_left_s
        stopping = daemon.stop_requested.is_set()
        refused = "stopping" if stopping else daemon.counters.refusals.text()
        waits = "" if started or stopping else daemon.status()
        refusals = daemon.counters.refusals
        reached = "was not reached within the lease" if left_s == 0 else refusals.text(unavailable=True)
        reached = reached or ("" if worker.database_answers else "did not answer the last heartbeat")
        schema = "is newer than this program: upgrade pgworkd" if worker.outdated else "fits"
        wake = "listening" if daemon.listening else "polling: notifications do not arrive"
        return [
            Check("database", not waits and not reached, waits or reached or "answers"),
            Check("schema", started and not worker.outdated, waits or schema),
            Check("lease", worker.lease_holds, waits or f"expires in {left_s:.1f} s unless renewed"),
            Check("loop", lag_s < BLOCKED_S, daemon.loop_watch.text() if lag_s >= BLOCKED_S else "runs"),
            Check("wake", started, waits or wake),
            Check("claims", started and not refused, refused or waits or "claims jobs"),
        ]

    def sick(self) -> str:
        """Why a restart would help; empty: it would not."""
        watch = self._daemon.loop_watch
        return watch.text() if watch.sick else ""

    def _declared(self, queues: set[str]) -> list[tuple[str, str]]:
        """Kinds of the app, shown from the start: else a rate could not see the first job of each."""
        handlers = list(self._daemon.app.handlers.values())[:KINDS_MAX]
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
        "pgworkd_settle_seconds": {(): durations(counters.settle_s)},
        "pgworkd_wake_seconds": {(): durations(counters.wake_s)},
        "pgworkd_jobs_rescued_total": rescued,
        "pgworkd_lease_fences_total": {(): counters.fences},
        "pgworkd_maintenance_seconds": {(task,): durations(each) for task, each in maintenance},
    }
