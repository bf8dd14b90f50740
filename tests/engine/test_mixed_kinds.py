"""A rolling deploy: the old daemon leaves unknown kinds to the new one, and nothing blocks if there is none."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from tests.kits.daemon import Recorder, insert, running, status, until, waits_for_status

pytestmark = [
    pytest.mark.usefixtures("soon_asked"),
    pytest.mark.slow("a rolling deploy: kinds that one daemon knows, and another does not"),
]
SERVED = "SELECT count(*) = 2 FROM pgworkd.pools"
LEFT = "SELECT count(*) = 0 FROM pgworkd.jobs"


@pytest.fixture
def soon_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In production daemons ask every 10 s which workers have a handler for a kind. Here a job waits long for one."""
    monkeypatch.setattr("pgworkd.engine.run.unknown_kinds.RECHECK_S", 0.3)
    monkeypatch.setattr("pgworkd.engine.run.unknown_kinds.FIRST_S", 30.0)


def app_of(*kinds: str) -> App:
    """No-op handlers of one queue."""
    app = App()
    for kind in kinds:

        @app.handler(kind, queue="q", concurrency=5)
        async def handle() -> None: ...

    return app


async def many(db: asyncpg.Connection[Any], kind: str, jobs: int, *, key: str | None = None) -> None:
    """Inserts `jobs` jobs in one statement."""
    sql = "INSERT INTO pgworkd.jobs (queue, kind, limit_key) SELECT 'q', $1, $2 FROM generate_series(1, $3)"
    await db.execute(sql, kind, key, jobs)


def given_back(seen: Recorder, kind: str) -> int:
    """How many runs of that kind were released."""
    return len(seen.all(events.JOB_RELEASED, kind=kind))


@pytest.mark.parametrize("key", [None, "tenant"])
async def test_a_newer_daemon_runs_kinds_unknown_to_the_older(
    dsn: str, db: asyncpg.Connection[Any], key: str | None
) -> None:
    async with running(app_of("old"), dsn) as (_, old), running(app_of("old", "new"), dsn) as (_, new):
        await until(lambda: db.fetchval(SERVED))
        await many(db, "new", 40, key=key)
        await until(lambda: db.fetchval(LEFT), limit_s=5)  # a job of an unknown kind waits 30 s
        met = given_back(old, "new")
        assert old.all(events.KIND_UNKNOWN) == ([{"queue": "q", "kind": "new", "elsewhere": True}] if met else [])
        await many(db, "new", 200, key=key)
        await many(db, "old", 200, key=key)
        await until(lambda: db.fetchval(LEFT), limit_s=5)
        if met:
            assert given_back(old, "new") == met
            assert len(old.all(events.KIND_UNKNOWN)) == 1
        assert len(new.all(events.JOB_COMPLETED, kind="new")) == 240
    async with running(app_of("old", "new"), dsn):  # the old one, restarted with the new code
        await many(db, "new", 10, key=key)
        await until(lambda: db.fetchval(LEFT), limit_s=5)


async def test_without_the_newer_daemon_the_job_is_released_with_an_error(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with running(app_of("old"), dsn) as (_, old):
        async with running(app_of("old", "new"), dsn):
            await until(lambda: db.fetchval(SERVED))
            while not given_back(old, "new"):
                await many(db, "new", 10)
                await until(lambda: db.fetchval(LEFT))
        job_id = await insert(db, "q", kind="new")
        error = "SELECT error FROM pgworkd.jobs WHERE id = $1 AND run_at > pgworkd.clock() + interval '25 s'"
        await until(lambda: db.fetchval(error, job_id))
        assert await db.fetchval(error, job_id) == "no handler for kind 'new'"
        done = await insert(db, "q", kind="old")
        await until(waits_for_status(db, done, "completed"))
        assert await status(db, job_id) == "pending"


async def test_a_job_that_came_before_its_daemon_runs_soon_after(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.engine.run.unknown_kinds.FIRST_S", 0.1)
    monkeypatch.setattr("pgworkd.engine.run.unknown_kinds.DELAY_S", 0.3)
    async with running(app_of("old"), dsn) as (_, old):
        job_id = await insert(db, "q", kind="new")
        await old.wait(events.JOB_RELEASED, 4)
        assert [facts["delay_s"] for facts in old.all(events.JOB_RELEASED)][:4] == [0.1, 0.2, 0.3, 0.3]
        async with running(app_of("new"), dsn):
            await until(waits_for_status(db, job_id, "completed"))


async def test_many_jobs_of_an_unknown_kind_are_claimed_in_small_portions(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.engine.run.unknown_kinds.DOSE", 20)
    monkeypatch.setattr("pgworkd.engine.run.unknown_kinds.RECHECK_S", 1000)
    async with running(app_of("old"), dsn) as (_, old):
        await many(db, "new", 5_000)
        done = await insert(db, "q", kind="old")
        await until(waits_for_status(db, done, "completed"))
        met = given_back(old, "new")
        assert 20 <= met < 5_000
        assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE error IS NOT NULL") == met
        async with running(app_of("new"), dsn):
            await until(lambda: db.fetchval("SELECT count(*) = $1 FROM pgworkd.jobs", met))
        assert old.all(events.KIND_UNKNOWN) == [{"queue": "q", "kind": "new", "elsewhere": False}]
