"""A session that a handler has spoilt in its job.transaction() is not used again: the next job finds a new one."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from pgworkd import App, Job
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.schema import plain_user, with_login

pytestmark = pytest.mark.slow("a daemon for each way to spoil a session")

SPOILT: dict[str, str] = {
    "prepared statements": "DEALLOCATE ALL",
    "one of them": "DEALLOCATE pgworkd_session",
    "a role": "SET ROLE pg_monitor",
    "a user": "SET SESSION AUTHORIZATION pg_monitor",
    "a temporary table": "CREATE TEMP TABLE notes (other int)",
    "a transaction that it began": "COMMIT; BEGIN",
    "one that failed": "COMMIT; BEGIN; SELECT 1 / 0",
    "a transaction that was prepared": "PREPARE TRANSACTION 'theirs'",
    "settings": "SET search_path = nowhere; SET statement_timeout = 1; SET timezone = 'Asia/Tokyo'",
    "an isolation level": "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE, READ ONLY",
    "a channel": "LISTEN theirs",
    "an advisory lock": "SELECT pg_advisory_lock(5)",
    "a cursor": "DECLARE theirs CURSOR WITH HOLD FOR SELECT 1",
}
ENDED = "SELECT status FROM pgworkd.all_jobs WHERE id = $1 AND status IN ('completed', 'dead')"
STATE = """SELECT current_user::text, session_user::text, to_regclass('notes')::oid = 'public.notes'::regclass,
    current_setting('search_path'), current_setting('statement_timeout'), current_setting('timezone'),
    current_setting('transaction_isolation'), current_setting('transaction_read_only'),
    (SELECT count(*) FROM pg_listening_channels()), (SELECT count(*) FROM pg_cursors),
    (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 5 AND pid = pg_backend_pid())"""


def app_of(spoil: Any, found: list[Any]) -> App:
    app = App()

    @app.handler("spoil", queue="q", concurrency=1, max_attempts=1)
    async def _(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.fetchval("SELECT $1::int", 1)
            await spoil(connection)

    @app.handler("state", queue="q", max_attempts=1)
    async def _(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.fetchval("SELECT $1::int", 1)
            found.append((await connection.fetchrow(STATE), await connection.fetchval("SELECT '{}'::jsonb")))
            await connection.execute("INSERT INTO notes VALUES (1)")

    return app


async def states(dsn: str, db: asyncpg.Connection[Any], spoil: Any) -> list[Any]:
    """What a job finds in its session before another has spoilt it, and what three find afterwards."""
    await db.execute("CREATE TABLE public.notes (n int)")
    found: list[Any] = []
    async with running(app_of(spoil, found), dsn, transactions_max=1):
        for kind in ("state", "spoil", "state", "state", "state"):
            job_id = await insert(db, "q", kind=kind)
            status = await until(lambda job_id=job_id: db.fetchval(ENDED, job_id))
            assert status == "completed" or kind == "spoil", await db.fetchval("SELECT error FROM pgworkd.jobs")
    assert await db.fetchval("SELECT count(*) FROM public.notes") == 4
    return found


@pytest.mark.parametrize("what", SPOILT)
async def test_the_next_job_finds_a_session_as_new(dsn: str, db: asyncpg.Connection[Any], what: str) -> None:
    async def spoil(connection: Any) -> None:
        await connection.execute(SPOILT[what])

    first, *others = await states(dsn, db, spoil)
    assert others == [first] * 3


async def test_the_next_job_finds_none_of_its_codecs(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async def spoil(connection: Any) -> None:
        await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)

    first, *others = await states(dsn, db, spoil)
    assert others == [first] * 3


async def test_a_role_that_a_session_begins_with_is_its_own(dsn: str, db: asyncpg.Connection[Any]) -> None:
    pids: set[int] = set()
    app = App()

    @app.handler("q", concurrency=1)
    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            pids.add(await connection.fetchval("SELECT pg_backend_pid()"))

    async with plain_user(dsn, db) as user_dsn:
        user = urlsplit(user_dsn).username
        await db.execute(
            f"CREATE ROLE {user}_2 LOGIN PASSWORD 'right' IN ROLE {user}; ALTER ROLE {user}_2 SET role = {user}"
        )
        try:
            async with running(app, with_login(dsn, f"{user}_2", "right"), transactions_max=1):
                for _ in range(5):
                    await until(waits_for_status(db, await insert(db, "q"), "completed"))
        finally:
            await db.execute(f"DROP ROLE {user}_2")
    assert len(pids) == 1
