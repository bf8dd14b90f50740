"""`pgworkd bench` as a process: it prints its figures, and leaves every table as it was, whatever ends it."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import psycopg
import pytest

from pgworkd.bench.run import HELD_S
from tests.kits.bench import JOBS, LINE, REGISTERED, SERVED, SESSIONS, contents, wait_for
from tests.kits.cli import Shell, clean, run_bare, shell
from tests.kits.commands import Command, Start, start

__all__ = ["clean", "shell", "start"]  # fixtures

HELD = f"""SELECT clock_timestamp() - min(xact_start) > '{HELD_S} s' FROM pg_stat_activity
    WHERE application_name = 'forgotten'"""  # noqa: S608 - a number of ours
EXPIRED = "SELECT NOT EXISTS (SELECT FROM pgworkd.workers WHERE lease_until > clock_timestamp())"
SLOW_END_S = 60.0
"""A loaded machine, and the wait for the lease of a killed run."""


@pytest.fixture
def bench(shell: Shell, start: Start) -> Any:
    """Starts `pgworkd bench` on the test's database."""
    return lambda *args: start("bench", *args, stdout=subprocess.PIPE, PGWORKD_DSN=shell.dsn)


def ended(command: Command, code: int = 0) -> str:
    """Waits for its end; its standard output."""
    assert command.process.stdout is not None
    output = str(command.process.stdout.read())
    assert command.process.wait(SLOW_END_S) == code, command.lines
    assert command.ends() == code
    return output


@pytest.mark.slow("commands and daemons in processes of their own")
def test_all_figures_are_printed_and_every_table_is_as_before(shell: Shell, bench: Any) -> None:
    shell.sql("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('own', 7)")
    shell.sql("INSERT INTO pgworkd.jobs (queue) VALUES ('own')")
    before = contents(shell)
    command = bench("--jobs", "400")
    lines = ended(command).splitlines()
    assert [line.split("  ")[0] for line in lines[:8]] == [
        "WHAT",
        "round trip",
        "enqueue one by one",
        "enqueue in bulk",
        "drain",
        "worker CPU",
        "server CPU",
        "insert to handler, idle",
    ]
    assert lines[9].startswith("Draining (")
    assert len(lines) == 10
    assert len(command.lines) == 6, command.lines
    assert "will write 400 jobs of 200 bytes to postgresql://" in command.lines[0]
    assert contents(shell) == before
    assert not shell.sql(SESSIONS)


@pytest.mark.slow("commands and daemons in processes of their own")
def test_json_has_the_figures_and_the_verdict(shell: Shell, bench: Any) -> None:
    before = contents(shell)
    found = json.loads(ended(bench("--jobs", "300", "--payload-bytes", "5000", "--concurrency", "3", "--json")))
    assert found["drain"]["jobs"] == 290
    assert found["drain"]["complete"] is True
    assert found["enqueue_bulk"]["jobs"] == 270
    assert found["latency"]["count"] == 5, "after the warm-up"
    assert found["verdict"]["sentence"].startswith("Draining (")
    for name in ("round_trip", "enqueue_single", "enqueue_single_without_fsync", "latency"):
        assert 0 < found[name]["p50_ms"] <= found[name]["p95_ms"] <= found[name]["p99_ms"]
    assert contents(shell) == before


MOMENTS = {
    "connected": SESSIONS,
    "registered": REGISTERED,
    "created": LINE,
    "one by one": JOBS,
    "in bulk": f"SELECT ({JOBS}) > 1000",
    "drain": SERVED,
    "draining": f"SELECT ({SERVED}) AND ({JOBS}) BETWEEN 10 AND 9000",
    "drained": f"SELECT ({SERVED}) AND ({JOBS}) < 10",
    "idle": "SELECT EXISTS (SELECT FROM pgworkd.pools WHERE queue LIKE 'pgworkd-bench-%%' AND idle)",
}


@pytest.mark.slow("commands and daemons in processes of their own")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_leaves_nothing(shell: Shell, bench: Any, moment: str, number: signal.Signals) -> None:
    before = contents(shell)
    command = bench("--jobs", "10000")
    wait_for(shell, MOMENTS[moment], SLOW_END_S)
    command.stop(number)
    assert ended(command, 1) == ""
    assert command.lines[-1] == "pgworkd: stopped; nothing is left of it in the database"
    assert contents(shell) == before
    assert not shell.sql(SESSIONS)


@pytest.mark.slow("commands and daemons in processes of their own")
def test_a_backlog_that_is_not_drained_in_time_is_reported_and_removed(shell: Shell, bench: Any) -> None:
    before = contents(shell)
    command = bench("--jobs", "2000", "--seconds", "4")
    wait_for(shell, f"SELECT ({JOBS}) > 100", SLOW_END_S)
    with psycopg.connect(shell.dsn) as other:  # claims pass over what is locked
        last = "SELECT FROM pgworkd.jobs WHERE status = 'pending' ORDER BY id DESC LIMIT 3 FOR UPDATE SKIP LOCKED"
        assert len(other.execute(last).fetchall()) == 3
        wait_for(shell, f"SELECT NOT ({REGISTERED})", SLOW_END_S)
    output = ended(command)
    assert "cut by --seconds" in output
    assert "not measured: --seconds was too short" in output
    assert contents(shell) == before


@pytest.mark.slow("commands and daemons in processes of their own")
def test_more_signals_do_not_cut_the_removal_short(shell: Shell, bench: Any) -> None:
    before = contents(shell)
    command = bench("--jobs", "10000")
    wait_for(shell, MOMENTS["in bulk"], SLOW_END_S)
    while command.process.poll() is None:  # to its very end
        command.stop(signal.SIGINT)
        shell.sql("SELECT pg_sleep(0.005)")
    assert ended(command, 1) == ""
    assert contents(shell) == before


@pytest.mark.slow("commands and daemons in processes of their own")
@pytest.mark.parametrize("moment", ["registered", "created", "in bulk", "drain"])
def test_the_next_run_removes_what_a_killed_one_has_left_and_no_queue_of_a_user(
    shell: Shell, bench: Any, moment: str
) -> None:
    shell.sql("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('pgworkd-bench-mine', 7)")
    shell.sql("INSERT INTO pgworkd.jobs (queue) VALUES ('pgworkd-bench-mine')")
    before = contents(shell)
    command = bench("--jobs", "10000")
    wait_for(shell, MOMENTS[moment].replace("bench-%%", "bench-____________"), SLOW_END_S)
    command.stop(signal.SIGKILL)
    command.process.wait()
    assert contents(shell) != before
    early = bench("--clean")
    assert ended(early) == "nothing to remove\n"
    assert "its run goes on, or was killed just now" in early.lines[0]
    wait_for(shell, EXPIRED, SLOW_END_S)
    again = bench("--jobs", "100") if moment == "in bulk" else bench("--clean")
    assert "removed" in ended(again) + "\n".join(again.lines)
    assert contents(shell) == before


@pytest.mark.slow("commands and daemons in processes of their own")
def test_two_runs_at_once_leave_each_other_alone(shell: Shell, bench: Any) -> None:
    before = contents(shell)
    first = bench("--jobs", "10000")
    wait_for(shell, LINE, SLOW_END_S)
    second = bench("--jobs", "100")
    assert "Draining" in ended(first)
    assert "Draining" in ended(second)
    assert not [line for line in second.lines if "removed" in line]
    assert contents(shell) == before
    assert ended(bench("--clean")) == "nothing to remove\n"


@pytest.mark.slow("commands and daemons in processes of their own")
def test_beside_a_busy_fleet(shell: Shell, bench: Any, start: Start) -> None:
    daemon = start("run", "--app", "notes:app", "--queue", "mail", PGWORKD_DSN=shell.dsn)
    daemon.event("daemon.ready")
    shell.sql("INSERT INTO pgworkd.jobs (queue) SELECT 'mail' FROM generate_series(1, 30000)")
    assert "Draining" in ended(bench("--jobs", "500"))
    wait_for(shell, "SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)", SLOW_END_S)
    found = shell.db.execute(
        """SELECT queue, status::text, failures, count(*), count(DISTINCT worker_id)
           FROM pgworkd.finished_jobs GROUP BY 1, 2, 3"""
    ).fetchall()  # not by attempts: jobs that were claimed ahead go back where the machine is slow
    assert found == [("mail", "completed", 0, 30000, 1)]
    assert shell.sql("SELECT count(*) FROM pgworkd.workers") == 1
    assert shell.sql("SELECT count(*) FROM pgworkd.audit") == 0
    for table in ("queue_samples", "queue_minutes"):
        assert not any("pgworkd-bench-" in row for row in contents(shell)[table])
    daemon.stop()
    assert daemon.ends() == 0


@pytest.mark.slow("commands and daemons in processes of their own")
def test_a_held_transaction_is_named(shell: Shell, bench: Any) -> None:
    with psycopg.connect(shell.dsn, application_name="forgotten") as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT count(*) FROM pgworkd.jobs")
        wait_for(shell, HELD)
        found = json.loads(ended(bench("--jobs", "100", "--json")))
    assert "forgotten" in found["verdict"]["sentence"]
    assert "holds back vacuum" in found["verdict"]["sentence"]
    assert not shell.sql(JOBS)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--jobs", "0"), "--jobs 0: give a number from 100 to 1,000,000"),
        (("--jobs", "-5"), "--jobs -5: give a number from 100 to 1,000,000"),
        (("--jobs", "1000001"), "--jobs 1000001: give a number from 100 to 1,000,000"),
        (
            ("--payload-bytes", "1048577"),
            "--payload-bytes 1048577: give a number from 50 to 1,048,576",
        ),
        (("--payload-bytes", "1"), "--payload-bytes 1: give a number from 50 to 1,048,576"),
        (("--concurrency", "0"), "--concurrency 0: give a number from 1 to 1,000"),
        (("--seconds", "0"), "--seconds 0.0: give a number from 1 to 50"),
        (("--seconds", "nan"), "--seconds 'nan': give seconds, or a duration"),
        (
            ("--jobs", "2000", "--payload-bytes", "1048576", "--dsn", "postgresql://h/d"),
            "--jobs 2000 with --payload-bytes 1048576 would write more than 1 GiB: give --jobs of 1024 at most",
        ),
        (
            ("--jobs", "100001", "--dsn", "postgresql://h/d"),
            "write 100,001 jobs of 200 bytes to postgresql://h/d (flag): add --yes",
        ),
    ],
)
def test_wrong_options_are_refused_with_the_accepted_range(args: tuple[str, ...], line: str) -> None:
    result = run_bare("bench", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"pgworkd: {line}")
    assert result.stderr.count("\n") == 1
