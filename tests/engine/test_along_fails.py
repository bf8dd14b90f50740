"""A claim that goes along with a settle: what becomes of the two when their call fails or hangs."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import events, pool
from pgworkd.chores import Periods
from pgworkd.errors import DatabaseError, OutcomeUnknown, WorkerLost
from pgworkd.job import Reason
from pgworkd.link import LinkOptions
from tests.engine.ahead_kit import Waiters, fill
from tests.engine.along_kit import ALL_OVER, UNTOLD, calls_of, let_go, nothing_ahead, warmed_up
from tests.kit import insert, running, until, waits_for_status


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One job, one settle, one claim along."""
    nothing_ahead(monkeypatch)


# It fails.


REFUSE = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.payload ? 'refuse' THEN RAISE EXCEPTION 'the auditor says no'; END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER refuse BEFORE INSERT ON pgworkd.finished_jobs FOR EACH ROW EXECUTE FUNCTION refuse();
"""


async def test_an_outcome_that_is_refused_takes_no_claim_down_with_it(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ALONG_S", 60.0)  # whoever waits for an answer that has come is too late
    await db.execute(REFUSE)
    waiters = Waiters(1)
    odd = await insert(db, "q", '{"refuse": true}', max_attempts=1)
    fine = [await insert(db, "q", '{"wait": true}') for _ in range(5)]
    async with running(waiters.app, dsn, **UNTOLD) as (daemon, seen):
        await waiters.gauge.shows(1)
        calls = calls_of(daemon, monkeypatch)
        waiters.gauge.go_on.set()
        await until(waits_for_status(db, odd, "dead"), limit_s=2)
        for job_id in fine:
            await until(waits_for_status(db, job_id, "completed"), limit_s=2)
        assert isinstance(calls[0].error, DatabaseError)
        assert calls[0].settled == [odd]
        assert len(seen.all(events.JOB_DEAD)) == 1
        assert seen.all(events.JOB_STALE) == []
    assert len(waiters.returned) == sum(waiters.returned.values()) == 6
    assert await db.fetchval("SELECT max(attempts) FROM pgworkd.finished_jobs") == 1


async def test_a_worker_that_is_lost_is_heard_of_and_its_settle_still_counts(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiters = Waiters(1)
    await fill(db, 0, 6)
    async with running(waiters.app, dsn, **UNTOLD) as (daemon, seen):
        await waiters.gauge.shows(1)
        calls, worker_id = calls_of(daemon, monkeypatch), daemon.worker_id
        await db.execute("UPDATE pgworkd.workers SET lost_at = now()")
        waiters.gauge.go_on.set()
        await seen.wait(events.LEASE_LOST, worker_id=worker_id)
        await until(lambda: db.fetchval(ALL_OVER), limit_s=4)
        assert isinstance(calls[0].error, WorkerLost)
        assert len(seen.all(events.LEASE_LOST)) == 1
        await seen.wait(events.JOB_COMPLETED, count=6)
        assert len(seen.all(events.JOB_COMPLETED)) == 6
    assert len(waiters.returned) == sum(waiters.returned.values()) == 6
    rows = await db.fetch(
        "SELECT worker_id = $1, attempts, count(*) FROM pgworkd.finished_jobs GROUP BY 1, 2", worker_id
    )
    assert {tuple(row) for row in rows} == {(True, 1, 1), (False, 1, 5)}


_CUT = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE application_name = 'pgworkd settle' AND datname = current_database() AND wait_event_type = 'Lock'"""


async def test_a_connection_that_is_cut_in_the_middle_costs_no_job_and_no_second_run(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiters = Waiters(1)
    await fill(db, 0, 12)
    other = await asyncpg.connect(dsn)
    async with running(waiters.app, dsn, **UNTOLD) as (daemon, seen):
        await waiters.gauge.shows(1)
        await warmed_up()
        calls = calls_of(daemon, monkeypatch)
        for cuts in (1, 2, 3):
            done = sum(waiters.returned.values())
            async with db.transaction():
                await db.execute("LOCK TABLE pgworkd.finished_jobs IN SHARE MODE")
                let_go(waiters)
                await until(lambda: other.fetchval(_CUT), limit_s=2)
                await until(lambda cuts=cuts: len(calls) >= cuts, limit_s=2)  # type: ignore[misc]
            await seen.wait(events.JOB_COMPLETED, count=done + 1)
            await waiters.gauge.shows(1)
            errors = [call.error for call in calls if call.error is not None]
            assert len(errors) == cuts
            assert {type(error) for error in errors} == {OutcomeUnknown}
        waiters.gauge.go_on.set()
        await until(lambda: other.fetchval(ALL_OVER), limit_s=4)
        assert seen.all(events.JOB_STALE) == []
    await other.close()
    assert len(waiters.returned) == sum(waiters.returned.values()) == 12
    assert await db.fetchval("SELECT max(attempts) FROM pgworkd.finished_jobs") == 1


async def test_an_answer_that_is_lost_costs_no_job_and_no_second_run(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settled and claimed, and nobody told: the settle is looked up, and the claim is given back as a stray."""
    waiters = Waiters(1)
    await fill(db, 0, 6)
    link = LinkOptions(dsn, connect_timeout_s=5, command_timeout_s=0.3)
    async with running(waiters.app, dsn, link=link, periods=Periods(strays_s=0.05)) as (daemon, seen):
        await waiters.gauge.shows(1)
        store = daemon._store
        original, lost = store.settle_and_claim, []

        async def answer_lost(*args: Any) -> Any:
            answer = await original(*args)
            if not lost:
                lost.append(answer)
                raise OutcomeUnknown("no answer")
            return answer

        monkeypatch.setattr(store, "settle_and_claim", answer_lost)
        waiters.gauge.go_on.set()
        await until(lambda: db.fetchval(ALL_OVER), limit_s=4)
        ((settled,), (claimed,)) = lost[0]
        assert len(seen.all(events.JOB_COMPLETED, job_id=str(settled))) == 1
        assert seen.all(events.JOB_STALE) == []
        assert seen.all(events.STRAYS_RELEASED) == [{"count": 1}]
    assert len(waiters.returned) == sum(waiters.returned.values()) == 6
    rows = dict(await db.fetch("SELECT id, attempts FROM pgworkd.finished_jobs"))
    assert rows.pop(claimed.id) == 2
    assert set(rows.values()) == {1}


# It hangs.


@pytest.mark.parametrize("ends", ["with an answer", "without"])
async def test_while_it_hangs_claims_go_on_by_themselves(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Someone builds an index on the history. With a short time-out the call fails before that is over."""
    waiters = Waiters(1)
    await fill(db, 0, 12)
    link = LinkOptions(dsn, connect_timeout_s=5, command_timeout_s=5 if ends == "with an answer" else 0.4)
    async with running(waiters.app, dsn, link=link) as (daemon, seen):
        await waiters.gauge.shows(1)
        await warmed_up()
        calls = calls_of(daemon, monkeypatch)
        async with db.transaction():
            await db.execute("LOCK TABLE pgworkd.finished_jobs IN SHARE MODE")
            for started in (2, 3, 4, 5):
                began = anyio.current_time()
                let_go(waiters)
                await seen.wait(events.JOB_STARTED, count=started)
                assert anyio.current_time() - began < pool.ALONG_S + 0.5
                await waiters.gauge.shows(1)
            if ends == "without":
                await until(lambda: calls, limit_s=2)
            assert seen.all(events.JOB_COMPLETED) == []
        await seen.wait(events.JOB_COMPLETED, count=4)
        assert (calls[0].error is None) is (ends == "with an answer")
        waiters.gauge.go_on.set()
        await until(lambda: db.fetchval(ALL_OVER), limit_s=4)
        await seen.wait(events.JOB_COMPLETED, count=12)
        assert len(seen.all(events.JOB_COMPLETED)) == 12
    assert len(waiters.returned) == sum(waiters.returned.values()) == 12
    # What the late answer brought could wait here for a slot that is taken: it was given back, unspent.
    assert await db.fetchval("SELECT max(failures) FROM pgworkd.finished_jobs") == 0


async def test_a_stop_while_it_hangs_gives_back_what_it_claims(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "ALONG_S", 60.0)
    waiters = Waiters(1)
    await fill(db, 0, 5)
    other = await asyncpg.connect(dsn)
    async with running(waiters.app, dsn) as (daemon, seen):
        await waiters.gauge.shows(1)
        await warmed_up()
        calls = calls_of(daemon, monkeypatch)
        async with db.transaction():
            await db.execute("LOCK TABLE pgworkd.finished_jobs IN SHARE MODE")
            waiters.gauge.go_on.set()
            await until(lambda: daemon.pools["q"]._along, limit_s=2)
            daemon.request_stop()
            await seen.wait(events.DAEMON_STOPPING)
        released = await seen.wait(events.JOB_RELEASED)
        assert released["reason"] == Reason.SHUTDOWN.value
        assert (await seen.wait(events.DAEMON_STOPPED))["exit_code"] == 0
        assert [call.claimed for call in calls] == [1]
        assert sum(waiters.began.values()) == 1
    await other.close()
    rows = await db.fetch("SELECT status::text, failures, count(*) FROM pgworkd.all_jobs GROUP BY 1, 2 ORDER BY 1")
    assert [tuple(row) for row in rows] == [("completed", 0, 1), ("pending", 0, 4)]
