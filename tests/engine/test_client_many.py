"""Many jobs in one call, and the stored fields of a job."""

from __future__ import annotations

import dataclasses
import enum
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from pydantic import BaseModel

from pgworkd.client import NewJob, connections, enqueue, enqueue_many, new_job
from pgworkd.errors import DELAY_S_MAX
from tests.kits.drivers import in_autocommit, settled, sqlalchemy_engine, stored


@pytest.mark.slow("100,000 jobs each")
async def test_a_hundred_thousand_jobs_in_one_call(dsn: str, db: asyncpg.Connection[Any]) -> None:
    ids = await enqueue_many(db, ({"queue": "q", "payload": {"n": n}} for n in range(100_000)))
    rows = await db.fetch("SELECT id FROM pgworkd.jobs ORDER BY (payload ->> 'n')::int")
    assert [row[0] for row in rows] == ids
    assert len(ids) == 100_000


async def test_large_payloads_are_split_over_several_statements(db: asyncpg.Connection[Any]) -> None:
    jobs = [NewJob("q", {"text": "x" * 1_000_000}, meta={"n": n}) for n in range(20)]
    rows = [new_job.row(job) for job in jobs]
    statements = [step() for step in connections.inserts(range(20), rows)]
    assert [values[16].count("\n") + 1 for _, values in statements] == [8, 8, 4]  # its ids, one per line
    ids = await enqueue_many(db, jobs)
    found = await db.fetch("SELECT id FROM pgworkd.jobs ORDER BY (meta ->> 'n')::int")
    assert [row[0] for row in found] == ids


# Stored fields


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
        serialize_key="{s}" * 170,
        limit_key="%l",
        on_retry="yield",
        dedupe_until=datetime(2199, 12, 31, 23, 59, 59, 999999, UTC),
    )
    async with opener(dsn, autocommit=True) as caller:
        job_id, beside = await settled(enqueue_many(caller.conn, [job, {"queue": "p"}]))
        plain = await settled(enqueue(caller.conn, "p"))

    row = dict(await db.fetchrow("SELECT * FROM pgworkd.jobs WHERE id = $1", job_id) or {})
    wanted = {**dataclasses.asdict(job), "status": "pending", "yields": True}
    for name in ("delay", "dedupe_for", "dedupe_by", "on_retry", "after", "on_failed_dependency"):
        del wanted[name]
    found = {**row, "payload": json.loads(row["payload"]), "meta": json.loads(row["meta"])}
    assert {name: found[name] for name in wanted} == wanted

    # Omitted fields are left to the table and the handler.
    await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('p')")
    *ours, tables = await db.fetch("SELECT * FROM pgworkd.jobs WHERE queue = 'p' ORDER BY created_at")
    assert [own["id"] for own in ours] == [beside, plain]
    for own in ours:
        differing = {name for name in own.keys() if own[name] != tables[name]}  # noqa: SIM118 - a Record
        assert differing == {"id", "run_at", "created_at"}
        assert own["run_at"] == own["created_at"]


@pytest.mark.parametrize(("delay", "expected_s"), [(90, 90), (0.25, 0.25), (timedelta(days=366), 366 * 86_400)])
async def test_delays_count_from_the_databases_clock(
    delay: float | timedelta, expected_s: float, db: asyncpg.Connection[Any]
) -> None:
    await db.execute("SET pgworkd.clock = '2037-01-01 00:00:00+00'")
    job_id = await enqueue(db, "q", delay=delay)
    run_at = await db.fetchval("SELECT run_at FROM pgworkd.jobs WHERE id = $1", job_id)
    assert run_at == datetime(2037, 1, 1, tzinfo=UTC) + timedelta(seconds=expected_s)
    kept = await enqueue(db, "q", dedupe_key="k", dedupe_for=delay)
    until = await db.fetchval("SELECT dedupe_until FROM pgworkd.jobs WHERE id = $1", kept)
    assert until == run_at


async def test_session_settings_do_not_matter(db: asyncpg.Connection[Any]) -> None:
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


async def test_an_sqlalchemy_connection_with_stream_results_works(dsn: str, db: asyncpg.Connection[Any]) -> None:
    engine = sqlalchemy_engine(dsn, autocommit=True)
    with engine.connect().execution_options(stream_results=True) as conn:
        job_id = enqueue(conn, "q", {"n": 1})
    engine.dispose()
    assert await stored(db) == {job_id: {"n": 1}}


async def test_models_and_dataclasses_are_accepted_as_payloads(db: asyncpg.Connection[Any]) -> None:
    class Model(BaseModel):
        note: int

    @dataclasses.dataclass
    class Data:
        note: int

    ids = await enqueue_many(db, [NewJob("q", Model(note=1)), NewJob("q", Data(note=2)), NewJob("q")])
    found = await stored(db)
    assert [found[job_id] for job_id in ids] == [{"note": 1}, {"note": 2}, {}]


class Queue(str, enum.Enum):  # noqa: UP042 - the older form is the one to test
    OCR = "ocr"


class Level(enum.IntEnum):
    HIGH = 5


@in_autocommit
async def test_str_and_int_enums_are_stored_as_their_values(opener: Any, dsn: str, db: asyncpg.Connection[Any]) -> None:
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
        {"queue": "q", "serialize_key": "s", "limit_key": "l", "dedupe_key": "d", "dedupe_for": 1e-6},
        {
            "queue": "q",
            "serialize_key": "s" * 512,
            "limit_key": "\n" * 512,
            "dedupe_key": "d",
            "dedupe_for": timedelta(days=366),
            "on_retry": "yield",
        },
        {"queue": "q", "dedupe_key": "d", "dedupe_until": datetime(1970, 1, 1, tzinfo=UTC)},
    ],
)
async def test_the_table_accepts_values_at_the_limits(bounds: dict[str, Any], db: asyncpg.Connection[Any]) -> None:
    assert await enqueue(db, **bounds) in await stored(db)
