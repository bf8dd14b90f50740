"""What daemons write down of what they ran: every attempt once, by queue and kind, however they stop."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job, PermanentError, Snooze
from pgworkd.admin.admin import Admin
from pgworkd.core.events import PUSH_ANSWERED, Events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.counters import KINDS_MAX, OTHER, Counters
from pgworkd.engine.life import signals
from pgworkd.engine.life.daemon import Daemon
from tests.kits.apps import attempt_of
from tests.kits.daemon import insert, quick_options, running, until

pytestmark = pytest.mark.slow("statistics of a fleet, over seconds")

SUMS = """
    SELECT kind, sum(started)::int, sum(completed)::int, sum(failed)::int, sum(dead)::int, sum(released)::int
    FROM pgworkd.queue_minutes GROUP BY kind ORDER BY kind"""
SHAPE = """
    SELECT bool_and(array_length(waits, 1) = 72 AND array_length(runs, 1) = 72
                    AND (SELECT sum(x) FROM unnest(waits) x) = started AND wait_s >= 0 AND run_s >= 0)
        AND sum((SELECT sum(x) FROM unnest(runs) x)) = sum(started)
    FROM pgworkd.queue_minutes"""


def app_of_all_ends() -> App:
    app = App()

    @app.handler("good")
    async def good() -> None: ...

    @app.handler("bad", max_attempts=1)
    async def bad() -> None:
        raise PermanentError("no")

    @app.handler("flaky")
    async def flaky(job: Job) -> None:
        if job.attempt == 1:
            raise ValueError("once")

    @app.handler("later")
    async def later(job: Job) -> None:
        if job.attempt == 1:
            raise Snooze(0)

    return app


async def test_every_attempt_is_written_once_when_the_daemons_have_stopped(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    for queue in ("good", "bad", "flaky", "later"):
        for _ in range(40):
            await insert(db, queue)
    await db.execute("INSERT INTO pgworkd.queues (name, backoff_s) VALUES ('flaky', 0)")
    left = "SELECT count(*) FROM pgworkd.jobs WHERE status <> 'dead'"
    async with running(app_of_all_ends(), dsn), running(app_of_all_ends(), dsn):

        async def ended() -> bool:
            return await db.fetchval(left) == 0

        await until(ended)
    assert [tuple(row) for row in await db.fetch(SUMS)] == [
        ("bad", 40, 0, 0, 40, 0),
        ("flaky", 80, 40, 40, 0, 0),
        ("good", 40, 40, 0, 0, 0),
        ("later", 80, 40, 0, 0, 40),
    ]
    assert await db.fetchval(SHAPE)


async def test_what_runs_is_counted_as_started_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """While it runs, not when it ends: a handler that hangs is one that was started, after a wait."""
    app, goes_on = App(), anyio.Event()

    @app.handler("long")
    async def long() -> None:
        await goes_on.wait()

    async with running(app, dsn) as (daemon, _):
        await insert(db, "long")
        await until(lambda: daemon.counters.kinds and daemon.counters.of("long", "long").started)
        counted = daemon.counters.of("long", "long")
        assert sum(counted.waits.counts) == 1
        assert sum(counted.runs.counts) == 0
        goes_on.set()
        await until(lambda: counted.ended["completed"])
    assert (counted.started, sum(counted.waits.counts), sum(counted.runs.counts)) == (1, 1, 1)
    written = await db.fetchrow("SELECT sum(started)::int, sum(completed)::int FROM pgworkd.queue_minutes")
    assert tuple(written or ()) == (1, 1)


async def test_a_claim_that_fails_has_a_duration(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """While a table is locked there are no others: their durations would say that all is well."""
    connection = ConnectionOptions(dsn, command_timeout_s=1.0)
    async with running(app_of_all_ends(), dsn, connection=connection) as (daemon, _):
        async with db.transaction():
            await db.execute("LOCK TABLE pgworkd.jobs IN ACCESS EXCLUSIVE MODE")
            await until(lambda: daemon.counters.claims["good", "failed"])
            assert daemon.counters.refusals.lasting_s > 0.5, "a rule is to see that nothing can be claimed"
        assert sum(daemon.counters.claim_s.counts) == daemon.counters.claims.total()
        assert daemon.counters.claim_s.sum_s > 0.5
        await until(lambda: daemon.counters.refusals.lasting_s == 0)


def test_answers_of_endpoints_are_counted() -> None:
    events_ = Events()
    counters = Counters(events_)
    for status in (200, 200, 503, None):
        events_.emit(PUSH_ANSWERED, endpoint="billing", status=status, took_s=0.25)
    assert counters.answers == {("billing", "200"): 2, ("billing", "503"): 1, ("billing", "none"): 1}
    assert (sum(counters.answer_s["billing"].counts), counters.answer_s["billing"].sum_s) == (4, 1.0)


async def test_a_period_has_what_ended_in_it_only(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "MINUTES_S", 0.05)
    monkeypatch.setitem(signals.FIRST_S, "minutes", 0.05)
    written = "SELECT sum(completed)::int, sum(started)::int FROM pgworkd.queue_minutes"
    async with running(app_of_all_ends(), dsn):
        for number in range(1, 4):
            await insert(db, "good")

            async def is_written(jobs: int = number) -> bool:
                return (await db.fetchval(written) or 0) >= jobs

            await until(is_written)
    assert tuple(await db.fetchrow(written) or ()) == (3, 3)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.queue_minutes") == 3


async def test_a_daemon_that_waits_before_it_works_writes_no_period_of_before(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Between a daemon's making and its work may lie an hour, in which the database is away or has no schema."""
    daemon = Daemon(app_of_all_ends(), quick_options(dsn))
    made_at = await db.fetchval("SELECT clock_timestamp()")
    await insert(db, "good")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        await until(lambda: db.fetchval("SELECT count(*) = 1 FROM pgworkd.finished_jobs"))
        daemon.request_stop()
    assert await db.fetchval("SELECT min(at) FROM pgworkd.queue_minutes") >= made_at


async def test_the_daemons_sample_the_queues_and_count_the_deaths(dsn: str, db: asyncpg.Connection[Any]) -> None:
    for _ in range(5):
        await insert(db, "bad")
    groups = "SELECT deaths, right(pattern, 2) FROM pgworkd.error_groups"
    async with running(app_of_all_ends(), dsn):

        async def counted() -> bool:
            return sum(row[0] for row in await db.fetch(groups)) == 5

        await until(counted)
        await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.samples"))
    assert [tuple(row) for row in await db.fetch(groups)] == [(5, "no")]


async def test_without_statistics_only_deaths_are_counted(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await insert(db, "bad")
    async with running(app_of_all_ends(), dsn, statistics=False):

        async def counted() -> bool:
            return bool(await db.fetchval("SELECT count(*) FROM pgworkd.error_groups"))

        await until(counted)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.samples") == 0
    assert await db.fetchval("SELECT count(*) FROM pgworkd.queue_minutes") == 0


async def test_errors_that_differ_from_their_second_line_on_are_of_one_group(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app = App()

    @app.handler("q", max_attempts=1)
    async def fail(job: Job) -> None:
        raise RuntimeError(f"call failed\nresponse body: {'abcdefgh'[int(str(job.id)[-1], 16) % 8] * 9}")

    for _ in range(20):
        await insert(db, "q")
    groups = "SELECT deaths::int, pattern FROM pgworkd.error_groups"
    async with running(app, dsn):

        async def counted() -> bool:
            return sum(row[0] for row in await db.fetch(groups)) == 20

        await until(counted)
    assert [tuple(row) for row in await db.fetch(groups)] == [(20, "RuntimeError: call failed")]
    found = await db.fetch("SELECT dead::int, pattern FROM pgworkd.dead_groups()")
    await db.execute("DELETE FROM pgworkd.deaths")
    assert await db.fetch("SELECT dead::int, pattern FROM pgworkd.dead_groups()") == found, "grouped on the fly"


def test_a_kind_per_job_is_counted_as_other_beyond_a_bound() -> None:
    counters, seen = Counters(Events(), {"mine"}), Counter[str]()
    for number in range(10 * KINDS_MAX):
        attempt = attempt_of(1)
        attempt.claimed = attempt.claimed._replace(kind=f"kind-{number}")
        counters.ended("completed", [attempt])
    for (_, kind), of_kind in counters.kinds.items():
        seen[kind] += of_kind.ended["completed"]
    declared = attempt_of(1)
    declared.claimed = declared.claimed._replace(kind="mine")
    counters.ended("completed", [declared])
    assert counters.kinds["q", "mine"].ended["completed"] == 1, "kinds of the app are never among the others"
    assert len(counters.kinds) == KINDS_MAX + 2
    assert seen[OTHER] == 9 * KINDS_MAX


async def test_the_list_of_queues_reads_a_sample_where_counting_is_expensive(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    for queue in ("a", "a", "b"):
        await insert(db, queue)
    async with Admin(ConnectionOptions(dsn)) as admin:
        assert [(row.queue, row.due, row.sample_age_s) for row in await admin.queues.find()] == [
            ("a", 2, None),
            ("b", 1, None),
        ]
        await db.fetchval("SELECT pgworkd.sample_queues()")
        await db.execute("UPDATE pgworkd.samples SET took_s = 0.5")
        await db.execute("DELETE FROM pgworkd.jobs WHERE queue = 'b'")
        sampled = await admin.queues.find()
        assert [(row.queue, row.due) for row in sampled] == [("a", 2), ("b", 1)]
        assert all(0 <= (row.sample_age_s or -1) < 60 for row in sampled)
        assert [row.queue for row in await admin.queues.find(exact=True)] == ["a"]
        await db.execute("UPDATE pgworkd.samples SET at = at - interval '10 min'")
        assert [row.queue for row in await admin.queues.find()] == ["a"], "nobody samples any more"
