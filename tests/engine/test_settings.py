"""Rows of `queues` are changed by plain SQL while daemons run: all follow within moments, also after a restart."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.engine.life.daemon import Daemon
from tests.kits.apps import Gauge
from tests.kits.daemon import insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("settings from each source, in processes")

UNTOLD = {"heartbeat_s": 900.0, "lease_s": 3600.0, "poll_s": 60.0}
"""Daemons depend on notifications or known deadlines: heartbeats and polls come too late for these tests."""


def app_of(gauge: Gauge, **options: Any) -> App:
    app = App()

    @app.handler("q", **options)
    async def handle() -> None:
        await gauge()

    return app


def has(daemon: Daemon, **wanted: Any) -> Callable[[], Awaitable[bool]]:
    """A condition: the daemon's pool has these attributes."""

    async def fact() -> bool:
        return all(getattr(daemon.pools["q"], name) == value for name, value in wanted.items())

    return fact


async def fill(db: asyncpg.Connection[Any], count: int) -> None:
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, $1::int)", count)


async def test_a_plain_update_takes_effect_in_both_daemons_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = app_of(Gauge(), concurrency=4)
    async with running(app, dsn, **UNTOLD) as (a, _), running(app, dsn, **UNTOLD) as (b, _):
        await db.execute("INSERT INTO pgworkd.queues (name) VALUES ('q')")
        for sql, wanted in (
            ("UPDATE pgworkd.queues SET concurrency = 7", {"concurrency": 7}),
            ("UPDATE pgworkd.queues SET paused_until = 'infinity'", {"concurrency": 7, "paused": True}),
            ("UPDATE pgworkd.queues SET max_running = 3", {"limited": True}),
            ("UPDATE pgworkd.queues SET paused_until = NULL, concurrency = 2", {"concurrency": 2, "paused": False}),
            ("DELETE FROM pgworkd.queues", {"concurrency": 4, "limited": False}),
        ):
            await db.execute(sql)
            for daemon in (a, b):
                await until(has(daemon, **wanted), limit_s=2)
        # The effective settings are in the database, too.
        await until(lambda: db.fetchval("SELECT count(*) = 2 FROM pgworkd.pools WHERE concurrency = 4"))


async def test_a_row_overrides_code_from_the_first_claim_after_a_restart(dsn: str, db: asyncpg.Connection[Any]) -> None:
    gauge = Gauge()
    await db.execute("INSERT INTO pgworkd.queues (name, concurrency) VALUES ('q', 2)")
    await fill(db, 30)
    for _ in range(2):
        async with running(app_of(gauge, concurrency=10), dsn, shutdown_s=0) as (_, seen):
            await gauge.shows(2)
            assert seen.seen[-1][0] == events.JOB_STARTED
            assert await db.fetchval("SELECT max(concurrency) FROM pgworkd.pools") == 2
        await gauge.shows(0)
    assert gauge.most == 2


@pytest.mark.parametrize("later", [0.0, 0.3])
async def test_a_pause_ends_at_its_deadline_without_a_notification(
    dsn: str, db: asyncpg.Connection[Any], later: float
) -> None:
    """Also a pause that was extended."""
    gauge = Gauge()
    gauge.go_on.set()
    async with running(app_of(gauge), dsn, **UNTOLD) as (daemon, seen):
        await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', now() + interval '1.5 s')")
        job_id = await insert(db, "q")
        await seen.wait(events.QUEUE_SETTINGS, paused=True)
        if later:
            await db.execute("UPDATE pgworkd.queues SET paused_until = paused_until + $1 * interval '1 s'", later)
            await seen.wait(events.QUEUE_SETTINGS, count=2, paused=True)
        await until(waits_for_status(db, job_id, "completed"), limit_s=4)
        assert not daemon.pools["q"].paused
    late_s = await db.fetchval(
        "SELECT extract(epoch FROM started_at - paused_until) FROM pgworkd.finished_jobs, pgworkd.queues"
    )
    assert 0 <= late_s < 1


async def test_a_raised_limit_starts_waiting_jobs_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The pool is limited before and after: it is notified of the change only."""
    gauge = Gauge()
    await db.execute("INSERT INTO pgworkd.queues (name, max_running) VALUES ('q', 1)")
    async with running(app_of(gauge, concurrency=4), dsn, **UNTOLD):
        await fill(db, 5)
        await gauge.shows(1)
        await db.execute("UPDATE pgworkd.queues SET max_running = 3")
        await gauge.shows(3)
        await db.execute("UPDATE pgworkd.queues SET max_running = NULL")
        await gauge.shows(4)
        gauge.go_on.set()
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))


async def test_lowered_concurrency_starts_no_job_until_there_is_capacity(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Two daemons with six slots each, then two each: at most four of twelve may run before the next one starts."""
    gauges = [Gauge(), Gauge()]
    started = [0, 0]

    def app_with(index: int) -> App:
        app = App()

        @app.handler("q", concurrency=6)
        async def handle() -> None:
            started[index] += 1
            await gauges[index]()

        return app

    async with running(app_with(0), dsn) as (a, _), running(app_with(1), dsn) as (b, _):
        await fill(db, 40)
        for gauge in gauges:
            await gauge.shows(6)
        await db.execute("INSERT INTO pgworkd.queues (name, concurrency) VALUES ('q', 2)")
        for daemon in (a, b):
            await until(has(daemon, concurrency=2), limit_s=2)
        assert started == [6, 6]
        for gauge in gauges:
            old, gauge.go_on, gauge.most = gauge.go_on, anyio.Event(), 0
            old.set()
        for gauge in gauges:
            await gauge.shows(2)
        assert [gauge.most for gauge in gauges] == [2, 2]
        for gauge in gauges:
            gauge.go_on.set()
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=4)
        assert max(gauge.most for gauge in gauges) <= 2
    assert sum(started) == 40


async def test_only_changed_settings_are_reported_and_only_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with running(app_of(Gauge(), concurrency=4), dsn, heartbeat_s=0.02) as (daemon, seen):
        await db.execute("INSERT INTO pgworkd.queues (name, max_running, keep_s) VALUES ('q', 5, 60), ('other', 1, 1)")
        first = await seen.wait(events.QUEUE_SETTINGS)
        await db.execute("UPDATE pgworkd.queues SET max_running = 6, keep_s = NULL, concurrency = 9 WHERE name = 'q'")
        second = await seen.wait(events.QUEUE_SETTINGS, count=2)
        await db.execute("UPDATE pgworkd.queues SET concurrency = 9, updated_at = now()")  # no change
        beaten_s = daemon.worker.heartbeat.tried_at_s if daemon.worker.heartbeat else 0.0
        await until(lambda: _beats(daemon, beaten_s + 0.1))
        assert len(seen.all(events.QUEUE_SETTINGS)) == 2
    assert (first["changed"], first["was"]) == ({"max_running": 5, "keep_s": 60}, {"max_running": None, "keep_s": None})
    assert second["changed"] == {"max_running": 6, "keep_s": None, "concurrency": 9}
    assert second["was"] == {"max_running": 5, "keep_s": 60, "concurrency": 4}
    assert (second["concurrency"], second["paused"]) == (9, False)


async def _beats(daemon: Daemon, since_s: float) -> bool:
    assert daemon.worker.heartbeat is not None
    return daemon.worker.heartbeat.renewed_at_s > since_s


# Backoff


async def test_the_backoff_of_a_row_overrides_the_handlers_from_the_next_failure(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app = App()

    @app.handler("q", backoff=[500.0], max_attempts=50)
    async def fail() -> None:
        raise ValueError("no")

    async def retry_in_s() -> float:
        done = len(seen.all(events.JOB_FAILED))
        await db.execute("SELECT pgworkd.retry(ARRAY(SELECT id FROM pgworkd.jobs))")
        return float((await seen.wait(events.JOB_FAILED, count=done + 1))["retry_in_s"])

    async with running(app, dsn) as (_, seen):
        await insert(db, "q")
        assert (await seen.wait(events.JOB_FAILED))["retry_in_s"] == pytest.approx(500, rel=0.11)
        for changes, wanted in (
            ("backoff_s = 60, backoff_factor = 1", 60),
            ("backoff_s = 200", 200),
            ("backoff_factor = 100, backoff_cap_s = 3000", 3000),
            ("backoff_s = NULL, backoff_factor = 1", 30),  # not the handler's policy, but our own numbers
            ("backoff_factor = NULL, backoff_cap_s = NULL", 500),
        ):
            known = len(seen.all(events.QUEUE_SETTINGS))
            await db.execute("INSERT INTO pgworkd.queues (name) VALUES ('q') ON CONFLICT DO NOTHING")
            await db.execute(f"UPDATE pgworkd.queues SET {changes}")  # noqa: S608 - ours
            await seen.wait(events.QUEUE_SETTINGS, count=known + 1)
            assert await retry_in_s() == pytest.approx(wanted, rel=0.11)


# Daemons with different code


async def test_without_a_row_each_daemon_follows_its_code_and_logs_the_difference(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    few, many = app_of(Gauge(), concurrency=3), app_of(Gauge(), concurrency=8)
    quick: dict[str, Any] = {"heartbeat_s": 0.02}
    async with running(few, dsn, worker_name="a", **quick) as (a, seen_a):
        async with running(many, dsn, worker_name="b", **quick) as (b, seen_b):
            assert await seen_a.wait(events.QUEUE_DIFFERS) == {
                "queue": "q", "ours": 3, "theirs": 8, "workers": ["b"], "row": None,
            }  # fmt: skip
            assert (await seen_b.wait(events.QUEUE_DIFFERS))["theirs"] == 3
            assert (a.pools["q"].concurrency, b.pools["q"].concurrency) == (3, 8)
            await db.execute("INSERT INTO pgworkd.queues (name, concurrency) VALUES ('q', 5)")
            for daemon in (a, b):
                await until(has(daemon, concurrency=5), limit_s=2)
            await db.execute("DELETE FROM pgworkd.queues")
            await until(has(a, concurrency=3), limit_s=2)
            await until(has(b, concurrency=8), limit_s=2)
            assert len(seen_a.all(events.QUEUE_DIFFERS)) == len(seen_b.all(events.QUEUE_DIFFERS)) == 1
            a.add_queue("q", 4)  # another value is reported again
            await seen_b.wait(events.QUEUE_DIFFERS, theirs=4)
        async with running(many, dsn, worker_name="b", **quick) as (_, seen_b):
            await seen_b.wait(events.QUEUE_DIFFERS, theirs=4)
    assert [facts["ours"] for facts in seen_a.all(events.QUEUE_DIFFERS)] == [3, 4]


async def test_daemons_with_the_same_code_log_no_difference(dsn: str) -> None:
    app = app_of(Gauge(), concurrency=3)
    async with running(app, dsn, heartbeat_s=0.02) as (a, seen_a), running(app, dsn, heartbeat_s=0.02) as (b, seen_b):
        since_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        for daemon in (a, b):
            await until(lambda d=daemon: _beats(d, since_s + 0.1))
    assert seen_a.all(events.QUEUE_DIFFERS) == seen_b.all(events.QUEUE_DIFFERS) == []
