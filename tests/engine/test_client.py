"""Application code enqueues on its own connection: each driver, each fault, all or nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import inspect
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, assert_type
from uuid import UUID

import asyncpg
import django.db  # type: ignore[import-untyped]
import psycopg
import pytest
import sqlalchemy
from django.conf import settings as django_settings  # type: ignore[import-untyped]
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from pydantic import BaseModel
from sqlalchemy import orm

from pgworkd import client
from pgworkd.client import NewJob, enqueue, enqueue_many
from pgworkd.errors import DELAY_S_MAX, InvalidPayload, UsageError

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession


@dataclasses.dataclass
class Caller:
    """An application's connection; in a transaction that `commit` and `rollback` end, or in autocommit."""

    conn: Any
    commit: Callable[[], Any]
    rollback: Callable[[], Any]
    execute: Callable[[str], Any]


def nothing() -> None:
    pass


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def asyncpg_connection(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    conn = await asyncpg.connect(dsn)
    try:
        if autocommit:
            yield Caller(conn, nothing, nothing, conn.execute)
        else:
            transaction = conn.transaction()
            await transaction.start()
            yield Caller(conn, transaction.commit, transaction.rollback, conn.execute)
    finally:
        conn.terminate()


@asynccontextmanager
async def asyncpg_proxy(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool, pool.acquire() as conn:
        if autocommit:
            yield Caller(conn, nothing, nothing, conn.execute)
            return
        transaction = conn.transaction()
        await transaction.start()
        yield Caller(conn, transaction.commit, transaction.rollback, conn.execute)
        if conn.is_in_transaction():  # an aborted one that the test left
            await transaction.rollback()


@asynccontextmanager
async def asyncpg_pool(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    assert autocommit
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        yield Caller(pool, nothing, nothing, pool.execute)


@asynccontextmanager
async def psycopg_sync(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    with psycopg.connect(dsn, autocommit=autocommit) as conn:
        yield Caller(conn, conn.commit, conn.rollback, conn.execute)


@asynccontextmanager
async def psycopg_unusual(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    """With rows as dicts and $1 as the style of parameters."""
    with psycopg.connect(dsn, autocommit=autocommit, row_factory=dict_row, cursor_factory=psycopg.RawCursor) as conn:
        yield Caller(conn, conn.commit, conn.rollback, conn.execute)


@asynccontextmanager
async def psycopg_async(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit) as conn:
        yield Caller(conn, conn.commit, conn.rollback, conn.execute)


@asynccontextmanager
async def sqlalchemy_connection(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    with sqlalchemy_engine(dsn, autocommit).connect() as conn:
        yield Caller(conn, conn.commit, conn.rollback, lambda sql: conn.execute(sqlalchemy.text(sql)))
    conn.engine.dispose()


@asynccontextmanager
async def sqlalchemy_session(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    engine = sqlalchemy_engine(dsn, autocommit)
    with orm.Session(engine) as session:
        yield Caller(session, session.commit, session.rollback, lambda sql: session.execute(sqlalchemy.text(sql)))
    engine.dispose()


@asynccontextmanager
async def sqlalchemy_scoped_session(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    engine = sqlalchemy_engine(dsn, autocommit)
    session = orm.scoped_session(orm.sessionmaker(engine))
    yield Caller(session, session.commit, session.rollback, lambda sql: session.execute(sqlalchemy.text(sql)))
    session.remove()
    engine.dispose()


def sqlalchemy_engine(dsn: str, autocommit: bool) -> sqlalchemy.Engine:
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    return sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), **options)


@asynccontextmanager
async def sqlalchemy_async_engine(dsn: str, autocommit: bool, driver: str) -> AsyncIterator[Any]:
    pytest.importorskip("greenlet", reason="SQLAlchemy's async side needs sqlalchemy[asyncio]")
    from sqlalchemy.ext.asyncio import create_async_engine

    connect: Any = asyncpg.connect if driver == "asyncpg" else psycopg.AsyncConnection.connect
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    engine = create_async_engine(f"postgresql+{driver}://", async_creator=lambda: connect(dsn), **options)
    yield engine
    await engine.dispose()


@asynccontextmanager
async def sqlalchemy_async_connection(dsn: str, autocommit: bool, driver: str = "asyncpg") -> AsyncIterator[Caller]:
    async with sqlalchemy_async_engine(dsn, autocommit, driver) as engine, engine.connect() as conn:
        yield Caller(conn, conn.commit, conn.rollback, lambda sql: conn.execute(sqlalchemy.text(sql)))


@asynccontextmanager
async def sqlalchemy_async_psycopg(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with sqlalchemy_async_connection(dsn, autocommit, "psycopg") as caller:
        yield caller


@asynccontextmanager
async def sqlalchemy_async_session(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with sqlalchemy_async_engine(dsn, autocommit, "asyncpg") as engine:
        from sqlalchemy.ext.asyncio import AsyncSession

        async with AsyncSession(engine) as session:
            yield Caller(session, session.commit, session.rollback, lambda sql: session.execute(sqlalchemy.text(sql)))


@asynccontextmanager
async def sqlalchemy_async_scoped_session(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with sqlalchemy_async_engine(dsn, autocommit, "asyncpg") as engine:
        from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker

        session = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        yield Caller(session, session.commit, session.rollback, lambda sql: session.execute(sqlalchemy.text(sql)))
        await session.remove()


@asynccontextmanager
async def django_proxy(dsn: str, autocommit: bool, *, proxy: bool = True) -> AsyncIterator[Caller]:
    """Django's `connection`, in an atomic block unless autocommit."""
    if not django_settings.configured:
        engine = {"ENGINE": "django.db.backends.postgresql", "TEST": {}}
        django_settings.configure(DATABASES={"default": engine}, USE_TZ=True)
        django.setup()
    parts = conninfo_to_dict(dsn)
    django.db.connections.settings["default"].update(
        NAME=parts["dbname"],
        HOST=parts.get("host", ""),
        PORT=parts.get("port", ""),
        USER=parts.get("user", ""),
        PASSWORD=parts.get("password", ""),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")  # the test's loop has nothing else to do
        conn: Any = django.db.connection if proxy else django.db.connections["default"]
        conn.connect()
        conn.set_autocommit(autocommit)
        try:
            yield Caller(conn, conn.commit, conn.rollback, lambda sql: conn.cursor().execute(sql))
        finally:
            conn.close()


@asynccontextmanager
async def django_wrapper(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with django_proxy(dsn, autocommit, proxy=False) as caller:
        yield caller


TRANSACTIONAL = [
    *(asyncpg_connection, asyncpg_proxy, psycopg_sync, psycopg_unusual, psycopg_async),
    *(sqlalchemy_connection, sqlalchemy_session, sqlalchemy_scoped_session),
    *(sqlalchemy_async_connection, sqlalchemy_async_psycopg, sqlalchemy_async_session, sqlalchemy_async_scoped_session),
    *(django_proxy, django_wrapper),
]
in_a_transaction = pytest.mark.parametrize("opener", TRANSACTIONAL)
in_autocommit = pytest.mark.parametrize("opener", [*TRANSACTIONAL, asyncpg_pool])


@pytest.fixture(params=[5_000, 2], ids=["one-statement", "several-statements"])
def statement_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(client, "_STATEMENT_ROWS", request.param)
    return int(request.param)


@pytest.fixture
def several_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_STATEMENT_ROWS", 2)


def numbered(count: int, **last: Any) -> list[NewJob]:
    """Jobs with payloads {"n": 0}, {"n": 1} ...; the last one also has the given fields."""
    jobs = [NewJob("q", {"n": n}) for n in range(count)]
    jobs[-1] = dataclasses.replace(jobs[-1], **last)
    return jobs


async def stored(db: asyncpg.Connection[Any]) -> dict[UUID, Any]:
    """What another connection sees: payloads by id."""
    return {row[0]: json.loads(row[1]) for row in await db.fetch("SELECT id, payload FROM pgworkd.jobs")}


def sqlstate(error: BaseException) -> str | None:
    """As the caller finds it: on the driver's exception, or on the one that SQLAlchemy or Django has wrapped."""
    inner: Any = getattr(error, "orig", None) or error.__cause__ or error
    return getattr(error, "sqlstate", None) or getattr(inner, "sqlstate", None)


# Transactions


@in_a_transaction
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_jobs_come_and_go_with_the_callers_transaction(
    opener: Any, end: str, statement_rows: int, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=False) as caller:
        single = await settled(enqueue(caller.conn, "q", {"n": "single"}))
        many = await settled(enqueue_many(caller.conn, numbered(7)))
        assert await stored(db) == {}

        await settled(getattr(caller, end)())
        assert isinstance(single, UUID)
        in_order = {single: {"n": "single"}, **{job_id: {"n": n} for n, job_id in enumerate(many)}}
        assert await stored(db) == (in_order if end == "commit" else {})


@in_a_transaction
async def test_a_large_call_may_be_the_first_thing_in_a_transaction(
    opener: Any, several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=False) as caller:
        await settled(enqueue_many(caller.conn, numbered(7)))
        assert await stored(db) == {}
        await settled(caller.rollback())
        assert await stored(db) == {}


@in_autocommit
async def test_jobs_exist_at_once_in_autocommit(
    opener: Any, statement_rows: int, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=True) as caller:
        single = await settled(enqueue(caller.conn, "q", {"n": "single"}))
        assert await stored(db) == {single: {"n": "single"}}
        many = await settled(enqueue_many(caller.conn, iter(numbered(7))))
        assert await stored(db) == {single: {"n": "single"}, **{job_id: {"n": n} for n, job_id in enumerate(many)}}


@in_autocommit
async def test_in_autocommit_a_conflict_in_the_last_statement_leaves_nothing_and_a_usable_connection(
    opener: Any, several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=True) as caller:
        first = await settled(enqueue(caller.conn, "q", {"n": "first"}, dedupe_key="taken"))
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each driver has its own
            await settled(enqueue_many(caller.conn, numbered(7, dedupe_key="taken")))
        assert sqlstate(caught.value) == "23505"
        assert await stored(db) == {first: {"n": "first"}}

        # It still is what it was: in autocommit.
        second = await settled(enqueue(caller.conn, "q", {"n": "second"}))
        assert await stored(db) == {first: {"n": "first"}, second: {"n": "second"}}


@in_a_transaction
async def test_of_a_failed_call_nothing_is_left_even_if_the_caller_commits(
    opener: Any, several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=False) as caller:
        first = await settled(enqueue(caller.conn, "q", {"n": "first"}, dedupe_key="taken"))
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each driver has its own
            await settled(enqueue_many(caller.conn, numbered(7, dedupe_key="taken")))
        assert sqlstate(caught.value) == "23505"
        await settled(caller.commit())
        assert await stored(db) == {first: {"n": "first"}}


DRIVERS_OWN = {
    asyncpg_connection: asyncpg.UniqueViolationError,
    psycopg_sync: psycopg.errors.UniqueViolation,
    psycopg_async: psycopg.errors.UniqueViolation,
    sqlalchemy_connection: sqlalchemy.exc.IntegrityError,
    sqlalchemy_async_session: sqlalchemy.exc.IntegrityError,
    django_proxy: django.db.IntegrityError,
}


@pytest.mark.parametrize("opener", DRIVERS_OWN)
async def test_a_taken_dedupe_key_raises_the_drivers_own_error(opener: Any, statement_rows: int, dsn: str) -> None:
    async with opener(dsn, autocommit=False) as caller:
        with pytest.raises(DRIVERS_OWN[opener]):
            await settled(enqueue_many(caller.conn, [NewJob("q", dedupe_key="a"), *numbered(3, dedupe_key="a")]))


@in_a_transaction
async def test_an_aborted_transaction_passes_the_drivers_error(
    opener: Any, statement_rows: int, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=False) as caller:
        with pytest.raises(Exception, match="division by zero"):
            await settled(caller.execute("SELECT 1 / 0"))
        calls: list[Callable[[], Any]] = [
            lambda: enqueue(caller.conn, "q"),
            lambda: enqueue_many(caller.conn, numbered(7)),
        ]
        for call in calls:
            with pytest.raises(Exception) as caught:  # noqa: PT011 - each driver has its own
                await settled(call())
            assert sqlstate(caught.value) == "25P02"
        await settled(caller.rollback())
        assert await stored(db) == {}


async def test_a_closed_connection_passes_the_drivers_error(dsn: str) -> None:
    asynchronous = await asyncpg.connect(dsn)
    await asynchronous.close()
    with pytest.raises(asyncpg.InterfaceError):
        await enqueue(asynchronous, "q")
    synchronous = psycopg.connect(dsn)
    synchronous.close()
    with pytest.raises(psycopg.OperationalError):
        enqueue(synchronous, "q")
    engine = sqlalchemy_engine(dsn, autocommit=False)
    connection = engine.connect()
    connection.close()
    with pytest.raises(sqlalchemy.exc.ResourceClosedError):
        enqueue(connection, "q")
    engine.dispose()


@in_a_transaction
async def test_a_lost_connection_passes_the_drivers_error(
    opener: Any, several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=True) as caller:
        await settled(enqueue_many(caller.conn, numbered(7)))
        await db.fetch(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each driver has its own
            await settled(enqueue_many(caller.conn, numbered(7)))
        library = opener.__name__.partition("_")[0]
        assert type(caught.value).__module__.partition(".")[0] == library
    assert len(await stored(db)) == 7


async def test_a_call_cancelled_between_statements_leaves_nothing(
    several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    class Cancelled(asyncpg.Connection):
        calls = 0

        async def fetch(self, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            if self.calls == 3:
                raise asyncio.CancelledError
            return await super().fetch(*args, **kwargs)

    conn = await asyncpg.connect(dsn, connection_class=Cancelled)
    async with conn.transaction():
        with pytest.raises(asyncio.CancelledError):
            await enqueue_many(conn, numbered(7))
    await conn.close()
    assert await stored(db) == {}


async def test_an_interrupt_between_statements_leaves_nothing(
    several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    class Interrupted(psycopg.Cursor[Any]):
        calls = 0

        def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += "INSERT" in query
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().execute(query, *args, **kwargs)

    with psycopg.connect(dsn, cursor_factory=Interrupted) as conn:
        with pytest.raises(KeyboardInterrupt):
            enqueue_many(conn, numbered(7))
        conn.commit()
    assert Interrupted.calls == 3
    assert await stored(db) == {}


async def test_inside_nested_blocks_of_the_caller(statement_rows: int, dsn: str, db: asyncpg.Connection[Any]) -> None:
    """A savepoint of the caller that is rolled back takes its jobs along, and no others."""
    with psycopg.connect(dsn) as conn, conn.transaction():
        kept = enqueue_many(conn, numbered(3))
        with conn.transaction(force_rollback=True):
            enqueue_many(conn, numbered(3))
    assert set(await stored(db)) == set(kept)

    async with django_proxy(dsn, autocommit=True) as caller:
        with django.db.transaction.atomic():
            kept += enqueue_many(caller.conn, numbered(3))
            with django.db.transaction.atomic():
                enqueue_many(caller.conn, numbered(3))
                caller.conn.set_rollback(True)
            assert len(await stored(db)) == 3
        assert set(await stored(db)) == set(kept)

    engine = sqlalchemy_engine(dsn, autocommit=False)
    with orm.Session(engine) as session, session.begin():
        kept += enqueue_many(session, numbered(3))
        with session.begin_nested() as nested:
            enqueue_many(session, numbered(3))
            nested.rollback()
    engine.dispose()
    assert set(await stored(db)) == set(kept)


# Many


async def test_a_hundred_thousand_jobs_in_one_call(dsn: str, db: asyncpg.Connection[Any]) -> None:
    ids = await enqueue_many(db, ({"queue": "q", "payload": {"n": n}} for n in range(100_000)))
    rows = await db.fetch("SELECT id FROM pgworkd.jobs ORDER BY (payload ->> 'n')::int")
    assert [row[0] for row in rows] == ids
    assert len(ids) == 100_000


async def test_of_a_hundred_thousand_jobs_with_a_bad_last_one_nothing_is_inserted(db: asyncpg.Connection[Any]) -> None:
    jobs = numbered(100_000, payload={"items": [1, 2, 3, {"name": "a\0b"}]})
    with pytest.raises(InvalidPayload, match=r"^jobs\[99999\]\.payload\.items\[3\]\.name holds a NUL"):
        await enqueue_many(db, jobs)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_of_a_hundred_thousand_jobs_with_a_conflict_in_the_last_nothing_is_inserted(
    db: asyncpg.Connection[Any],
) -> None:
    await enqueue(db, "q", dedupe_key="taken")
    with pytest.raises(asyncpg.UniqueViolationError):
        await enqueue_many(db, numbered(100_000, dedupe_key="taken"))
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 1


async def test_large_payloads_are_spread_over_statements(db: asyncpg.Connection[Any]) -> None:
    jobs = [NewJob("q", {"text": "x" * 1_000_000}, meta={"n": n}) for n in range(20)]
    rows = [client._row(job, "") for job in jobs]
    assert [len(part) for part in client._parts(rows)] == [8, 8, 4]
    ids = await enqueue_many(db, jobs)
    found = await db.fetch("SELECT id FROM pgworkd.jobs ORDER BY (meta ->> 'n')::int")
    assert [row[0] for row in found] == ids


@in_autocommit
async def test_no_jobs_no_ids(opener: Any, dsn: str) -> None:
    async with opener(dsn, autocommit=True) as caller:
        assert await settled(enqueue_many(caller.conn, [])) == []
        assert await settled(enqueue_many(caller.conn, iter(()))) == []


# What is stored


@in_autocommit
async def test_every_field_is_stored(opener: Any, dsn: str, db: asyncpg.Connection[Any]) -> None:
    run_at = datetime(2031, 5, 6, 7, 8, 9, 123456, timezone(timedelta(hours=-7)))
    job = NewJob(
        'Grüße, ${1} %s :p1 {"a",NULL} \\ \'',
        {"text": "ä€😀 \\ \" ' {,} %s :x $1 NULL", "deep": [[1, None, True, 1.5]]},
        kind="k",
        priority=-(2**31),
        run_at=run_at,
        expires_at=datetime(2199, 12, 31, 23, 59, 59, 999999, UTC),
        max_attempts=1000,
        timeout_s=1.5,
        dedupe_key="ü" * 512,
        meta={"traceparent": "00-abc"},
    )
    async with opener(dsn, autocommit=True) as caller:
        job_id, plain = await settled(enqueue_many(caller.conn, [job, {"queue": "p"}]))

    row = dict(await db.fetchrow("SELECT * FROM pgworkd.jobs WHERE id = $1", job_id) or {})
    wanted = {**dataclasses.asdict(job), "status": "pending"}
    del wanted["delay"]
    found = {**row, "payload": json.loads(row["payload"]), "meta": json.loads(row["meta"])}
    assert {name: found[name] for name in wanted} == wanted

    # And what is not given is left to the table and to the handler.
    await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('p')")
    ours, tables = await db.fetch("SELECT * FROM pgworkd.jobs WHERE queue = 'p' ORDER BY created_at")
    differing = {name for name in ours.keys() if ours[name] != tables[name]}  # noqa: SIM118 - a Record
    assert differing == {"id", "run_at", "created_at"}
    assert ours["id"] == plain
    assert ours["run_at"] == ours["created_at"]


@pytest.mark.parametrize(("delay", "expected_s"), [(90, 90), (0.25, 0.25), (timedelta(days=366), 366 * 86_400)])
async def test_delays_count_from_the_databases_clock(
    delay: float | timedelta, expected_s: float, db: asyncpg.Connection[Any]
) -> None:
    await db.execute("SET pgworkd.clock = '2037-01-01 00:00:00+00'")
    job_id = await enqueue(db, "q", delay=delay)
    run_at = await db.fetchval("SELECT run_at FROM pgworkd.jobs WHERE id = $1", job_id)
    assert run_at == datetime(2037, 1, 1, tzinfo=UTC) + timedelta(seconds=expected_s)


async def test_settings_of_the_session_do_not_matter(db: asyncpg.Connection[Any]) -> None:
    await db.execute("SET DateStyle = 'German, DMY'; SET timezone = 'Asia/Kolkata'; SET search_path = pg_catalog")
    for name in ("jsonb", "uuid", "timestamptz", "int4"):  # values as the caller prefers them
        await db.set_type_codec(name, schema="pg_catalog", encoder=str, decoder=str, format="text")
    run_at = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)
    job_id = await enqueue(db, "q", {"n": 1}, run_at=run_at, priority=7)
    assert isinstance(job_id, UUID)
    found = await db.fetchval(
        "SELECT run_at = '2031-02-03 04:05:06Z' AND priority = 7 AND id = $1 FROM pgworkd.jobs", str(job_id)
    )
    assert found is True


async def test_a_streaming_connection_will_do(dsn: str, db: asyncpg.Connection[Any]) -> None:
    engine = sqlalchemy_engine(dsn, autocommit=True)
    with engine.connect().execution_options(stream_results=True) as conn:
        job_id = enqueue(conn, "q", {"n": 1})
    engine.dispose()
    assert await stored(db) == {job_id: {"n": 1}}


async def test_models_and_dataclasses_are_payloads(db: asyncpg.Connection[Any]) -> None:
    class Model(BaseModel):
        note: int

    @dataclasses.dataclass
    class Data:
        note: int

    ids = await enqueue_many(db, [NewJob("q", Model(note=1)), NewJob("q", Data(note=2)), NewJob("q")])
    found = await stored(db)
    assert [found[job_id] for job_id in ids] == [{"note": 1}, {"note": 2}, {}]


class Queue(str, enum.Enum):  # noqa: UP042 - the older way is the one to be met
    OCR = "ocr"


class Level(enum.IntEnum):
    HIGH = 5


@in_autocommit
async def test_enums_of_text_and_numbers_stand_for_their_values(
    opener: Any, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    jobs = [NewJob(Queue.OCR, priority=Level.HIGH), NewJob("ocr", priority=5), NewJob(Queue.OCR, priority=70_000)]
    async with opener(dsn, autocommit=True) as caller:
        await settled(enqueue_many(caller.conn, jobs))
    rows = await db.fetch("SELECT queue, priority FROM pgworkd.jobs ORDER BY priority")
    assert [tuple(row) for row in rows] == [("ocr", 5), ("ocr", 5), ("ocr", 70_000)]


@pytest.mark.parametrize(
    "bounds",
    [
        {"queue": "q", "kind": "k", "dedupe_key": "d", "priority": -(2**31), "max_attempts": 1, "timeout_s": 1e-300},
        {
            "queue": "😀" * 200,
            "kind": "\n" * 200,
            "dedupe_key": "d" * 512,
            "priority": 2**31 - 1,
            "max_attempts": 1000,
            "timeout_s": DELAY_S_MAX,
            "delay": DELAY_S_MAX,
        },
        {"queue": "q", "run_at": datetime(1970, 1, 1, tzinfo=UTC), "timeout_s": timedelta(microseconds=1)},
        {"queue": "q", "run_at": datetime(2199, 12, 31, 23, 59, 59, tzinfo=UTC), "timeout_s": 1},
    ],
)
async def test_the_bounds_themselves_are_accepted_by_the_table(
    bounds: dict[str, Any], db: asyncpg.Connection[Any]
) -> None:
    assert await enqueue(db, **bounds) in await stored(db)


# What is refused


class Untouchable:
    """Looks like asyncpg's connection, and must not be touched."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a round trip began: {name}")


Untouchable.__module__, Untouchable.__name__ = "asyncpg.connection", "Connection"

CYCLE: dict[str, Any] = {}
CYCLE["self"] = CYCLE
BAD: list[tuple[dict[str, Any], str]] = [
    ({"queue": ""}, "queue must be text of 1 to 200 characters"),
    ({"queue": "q" * 201}, "queue must be text of 1 to 200"),
    ({"queue": None}, "queue must be text"),
    ({"queue": b"q"}, "queue must be text"),
    ({"queue": "a\0b"}, "queue holds a NUL"),
    ({"queue": "a\udc80b"}, "queue holds a lone surrogate"),
    ({"kind": ""}, "kind must be text of 1 to 200"),
    ({"kind": "k" * 201}, "kind must be text of 1 to 200"),
    ({"kind": "\0"}, "kind holds a NUL"),
    ({"kind": 7}, "kind must be text"),
    ({"dedupe_key": ""}, "dedupe_key must be text of 1 to 512"),
    ({"dedupe_key": "d" * 513}, "dedupe_key must be text of 1 to 512"),
    ({"dedupe_key": "\0"}, "dedupe_key holds a NUL"),
    ({"dedupe_key": UUID(int=1)}, "dedupe_key must be text"),
    ({"priority": 2**31}, "priority must be an int from -2147483648 to 2147483647"),
    ({"priority": -(2**31) - 1}, "priority must be an int"),
    ({"priority": 10**5000}, "priority must be an int"),
    ({"priority": 1.0}, "priority must be an int"),
    ({"priority": True}, "priority must be an int"),
    ({"priority": None}, "priority must be an int"),
    ({"max_attempts": 0}, "max_attempts must be an int from 1 to 1000"),
    ({"max_attempts": -1}, "max_attempts must be"),
    ({"max_attempts": 1001}, "max_attempts must be"),
    ({"max_attempts": 2**31}, "max_attempts must be"),
    ({"max_attempts": "3"}, "max_attempts must be"),
    ({"max_attempts": True}, "max_attempts must be"),
    ({"run_at": datetime(2030, 1, 1)}, "run_at must be .* with a time zone: without one it is a guess"),
    ({"run_at": "2030-01-01T00:00:00Z"}, "run_at must be a datetime"),
    ({"run_at": datetime(2030, 1, 1, tzinfo=UTC).date()}, "run_at must be a datetime"),
    ({"run_at": datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)}, "run_at must be .* 1970 to 2199"),
    ({"run_at": datetime(2200, 1, 1, tzinfo=UTC)}, "run_at must be .* 1970 to 2199"),
    (
        {"run_at": datetime(2199, 12, 31, 23, tzinfo=timezone(timedelta(hours=-2)))},
        "run_at must be .* 1970 to 2199",
    ),
    (
        {"run_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))},
        "run_at must be .* 1970 to 2199",
    ),
    (
        {"run_at": datetime.min.replace(tzinfo=timezone(timedelta(hours=12)))},
        "run_at must be .* 1970 to 2199",
    ),
    ({"expires_at": datetime(2030, 1, 1)}, "expires_at must be .* with a time zone"),
    ({"expires_at": datetime(2200, 1, 1, tzinfo=UTC)}, "expires_at must be a datetime from 1970 to 2199"),
    ({"run_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 0}, "run_at and delay are both given"),
    ({"delay": -1}, "delay is"),
    ({"delay": -1e-9}, "delay is"),
    ({"delay": timedelta(microseconds=-1)}, "delay is"),
    ({"delay": DELAY_S_MAX + 1}, "delay is"),
    ({"delay": timedelta.max}, "delay is"),
    ({"delay": 10**400}, "delay is"),
    ({"delay": float("nan")}, "delay is nan"),
    ({"delay": float("inf")}, "delay is inf"),
    ({"delay": True}, "delay is a bool"),
    ({"delay": "10s"}, "delay is a str"),
    ({"timeout_s": 0}, "timeout_s is 0"),
    ({"timeout_s": 0.0}, "timeout_s is 0"),
    ({"timeout_s": timedelta(0)}, "timeout_s is 0"),
    ({"timeout_s": -1}, "timeout_s is"),
    ({"timeout_s": DELAY_S_MAX + 1}, "timeout_s is"),
    ({"timeout_s": float("nan")}, "timeout_s is nan"),
    ({"timeout_s": "60"}, "timeout_s is a str"),
    ({"payload": [1]}, "payload is of type list: an object is needed"),
    ({"payload": '{"n": 1}'}, "payload is of type str: an object is needed"),
    ({"payload": {"a": "\0"}}, "payload.a holds a NUL"),
    ({"payload": {"\0": 1}}, "payload.* is a key that holds a NUL"),
    ({"payload": {"a": ["\ud800"]}}, r"payload.a\[0\] holds a lone surrogate"),
    ({"payload": {"a": float("nan")}}, "payload.a is nan"),
    ({"payload": {"a": float("-inf")}}, "payload.a is -inf"),
    ({"payload": {"a": b""}}, "payload.a is of type bytes"),
    ({"payload": {"a": {1}}}, "payload.a is of type set"),
    ({"payload": {"a": datetime(2030, 1, 1)}}, "payload.a is of type datetime"),
    ({"payload": {"a": object()}}, "payload.a is of type object"),
    ({"payload": {1: 1}}, "payload has a key of type int"),
    ({"payload": {"a": 10**4300}}, "payload.a is an integer of more than 4300 digits"),
    ({"payload": {"a": "x" * 2**20}}, "payload takes 1,048,584 bytes"),
    ({"payload": CYCLE}, "payload.self refers back to itself"),
    ({"meta": ["tag"]}, "meta is of type list: an object is needed"),
    ({"meta": {"a": "\0"}}, "meta.a holds a NUL"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_arguments_are_refused_at_the_call(fields: dict[str, Any], message: str) -> None:
    arguments = {"queue": "q", **fields}
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        enqueue(Untouchable(), **arguments)
    assert isinstance(caught.value, InvalidPayload) or not {"payload", "meta"} & set(fields)

    for bad in (arguments, NewJob(**arguments)):
        with pytest.raises(UsageError, match=rf"^jobs\[1\]\.{message}"):
            enqueue_many(Untouchable(), [NewJob("q"), bad, {"queue": ""}])


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([{"queue": "q", "dealy": 5}], r"^jobs\[0\] is not a job: .*'dealy'"),
        ([NewJob("q"), {"payload": {}}], r"^jobs\[1\] is not a job: .*'queue'"),
        ([{"queue": "q", 7: 1}], r"^jobs\[0\] is not a job: "),
        ([None], r"^jobs\[0\] is not a job: .*mapping"),
        ([("q", {})], r"^jobs\[0\] is not a job: .*mapping"),
        ({"queue": "q"}, r"^jobs\[0\] is not a job: .*mapping, not str"),  # one mapping instead of a list of them
    ],
)
def test_what_is_no_job_is_refused_at_the_call(jobs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        enqueue_many(Untouchable(), jobs)


class NotOurs:
    """Of no module that we know."""


@pytest.mark.parametrize(
    "conn",
    [None, "postgresql://localhost", NotOurs(), sqlalchemy.create_engine("postgresql+psycopg://"), psycopg],
    ids=lambda conn: type(conn).__name__,
)
def test_connections_of_other_types_are_refused_with_the_types_we_know(conn: Any) -> None:
    calls: list[Callable[[], Any]] = [lambda: enqueue(conn, "q"), lambda: enqueue_many(conn, [])]
    for call in calls:
        with pytest.raises(UsageError, match=r"cannot enqueue on a .*: pass one of asyncpg.Connection, .*django"):
            call()


def test_the_client_imports_no_driver() -> None:
    program = (
        "import sys, pgworkd.client; print(sorted({'asyncpg', 'psycopg', 'sqlalchemy', 'django'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def types_as_mypy_sees_them(  # never called
    connection: asyncpg.Connection[Any],
    proxy: PoolConnectionProxy[Any],
    pool: asyncpg.Pool[Any],
    sync: psycopg.Connection[Any],
    asynchronous: psycopg.AsyncConnection[Any],
    sa_sync: sqlalchemy.Connection,
    sa_session: orm.Session,
    sa_scoped: orm.scoped_session[orm.Session],
    sa_async: AsyncConnection,
    sa_async_session: AsyncSession,
) -> None:
    assert_type(await enqueue(connection, "q", {}, delay=1), UUID)
    assert_type(await enqueue(proxy, "q"), UUID)
    assert_type(await enqueue(pool, "q"), UUID)
    assert_type(enqueue(sync, "q"), UUID)
    assert_type(await enqueue(asynchronous, "q"), UUID)
    assert_type(enqueue(sa_sync, "q"), UUID)
    assert_type(enqueue(sa_session, "q"), UUID)
    assert_type(enqueue(sa_scoped, "q"), UUID)
    assert_type(await enqueue(sa_async, "q"), UUID)
    assert_type(await enqueue(sa_async_session, "q"), UUID)
    assert_type(await enqueue_many(pool, [NewJob("q"), {"queue": "q"}]), list[UUID])
    assert_type(enqueue_many(sync, [NewJob("q"), {"queue": "q"}]), list[UUID])
