"""`python -m tests.simulation.planted`: plants bugs one at a time, and checks that the simulation catches them."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.kits.planting import Planted, mutated_tree, run_module, verdicts

SCHEDULES = (60, 2000)
TIMEOUT_S = 600

# The invariants whose schedules are run for each bug; any may catch it.
BUGS: dict[Planted, str] = {
    Planted(
        "over-claim by one",
        "pgworkd/engine/claim/pool.py",
        "executor.free + self._ahead,",
        "executor.free + self._ahead + 1,",
    ): "claims_bounded",
    Planted(
        "slots not counted when a task continues with the next job",
        "pgworkd/engine/run/executor.py",
        "if self._waiting and self.busy < self.concurrency and not self._yielding and",
        "if self._waiting and not self._yielding and",
    ): "slots",
    Planted(
        "lost wake-up: a task is not woken",
        "pgworkd/engine/run/executor.py",
        "wakeup.set_result(None)",
        "wakeup.done()",
    ): "idle_slot",
    Planted(
        "lost wake-up: the result of a poll is not passed on",
        "pgworkd/engine/wake/poller.py",
        "pool.expect(due.get(pool.queue))",
        "pool.expect(None)",
    ): "idle_slot",
    Planted(
        "a polling pool waits for a notification",
        "pgworkd/engine/claim/poll_mode.py",
        """        return min(POLL_CAP_S, POLL_FIRST_S * 2.0 ** min(self._empty_claims, 10))

    def sleep_s(self, delay_s: float) -> float:
        \"\"\"How long a pool that wants to sleep for `delay_s` may sleep.\"\"\"
        return delay_s if self.announced else min(delay_s, SLEEP_S_MAX)""",
        """        return math.inf

    def sleep_s(self, delay_s: float) -> float:
        return delay_s""",
    ): "comes_back",
    Planted(
        "a handler is called under a timer that is disarmed",
        "pgworkd/engine/life/heartbeat.py",
        "        if self._kill_timer is not None and not self._kill_timer.armed:\n",
        "        if self._kill_timer is not None and not self._kill_timer.armed and self._void:\n",
    ): "lease",
    Planted(
        "the kill timer is left behind by what it protected",
        "pgworkd/engine/life/heartbeat.py",
        "                self._call_in_daemon(self._disarm_if_idle)\n",
        "                pass\n",
    ): "lease",
    Planted(
        "the settler drops its batch on an error",
        "pgworkd/engine/settle/loop.py",
        "                await self._policy.unavailable(error)\n",
        "                return {}, _NOTHING, {}\n",
    ): "settled_once",
    Planted(
        "a settle reports what it has not settled",
        "pgworkd/engine/settle/loop.py",
        "                await self._policy.unavailable(error)\n",
        "                self._policy.settled(items, {item.fence.job_id: 'completed' for item in items}, {})\n",
    ): "reported_once",
    Planted(
        "the settler is never full",
        "pgworkd/engine/settle/settler.py",
        "return 0 if self.full else CAPACITY - self._loop.count",
        "return CAPACITY",
    ): "backlog",
    Planted(
        "nothing is given back at a stop",
        "pgworkd/engine/life/shutdown.py",
        "        self._queues.release_unstarted(Reason.SHUTDOWN)\n        if not self.now",
        "        self._queues.claim_soon()\n        if not self.now",
    ): "stop",
    Planted(
        "a stop that tells nobody",
        "pgworkd/engine/attempts.py",
        "            self.scope.end(self.grace_s(reason))",
        "            self.scope = None",
    ): "stop",
    Planted(
        "what stalls here is kept",
        "pgworkd/engine/claim/pool.py",
        "if self._executor.waiting > STALLS_MAX * begun:",
        "if self._executor.waiting > 10 * CLAIM_MAX:",
    ): "hoarding",
    Planted(
        "the process outlives its lease",
        "pgworkd/engine/life/heartbeat.py",
        "self._end_s = lease_s - lease_s / 30",
        "self._end_s = lease_s + lease_s / 3",
    ): "lease",
    Planted(
        "a removed queue is gone before its jobs",
        "pgworkd/engine/life/queues.py",
        "if pool.quiet and all(attempt.queue != pool.queue for attempt in self._in_flight):",
        "if pool.quiet:",
    ): "removal",
    Planted(
        "a cursor without sweeps",
        "pgworkd/engine/claim/claim_cursor.py",
        "self._level = next((level for level in reversed(range(LEVELS)) if now >= self._due_at[level]), None)",
        "self._level = None",
    ): "cursor",
    Planted(
        "backoff without a cap",
        "pgworkd/core/backoff.py",
        "return min(self.base_s * float(self.factor) ** (failures - 1), self.cap_s)",
        "return self.base_s * float(self.factor) ** (failures - 1)",
    ): "backoff",
    Planted(
        "an occurrence that is not later",
        "pgworkd/core/recurrence.py",
        "first = instant if backwards else instant + step",
        "first = instant",
    ): "schedule",
}


def verdict(planted: Planted, invariant: str) -> tuple[str, bool, str]:
    """Runs schedules in a tree with that bug: its name, whether it was caught, and what was seen."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = mutated_tree(planted, Path(scratch))
        for schedules in SCHEDULES:
            options = ("--invariant", invariant, "--schedules", str(schedules), "--processes", "1")
            run = run_module(tree, "tests.simulation", *options, timeout_s=TIMEOUT_S)
            if run.returncode not in (0, 1) or "schedules in" not in run.stdout:
                raise RuntimeError(f"{planted.name}: the simulation itself failed:\n{run.stdout}{run.stderr}")
            failed = re.search(r"(\d+) failed\n(.*)", run.stdout)
            if run.returncode and failed is not None:
                return planted.name, True, f"{failed[1]} of {schedules} schedules of {invariant}; {failed[2][:90]}"
    return planted.name, False, f"{SCHEDULES[-1]} schedules of {invariant} attempt"


def main() -> int:
    rows = [verdict(planted, invariant) for planted, invariant in BUGS.items()]
    sys.stdout.write(verdicts(rows) + "\n")
    return 0 if all(caught for _, caught, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
