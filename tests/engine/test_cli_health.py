"""`pgworkd doctor` on queues: it reports what keeps due jobs from running, with a remedy and exit code 1."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from anyio.to_thread import run_sync

from pgworkd import App
from tests.kits.cli import WORKER, Shell, clean, shell
from tests.kits.daemon import insert, running, until

pytestmark = pytest.mark.slow("daemons that answer, and do not")

__all__ = ["clean", "shell"]  # fixtures

WARNED = ("endpoints", "warn")
OLD = "now() - interval '2 min'"


def found(shell: Shell, code: int = 1) -> dict[str, tuple[str, str]]:
    """The finding and remedy of each problem, by subject."""
    lines = json.loads(shell("doctor", "--json", code=code).stdout)
    bad = {each["subject"]: (each["finding"], each["remedy"]) for each in lines if each["level"] == "bad"}
    assert bool(bad) == (code == 1)
    assert all(remedy for _, remedy in bad.values())
    return bad


def serve(shell: Shell, queue: str, lease: str = "1 min", slots: int = 3) -> int:
    worker = shell.sql(WORKER, "w", lease)
    shell.sql("INSERT INTO pgworkd.pools (worker_id, queue, concurrency) VALUES (%s, %s, %s)", worker, queue, slots)
    return int(worker)


@pytest.mark.parametrize("columns", ["", "serialize_key", "limit_key"])
def test_doctor_finds_a_due_queue_without_a_live_worker(shell: Shell, columns: str) -> None:
    shell.sql(
        f"INSERT INTO pgworkd.jobs (queue, run_at, serialize_key, limit_key) VALUES ('late', {OLD}, %s, %s)",  # noqa: S608
        "k" if columns == "serialize_key" else None,
        "k" if columns == "limit_key" else None,
    )
    assert found(shell)["queues"] == ("due jobs, but no worker: 'late'", "start one: pgworkd run --queue NAME")
    serve(shell, "late", lease="-1 min")  # a lost worker does not count
    assert "'late'" in found(shell)["queues"][0]
    shell("queues", "pause", "late")
    assert found(shell, code=0) == {}


def test_doctor_tells_of_results_that_were_dropped(shell: Shell) -> None:
    shell("endpoints", "add", "a", "https://example.com/", "--unsigned", "--queue", "qa")
    shell.sql("SELECT pgworkd.warn_of('a', 'result cannot be read: it is no JSON')")
    shell.sql("UPDATE pgworkd.endpoints SET warned_at = warned_at - interval '10 minutes'")

    def warned() -> list[tuple[str, str]]:
        lines = json.loads(shell("doctor", "--json").stdout)
        return [(each["finding"], each["remedy"]) for each in lines if (each["subject"], each["level"]) == WARNED]

    ((said, remedy),) = warned()
    assert "'a' has answered 2xx with a result that cannot be stored (result cannot be read" in said
    assert said.endswith("10 min ago its job completed without it")
    assert "another Content-Type; the log names the jobs" in remedy
    shell("endpoints", "set", "a", "--strict-results")
    assert warned() == [], "such jobs are dead"


def test_doctor_tells_of_endpoints_to_which_nothing_is_sent(shell: Shell) -> None:
    for name in ("a", "b", "c"):
        shell("endpoints", "add", name, "https://example.com/", "--unsigned", "--queue", f"q{name}")
        shell.sql(f"INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('q{name}', {OLD})")  # noqa: S608
    shell.sql("SELECT pgworkd.disable_endpoint('a', 'HTTP 410')")
    shell.sql("SELECT pgworkd.pause_endpoint('b', 300, 'HTTP 503')")
    shell("endpoints", "add", "unused", "https://example.com/", "--unsigned")
    shell("endpoints", "disable", "unused")
    problems = found(shell)
    assert problems["queues"] == (
        "due jobs with an endpoint, but nobody sends them: 'qc'",
        "start pgworkd push; if one runs, its log says why it does not (endpoint.refused)",
    )
    assert problems["endpoints"] == (
        "'a' is disabled (HTTP 410), and so are its queues: 'qa'",
        "pgworkd endpoints enable a, or give its queues another",
    )
    lines = json.loads(shell("doctor", "--json", code=1).stdout)
    (paused,) = [each for each in lines if each["subject"] == "endpoints" and each["level"] == "warn"]
    assert "(HTTP 503), and so are its queues: 'qb'" in paused["finding"]
    jobs = {each["queue"]: each["id"] for each in json.loads(shell("jobs", "--json").stdout)}
    waits = {queue: json.loads(shell("job", jobs[queue], "--json").stdout)["waits"] for queue in ("qa", "qb", "qc")}
    assert waits == {
        "qa": "its queue is paused with the endpoint a: HTTP 410",
        "qb": "its queue is paused with the endpoint b: HTTP 503",
        "qc": None,
    }


def test_doctor_finds_due_jobs_beside_idle_slots(shell: Shell) -> None:
    worker = serve(shell, "q")
    shell.sql("INSERT INTO pgworkd.jobs (queue, run_at, priority) VALUES ('q', now(), 9)")
    shell.sql(f"INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('q', {OLD})")  # noqa: S608
    finding, remedy = found(shell)["queues"]
    assert finding.startswith("'q': a job has been due for 12")
    assert finding.endswith("s although there are 3 idle slots in 1 worker")
    assert "logs" in remedy
    shell.sql(
        "INSERT INTO pgworkd.jobs (queue, status, worker_id, attempts)"
        " SELECT 'q', 'running', %s, 1 FROM generate_series(1, 3)",
        worker,
    )
    assert found(shell, code=0) == {}, "no slot is idle"


def test_doctor_says_that_a_lock_may_keep_it_from_an_answer(shell: Shell) -> None:
    shell.db.autocommit = False
    shell.sql("LOCK TABLE pgworkd.jobs")
    finding, remedy = found(shell)["answers"]
    assert finding.startswith("the database left a question unanswered: canceling statement due to statement timeout")
    assert "pg_blocking_pids()" in finding
    assert "pg_stat_activity" in remedy
    shell.db.rollback()
    shell.db.autocommit = True
    assert found(shell, code=0) == {}


def test_doctor_accepts_jobs_held_back_by_limits_and_keys(shell: Shell) -> None:
    serve(shell, "limited"), serve(shell, "keyed")
    shell("queues", "set", "limited", "--max-running", "1")
    shell.sql(f"INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('limited', {OLD})")  # noqa: S608
    shell.sql(f"INSERT INTO pgworkd.jobs (queue, run_at, serialize_key) VALUES ('keyed', {OLD}, 'k')")  # noqa: S608
    assert found(shell, code=0) == {}


def test_doctor_finds_a_schedule_in_error(shell: Shell) -> None:
    shell.sql("INSERT INTO pgworkd.schedules (name, queue, cron, error) VALUES ('s', 'q', '0 0 30 2 *', 'never due')")
    assert found(shell)["schedules"] == ("'s' has no next occurrence: never due", "correct its rule")
    shell.sql("UPDATE pgworkd.schedules SET enabled = false")
    assert found(shell, code=0) == {}


def test_doctor_finds_jobs_blocked_by_a_dead_job(shell: Shell) -> None:
    dead = shell.die("q")
    with shell.db.transaction():
        waiting = shell.sql("INSERT INTO pgworkd.jobs (queue) VALUES ('q') RETURNING id")
        shell.sql("SELECT pgworkd.depend(%s, ARRAY[%s]::uuid[], 'wait')", waiting, dead)
    finding, remedy = found(shell)["dependencies"]
    assert finding == f"1 job waiting for the dead job {dead} (see pgworkd job {waiting})"
    assert remedy.startswith(f"pgworkd retry {dead}")
    shell("undepend", str(waiting))
    assert "dependencies" not in found(shell, code=0)


@pytest.mark.parametrize("status", ["cancelled", "discarded"])
def test_doctor_finds_jobs_blocked_by_one_that_cannot_be_retried(shell: Shell, status: str) -> None:
    first = shell.sql("INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('q', now() + interval '1 h') RETURNING id")
    with shell.db.transaction():
        waiting = shell.sql("INSERT INTO pgworkd.jobs (queue) VALUES ('q') RETURNING id")
        shell.sql("SELECT pgworkd.depend(%s, ARRAY[%s]::uuid[], 'wait')", waiting, first)
    if status == "discarded":
        shell.sql("UPDATE pgworkd.jobs SET status = 'dead' WHERE id = %s", first)
    shell("cancel" if status == "cancelled" else "discard", str(first))
    finding, remedy = found(shell)["dependencies"]
    assert finding == f"1 job waiting for the {status} job {first} (see pgworkd job {waiting})"
    assert remedy.startswith("pgworkd undepend ID")
    shell("cancel", str(waiting))
    assert "dependencies" not in found(shell, code=0)


async def test_doctor_finds_a_kind_without_a_handler(dsn: str, db: Any, shell: Shell) -> None:
    app = App()

    @app.handler("q")
    async def handle() -> None: ...

    async with running(app, dsn):
        await insert(db, "q", kind="new")
        await until(lambda: db.fetchval("SELECT error IS NOT NULL FROM pgworkd.jobs"))
        kinds = (await run_sync(found, shell))["kinds"]
    assert kinds[0] == "no live worker of queue 'q' has a handler for 'new': at least 1 job"
    assert "deploy" in kinds[1]


def test_doctor_stays_cheap_with_many_jobs(shell: Shell) -> None:
    """100,000 future and 20,000 dead jobs in a queue."""
    serve(shell, "q")
    shell.sql(
        "INSERT INTO pgworkd.jobs (queue, run_at, priority) SELECT 'q', now() + interval '1 h', mod(i, 3)"
        " FROM generate_series(1, 100000) i"
    )
    shell.sql(
        "INSERT INTO pgworkd.jobs (queue, status, failures, failed_at, max_attempts)"
        " SELECT 'q', 'dead', 1, now(), 1 FROM generate_series(1, 20000)"
    )
    shell.sql("ANALYZE pgworkd.jobs")
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        assert found(shell, code=0) == {}
        took_s.append(time.monotonic() - began_s)
    assert "10,000 or more" in shell("doctor").stdout
    assert min(took_s) < 2.0


def test_doctor_finds_deferred_effects_that_are_not_applied(shell: Shell) -> None:
    shell.sql("SELECT pgworkd.put_off(NULL, ARRAY[pgworkd.new_id(), pgworkd.new_id()], true)")
    assert found(shell, code=0) == {}, "they have just been put off"
    shell.sql(f"UPDATE pgworkd.pending_effects SET put_off_at = {OLD}")  # noqa: S608
    finding, remedy = found(shell)["effects"]
    assert finding.startswith("2 effects of finished jobs not applied yet, the oldest for 12")
    assert "pg_stat_activity" in remedy
    shell.sql("SELECT pgworkd.apply_effects()")
    assert found(shell, code=0) == {}
