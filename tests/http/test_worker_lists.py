"""What remote workers list in their beats, and what becomes of what they do not list."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from pgworkd.core import events
from pgworkd.gateway.workers import watch
from tests.kits.daemon import Recorder, until
from tests.kits.gateway import Caller, calling
from tests.kits.verbs import Db
from tests.kits.workers import registered


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PERIOD_S", 0.05)


def seen_by(call: Caller) -> Recorder:
    """Its events, from now on."""
    recorder = Recorder()
    gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
    gateway.remote.events.listen(recorder)
    return recorder


async def insert(db: Db, jobs: int = 1, max_attempts: int | None = None, **columns: Any) -> list[str]:
    sql = "INSERT INTO pgworkd.jobs (queue, max_attempts, expires_at) VALUES ('q', $1, $2) RETURNING id::text"
    return [await db.fetchval(sql, max_attempts, columns.get("expires_at")) for _ in range(jobs)]


async def row(db: Db, job_id: str) -> tuple[str, int, int, int]:
    sql = "SELECT status::text, attempts, failures, losses FROM pgworkd.jobs WHERE id = $1::uuid"
    return tuple(await db.fetchrow(sql, job_id))


async def looked(call: Caller, times: int = 2) -> None:
    """The gateway has compared its lists with the database so often."""
    store = call.client._transport.app.gateway.remote.remote  # type: ignore[attr-defined]
    looks, look = 0, store.work_of

    async def counted(workers: Any) -> Any:
        nonlocal looks
        found = await look(workers)
        looks += 1
        return found

    store.work_of = counted
    await until(lambda: looks > times)
    store.work_of = look


async def test_what_a_claim_took_and_no_list_has_goes_back_uncounted(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        kept, lost = await insert(db, 2)
        worker, seen = await registered(call), seen_by(call)
        got = {each["job"]["id"]: each for each in await worker.claim(most=2)}
        await worker.beat(got[kept])
        await until(lambda: seen.all(events.ORPHANS_RELEASED))
        assert await row(db, lost) == ("pending", 1, 0, 0)
        assert await row(db, kept) == ("running", 1, 0, 0)
        assert (await worker.beat(*got.values()))["gone"] == [got[lost]["assignment"]]


async def test_what_was_listed_and_is_not_any_more_counts_as_lost(dsn: str, db: Db) -> None:
    """Its worker has stopped it, or forgotten it: it has begun."""
    async with calling(dsn, workers=True) as call:
        often, once = [*await insert(db), *await insert(db, max_attempts=1)]
        worker, seen = await registered(call), seen_by(call)
        got = await worker.claim(most=2)
        await worker.beat(*got)
        await looked(call)
        await worker.beat()
        await until(lambda: len(seen.all(events.JOB_LOST)) == 2)
        assert await row(db, often) == ("failed", 1, 0, 1)
        assert await row(db, once) == ("dead", 1, 0, 1)
        assert seen.all(events.JOB_DEAD, job_id=once)
        assert "no longer lists it" in await db.fetchval("SELECT error FROM pgworkd.jobs WHERE id = $1::uuid", once)
        assert not seen.all(events.ORPHANS_RELEASED)


async def test_another_gateway_knows_what_was_listed(dsn: str, db: Db) -> None:
    """The first one is killed: a job that may run only once is not run again."""
    (once,) = await insert(db, max_attempts=1)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        await worker.beat(*await worker.claim())
    async with calling(dsn, workers=True) as other:
        worker.call = other
        await worker.beat()
        await until(lambda: db.fetchval("SELECT status = 'dead' FROM pgworkd.jobs WHERE id = $1::uuid", once))


async def test_what_a_claim_brings_that_is_under_way_stays(dsn: str, db: Db) -> None:
    """Its answer may be on its way for as long as it likes: no list is expected to have it."""
    async with calling(dsn, workers=True) as call:
        (job_id,) = await insert(db)
        worker = await registered(call)
        assert await worker.claim(queues=["q"], max_attempts={"q": 3})
        worker.read.clear()  # the worker has not read it yet
        for _ in range(3):
            await worker.beat()
            await looked(call)
        assert await row(db, job_id) == ("running", 1, 0, 0)


async def test_an_old_list_that_comes_late_takes_nothing_back(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        await insert(db, 2)
        worker = await registered(call)
        (first,) = await worker.claim()
        (second,) = await worker.claim()
        await worker.beat(first, second)
        await worker.beat(first, claim_id=1)
        await worker.beat(claim_id=None)
        await looked(call)
        for each in (first, second):
            assert await row(db, each["job"]["id"]) == ("running", 1, 0, 0)


@pytest.mark.parametrize("listed", [True, False])
async def test_without_numbers_or_lists_attempts_stay(dsn: str, db: Db, listed: bool) -> None:
    async with calling(dsn, workers=True) as call:
        (job_id,) = await insert(db)
        worker = await registered(call)
        await worker.claim(claim_id=None if listed else 1)
        await worker.beat(listed=listed)
        await looked(call)
        assert await row(db, job_id) == ("running", 1, 0, 0)


async def test_a_row_that_is_locked_is_noted_later(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        once, other = await insert(db, 2, max_attempts=1)
        worker = await registered(call)
        got = await worker.claim(most=2)
        sql = "SELECT id::text FROM pgworkd.jobs WHERE listed = attempts"
        async with db.transaction():
            await db.execute("SELECT FROM pgworkd.jobs WHERE id = $1::uuid FOR UPDATE", once)
            await worker.beat(*got)
        assert [each[0] for each in await db.fetch(sql)] == [other]
        await worker.beat(*got)
        assert {each[0] for each in await db.fetch(sql)} == {once, other}


async def test_a_row_that_may_not_be_changed_costs_no_lease_and_no_other(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        bad, good = await insert(db, 2)
        await db.execute(f"""CREATE FUNCTION public.no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF NEW.listed IS NOT NULL AND NEW.id = '{bad}' THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END $$;
            CREATE TRIGGER no BEFORE UPDATE ON pgworkd.jobs FOR EACH ROW EXECUTE FUNCTION public.no()""")
        worker = await registered(call)
        got = await worker.claim(most=2)
        assert (await worker.beat(*got))["gone"] == []
        sql = "SELECT id::text FROM pgworkd.jobs WHERE listed = attempts"
        assert [each[0] for each in await db.fetch(sql)] == [good]


async def test_a_lock_on_all_jobs_costs_no_lease_and_hides_nothing_that_has_begun(dsn: str, db: Db) -> None:
    async with (
        calling(dsn, workers=True) as call,
        asyncpg.create_pool(dsn, min_size=1) as pool,
        pool.acquire() as other,
    ):
        (job,) = await insert(db, max_attempts=1)
        worker, seen = await registered(call), seen_by(call)
        got = await worker.claim()
        lease = "SELECT lease_until FROM pgworkd.workers WHERE kind = 'remote'"
        before = await db.fetchval(lease)
        async with other.transaction():
            await other.execute("LOCK TABLE pgworkd.jobs IN ACCESS EXCLUSIVE MODE")
            assert (await worker.beat(*got))["listed"] is False
            assert await db.fetchval(lease) > before
        assert (await worker.beat(*got))["listed"] is True
        await worker.beat()
        await seen.wait(events.JOB_DEAD)
        assert await row(db, job) == ("dead", 1, 0, 1)


async def test_a_worker_may_list_as_many_as_it_may_hold(dsn: str) -> None:
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        text = "a1_" + "x" * 120
        assert len((await worker.beat(*({"assignment": f"{text}{n}"} for n in range(60_000))))["gone"]) == 60_000
        queues = {f"q{n}": 10_000 for n in range(6)}
        code, slug, body = await call.problem("POST", "/v1/workers", {"name": "w", "queues": queues, "lease_s": 30})
        assert (code, slug, body["errors"][0]["pointer"]) == (422, "invalid", "/queues")


async def test_signing_off_makes_nothing_dead_that_the_worker_never_knew_of(dsn: str, db: Db) -> None:
    known, unknown = [(await insert(db, max_attempts=1))[0] for _ in range(2)]
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        first, _ = [*await worker.claim(), *await worker.claim()]  # the answer to the second one is lost
        await worker.beat(first)
        assert await worker.sign_off() == 2
    assert [(await row(db, each))[0] for each in (known, unknown)] == ["dead", "pending"]


async def test_signing_off_from_a_claim_whose_answer_never_came_gives_its_jobs_back(dsn: str, db: Db) -> None:
    jobs = [(await insert(db, max_attempts=1))[0] for _ in range(3)]
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        first, *_ = [*await worker.claim(claim_id=1), *await worker.claim(claim_id=2), *await worker.claim(claim_id=3)]
        await worker.beat(first, claim_id=1)
        assert await worker.sign_off(claim_id=2) == 3
    assert [(await row(db, each))[0] for each in jobs] == ["dead", "pending", "dead"], "it knows of no third claim"
