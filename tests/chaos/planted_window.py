"""Bugs planted into what users and operators see: README, commands, systemd unit."""

from __future__ import annotations

from tests.chaos.bug import Bug, python, sql
from tests.kits.planting import Planted

_FIRST_SIGHT = "tests/engine/test_first_sight.py"

BUGS = (
    Bug(
        Planted("README names a queue that the app lacks", "README.md", "enqueue welcome '", "enqueue welcom '"),
        tests="tests/docs/test_blocks.py",
    ),
    python(
        "systemd ends a daemon that waits for the database at its start",
        "processes/sd_notify",
        "                    if not sent_ready:\n",
        "                    if False:\n",
        tests="tests/engine/test_systemd.py",
    ),
    Bug(
        Planted("the unit keeps its capabilities", "systemd/pgworkd.service", "CapabilityBoundingSet=\n", "\n"),
        tests="tests/unit/test_units.py",
    ),
    python(
        "a paused queue is not shown as paused in its settings",
        "admin/queues",
        " || jsonb_build_object('paused', q.paused_until > pgworkd.clock())",
        "",
        tests="tests/engine/test_settings_cli.py",
    ),
    python(
        "one job is printed as plural",
        "core/validation",
        "noun if count == 1 else plural",
        "plural",
        tests="tests/unit/test_words.py",
    ),
    python(
        "doctor counts dead workers as live",
        "admin/doctor_queries",
        " AND w.lost_at IS NULL AND w.lease_until >= pgworkd.clock()) fleet",
        ") fleet",
        tests="tests/engine/test_cli_health.py",
    ),
    python(
        "doctor fails at a queue that is drained while it looks",
        "admin/doctor_queries",
        "coalesce(extract(epoch FROM pgworkd.clock() - least(plain.at, keyed.at, suspect.at)), 0)::float8",
        "extract(epoch FROM pgworkd.clock() - least(plain.at, keyed.at, suspect.at))::float8",
        tests="tests/engine/test_cli_doctor.py -k drained",
    ),
    python(
        "doctor does not report jobs blocked by dead ones",
        "admin/findings",
        "_stuck(health), ",
        "[], ",
        tests="tests/engine/test_cli_health.py",
    ),
    python(
        "no warning when the container's stop timeout is too short",
        "cli/serve",
        '    if settings.origin("shutdown_s") != "default" or (',
        "    if True or (",
        tests="tests/engine/test_cli_serve.py",
    ),
    python(
        "a command that skipped jobs does not give the reason",
        "admin/operations",
        "return list((await jobs.refusals(operation, rest)).values()) if rest else []",
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
        tests="tests/engine/test_cli_operations.py",
    ),
    sql(
        "a schedule whose occurrence was deleted is restored too late",
        "AND j.status = 'dead' AND j.schedule IS NOT NULL) THEN",
        "AND j.status = 'dead' AND false) THEN",
        tests="tests/engine/test_schedule_chains.py",
    ),
    python(
        "occurrences that fell due while a schedule was broken are skipped",
        "engine/life/recurring",
        "min(late_from, row.at))",
        "row.at)",
        tests="tests/engine/test_schedule_chains.py",
    ),
    python(
        "a job that raises LeaseLost is retried forever",
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
    python(
        "a demo that is stopped keeps its pages up",
        "demo/demo",
        "        self._keep = False\n",
        "",
        tests=_FIRST_SIGHT,
    ),
    python(
        "what is done on the pages is taken for a fault of the daemon",
        "demo/demo",
        '        if stored.pop("acts"):',
        '        if stored.pop("acts") < 0:',
        tests=_FIRST_SIGHT,
    ),
    python(
        "another program on the default port keeps dev from starting",
        "cli/gateway",
        "    except UsageError:\n        listener = bound(",
        "    except ZeroDivisionError:\n        listener = bound(",
        tests=_FIRST_SIGHT,
    ),
)
