"""Settling jobs: in natural batches, across outages, despite rejected outcomes, and bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.core.job import Ending
from pgworkd.database import store
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.settle import loop, settler
from pgworkd.errors import OutcomeUnknown, Snooze
from tests.kits.daemon import insert, running, status, until, waits_for_status
from tests.kits.proxy import Proxy

pytestmark = pytest.mark.slow("outcomes that are delayed, locked and rejected")

BACKLOG = "INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, $1::int)"


def counted(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each flush of completions, from now on."""
    sizes: list[int] = []
    kept = daemon._store
    settle = kept.settle

    async def counting(ending: Ending, settles: Any, *rest: Any, **how: bool) -> Any:
        if settles and ending is Ending.COMPLETED:  # the warm-up settles nothing
            sizes.append(len(settles))
        return await settle(ending, settles, *rest, **how)

    monkeypatch.setattr(kept, "settle", counting)
    return sizes


async def test_outcomes_are_batched_while_a_flush_is_in_progress(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOCK_TIMEOUT_S", 8.0)
    app = App()

    @app.handler("q", concurrency=1000)
    async def handle() -> None:
        return None

    async with running(app, dsn) as (daemon, seen):
        sizes = counted(daemon, monkeypatch)
        await insert(db, "q")
        await seen.wait(events.JOB_COMPLETED)
        assert sizes == [1], "a quiet daemon settles at once"
        async with db.transaction():
            await db.execute("LOCK TABLE pgworkd.finished_jobs IN SHARE MODE")  # claims work, settles wait
            inserter = await asyncpg.connect(dsn)
            await insert(inserter, "q")
            await until(lambda: len(sizes) == 2)  # it hangs with one job
            for n in range(1, 11):
                await inserter.execute(BACKLOG, 30)
                await seen.wait(events.JOB_STARTED, count=2 + 30 * n)
            assert len(sizes) == 2
            assert len(seen.all(events.JOB_COMPLETED)) == 1
        await seen.wait(events.JOB_COMPLETED, count=302)
        await inserter.close()
    assert sizes == [1, 1, 300]


async def test_claims_continue_while_nothing_can_be_settled(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Someone builds an index on the history: neither blocked settles nor blocked maintenance delay a claim."""
    app = App()

    @app.handler("q", concurrency=1000)
    async def handle() -> None:
        return None

    async with running(app, dsn) as (_, seen):
        async with db.transaction():
            await db.execute("LOCK TABLE pgworkd.finished_jobs IN SHARE MODE")
            inserter = await asyncpg.connect(dsn)
            longest = 0.0
            for n in range(1, 251):  # enough of them per second to keep the pool polling
                began = anyio.current_time()
                await insert(inserter, "q")
                await seen.wait(events.JOB_STARTED, count=n)
                longest = max(longest, anyio.current_time() - began)
            await inserter.close()
        assert longest < 1
        await seen.wait(events.JOB_COMPLETED, count=250)


async def test_a_batch_has_a_size_limit(dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FLUSH_MAX", 7)
    app = App()

    @app.handler("q", concurrency=100)
    async def handle() -> None:
        return None

    async with running(app, dsn) as (daemon, seen):
        sizes = counted(daemon, monkeypatch)
        await db.execute(BACKLOG, 500)
        await seen.wait(events.JOB_COMPLETED, count=500)
    assert sum(sizes) == 500
    assert max(sizes) == 7


@pytest.mark.fast
async def test_one_batch_settles_outcomes_of_all_kinds(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Each is settled by its own function; none waits for the next flush."""
    app, go_on = App(), anyio.Event()

    @app.handler("q", max_attempts=1, concurrency=100)
    async def handle(payload: dict[str, Any], job: Job) -> Any:
        await go_on.wait()
        match payload.get("end"):
            case "fail":
                raise ValueError("failed")
            case "snooze" if job.attempt == 1:
                raise Snooze(0.01)
            case "unstorable":
                return object()
            case "transaction":
                async with job.transaction():
                    job.result = "in a transaction"
        return "returned"

    ends = ["return", "fail", "snooze", "unstorable", "transaction"]
    async with running(app, dsn) as (_, seen):
        ids = {end: [await insert(db, "q", f'{{"end": "{end}"}}') for _ in range(5)] for end in ends}
        await seen.wait(events.JOB_STARTED, count=25)
        go_on.set()
        wanted = {"fail": "dead", "unstorable": "dead"}
        for end in ends:
            for job_id in ids[end]:
                await until(waits_for_status(db, job_id, wanted.get(end, "completed")))
        assert len(seen.all(events.JOB_STALE)) == 0
    found = await db.fetch(
        "SELECT result::text, attempts, count(*) FROM pgworkd.finished_jobs GROUP BY 1, 2 ORDER BY 1, 2"
    )
    assert [tuple(row) for row in found] == [('"in a transaction"', 1, 5), ('"returned"', 1, 5), ('"returned"', 2, 5)]


@pytest.mark.fast
@pytest.mark.parametrize("heals_after", [1, 4])
async def test_an_outage_during_a_settle_loses_no_outcome(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, heals_after: int
) -> None:
    """Half of the failing calls have taken effect: only their response was lost."""
    app = App()

    @app.handler("q", concurrency=50)
    async def handle() -> None:
        return None

    async with running(app, dsn) as (daemon, seen):
        kept, calls = daemon._store, 0
        settle = kept.settle

        async def unreliable(*args: Any, **how: bool) -> Any:
            nonlocal calls
            calls += 1
            if calls > heals_after * 2:
                return await settle(*args, **how)
            if calls % 2:
                await settle(*args, **how)
            raise OutcomeUnknown("no answer")

        monkeypatch.setattr(kept, "settle", unreliable)
        monkeypatch.setattr("pgworkd.database.reconnect.CAP_S", 0.1)
        await db.execute(BACKLOG, 200)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
        await until(lambda: len(daemon.in_flight) == 0)
        # It has queried the outcomes whose response was lost.
        assert len(seen.all(events.JOB_COMPLETED)) == 200
        assert seen.all(events.JOB_STALE) == []
        outage = seen.all(events.DATABASE_UNAVAILABLE, part="settler")
        assert 1 <= len(outage) <= heals_after * 2
        await seen.wait(events.DATABASE_RECOVERED, part="settler")
    rows = await db.fetch("SELECT attempts, failures, count(*) FROM pgworkd.finished_jobs GROUP BY 1, 2")
    assert [tuple(row) for row in rows] == [(1, 0, 200)]


async def test_settling_resumes_as_soon_as_any_call_gets_a_response(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App()
    go_on = anyio.Event()

    @app.handler("q")
    async def handle() -> None:
        await go_on.wait()

    monkeypatch.setattr("pgworkd.database.reconnect.FIRST_S", 60.0)  # only the heartbeat retries earlier
    monkeypatch.setattr("pgworkd.database.reconnect.CAP_S", 60.0)
    async with Proxy(dsn) as proxy, running(app, proxy.dsn, heartbeat_s=0.1) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        proxy.mode = "refuse"
        proxy.cut()
        await seen.wait(events.DATABASE_UNAVAILABLE, part="lease")
        go_on.set()
        await seen.wait(events.DATABASE_UNAVAILABLE, part="settler")
        proxy.mode = "pass"
        await until(waits_for_status(db, job_id, "completed"))


REFUSE = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.payload ? 'refuse' AND {condition} THEN
            RAISE EXCEPTION 'the auditor says no' {using};
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER refuse BEFORE {event} FOR EACH ROW EXECUTE FUNCTION refuse();
"""


@pytest.mark.fast
@pytest.mark.parametrize("using", ["", "USING ERRCODE = '23514'", "USING ERRCODE = '22023'"])
async def test_a_rejected_outcome_fails_alone(dsn: str, db: asyncpg.Connection[Any], using: str) -> None:
    """A trigger of the user's that rejects one job."""
    await db.execute(REFUSE.format(condition="true", using=using, event="INSERT ON pgworkd.finished_jobs"))
    app, go_on = App(), anyio.Event()

    @app.handler("q", max_attempts=1, concurrency=50)
    async def handle() -> None:
        await go_on.wait()

    async with running(app, dsn) as (daemon, seen):
        fine = [await insert(db, "q") for _ in range(10)]
        odd = await insert(db, "q", '{"refuse": true}')
        fine += [await insert(db, "q") for _ in range(10)]
        await seen.wait(events.JOB_STARTED, count=21)
        go_on.set()
        await until(waits_for_status(db, odd, "dead"))
        for job_id in fine:
            await until(waits_for_status(db, job_id, "completed"))
        await seen.wait(events.JOB_COMPLETED, count=20)
        assert len(seen.all(events.JOB_COMPLETED)) == 20
        assert daemon.worker.may_claim
        await until(waits_for_status(db, await insert(db, "q"), "completed"))
    row = await db.fetchrow("SELECT error, failures FROM pgworkd.jobs WHERE id = $1", odd)
    assert row is not None
    assert row["error"].startswith("the outcome 'completed' could not be stored")
    assert row["failures"] == 1


async def test_a_job_whose_every_outcome_is_rejected_blocks_no_other(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q", concurrency=5)
    async def handle(payload: dict[str, Any]) -> None:
        if payload:
            raise ValueError("and its failure cannot be stored either")

    connection = ConnectionOptions(dsn, connect_timeout_s=5, command_timeout_s=1)
    async with running(app, dsn, connection=connection) as (daemon, _):
        odd = await insert(db, "q", '{"refuse": true}', run_at=await db.fetchval("SELECT now() + interval '1 h'"))
        refusal = REFUSE.format(
            condition="NEW.status <> 'running'", using="", event="UPDATE ON pgworkd.jobs"
        ) + REFUSE.replace("refuse()", "refuse2()").replace("TRIGGER refuse", "TRIGGER refuse2").format(
            condition="true", using="", event="INSERT ON pgworkd.finished_jobs"
        )
        await db.execute(refusal)
        await db.execute(
            "ALTER TABLE pgworkd.jobs DISABLE TRIGGER refuse; UPDATE pgworkd.jobs SET run_at = now();"
            " ALTER TABLE pgworkd.jobs ENABLE TRIGGER refuse"
        )
        await until(waits_for_status(db, odd, "running"))
        for _ in range(5):
            await until(waits_for_status(db, await insert(db, "q"), "completed"), limit_s=3)
        assert daemon.worker.may_claim
        assert await status(db, odd) == "running"
        # The job is settled once the trigger is repaired.
        await db.execute("DROP TRIGGER refuse ON pgworkd.jobs; DROP TRIGGER refuse2 ON pgworkd.finished_jobs")
        await until(lambda: db.fetchval("SELECT status <> 'running' FROM pgworkd.jobs WHERE id = $1", odd))


@pytest.mark.fast
async def test_a_full_settler_stops_claims_until_there_is_capacity(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settler, "CAPACITY", 50)
    monkeypatch.setattr(loop, "FLUSH_MAX", 20)
    app = App()

    @app.handler("q", concurrency=10)
    async def handle() -> None:
        return None

    async with running(app, dsn) as (daemon, seen):
        async with db.transaction():
            await db.execute("LOCK TABLE pgworkd.finished_jobs IN SHARE MODE")
            other = await asyncpg.connect(dsn)
            await other.execute(BACKLOG, 500)
            await until(lambda: daemon._settler.full)
            held = await _steady(lambda: len(daemon.in_flight))
            # At most the buffer, one flush in progress, and the jobs in the slots when it became full.
            assert 50 <= held <= 50 + 20 + 10
            assert await other.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'") == held
            assert daemon.pools["q"].running == 0
            await other.close()
        await seen.wait(events.JOB_COMPLETED, count=500)
    assert await db.fetchval("SELECT max(attempts) FROM pgworkd.finished_jobs") == 1


@pytest.mark.fast
async def test_a_stop_flushes_waiting_outcomes_or_reports_that_it_cannot(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.engine.life.shutdown.FLUSH_GRACE_S", 0.3)
    app = App()

    @app.handler("q")
    async def handle() -> None:
        return None

    async with db.transaction():
        await db.execute("LOCK TABLE pgworkd.finished_jobs IN SHARE MODE")
        other = await asyncpg.connect(dsn)
        connection = ConnectionOptions(dsn, connect_timeout_s=1, command_timeout_s=0.5)
        async with running(app, dsn, connection=connection) as (daemon, seen):
            for _ in range(3):
                await insert(other, "q")
            await seen.wait(events.JOB_STARTED, count=3)
            daemon.request_stop()
            await seen.wait(events.DAEMON_STOPPED, exit_code=1)
            assert seen.all(events.SHUTDOWN_INCOMPLETE) == [{"reason": "3 outcomes not stored"}]
        # They are still protected by a lease, which will expire.
        assert await other.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'") == 3
        assert await other.fetchval("SELECT count(*) FROM pgworkd.workers") == 1
        await other.close()


async def _steady(reading: Callable[[], int]) -> int:
    """The value once it has not changed for a while."""
    last, since = reading(), 0
    while since < 10:
        await anyio.sleep(0.02)
        now = reading()
        last, since = now, since + 1 if now == last else 0
    return last
