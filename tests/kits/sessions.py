"""Several sessions: calls that wait, locks, notifications, rows that refuse changes, and what a statement costs."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Sequence
from typing import Any, Generic, TypeVar

import anyio
import asyncpg
from anyio.abc import TaskGroup

from tests.kits.daemon import until
from tests.kits.verbs import Db

T = TypeVar("T")
NO_STATISTICS = "ALTER TABLE pgworkd.jobs SET (autovacuum_enabled = off)"


class Later(Generic[T]):
    """A pending call in a session that will have to wait; `await later.answer()` once it can proceed."""

    def __init__(self, tasks: TaskGroup, call: Awaitable[T]) -> None:
        self._call, self._done = call, anyio.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        tasks.start_soon(self._run)

    async def _run(self) -> None:
        try:
            self._value = await self._call
        except asyncpg.PostgresError as error:
            self._error = error
        finally:
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether it has finished."""
        return self._done.is_set()

    async def answer(self) -> T:
        """Waits for the end; returns or raises the result of the call."""
        with anyio.fail_after(10):
            await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


async def waits_for_lock(observer: Db, session: Db) -> None:
    """Returns when `session` waits for a lock that another holds."""
    pid = session.get_server_pid()
    sql = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $1"
    await until(lambda: observer.fetchval(sql, pid), 10)


async def is_locked(observer: Db, table: str, key: str, value: object) -> bool:
    """Whether another session has locked the row so that it could not be updated now."""
    sql = f"SELECT 1 FROM pgworkd.{table} WHERE {key} = $1"  # noqa: S608 - names are ours
    assert await observer.fetchval(sql, value) == 1, "no such row"
    return await observer.fetchval(f"{sql} FOR UPDATE SKIP LOCKED", value) is None


class Notices:
    """A session that LISTENs. A notification of its own shows that all earlier ones have arrived."""

    def __init__(self, session: Db) -> None:
        self._session = session
        self._heard: list[str] = []

    async def listen(self) -> Notices:
        """Starts to listen."""
        await self._session.add_listener("pgworkd", lambda *args: self._heard.append(str(args[3])))
        return self

    async def heard(self) -> list[Any]:
        """The payloads, as JSON, of everything committed since the last call."""
        mark = uuid.uuid4().hex

        async def marked() -> bool:
            return mark in self._heard

        await self._session.execute("SELECT pg_notify('pgworkd', $1)", mark)
        await until(marked, 10)
        index = self._heard.index(mark)
        heard, self._heard = self._heard[:index], self._heard[index + 1 :]
        return [json.loads(text) for text in heard]

    async def queues(self) -> list[str]:
        """The queues notified by everything committed since the last call."""
        return [notice["queue"] for notice in await self.heard()]


async def blocks(db: Db, sql: str, *args: object) -> int:
    """Pages that a statement touches, including its functions. The statement is rolled back.

    The first run in a session also reads catalogs, so it is run twice.
    """
    total = 0
    for _ in range(2):
        transaction = db.transaction()
        await transaction.start()
        plan = json.loads(await db.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {sql}", *args))[0]
        await transaction.rollback()
        total = sum(plan["Plan"][f"Shared {kind} Blocks"] for kind in ("Hit", "Read"))
    return total


async def rows_read(db: Db) -> tuple[int, int]:
    """Rows of `jobs` that this session has read so far by sequential scans, and by index scans.

    Call it before and after, in one transaction: between transactions the counts are flushed to the shared statistics.
    """
    row = await db.fetchrow(
        "SELECT seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relid = 'pgworkd.jobs'::regclass"
    )
    assert row is not None
    return row["seq_tup_read"], row["idx_tup_fetch"]


async def read_by_table(db: Db) -> dict[str, tuple[int, int]]:
    """Rows read so far in this transaction, by table: by sequential scans, and by index scans."""
    rows = await db.fetch(
        "SELECT relname, seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE schemaname = 'pgworkd'"
    )
    return {row["relname"]: (row["seq_tup_read"], row["idx_tup_fetch"]) for row in rows}


STATISTICS = ["none", "empty", "full"]


async def crowd_tables(db: Db, tables: Sequence[str], sql: str, statistics: str) -> None:
    """Inserts what `sql` inserts into these tables: without planner statistics, with those of before, or of after."""
    for table in tables:
        await db.execute(f"ALTER TABLE pgworkd.{table} SET (autovacuum_enabled = off)")
        if statistics == "empty":
            await db.execute(f"ANALYZE pgworkd.{table}")
    await db.execute(sql)
    if statistics == "full":
        for table in tables:
            await db.execute(f"ANALYZE pgworkd.{table}")


REFUSE = """
    CREATE TABLE public.kept (id text PRIMARY KEY);
    CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        v_id text := to_jsonb(CASE TG_OP WHEN 'INSERT' THEN NEW ELSE OLD END) ->> TG_ARGV[0];
    BEGIN
        IF EXISTS (SELECT FROM public.kept k WHERE k.id = v_id) THEN
            RAISE EXCEPTION 'this one stays as it is';
        END IF;
        RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
    END $$
"""


async def refuse(db: Db, *ids: object, table: str = "jobs", column: str = "id", when: str = "UPDATE OR DELETE") -> None:
    """Makes these rows refuse every change from now on."""
    if await db.fetchval("SELECT to_regproc('public.refuse') IS NULL"):
        await db.execute(REFUSE)
    await db.execute(
        f"CREATE OR REPLACE TRIGGER a_refuse BEFORE {when} ON pgworkd.{table} "
        f"FOR EACH ROW EXECUTE FUNCTION public.refuse('{column}')"
    )
    await db.executemany("INSERT INTO public.kept VALUES ($1)", [(str(each),) for each in ids])


async def refused_rows(db: Db) -> dict[str, set[str]]:
    """The rows recorded as refused: keys by function."""
    rows = await db.fetch("SELECT what, array_agg(key) FROM pgworkd.refused_rows GROUP BY what")
    return {row[0]: set(row[1]) for row in rows}
