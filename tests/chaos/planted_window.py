"""Bugs in what users and operators see: README, the commands, the unit."""

from __future__ import annotations

from tests.chaos.bug import Bug, python, sql
from tests.planting import Planted

BUGS = (
    Bug(
        Planted("README names a queue that the app lacks", "README.md", "enqueue welcome '", "enqueue welcom '"),
        tests="tests/docs/test_blocks.py",
    ),
    python(
        "systemd ends a start that waits for the database",
        "fleet/sd_notify",
        "                    if not sent_ready:\n",
        "                    if False:\n",
        tests="tests/engine/test_systemd.py",
    ),
    Bug(
        Planted("the unit keeps its capabilities", "systemd/pgworkd.service", "CapabilityBoundingSet=\n", "\n"),
        tests="tests/unit/test_units.py",
    ),
    python(
        "a paused queue is not called paused where its settings are shown",
        "admin/queues",
        " || jsonb_build_object('paused', q.paused_until > pgworkd.clock())",
        "",
        tests="tests/engine/test_settings_cli.py",
    ),
    python(
        "one job is called jobs",
        "words/validation",
        "noun if count == 1 else plural",
        "plural",
        tests="tests/unit/test_words.py",
    ),
    python(
        "doctor takes dead workers for live ones",
        "admin/doctor_queries",
        " AND w.lost_at IS NULL AND w.lease_until >= pgworkd.clock()) fleet",
        ") fleet",
        tests="tests/engine/test_cli_health.py",
    ),
    python(
        "doctor does not see jobs behind dead ones",
        "cli/health",
        "_stuck(health), ",
        "[], ",
        tests="tests/engine/test_cli_health.py",
    ),
    python(
        "nobody is warned of a stop that its container cuts short",
        "cli/serve",
        '    if settings.origin("shutdown_s") != "default":',
        "    if True:",
        tests="tests/engine/test_cli_serve.py",
    ),
    python(
        "a verb that left jobs alone does not say why",
        "cli/job_operations",
        "return list((await admin.jobs.refusals(operation, rest)).values()) if rest else []",
        "return []",
        tests="tests/engine/test_cli_refusals.py",
    ),
    python(
        "--call-back is dropped",
        "admin/jobs",
        '"SELECT pgworkd.retry($1, NULL, $2)", ids, call_back)',
        '"SELECT pgworkd.retry($1, NULL, $2)", ids, False)',
        tests="tests/engine/test_cli_refusals.py",
    ),
    python(
        "expiry is not logged",
        "engine/life/maintenance",
        "            self._events.emit(events.JOBS_EXPIRED,",
        "            dict(",
        tests="tests/engine/test_expiry.py",
    ),
    Bug(
        Planted(
            "a discarded job is shown as dead",
            "schema.sql",
            "SELECT id, queue, coalesce(kind, queue), CASE status WHEN 'dead' THEN 'discarded' ELSE status::text END,",
            "SELECT id, queue, coalesce(kind, queue), status::text,",
        ),
        tests="tests/engine/test_cli_acts.py",
    ),
    sql(
        "a chain whose occurrence was lost is restored some time",
        "AND j.status = 'dead' AND j.schedule IS NOT NULL) THEN",
        "AND j.status = 'dead' AND false) THEN",
        tests="tests/engine/test_schedule_chains.py",
    ),
    python(
        "what came due while a chain was broken is skipped",
        "engine/life/recurring",
        "min(late_from, row.at))",
        "row.at)",
        tests="tests/engine/test_schedule_chains.py",
    ),
    python(
        "whoever raises LeaseLost runs again for ever",
        "engine/run/runner",
        "        if isinstance(error, RetryAfter):\n",
        "        if isinstance(error, LeaseLost):\n            return Outcome(Ending.RELEASED)\n"
        "        if isinstance(error, RetryAfter):\n",
        tests="tests/engine/test_transactions.py",
    ),
    Bug(
        Planted(
            "a schedule of a worker whose lease is over cannot be removed",
            "schema.sql",
            "WHERE w.lost_at IS NULL AND w.lease_until > clock() AND p_name = ANY (w.schedules)",
            "WHERE w.lost_at IS NULL AND p_name = ANY (w.schedules)",
        ),
        tests="tests/engine/test_cli_schedules.py",
    ),
)
