"""`pgworkd doctor` on a database that others hold up or have not opened: it says who, and what is lacking."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import anyio
import asyncpg
import pytest
from anyio.to_thread import run_sync

from pgworkd.admin import Admin, doctor_queries
from pgworkd.admin.findings import judged
from pgworkd.database import grants
from pgworkd.database.connection import ConnectionOptions
from tests.engine.test_cli_health import found
from tests.kits.cli import NOBODY, Shell, clean, shell
from tests.kits.daemon import until
from tests.kits.others import things
from tests.kits.schema import granted, plain_user
from tests.kits.verbs import Db

__all__ = ["clean", "shell"]  # fixtures

LATE = "SELECT count(*) FROM pg_locks WHERE NOT granted AND waitstart < clock_timestamp() - interval '1 s'"


_READS = "is for members of pgworkd_reader or pgworkd_worker"
_ENQUEUES = "is for members of pgworkd_enqueuer or pgworkd_worker"
_WORKS = "is for members of pgworkd_worker"


@contextlib.asynccontextmanager
async def waiting(dsn: str, sql: str) -> AsyncIterator[None]:
    """A session whose statement has waited for a lock for some time."""
    async with anyio.create_task_group() as tasks:
        session = await asyncpg.connect(dsn)

        async def wait() -> None:
            with contextlib.suppress(asyncpg.PostgresError, OSError):
                await session.execute(sql)

        tasks.start_soon(wait)
        yield
        session.terminate()


@pytest.mark.slow("questions that wait for a lock as long as they may")
@pytest.mark.parametrize(
    ("holds", "waits", "on"),
    [
        ("LOCK TABLE pgworkd.jobs", "INSERT INTO pgworkd.jobs (queue) VALUES ('q')", "jobs"),
        ("SELECT count(*) FROM pgworkd.jobs", "ALTER TABLE pgworkd.jobs ADD COLUMN theirs int", "jobs"),
        ("UPDATE pgworkd.workers SET seen_at = now()", "BEGIN; LOCK TABLE pgworkd.workers", "workers"),
        ("SELECT pgworkd.lock_queue('q')", "SELECT pgworkd.lock_queue('q')", "a queue"),
    ],
)
async def test_doctor_names_the_session_that_all_wait_for(
    dsn: str, db: Db, shell: Shell, holds: str, waits: str, on: str
) -> None:
    """And the first in line, behind which the others stand."""
    await db.execute(f"SET application_name = 'psql'; BEGIN; {holds}")
    observer = await asyncpg.connect(dsn)
    async with waiting(dsn, waits), waiting(dsn, waits):
        await until(lambda: observer.fetchval(LATE + " HAVING count(*) > 1"))
        finding, remedy = (await run_sync(found, shell))["locks"]
        pid = db.get_server_pid()
        first = int(remedy.split("pg_cancel_backend(")[1].split(")")[0])
        assert finding.startswith(f"2 sessions waiting for a lock on {on}, for up to ")
        assert f": pid {pid} (psql, postgres, idle in transaction, in a transaction for " in finding
        assert f") holds it: SET application_name = 'psql'; BEGIN; {holds}; " in finding
        assert finding.endswith(f"first in line is pid {first}: {waits}")
        assert f"SELECT pg_terminate_backend({pid})" in remedy
        assert "pgworkd" not in await observer.fetchval(
            "SELECT application_name FROM pg_stat_activity WHERE pid = $1", first
        )
        await db.execute("ROLLBACK")
    await until(lambda: observer.fetchval("SELECT count(*) = 0 FROM pg_locks WHERE NOT granted"))
    assert "locks" not in await run_sync(found, shell, 0)
    observer.terminate()


async def test_doctor_tells_a_jam_from_daemons_that_hang(dsn: str, db: Db, shell: Shell) -> None:
    """With a lock there is nothing to restart."""
    worker = shell.sql(
        "INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until)"
        " VALUES ('w', 1, '0', 30, now() + interval '1 min') RETURNING id"
    )
    shell.sql("INSERT INTO pgworkd.pools (worker_id, queue, concurrency) VALUES (%s, 'q', 3)", worker)
    shell.sql("INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('q', now() - interval '2 min')")
    assert "restart" in (await run_sync(found, shell))["queues"][1]
    await db.execute("BEGIN; LOCK TABLE pgworkd.jobs IN SHARE MODE")
    async with waiting(dsn, "UPDATE pgworkd.jobs SET priority = 1"):
        await until(lambda: shell.sql(LATE))
        problems = await run_sync(found, shell)
        assert set(problems) == {"locks"}
        await db.execute("ROLLBACK")


@pytest.mark.parametrize(
    ("role", "words", "groups"),
    [
        ("enqueuer", ("doctor",), f"SELECT {_READS}"),
        ("enqueuer", ("queues",), f"SELECT {_READS}"),
        ("enqueuer", ("jobs",), f"SELECT {_READS}, INSERT {_ENQUEUES}, UPDATE and DELETE {_WORKS}"),
        ("enqueuer", ("cancel", NOBODY), f"EXECUTE {_WORKS}"),
        ("reader", ("enqueue", "q"), f"EXECUTE {_ENQUEUES}"),
        ("reader", ("queues", "pause", "q", "--create"), f"EXECUTE {_WORKS}"),
        ("worker", ("token", "list"), "SELECT and INSERT and UPDATE and DELETE is for members of pgworkd_gateway"),
    ],
)
async def test_a_command_without_the_right_names_who_has_it(
    dsn: str, db: Db, shell: Shell, role: str, words: tuple[str, ...], groups: str
) -> None:
    async with granted(dsn, db) as roles:
        shell.dsn = roles.dsn(role)
        result = await run_sync(lambda: shell(*words, code=1 if words == ("doctor",) else 2))
        assert f"check user, password, database and grants: {groups}" in result.stdout + result.stderr
        assert "(GRANT the group TO this user)" in result.stdout + result.stderr


@pytest.mark.parametrize("name", ["secrets", "public"])
def test_an_object_that_is_not_ours_is_for_no_group(name: str) -> None:
    assert grants.groups_that_may(f"permission denied for table {name}") == grants.groups_that_may("jobs") == ""


async def test_doctor_compares_the_sessions_with_the_limit_of_the_role(dsn: str, db: Db, shell: Shell) -> None:
    async with plain_user(dsn, db) as user:
        shell.dsn = user
        name = user.split("://")[1].split(":")[0]

        async def said(limit: int, code: int) -> tuple[str, str]:
            await db.execute(f"ALTER ROLE {name} CONNECTION LIMIT {limit}")
            lines = json.loads((await run_sync(lambda: shell("doctor", "--json", code=code))).stdout)
            line = next(each for each in lines if each["subject"] == "sessions")
            return line["level"], line["finding"]

        assert await said(4, 1) == ("bad", f"1 of 4 used, of role {name}")
        assert await said(5, 0) == ("ok", f"1 of 5 used, of role {name}")
        held = await asyncpg.connect(user)
        assert await said(5, 0) == ("warn", f"2 of 5 used, of role {name}")
        held.terminate()


def test_doctor_tells_of_rows_of_no_day(shell: Shell) -> None:
    assert "finished_jobs_other" not in shell("doctor").stdout
    shell.sql(
        "INSERT INTO pgworkd.finished_jobs"
        " (id, finished_at, run_at, created_at, status, priority, attempts, failures, queue, payload, errors)"
        " SELECT pgworkd.new_id(), now() - interval '30 days', now(), now(), 'completed', 0, 1, 0, 'q', '{}', '[]'"
    )
    assert "1 row of no day, in finished_jobs_other: deleted one by one after keep_days" in shell("doctor").stdout


def test_doctor_tells_of_policies(shell: Shell) -> None:
    (policy,) = [thing for thing in things((), ()) if thing.name == "jobs: a policy that keeps"]
    shell.db.execute(policy.create)
    (line,) = [line for line in shell("doctor").stdout.splitlines() if " rows " in line]
    assert "row level security is on for jobs: jobs that a policy keeps from a daemon's role wait" in line
    shell.db.execute(policy.drop)
    assert "row level" not in shell("doctor").stdout


async def test_a_queue_that_is_drained_while_doctor_looks_is_not_late(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last job is claimed between the question which queues wait and the one for how long."""
    monkeypatch.setattr(doctor_queries, "QUEUES", "SELECT 'drained' LIMIT $1")
    async with Admin(ConnectionOptions(dsn)) as admin:
        health = await admin.health()
    assert [(each.queue, each.overdue_s) for each in health.queues] == [("drained", 0.0)]
    assert {each.level for each in judged(health)} == {"ok"}
