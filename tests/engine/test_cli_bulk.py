"""Commands on all matching jobs: in chunks, with a confirmation, interruptible, reported as numbers."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from pgworkd.admin.jobs import JobOperations
from pgworkd.cli import bulk
from pgworkd.errors import DatabaseUnavailable
from tests.kits.cli import ME, Shell, clean, enqueue, run, shell

__all__ = ["clean", "shell"]  # fixtures


# All matching jobs


def many(shell: Shell, count: int, status: str = "pending", queue: str = "q") -> None:
    shell.sql(
        "INSERT INTO pgworkd.jobs (queue, status, failed_at) SELECT %s, %s, now() FROM generate_series(1, %s)",
        queue,
        status,
        count,
    )


def count(shell: Shell, status: str) -> int:
    return int(shell.sql("SELECT count(*) FROM pgworkd.all_jobs WHERE status::text = %s", status))


def test_retry_of_dead_jobs_takes_the_oldest_up_to_the_limit(shell: Shell) -> None:
    ids = [shell.die() for _ in range(4)]
    other, kind = shell.die("other"), shell.die("q", kind="k")
    assert shell("retry", "--dead", "--queue", "q", "--kind", "k").stdout == "1 job will run again\n"
    assert shell("retry", "--queue", "q", "--limit", "2").stdout == "2 jobs will run again\n"
    found = [shell.status(job_id) for job_id in (*ids, other, kind)]
    assert found == ["pending", "pending", "dead", "dead", "dead", "pending"]


def test_retry_all_needs_yes_and_skips_only_jobs_blocked_by_a_key(shell: Shell) -> None:
    many(shell, 1200, "dead")
    held = [shell.die(dedupe_key="k"), shell.die(dedupe_key="k")]
    assert "add --yes" in shell.refused("retry", "--all")
    assert count(shell, "dead") == 1202
    result = shell("retry", "--all", "--yes", code=1)
    assert result.stdout == "1,201 jobs will run again\n"
    assert "1 job left dead: a live job has its dedupe key" in result.stderr
    assert [shell.status(job_id) for job_id in held] == ["pending", "dead"]
    assert shell.sql("SELECT count(*) FROM pgworkd.audit WHERE what = 'retry'") == 1201


def test_retry_by_status_makes_waiting_retries_due(shell: Shell) -> None:
    job_id = enqueue(shell, "q", "--delay-s", "600")
    shell.sql("UPDATE pgworkd.jobs SET status = 'failed'")
    assert shell("retry", "--queue", "q").stdout == "0 jobs will run again\n"
    assert shell("retry", "--queue", "q", "--status", "failed").stdout == "1 job will run again\n"
    assert shell.sql("SELECT run_at <= now() FROM pgworkd.jobs WHERE id = %s", job_id)


def test_cancel_by_filter_ends_waiting_and_running_jobs_but_no_dead_ones(shell: Shell) -> None:
    many(shell, 2500)
    running, dead, kind = enqueue(shell), shell.die(), enqueue(shell, "q", "--kind", "k")
    run(shell, running)
    assert shell("cancel", "--queue", "q", "--kind", "k").stdout == "1 job cancelled\n"
    assert shell.status(kind) == "cancelled"
    result = shell("cancel", "--queue", "q")
    assert result.stdout == "2,500 jobs cancelled\n1 job running, and asked to stop\n"
    assert [shell.status(job_id) for job_id in (running, dead)] == ["running", "dead"]
    assert "cannot cancel a job whose status is dead" in shell.refused("cancel", "--queue", "q", "--status", "dead")
    told = json.loads(shell("discard", "--queue", "q", "--json").stdout)
    assert told == {"operation": "discard", "matched": 1, "discarded": 1, "refused": [], "stopped": False}
    assert shell.sql("SELECT count(*) FROM pgworkd.audit WHERE who = %s", ME) == 2503


def test_discard_by_filter(shell: Shell) -> None:
    shell.die(), shell.die(), shell.die("other")
    assert shell("discard", "--queue", "q").stdout == "2 jobs discarded\n"
    assert shell("discard", "--all", "--yes").stdout == "1 job discarded\n"


def test_bulk_operations_filter_by_key(shell: Shell) -> None:
    ids = [enqueue(shell, "q", "--dedupe-key", key) for key in ("a", "b")]
    shell.sql("UPDATE pgworkd.jobs SET serialize_key = 'a' WHERE id = %s", ids[1])
    assert shell("cancel", "--key", "a").stdout == "2 jobs cancelled\n"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("cancel", "--queue", "x\udcff"), "contains a NUL character or a lone surrogate"),
        (("cancel", "--key", ""), "key must be text of 1 to"),
        (("cancel", "--key", "k" * 513), "key must be text of 1 to"),
        (
            ("cancel", "--queue", "mail", "--status", "completed"),
            "cannot cancel a job whose status is completed: give status pending, blocked",
        ),
        (
            ("retry", "--queue", "mail", "--status", "running"),
            "cannot retry a job whose status is running: give status dead or failed",
        ),
        (
            ("discard", "--queue", "mail", "--status", "failed"),
            "cannot discard a job whose status is failed: give status dead",
        ),
    ],
)
def test_a_contradictory_filter_is_refused(shell: Shell, args: tuple[str, ...], told: str) -> None:
    job_id = enqueue(shell, "mail")
    assert told in shell.refused(*args)
    assert shell.status(job_id) == "pending"


# On a terminal, and interrupted


class Terminal:
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, answer: bool) -> list[str]:
    """A user at a terminal who gives this answer; the questions."""
    asked: list[str] = []

    def confirm(text: str, **_: Any) -> bool:
        asked.append(text)
        if not answer:
            raise bulk.typer.Abort
        return True

    monkeypatch.setattr(bulk.typer, "confirm", confirm)
    monkeypatch.setattr(bulk, "sys", type("", (), {"stdin": Terminal(), "stderr": Terminal()}))
    return asked


def test_more_than_a_hundred_jobs_need_a_confirmation_with_their_number(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    many(shell, 101)
    asked = on_terminal(monkeypatch, answer=False)
    assert "nothing done" in shell("cancel", "--queue", "q", code=1).stderr
    assert asked == ["cancel 101 jobs of queue 'q'?"]
    assert count(shell, "pending") == 101
    assert shell("cancel", "--queue", "q", "--limit", "1").stdout == "1 job cancelled\n"
    assert shell("cancel", "--queue", "q").stdout == "100 jobs cancelled\n"
    many(shell, 150, "dead")
    assert shell("retry", "--all", "--yes").stdout == "150 jobs will run again\n"
    assert len(asked) == 1, "neither for a hundred, nor with --yes"


def test_a_progress_bar_is_shown(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    many(shell, 2100)
    on_terminal(monkeypatch, answer=True)
    shown: list[tuple[int, int]] = []

    class Progress:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.total = 0

        def __enter__(self) -> Progress:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def add_task(self, _: str, total: int) -> int:
            self.total = total
            return 0

        def advance(self, _: int, count: int) -> None:
            shown.append((count, self.total))

    monkeypatch.setattr("rich.progress.Progress", Progress)
    assert shell("cancel", "--queue", "q").stdout == "2,100 jobs cancelled\n"
    assert shown == [(1000, 2100), (1000, 2100), (100, 2100)]


def test_the_progress_bar_is_drawn_on_standard_error_only(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    many(shell, 5)
    on_terminal(monkeypatch, answer=True)
    result = shell("cancel", "--queue", "q")
    assert result.stdout == "5 jobs cancelled\n"


def test_ctrl_c_stops_between_chunks_and_reports_the_progress(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    many(shell, 3000)
    cancel, calls = JobOperations.cancel, []

    async def cancel_and_be_interrupted(self: JobOperations, ids: Any) -> Any:
        calls.append(len(ids))
        os.kill(os.getpid(), signal.SIGINT)
        return await cancel(self, ids)

    monkeypatch.setattr(JobOperations, "cancel", cancel_and_be_interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = shell("cancel", "--queue", "q", code=1)
    assert result.stdout == "1,000 jobs cancelled\n"
    assert "stopped after 1,000 jobs" in result.stderr
    assert (calls, count(shell, "pending"), count(shell, "cancelled")) == ([1000], 2000, 1000)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_connection_lost_half_way_reports_the_true_count(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    many(shell, 3000, "dead")
    discard, calls = JobOperations.discard, []

    async def discard_and_lose_the_connection(self: JobOperations, ids: Any) -> Any:
        calls.append(len(ids))
        if len(calls) == 3:
            raise DatabaseUnavailable("no connection to the database: gone")
        return await discard(self, ids)

    monkeypatch.setattr(JobOperations, "discard", discard_and_lose_the_connection)
    result = shell("discard", "--queue", "q", "--json", code=1)
    told = {"matched": 2000, "discarded": 2000, "refused": []}
    assert json.loads(result.stdout) == {"operation": "discard", **told, "stopped": True}
    assert "gone" in result.stderr
    assert shell.sql("SELECT count(*) FROM pgworkd.finished_jobs") == 2000


@pytest.mark.parametrize("command", ["cancel", "retry", "discard"])
def test_a_queue_that_nobody_has_used_has_no_jobs_and_is_no_error(shell: Shell, command: str) -> None:
    """A script empties queues that may not have been used yet; who has misspelt one is told."""
    enqueue(shell, "mail")
    outcome = {"cancel": "cancelled", "retry": "will run again", "discard": "discarded"}[command]
    result = shell(command, "--queue", "mial")
    assert result.stdout == f"0 jobs {outcome}\n"
    assert result.stderr.startswith("pgworkd: unknown queue 'mial': did you mean 'mail'?: no live job, worker,")
    assert shell(command, "--queue", "mail", "--kind", "k").stderr == ""


# Groups of errors.


def die_of(shell: Shell, error: str, jobs: int, queue: str = "q") -> list[str]:
    ids = [
        shell.die(queue, error=f"E: {error}", errors=json.dumps([{"type": "E", "message": error}])) for _ in range(jobs)
    ]
    shell.sql("SELECT pgworkd.note_deaths(%s::uuid[])", ids)
    shell.sql("SELECT pgworkd.count_deaths(10000)")
    return ids


def group_of(shell: Shell, job: str) -> str:
    return str(shell.sql("SELECT group_id FROM pgworkd.deaths WHERE job_id = %s", job))


@pytest.mark.parametrize(("command", "status"), [("retry", "pending"), ("discard", "discarded")])
def test_one_group_of_errors_is_taken_and_no_other(shell: Shell, command: str, status: str) -> None:
    ours, others = die_of(shell, "no card", 3), die_of(shell, "no network", 2)
    elsewhere = die_of(shell, "no card", 1, "other")
    assert shell(command, "--group", group_of(shell, ours[0]), "--limit", "2").stdout.startswith("2 jobs ")
    assert shell(command, "--group", group_of(shell, ours[0])).stdout.startswith("1 job ")
    assert {shell.status(job) for job in ours} == {status}
    assert {shell.status(job) for job in (*others, *elsewhere)} == {"dead"}
    result = shell(command, "--group", group_of(shell, ours[0]))
    assert result.stdout.startswith("0 jobs ")
    assert f"no dead job is of group {group_of(shell, ours[0])}: see pgworkd dead" in result.stderr


def test_a_job_that_died_of_something_else_since_is_not_of_the_group(shell: Shell) -> None:
    (job,) = die_of(shell, "no card", 1)
    first = group_of(shell, job)
    shell.sql(
        "UPDATE pgworkd.jobs SET attempts = attempts + 1, error = 'E: no network', errors = %s WHERE id = %s",
        json.dumps([{"type": "E", "message": "no network"}]),
        job,
    )
    shell.sql("SELECT pgworkd.note_deaths(%s::uuid[])", [job])
    shell.sql("SELECT pgworkd.count_deaths(10000)")
    assert shell("retry", "--group", first).stdout == "0 jobs will run again\n"
    second = str(shell.sql("SELECT max(group_id) FROM pgworkd.deaths WHERE job_id = %s", job))
    assert shell("retry", "--group", second, "--queue", "q").stdout == "1 job will run again\n"


@pytest.mark.parametrize("large", [6_000, 11_000])
def test_a_large_group_is_found_among_many(shell: Shell, large: int) -> None:
    shell.sql(
        """WITH made AS (
               INSERT INTO pgworkd.jobs (queue, status, failed_at, attempts)
               SELECT 'q', 'dead', now(), 1 FROM generate_series(1, 12000) RETURNING id)
           INSERT INTO pgworkd.deaths (job_id, attempt, queue, kind, error_type, error, group_id)
           SELECT id, 1, 'q', 'q', 'E', 'e', CASE WHEN row_number() OVER () <= %s THEN 7 ELSE 8 END FROM made""",
        large,
    )
    assert shell("discard", "--group", "7", "--limit", "100").stdout == "100 jobs discarded\n"
    assert shell("discard", "--group", "7").stdout == f"{large - 100:,} jobs discarded\n"
    assert count(shell, "dead") == 12_000 - large
