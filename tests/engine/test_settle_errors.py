"""Each error of a settle, transient and permanent: what is split, what is isolated, what is reported."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from tests.kits.daemon import insert, running, until

CODES = ["57014", "55P03", "40001", "40P01", "53200", "55000", "22P05", "P0001", "XX000", "42501"]
_RAISES = """
CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF {condition} THEN
        PERFORM nextval('public.refused');
        RAISE EXCEPTION 'refused' USING ERRCODE = '{code}';
    END IF;
    RETURN coalesce(NEW, OLD);
END $$;
CREATE SEQUENCE public.refused;
CREATE TRIGGER refuse BEFORE DELETE OR UPDATE ON pgworkd.jobs FOR EACH ROW WHEN (OLD.status = 'running')
    EXECUTE FUNCTION public.refuse()"""
BAD = "OLD.payload ? 'bad'"
LASTING = {"55000", "22P05", "P0001"}
"""The same row would be rejected forever: it ends dead. Others may succeed later and stay in flight until then."""


def raises(code: str, condition: str) -> str:
    """A trigger of the user's that raises this when a job ends."""
    return _RAISES.format(code=code, condition=condition)


async def _refused(db: asyncpg.Connection[Any]) -> int:
    found: int = await db.fetchval("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM public.refused")
    return found


def _app() -> App:
    app = App()

    @app.handler("q", concurrency=300)
    async def handle() -> None:
        return None

    return app


@pytest.mark.slow("each error of a server")
@pytest.mark.parametrize("code", CODES)
async def test_one_bad_job_is_isolated_and_the_others_are_settled(
    dsn: str, db: asyncpg.Connection[Any], code: str
) -> None:
    await db.execute(raises(code, BAD + " AND TG_OP = 'DELETE'"))
    bad = await insert(db, "q", '{"bad": 1}', max_attempts=1)
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 400)")
    async with running(_app(), dsn) as (_, seen):
        await until(lambda: db.fetchval("SELECT count(*) = 1 FROM pgworkd.jobs"), limit_s=9)
        if code in LASTING:
            await until(lambda: db.fetchval("SELECT status = 'dead' FROM pgworkd.jobs WHERE id = $1", bad))
        else:
            assert await db.fetchval("SELECT status::text FROM pgworkd.jobs") == "running"
            await db.execute("DROP TRIGGER refuse ON pgworkd.jobs")
            await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=8)
        assert seen.all(events.DATABASE_UNAVAILABLE) == []
        assert await _refused(db) < 100, "the same batch again and again"
        assert len(seen.all(events.JOB_STARTED)) == 401
    assert seen.all(events.JOB_STALE) == []


@pytest.mark.slow("each outcome")
@pytest.mark.parametrize("code", CODES)
async def test_an_outcome_that_is_always_rejected_stays_in_flight_and_is_logged(
    dsn: str, db: asyncpg.Connection[Any], code: str
) -> None:
    await db.execute(raises(code, "OLD.queue = 'q'"))
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 30)")
    app = _app()

    @app.handler("fine")
    async def fine() -> None:
        return None

    async with running(app, dsn) as (_, seen):
        await seen.wait(events.OUTCOMES_DELAYED)
        await insert(db, "fine")
        await seen.wait(events.JOB_COMPLETED)
        before = await _refused(db)
        await until(lambda: len(seen.all(events.JOB_STARTED)) == 31)
        assert seen.all(events.DATABASE_UNAVAILABLE) == []
        assert before < 2_000
        await db.execute("DROP TRIGGER refuse ON pgworkd.jobs")
        await until(
            lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE status = 'running')"), limit_s=9
        )
        assert len(seen.all(events.JOB_STARTED)) == 31, "nothing ran a second time"


async def test_every_table_can_be_published(db: asyncpg.Connection[Any]) -> None:
    """CREATE PUBLICATION FOR ALL TABLES refuses UPDATE and DELETE (55000) where a table has no replica identity."""
    without = await db.fetch(
        "SELECT c.relname FROM pg_class c WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relkind IN ('r', 'p') "
        "AND c.relpersistence = 'p' AND c.relreplident = 'd' "
        "AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary) ORDER BY 1"
    )
    assert [row["relname"] for row in without] == []


async def test_many_locked_jobs_are_retried_together(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Each has its own delay; the number of calls must not grow with the number of jobs."""
    await db.execute(raises("55P03", "OLD.queue = 'q'"))
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 300)")
    async with running(_app(), dsn) as (_, seen):
        await until(lambda: len(seen.all(events.JOB_STARTED)) == 300)
        await until(lambda: _refused(db))
        before, began = await _refused(db), anyio.current_time()
        await anyio.sleep(2)
        asked_per_s = (await _refused(db) - before) / (anyio.current_time() - began)
        await db.execute("DROP TRIGGER refuse ON pgworkd.jobs")
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
        assert len(seen.all(events.JOB_STARTED)) == 300
    assert asked_per_s < 150, "ten times a second, each time down to one of them"
