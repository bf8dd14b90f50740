"""`pgworkd doctor` on what runs: event loops that are blocked, and jobs that run for far too long."""

from __future__ import annotations

import json

import pytest

from tests.engine.test_cli_health import found, serve
from tests.kits.cli import Shell, clean, shell
from tests.kits.commands import NOWHERE
from tests.kits.daemon import quick_options

__all__ = ["clean", "shell"]  # fixtures

RUNNING = """INSERT INTO pgworkd.jobs (queue, kind, status, worker_id, attempts, started_at, timeout_s)
    VALUES ('q', 'k', 'running', %s, 1, now() - make_interval(secs => %s), %s) RETURNING id"""
USUAL = """INSERT INTO pgworkd.queue_minutes (at, period_s, queue, kind, started, completed, failed, dead, released,
        waits, runs, wait_s, run_s)
    SELECT now() - interval '1 day', 60, 'q', 'k', 100, 100, 0, 0, 0, array_fill(0::bigint, ARRAY[72]),
        (SELECT array_agg(CASE WHEN n = %s THEN 100 ELSE 0 END::bigint) FROM generate_series(1, 72) n),
        0, 0"""
UP_TO_5_S, UP_TO_200_S = 38, 54
"""Places of a histogram."""


def warnings(shell: Shell) -> list[tuple[str, str]]:
    lines = json.loads(shell("doctor", "--json").stdout)
    return [(each["finding"], each["remedy"]) for each in lines if (each["subject"], each["level"]) == ("runs", "warn")]


def test_a_worker_whose_loop_is_blocked_is_named(shell: Shell) -> None:
    worker = serve(shell, "q")
    shell.sql(RUNNING, worker, 5, None)
    assert found(shell, code=0) == {}
    shell.sql("UPDATE pgworkd.workers SET state = 'blocked' WHERE id = %s RETURNING id", worker)
    finding, remedy = found(shell)["runs"]
    assert finding.startswith("the event loop of worker 'w' (pid ")
    assert finding.endswith(" is blocked, with 1 job")
    assert "loop.blocked" in remedy
    states = {each["id"]: each["state"] for each in json.loads(shell("workers", "--json").stdout)}
    assert states[worker] == "blocked"
    shell.sql("UPDATE pgworkd.workers SET lease_until = now() - interval '1 s' WHERE id = %s RETURNING id", worker)
    assert "runs" not in found(shell, code=0), "it is lost, which is another finding"


@pytest.mark.parametrize(
    ("claimed_s", "timeout_s", "usual", "known"),
    [
        (590, None, UP_TO_5_S, None),
        (660, None, UP_TO_5_S, "99 of 100 of its kind take less than 4.9"),
        (660, None, UP_TO_200_S, None),
        (2100, None, UP_TO_200_S, "99 of 100 of its kind take less than 200 s"),
        (3500, None, None, None),
        (3700, None, None, "none of its kind has ended in a week"),
        (660, 60.0, UP_TO_200_S, "its time-out is 60 s"),
        (3700, 400.0, UP_TO_5_S, None),
    ],
)
def test_a_job_that_runs_for_far_too_long_is_named(
    shell: Shell, claimed_s: float, timeout_s: float | None, usual: int | None, known: str | None
) -> None:
    worker = serve(shell, "q")
    job = shell.sql(RUNNING, worker, claimed_s, timeout_s)
    shell.sql(RUNNING, worker, 5, None)
    if usual is not None:
        shell.sql(USUAL + " RETURNING 1", usual)
    if known is None:
        assert warnings(shell) == []
        return
    ((finding, remedy),) = warnings(shell)
    assert finding.startswith(f"'k' in 'q' has been running on 'w' for {claimed_s} s; {known}")
    assert f"pgworkd cancel {job}" in remedy


def test_the_default_of_a_daemon_is_three_leases() -> None:
    assert quick_options(NOWHERE, lease_s=7.0).loop_limit == 21
    assert quick_options(NOWHERE, lease_s=7.0, loop_limit_s=0.0).loop_limit == 0
