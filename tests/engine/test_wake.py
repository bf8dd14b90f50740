"""Wake-ups: idle pools are notified, a pool that becomes idle misses no job, a lost connection is soon replaced."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.errors import Snooze
from tests.kits.apps import never_stalls
from tests.kits.daemon import insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("jobs that become due, a second or two ahead")

SLOW_POLL = {"poll_s": 60.0, "heartbeat_s": 20.0, "lease_s": 60.0}
"""Periods so long that a job found only by a poll is too late for any test here."""


def app_that_counts(ran: Counter[Any], **options: Any) -> App:
    app = App()

    @app.handler("q", **options)
    async def handle(job: Job) -> None:
        ran[job.id] += 1

    return app


def is_idle(db: asyncpg.Connection[Any]) -> Any:
    return lambda: db.fetchval("SELECT idle FROM pgworkd.pools WHERE queue = 'q'")


def is_polling(db: asyncpg.Connection[Any]) -> Any:
    return lambda: db.fetchval("SELECT NOT idle FROM pgworkd.pools WHERE queue = 'q'")


def is_empty(db: asyncpg.Connection[Any]) -> Any:
    return lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)")


@pytest.mark.fast
@pytest.mark.alone("a new job has to run within moments")
async def test_an_idle_pool_is_notified_within_moments(dsn: str, db: asyncpg.Connection[Any]) -> None:
    ran: Counter[Any] = Counter()
    async with running(app_that_counts(ran), dsn, **SLOW_POLL) as (_, seen):
        await until(is_idle(db))
        waits: list[float] = []
        for n in range(1, 21):
            began = anyio.current_time()
            await insert(db, "q")
            await seen.wait(events.JOB_STARTED, count=n)
            waits.append(anyio.current_time() - began)
        assert sorted(waits)[10] < 0.1
        assert max(waits) < 1


async def test_each_way_to_make_a_job_due_notifies_an_idle_pool(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, ran = App(), []

    @app.handler("q", max_attempts=1)
    async def handle(job: Job) -> None:
        ran.append(job.attempt)
        if job.attempt == 1:
            raise ValueError("dead at first")

    async with running(app, dsn, **SLOW_POLL) as (_, seen):
        await until(is_idle(db))
        async with db.transaction():
            first = await insert(db, "q")
            await insert(db, "q")
        await until(lambda: db.fetchval("SELECT count(*) = 2 FROM pgworkd.jobs WHERE status = 'dead'"), limit_s=4)
        assert await db.fetchval("SELECT pgworkd.retry(ARRAY[$1::uuid])", first) == [first]
        await until(waits_for_status(db, first, "completed"), limit_s=4)
        await db.copy_records_to_table("jobs", schema_name="pgworkd", columns=["queue"], records=[("q",)] * 3)
        await until(lambda: db.fetchval("SELECT count(*) = 4 FROM pgworkd.jobs WHERE status = 'dead'"), limit_s=4)
        assert len(seen.all(events.JOB_STARTED)) == 6


@pytest.mark.fast
async def test_a_statement_of_many_rows_sends_one_notification_per_queue(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    never_stalls(monkeypatch)  # released jobs send notifications, too
    ran: Counter[Any] = Counter()
    heard: list[str] = []
    listener = await asyncpg.connect(dsn)
    await listener.add_listener("pgworkd", lambda *a: heard.append(str(a[3])))
    async with running(app_that_counts(ran, concurrency=1000), dsn, **SLOW_POLL):
        await until(is_idle(db))
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 5000)")
        await until(is_empty(db))
        await listener.execute("SELECT 1")
        assert sum('"queue": "q"' in notice for notice in heard) == 1
    await listener.close()
    assert len(ran) == 5000


async def test_an_insert_into_an_unserved_queue_sends_no_notification(dsn: str, db: asyncpg.Connection[Any]) -> None:
    heard: list[str] = []
    listener = await asyncpg.connect(dsn)
    await listener.add_listener("pgworkd", lambda *a: heard.append(str(a[3])))
    async with running(app_that_counts(Counter()), dsn, **SLOW_POLL):
        await until(is_idle(db))
        await insert(db, "elsewhere")
        await db.execute("SELECT pg_notify('pgworkd', 'the last')")
        await until(lambda: "the last" in heard)
    assert heard == ["the last"]
    await listener.close()


@pytest.mark.alone("a job due has to run within moments")
@pytest.mark.parametrize("wait_ms", [30, 300, 1500])
async def test_a_future_job_runs_on_time(dsn: str, db: asyncpg.Connection[Any], wait_ms: int) -> None:
    ran: Counter[Any] = Counter()
    async with running(app_that_counts(ran), dsn) as (_, seen):
        late_s: list[float] = []
        while len(late_s) < 3 and min(late_s, default=1) >= 0.2:  # a stalled machine delays one of them, not all
            await until(is_idle(db))
            job_id = await db.fetchval(
                "INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('q', now() + $1 * interval '1 ms') RETURNING id",
                wait_ms,
            )
            await seen.wait(events.JOB_COMPLETED, job_id=str(job_id))
            late_s.append(await db.fetchval(
                "SELECT extract(epoch FROM started_at - run_at)::float8 FROM pgworkd.finished_jobs WHERE id = $1",
                job_id,
            ))  # fmt: skip
    assert 0 <= min(late_s) < 0.2


@pytest.mark.alone("a job due has to run within moments")
async def test_a_snoozed_job_runs_on_time_without_a_poll(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q")
    async def handle(job: Job) -> None:
        if job.attempt < 5:
            raise Snooze(0.05)

    async with running(app, dsn, **SLOW_POLL) as (_, seen):
        began = anyio.current_time()
        for _ in range(3):
            await insert(db, "q")
        await seen.wait(events.JOB_COMPLETED, count=3)
        assert 0.2 <= anyio.current_time() - began < 1.5


# The race: a job is inserted while the pool announces to the database that it becomes idle.

INSERTERS = 8


async def _insert_randomly(connection: asyncpg.Connection[Any]) -> None:
    """Three jobs, each in its own transaction, at random moments."""
    for _ in range(3):
        await anyio.sleep(random.uniform(0, 0.01))  # noqa: S311 - to hit every moment of the transition
        await connection.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('q')")


SLOW_COMMIT = """
    CREATE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(0.01); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON pgworkd.jobs
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow_commit();
"""
"""Like a synchronous standby or a slow disk: 10 ms between the insert, with its trigger, and its commit."""


@pytest.mark.parametrize("commit", ["quick", "quick again", "slow", "slow again"])
async def test_no_job_is_missed_when_a_pool_becomes_idle_under_constant_inserts(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    """The next poll is a minute away: only the protocol can find a job that is inserted during the transition."""
    if commit.startswith("slow"):
        await db.execute(SLOW_COMMIT)
    monkeypatch.setattr("pgworkd.engine.claim.poll_mode.POLLING_LEAST_S", 0.002)
    monkeypatch.setattr(
        "pgworkd.engine.claim.poll_mode.FOUND_PER_S_LEAST", 1e9
    )  # always calm: becomes idle whenever it may
    monkeypatch.setattr("pgworkd.engine.claim.poll_mode.NOTIFIED_PER_S_MAX", 8)  # and polls again in each burst
    ran: Counter[Any] = Counter()
    changes: list[bool] = []
    bursts = 40
    connections = [await asyncpg.connect(dsn) for _ in range(INSERTERS)]
    async with running(app_that_counts(ran, concurrency=2), dsn, **SLOW_POLL) as (daemon, _):
        store = daemon.pools["q"]._store
        told = store.set_pool

        async def tell(worker_id: int, queue: str, concurrency: int, *, idle: bool, code: tuple[int, str]) -> None:
            changes.append(idle)
            await told(worker_id, queue, concurrency, idle=idle, code=code)

        monkeypatch.setattr(store, "set_pool", tell)
        for _ in range(bursts):
            async with anyio.create_task_group() as tasks:
                for connection in connections:
                    tasks.start_soon(_insert_randomly, connection)
            # The inserts have ended: nothing could draw attention to a missed job any more.
            await until(is_empty(db), limit_s=3)
    for connection in connections:
        connection.terminate()
    assert changes.count(False) >= bursts // 2, "it was hardly ever awake: the transition was not tried"
    assert changes.count(True) >= bursts // 2
    assert sum(ran.values()) == len(ran) == bursts * INSERTERS * 3


async def test_a_job_committed_after_the_pool_became_idle_waits_one_poll_at_most(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trigger saw a polling pool and sent nothing; the last claim before idling could not see its row."""
    ran: Counter[Any] = Counter()
    async with running(app_that_counts(ran), dsn) as (daemon, _):
        pool = daemon.pools["q"]
        await until(is_idle(db))
        await pool._announce(idle=False)
        assert await db.fetchval("SELECT NOT idle FROM pgworkd.pools")
        transaction = db.transaction()
        await transaction.start()
        await insert(db, "q")
        pool.claim_soon()  # polling and calm: it becomes idle
        other = await asyncpg.connect(dsn)
        await until(is_idle(other))
        await anyio.sleep(0.05)
        await transaction.commit()
        committed = anyio.current_time()
        await until(is_empty(other), limit_s=4)
        assert anyio.current_time() - committed < 0.5  # poll_s is 0.1
        await other.close()


async def test_a_pool_polls_under_a_flood_of_notifications_and_becomes_idle_after_it(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    ran: Counter[Any] = Counter()
    async with running(app_that_counts(ran), dsn, **SLOW_POLL):
        await until(is_idle(db))
        other = await asyncpg.connect(dsn)
        await db.execute(
            "DO $$ BEGIN FOR i IN 1..300 LOOP INSERT INTO pgworkd.jobs (queue) VALUES ('q'); COMMIT; END LOOP; END $$"
        )
        await until(lambda: other.fetchval("SELECT NOT idle FROM pgworkd.pools"), limit_s=2)
        # While polling it finds jobs without a notification.
        await insert(db, "q")
        await until(is_empty(other), limit_s=2)
        inserted = await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs")
        await until(is_idle(db), limit_s=4)
        await insert(db, "q")
        await until(is_empty(other), limit_s=1)
        await other.close()
    assert sum(ran.values()) == len(ran) == inserted + 1


# Lost connections.

_CUT = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE application_name LIKE $1 AND datname = current_database()"""
_LISTENING = """SELECT pid FROM pg_stat_activity
    WHERE application_name = 'pgworkd listen' AND datname = current_database()"""


async def test_a_lost_listening_connection_is_replaced_within_two_seconds(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.engine.claim.poll_mode.POLL_ON_S", 0.0)  # for a while it would find the job by polling
    ran: Counter[Any] = Counter()
    async with running(app_that_counts(ran), dsn, **SLOW_POLL):
        await until(is_idle(db))
        old = await db.fetchval(_LISTENING)
        assert await db.fetchval(_CUT, "pgworkd listen") == 1
        await until(lambda: db.fetchval(f"SELECT NOT EXISTS ({_LISTENING} AND pid = $1)", old))
        cut = anyio.current_time()
        # Inserted while nobody listens: found when the connection is open again.
        await insert(db, "q")
        await until(is_empty(db), limit_s=4.5)
        await until(lambda: db.fetchval(f"SELECT EXISTS ({_LISTENING} AND pid <> $1)", old))
        assert anyio.current_time() - cut < 2


async def _keep_inserting(dsn: str, inserted: list[int], done: anyio.Event) -> None:
    connection = await asyncpg.connect(dsn)
    while not done.is_set():
        await connection.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 5)")
        inserted[0] += 5
        await anyio.sleep(0.002)
    await connection.close()


@pytest.mark.fast
@pytest.mark.parametrize("part", ["claim", "settle", "maintenance", "lease", "listen"])
async def test_a_lost_connection_loses_no_job_and_runs_none_twice(
    dsn: str, db: asyncpg.Connection[Any], part: str
) -> None:
    ran: Counter[Any] = Counter()
    inserted, done = [0], anyio.Event()
    async with running(app_that_counts(ran, concurrency=20), dsn) as (daemon, seen):
        worker_id = daemon.worker_id
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_keep_inserting, dsn, inserted, done)
            for _ in range(4):
                await until(lambda: db.fetchval(_CUT, f"pgworkd {part}"), limit_s=7)
                completed = len(seen.all(events.JOB_COMPLETED))
                await seen.wait(events.JOB_COMPLETED, count=completed + 10)
            done.set()
        # The last of them is inserted by now: only then an empty table means that all have run.
        await until(is_empty(db), limit_s=7)
        assert daemon.worker_id == worker_id
        assert seen.all(events.LEASE_FENCED) == []
    assert len(ran) == sum(ran.values()) == inserted[0]
    rows = await db.fetch("SELECT status::text, failures, count(*) FROM pgworkd.finished_jobs GROUP BY 1, 2")
    assert [tuple(row) for row in rows] == [("completed", 0, inserted[0])]


async def test_losing_all_connections_repeatedly_loses_no_job(dsn: str, db: asyncpg.Connection[Any]) -> None:
    ran: Counter[Any] = Counter()
    async with running(app_that_counts(ran, concurrency=20), dsn) as (_, seen):
        for _ in range(5):
            await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 100)")
            await until(lambda: len(ran) > 0)
            await until(lambda: db.fetchval(_CUT, "pgworkd %"), limit_s=4)
        await until(is_empty(db), limit_s=5)
        # It reports once per part and outage, not once per attempt.
        assert len(seen.all(events.DATABASE_UNAVAILABLE)) <= 5 * 12
        await until(lambda: _still_unavailable(seen.seen) == set(), limit_s=5)
    assert len(ran) == sum(ran.values()) == 500


def _still_unavailable(seen: Any) -> set[str]:
    outage: set[str] = set()
    for name, facts in seen:
        if name == events.DATABASE_UNAVAILABLE:
            outage.add(facts["part"])
        elif name == events.DATABASE_RECOVERED:
            outage.discard(facts["part"])
    return outage
