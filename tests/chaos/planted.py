"""python -m tests.chaos.planted: bugs planted into the engine, one at a time, and what catches each.

By a chaos run with some kinds of faults, or by tests, both of which pass on the unmodified engine. Exit code
1 if any bug is not caught.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.bug import Bug, python, sql
from tests.chaos.planted_addresses import BUGS as ADDRESSES
from tests.chaos.planted_alerts import BUGS as ALERTS
from tests.chaos.planted_blocked import BUGS as BLOCKED
from tests.chaos.planted_callers import BUGS as CALLERS
from tests.chaos.planted_claims import BUGS as CLAIMS
from tests.chaos.planted_dba import BUGS as DBA
from tests.chaos.planted_doors import BUGS as DOORS
from tests.chaos.planted_fleet import BUGS as FLEET
from tests.chaos.planted_forms import BUGS as FORMS
from tests.chaos.planted_gateway import BUGS as GATEWAY
from tests.chaos.planted_handlers import BUGS as HANDLERS
from tests.chaos.planted_locks import BUGS as LOCKS
from tests.chaos.planted_operations import BUGS as OPERATIONS
from tests.chaos.planted_options import BUGS as OPTIONS
from tests.chaos.planted_pages import BUGS as PAGES
from tests.chaos.planted_process import BUGS as PROCESS
from tests.chaos.planted_push import BUGS as PUSH
from tests.chaos.planted_releases import BUGS as RELEASES
from tests.chaos.planted_remote import BUGS as REMOTE
from tests.chaos.planted_rows import BUGS as ROWS
from tests.chaos.planted_runs import BUGS as RUNS
from tests.chaos.planted_signals import BUGS as SIGNALS
from tests.chaos.planted_sizes import BUGS as SIZES
from tests.chaos.planted_views import BUGS as VIEWS
from tests.chaos.planted_window import BUGS as WINDOW
from tests.kits.planting import mutated_tree, run_module, verdicts

LIMIT_S = 420.0
TRIES_MAX = 3
_VERDICT = re.compile(r" *[\d,]+ +(?P<violations>[\d,]+)  (?P<check>.+)")  # of a run's table


_FENCE = "WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.attempts = s.attempt AND j.worker_id IS NOT NULL\n"
_OF_THE_WORKER = (
    "          AND (p_worker IS NULL OR j.worker_id = p_worker"
    " AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token))\n"
)
_OF_COMPLETED = "        -- what follows reads"
BUGS = (
    *ADDRESSES,
    *ALERTS,
    *SIZES,
    *WINDOW,
    *VIEWS,
    *BLOCKED,
    *CLAIMS,
    *DBA,
    *ROWS,
    *RUNS,
    *FLEET,
    *LOCKS,
    *SIGNALS,
    *REMOTE,
    *GATEWAY,
    *CALLERS,
    *OPERATIONS,
    *PAGES,
    *FORMS,
    *DOORS,
    *OPTIONS,
    *PROCESS,
    *PUSH,
    *RELEASES,
    *HANDLERS,
    sql(
        "no fence",
        _FENCE + _OF_THE_WORKER + _OF_COMPLETED,
        "WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.worker_id IS NOT NULL\n" + _OF_COMPLETED,
        tests="tests/sql/test_settle.py",
    ),
    sql(
        "the fence accepts any worker with a lease",
        _FENCE + _OF_THE_WORKER + _OF_COMPLETED,
        "WHERE j.id = ANY (p_ids) AND j.id = s.id AND EXISTS (SELECT FROM workers w WHERE w.id = j.worker_id"
        " AND w.lost_at IS NULL)\n" + _OF_COMPLETED,
        tests="tests/sql/test_settle.py",
    ),
    sql(
        "a settle ignores the status",
        _FENCE + _OF_THE_WORKER + _OF_COMPLETED,
        "WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.attempts = s.attempt\n" + _OF_COMPLETED,
        tests="tests/sql/test_fence.py",
    ),
    sql(
        "claim by IN (SELECT ... LIMIT ... SKIP LOCKED)",
        "WHERE j.ctid = ANY (v_rows)\n        RETURNING CASE",
        "WHERE j.id IN (SELECT i.id FROM jobs i WHERE i.queue = p_queue AND i.status IN ('pending', 'failed')"
        " AND i.run_at <= v_now ORDER BY i.priority DESC, i.run_at LIMIT cardinality(v_rows) FOR UPDATE SKIP LOCKED)\n"
        "        RETURNING CASE",
        tests="tests/sql/test_claim.py",
    ),
    sql(
        "max_running is counted without a lock",
        "        PERFORM lock_queue(p_queue);\n",
        "        NULL;\n",
        kinds="burst,cut",
    ),
    sql(
        "no unique occurrence",
        "          AND (s.last_occurrence IS NULL OR s.last_occurrence < n.at)\n",
        "",
        tests="tests/sql/test_occurrences.py",
    ),
    sql(
        "an occurrence never counts as missed",
        "      AND greatest(j.run_at, j.occurrence) + make_interval(secs => s.missed_grace_s) < f.since\n",
        "      AND false\n",
        tests="tests/sql/test_schedule_missed.py",
    ),
    sql(
        "a retry delays its schedule",
        "                          AND (j.failures = 0 OR s.waits_for_retries))\n        RETURNING s.*",
        "                          )\n        RETURNING s.*",
        tests="tests/sql/test_schedule_missed.py",
    ),
    python(
        'missed="once" runs twice after a gap',
        "engine/life/recurring",
        "            previous = max(previous, now - timedelta(seconds=ran_s))\n",
        "            previous = min(previous, now - timedelta(seconds=ran_s))\n",
        tests="tests/stories/test_04_recurring.py",
    ),
    sql(
        "a batch's dedupe key is released when its tree finishes",
        "CASE WHEN r.cancelled_at IS NULL AND r.dedupe_until > clock() THEN r.dedupe_until END",
        "NULL",
        tests="tests/docs/test_blocks.py",
    ),
    sql(
        "a reopened tree stays finished",
        "    UPDATE batches b SET finished_at = NULL WHERE b.id = ANY (v_level);\n",
        "",
        tests="tests/sql/test_batch_reopened.py",
    ),
    python(
        "the heartbeat runs on the event loop",
        "engine/life/heartbeat",
        "        self._thread.start()\n",
        "        self._daemon_loop.create_task(self._main())\n",
        kinds="block_loop",
    ),
    sql(
        "rescues ignore the outage guard",
        "      AND w.steady_since <= v_now - make_interval(secs => w.lease_s)\n",
        "",
        tests="tests/sql/test_rescue_guard.py",
    ),
    sql(
        "rescues do not wait for the lease to expire",
        "v_judges AND w.lease_until < v_now AND CASE",
        "v_judges AND w.lease_until < v_now + interval '2 s' AND CASE",
        kinds="freeze_briefly",
    ),
    python(
        "a lost wake-up",
        "engine/claim/claim_loop",
        "            self._wanted, self.sleeps_until = True, 0.0\n            self._woken.set()\n",
        "            self._wanted, self.sleeps_until = True, 0.0\n",
        tests="tests/engine/test_wake.py",
    ),
    python(
        "a polling pool waits for a notification",
        "engine/claim/poll_mode",
        """        return min(POLL_CAP_S, POLL_FIRST_S * 2.0 ** min(self._empty_claims, 10))

    def sleep_s(self, delay_s: float) -> float:
        \"\"\"How long a pool that wants to sleep for `delay_s` may sleep.\"\"\"
        return delay_s if self.announced else min(delay_s, SLEEP_S_MAX)""",
        """        return math.inf

    def sleep_s(self, delay_s: float) -> float:
        return delay_s""",
        tests="tests/sweeps/test_arrivals.py",
    ),
    python(
        "a cursor without sweeps",
        "engine/claim/claim_cursor",
        "if now >= self._due_at[level]), None)",
        "if now >= self._due_at[level] + 1e9), None)",
        tests="tests/unit/test_cursor_model.py",
    ),
    python(
        "a swallowed cancellation",
        "engine/attempts",
        "            self.scope.end(self.grace_s(reason))\n",
        "            pass\n",
        kinds="terminate",
    ),
    python(
        "handlers keep running when the lease cannot be renewed",
        "engine/life/worker",
        "            self._in_flight.stop_all(Reason.FENCE)\n",
        "",
        tests="tests/engine/test_lease.py",
    ),
    python(
        "one undecodable payload fails the whole claim",
        "core/claims",
        "            return cls(map(_claimed, sorted(rows, key=_place)))\n",
        "            return cls([Claimed._make(row) for row in rows if __import__('json').loads(row[2]) != 0])\n",
        kinds="kill",
    ),
    sql(
        "a child batch's jobs are counted for its parent",
        "        WHERE b.id = n.batch_id\n        RETURNING b.id, b.dead > b.max_failures AS failed\n",
        "        WHERE b.id = (SELECT c.parent_id FROM batches c WHERE c.id = n.batch_id)\n"
        "        RETURNING b.id, b.dead > b.max_failures AS failed\n",
        kinds="kill",
    ),
    python(
        "times are taken from the worker's clock",
        "engine/life/recurring",
        "        now = self._database_now + timedelta(seconds=anyio.current_time() - self._read_at)\n",
        "        now = datetime.now(UTC)\n",
        kinds="worker_clock",
    ),
    python(
        "outcomes are dropped during a database outage",
        "engine/settle/loop",
        "                await self._policy.unavailable(error)\n",
        "                return {item.fence.job_id: 'completed' for item in items}, _NOTHING, {}\n",
        kinds="postgres_down,cut",
    ),
    python(
        "orphaned attempts are not released",
        "engine/life/maintenance",
        "        if orphans:\n",
        "        if orphans and False:\n",
        tests="tests/engine/test_lease_claims.py",
    ),
    python(
        "the database's clock alone makes an orphan",
        "engine/life/maintenance",
        "        if orphans and age_s > 0:\n",
        "        if False:\n",
        tests="tests/engine/test_lease_claims.py",
    ),
    sql(
        "losses are not counted",
        "            losses = least(j.losses, 2147483646) + 1, failed_at",
        "            failed_at",
        tests="tests/sql/test_rescue.py",
    ),
)


def find(bug: Bug) -> tuple[str, bool, str]:
    """Whether the bug is caught, and by what."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as into:
        tree = mutated_tree(bug.planted, Path(into))
        tries = 0
        while True:  # a run is random, so a bug may escape one
            tries += 1
            try:
                done = run_module(tree, *bug.command, timeout_s=LIMIT_S)
            except subprocess.TimeoutExpired:  # of the unmodified engine none takes half as long
                return bug.planted.name, True, f"{LIMIT_S:4.0f} s, run {tries}: hangs"
            if done.returncode != 0 or tries == TRIES_MAX or bug.tests:
                break
    took = f"{time.monotonic() - began_s:4.0f} s, run {tries}: "
    return bug.planted.name, done.returncode != 0, took + told(done.stdout)


def told(output: str) -> str:
    """The first violated check, or failed test."""
    for line in output.splitlines():
        if line.startswith("FAILED"):
            return line.removeprefix("FAILED ").split(" - ")[0]
        if (verdict := _VERDICT.fullmatch(line)) and verdict["violations"] != "0":
            return f"{verdict['check']} ({verdict['violations']})"
    return " / ".join(output.splitlines()[-3:])


def main(names: list[str]) -> int:
    """All bugs, or those whose names contain one of these texts."""
    bugs = [bug for bug in BUGS if not names or any(name in bug.planted.name for name in names)]
    rows = []
    for bug in bugs:
        rows.append(find(bug))
        sys.stderr.write(verdicts(rows[-1:]).splitlines()[0] + "\n")
    sys.stdout.write(verdicts(rows) + "\n")
    return 0 if all(caught for _, caught, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
