"""Notifications with the time since when a row has been due: a claim whose cursor is past it has to go back."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Notices
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


async def sleeper(db: Db, *queues: str) -> int:
    """A worker whose pools of these queues are idle."""
    worker_id = await v.worker(db)
    for queue in queues or ("q",):
        await v.set_pool(db, worker_id, queue)
    return worker_id


@pytest.mark.parametrize("back_s", [0.25, 3600.0, 86400 * 365.0])
async def test_a_backdated_insert_reports_the_time_it_was_due(db: Db, notices: Notices, back_s: float) -> None:
    await sleeper(db)
    run_at = v.T0 - timedelta(seconds=back_s)
    await v.one(db, run_at=run_at)
    assert await notices.heard() == [{"queue": "q", "run_at": run_at.timestamp()}]


async def test_the_notification_carries_the_same_number_as_the_claim(db: Db, notices: Notices) -> None:
    worker_id = await sleeper(db)
    await v.one(db, run_at=v.T0 - timedelta(microseconds=7_123_457))
    (notice,) = await notices.heard()
    assert [row["run_at"] for row in await v.claim(db, worker_id)] == [notice["run_at"]]


async def test_any_other_insert_reports_the_start_of_its_transaction(db: Db, notices: Notices) -> None:
    """Other jobs may have been claimed while it was open; and a later row of the same transaction changes nothing."""
    await db.execute("RESET pgworkd.clock")
    await sleeper(db)
    async with db.transaction():
        began_at = await db.fetchval("SELECT date_part('epoch', transaction_timestamp())")
        await db.execute("SELECT pg_sleep(0.01)")
        await v.one(db)
        await db.copy_records_to_table("jobs", schema_name="pgworkd", columns=["queue"], records=[("q",)] * 3)
        await db.execute(
            "INSERT INTO pgworkd.jobs (queue, run_at) SELECT 'q', pgworkd.clock() + make_interval(secs => $1)", 5.0
        )
    assert await notices.heard() == [{"queue": "q", "run_at": pytest.approx(began_at, abs=3e-6)}]


async def test_a_single_statement_reports_no_earlier_time_than_its_own(db: Db, notices: Notices) -> None:
    await db.execute("RESET pgworkd.clock")
    await sleeper(db)
    before = await db.fetchval("SELECT date_part('epoch', clock_timestamp())")
    await v.insert(db, 100)
    (notice,) = await notices.heard()
    first = await db.fetchval("SELECT date_part('epoch', min(run_at)) FROM pgworkd.jobs")
    assert before - 0.001 <= notice["run_at"] <= first


async def test_the_oldest_of_several_rows_counts(db: Db, notices: Notices) -> None:
    await sleeper(db)
    await db.execute(
        """INSERT INTO pgworkd.jobs (queue, run_at)
           SELECT 'q', pgworkd.clock() - make_interval(secs => s) FROM unnest(ARRAY[0, 30, 90, -5, 60]) s"""
    )
    assert await notices.heard() == [{"queue": "q", "run_at": v.at(-90).timestamp()}]


async def test_rows_that_are_not_pending_do_not_count(db: Db, notices: Notices) -> None:
    await sleeper(db)
    await db.execute(
        """INSERT INTO pgworkd.jobs (queue, status, run_at)
           SELECT 'q', s::pgworkd.job_status, pgworkd.clock() - make_interval(secs => n)
           FROM unnest(ARRAY['dead', 'pending'], ARRAY[90, 30]) AS u (s, n)"""
    )
    assert await notices.heard() == [{"queue": "q", "run_at": v.at(-30).timestamp()}]


async def test_every_idle_queue_of_a_statement_gets_an_early_enough_time(db: Db, notices: Notices) -> None:
    worker_id = await sleeper(db, "q", "r")
    await v.set_pool(db, worker_id, "awake", idle=False)
    await db.execute(
        """INSERT INTO pgworkd.jobs (queue, run_at)
           SELECT q, pgworkd.clock() - make_interval(secs => s)
           FROM unnest(ARRAY['q', 'r', 'awake'], ARRAY[30, 90, 60]) AS u (q, s)"""
    )
    heard = {notice["queue"]: notice["run_at"] for notice in await notices.heard()}
    assert set(heard) == {"q", "r"}
    assert heard["q"] <= v.at(-30).timestamp()
    assert heard["r"] <= v.at(-90).timestamp()


async def test_a_backdated_insert_notifies_no_polling_pool(db: Db, notices: Notices) -> None:
    await v.set_pool(db, await v.worker(db), idle=False)
    await v.one(db, run_at=v.at(-60))
    assert await notices.heard() == []


# Released


@pytest.mark.parametrize("idle", [True, False])
async def test_a_released_job_notifies_idle_and_polling_pools(db: Db, notices: Notices, *, idle: bool) -> None:
    worker_id = await v.worker(db)
    ids = [await v.one(db, run_at=v.at(-n)) for n in (60, 90, 30)]
    later = await v.one(db, run_at=v.at(-120))
    await v.claim(db, worker_id)
    await v.set_pool(db, worker_id, idle=idle)
    assert await v.release(db, ids) == set(ids)
    assert await notices.heard() == [{"queue": "q", "run_at": v.at(-90).timestamp()}]
    await v.release(db, [later], delay_s=5)
    assert await notices.heard() == []


@pytest.mark.parametrize("delay_s", [0.0, 1.0, 3600.0])
async def test_a_job_released_with_a_delay_notifies_nobody(db: Db, notices: Notices, delay_s: float) -> None:
    worker_id = await sleeper(db)
    await v.set_pool(db, await v.worker(db), idle=False)
    job_id = await v.one(db)
    await v.claim(db, worker_id)
    await notices.heard()
    assert await v.release(db, [job_id], delay_s=delay_s) == {job_id}
    assert await notices.heard() == []


async def test_only_jobs_released_without_a_delay_count(db: Db, notices: Notices) -> None:
    worker_id = await v.worker(db)
    early, late, other = await v.one(db, run_at=v.at(-90)), await v.one(db, run_at=v.at(-30)), await v.one(db, "r")
    await v.claim(db, worker_id)
    await v.claim(db, worker_id, queue="r")
    await sleeper(db, "q", "r")
    sql = "SELECT pgworkd.settle_released($1, '{1,1,1}', $2, '{NULL,NULL,NULL}')"
    assert len(await db.fetchval(sql, [early, late, other], [5.0, None, 5.0])) == 3
    assert await notices.heard() == [{"queue": "q", "run_at": v.at(-30).timestamp()}]


async def test_a_job_released_without_pools_or_too_late_notifies_nobody(db: Db, notices: Notices) -> None:
    first, second = await v.insert(db, 2)
    await v.claim(db, await v.worker(db))
    assert await v.release(db, [first]) == {first}
    assert await notices.heard() == []
    await sleeper(db)
    assert await v.release(db, [second], 7) == set()
    assert await notices.heard() == []


async def test_each_queue_is_notified_once(db: Db, notices: Notices) -> None:
    worker_id = await v.worker(db)
    ids = await v.insert(db, 3)
    ids += await v.insert(db, 3, queue="r")
    await v.claim(db, worker_id)
    await v.claim(db, worker_id, queue="r")
    for _ in range(2):
        await v.set_pool(db, await v.worker(db), "q", idle=False)
        await sleeper(db, "r")
    await v.release(db, ids)
    assert sorted(notice["queue"] for notice in await notices.heard()) == ["q", "r"]


# Anything else is due now


async def test_retry_notifies_only_idle_pools_and_gives_no_time(db: Db, notices: Notices) -> None:
    worker_id = await v.worker(db)
    job_id = await v.one(db, run_at=v.at(-60))
    await v.set_pool(db, worker_id, idle=False)
    for idle in (False, True):
        attempt = 1 + idle
        assert await v.claim_ids(db, worker_id) == [job_id]
        await v.set_pool(db, worker_id, idle=idle)
        await v.fail(db, [job_id], attempt, delay_s=3600)
        assert await notices.heard() == []
        assert await v.retry(db, job_id) == {job_id}
        assert await notices.heard() == ([{"queue": "q"}] if idle else [])
    await v.cancel(db, job_id)
    assert await notices.heard() == []


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "polling"])
async def test_a_rescue_notifies_all_pools_and_reports_the_time_since_when_jobs_are_due(
    db: Db, notices: Notices, idle: bool
) -> None:
    """The jobs it takes back keep their run_at and their place in the order: claims that are past it must go back."""
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    for back_s in (30, 60):
        await v.one(db, run_at=v.at(-back_s))
    assert len(await v.claim_ids(db, victim)) == 2
    await v.set_pool(db, rescuer, idle=idle)
    await v.steady(db, rescuer)
    assert set((await v.rescue(db, rescuer)).values()) == {"failed"}
    assert await notices.heard() == [{"queue": "q", "run_at": v.at(-60).timestamp()}]
    assert len(await v.claim_ids(db, rescuer)) == 2
