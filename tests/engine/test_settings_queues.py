"""Queues are added to a running daemon, changed and removed, by its application and by SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.errors import UsageError
from tests.kits.apps import Gauge
from tests.kits.commands import Start, database, start, waits_until
from tests.kits.daemon import insert, running, status, until, waits_for_status

pytestmark = pytest.mark.slow("settings that change while daemons run")

__all__ = ["start"]  # fixtures

QUEUES = "SELECT array_agg(queue::text ORDER BY queue) FROM pgworkd.pools"


def app_of(gauge: Gauge | None = None) -> App:
    """Three queues; the handler of `held` waits for the gauge."""
    app = App()

    @app.handler("one", concurrency=2)
    async def one() -> None:
        return None

    @app.handler("two")
    async def two() -> None:
        return None

    @app.handler("held", concurrency=2)
    async def held() -> None:
        await (gauge or Gauge())()

    return app


def serves(db: asyncpg.Connection[Any], *queues: str) -> Callable[[], Awaitable[bool]]:
    """A condition: the pools in the database are those of these queues."""

    async def fact() -> bool:
        return (await db.fetchval(QUEUES) or []) == sorted(queues)

    return fact


@contextlib.asynccontextmanager
async def bounded() -> AsyncIterator[None]:
    """Fails a test that waits for something that never happens."""
    with anyio.fail_after(4):
        yield


async def test_an_added_queue_follows_its_settings_row_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    gauge = Gauge()
    await db.execute("INSERT INTO pgworkd.queues (name, concurrency) VALUES ('held', 1)")
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'held' FROM generate_series(1, 9)")
    async with running(app_of(gauge), dsn, queues={"one": None}, shutdown_s=0) as (daemon, _):
        daemon.add_queue("held", 5)
        assert daemon.pools["held"].concurrency == 1
        await gauge.shows(1)
        daemon.add_queue("held", 4)  # the row still overrides it
        await db.execute("DELETE FROM pgworkd.queues")
        await gauge.shows(4)


async def test_an_added_queue_is_not_served_before_its_settings_row_is_known(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """A heartbeat fetches the settings of the queues known when it started; the new one is not among them."""
    gauge = Gauge()
    app = app_of()
    await db.execute("INSERT INTO pgworkd.queues (name, concurrency) VALUES ('later', 1)")
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'later' FROM generate_series(1, 9)")
    async with running(app, dsn, queues={"one": None}, shutdown_s=0) as (daemon, _):
        app.handler("later", concurrency=5)(gauge.__call__)
        daemon.add_queue("later", 5)
        assert not daemon.worker.may_claim
        await gauge.shows(1)
        assert (daemon.pools["later"].concurrency, gauge.most) == (1, 1)
        await until(waits_for_status(db, await insert(db, "one"), "completed"), limit_s=2)
        await db.execute("UPDATE pgworkd.queues SET concurrency = 3")
        await gauge.shows(3)


async def test_the_slots_of_a_served_queue_can_change(dsn: str, db: asyncpg.Connection[Any]) -> None:
    gauge = Gauge()
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'held' FROM generate_series(1, 9)")
    async with running(app_of(gauge), dsn, queues={"held": None}, shutdown_s=0) as (daemon, seen):
        await gauge.shows(2)
        daemon.add_queue("held", 4)
        await gauge.shows(4)
        daemon.add_queue("held", 4)
        assert len(seen.all(events.QUEUE_SETTINGS)) == 1
        assert seen.all(events.QUEUE_ADDED) == []
        daemon.add_queue("held")
        assert daemon.pools["held"].concurrency == 2


async def test_unknown_queues_and_slots_out_of_bounds_are_refused(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with running(app_of(), dsn, queues={"one": None}) as (daemon, _):
        with pytest.raises(UsageError, match="no handler serves queue 'three'; the app knows: held, one, two"):
            daemon.add_queue("three")
        with pytest.raises(UsageError, match="no handler serves queue 'three'"):
            daemon.serve({"two": None, "three": 1})
        for slots in (0, -1, 10**9, 1.5, True):
            with pytest.raises(UsageError, match=r"slots of queue 'two' .*: give a whole number from 1 to 10000"):
                daemon.add_queue("two", slots)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="queue 'two' is not served here; these are: one"):
            await daemon.remove_queue("two")
        assert list(daemon.pools) == ["one"]
    with pytest.raises(UsageError, match="the daemon is stopping"):
        daemon.add_queue("two")


async def test_removing_a_queue_waits_for_running_jobs_and_releases_the_rest(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    gauge = Gauge()
    async with running(app_of(gauge), dsn) as (daemon, seen), anyio.create_task_group() as tasks:
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'held' FROM generate_series(1, 9)")
        await gauge.shows(2)
        tasks.start_soon(daemon.remove_queue, "held")
        claimed = "SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'"
        await until(lambda: db.fetchval(f"SELECT ({claimed}) = 2"))
        for _ in range(3):  # the others continue meanwhile
            await until(waits_for_status(db, await insert(db, "one"), "completed"), limit_s=2)
        assert daemon.running == 2
        assert "held" in daemon.pools
        assert seen.all(events.QUEUE_REMOVED) == []
        gauge.go_on.set()
        await seen.wait(events.QUEUE_REMOVED, queue="held")
        await until(serves(db, "one", "two"))
        assert "held" not in daemon.pools
        found = await db.fetch("SELECT status::text, count(*), max(failures) FROM pgworkd.jobs GROUP BY 1")
        assert [tuple(row) for row in found] == [("pending", 7, 0)]
    assert gauge.most == 2


async def test_the_last_queue_may_be_removed_and_added_again(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with running(app_of(), dsn, queues={"one": None}) as (daemon, _):
        for _ in range(3):
            await daemon.remove_queue("one")
            assert daemon.pools == {}
            assert await serves(db)()
            job_id = await insert(db, "one")
            daemon.add_queue("one")
            await until(waits_for_status(db, job_id, "completed"), limit_s=2)
        tasks = [task.get_name() for task in asyncio.all_tasks()]
        assert tasks.count("pool one") == 1
        assert sum(name.startswith("runner one") for name in tasks) <= 2, "those of the old pools have ended"


async def test_a_draining_queue_that_is_added_again_continues(dsn: str, db: asyncpg.Connection[Any]) -> None:
    gauge = Gauge()
    async with (
        bounded(),
        running(app_of(gauge), dsn, queues={"held": None}) as (daemon, seen),
        anyio.create_task_group() as tasks,
    ):
        await insert(db, "held")
        await gauge.shows(1)
        pool = daemon.pools["held"]
        tasks.start_soon(daemon.remove_queue, "held")
        await until(lambda: _is(pool, closed=True))
        more = await insert(db, "held")
        daemon.add_queue("held")  # releases waiting callers, too: else the task group would not end
        await gauge.shows(2)
        assert daemon.pools["held"] is pool
        gauge.go_on.set()
        await until(waits_for_status(db, more, "completed"), limit_s=2)
        assert seen.all(events.QUEUE_REMOVED) == []
        assert await serves(db, "held")()


async def _is(pool: Any, *, closed: bool) -> bool:
    return bool(pool.closed) is closed


async def test_quick_removals_additions_and_pauses_lose_no_job(dsn: str, db: asyncpg.Connection[Any]) -> None:
    ran: list[Any] = []
    app = App()

    @app.handler("q", concurrency=5)
    async def handle(payload: dict[str, Any]) -> None:
        ran.append(payload["n"])
        await anyio.sleep(0.001)

    async with running(app, dsn) as (daemon, _):
        for round_ in range(20):
            numbers = [json.dumps({"n": round_ * 50 + n}) for n in range(50)]
            await db.execute("INSERT INTO pgworkd.jobs (queue, payload) SELECT 'q', unnest($1::jsonb[])", numbers)
            if round_ % 2:
                await daemon.remove_queue("q")
            else:
                daemon.serve({"q": 1 + round_})
            daemon.add_queue("q", 1 + round_ % 7)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=4)
    assert sorted(ran) == list(range(1000))


async def test_a_stop_does_not_wait_for_a_draining_queue(dsn: str, db: asyncpg.Connection[Any]) -> None:
    gauge = Gauge()
    async with bounded(), anyio.create_task_group() as tasks:
        async with running(app_of(gauge), dsn, shutdown_s=0) as (daemon, seen):
            job_id = await insert(db, "held")
            await gauge.shows(1)
            tasks.start_soon(daemon.remove_queue, "held")
            await until(lambda: _is(daemon.pools["held"], closed=True))
        assert seen.all(events.DAEMON_STOPPED) == [{"exit_code": 0}]
    assert await status(db, job_id) == "pending"


def test_sighup_adds_changes_and_removes_queues(start: Start, dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "pgworkd.toml"

    def settings(queues: str) -> None:
        file.write_text(f'log_format = "json"\nqueues = {queues}\n')

    settings('["mail=2"]')
    run = start("run", "--app", "notes:app", PGWORKD_DSN=dsn)
    run.event("daemon.ready")
    with database(dsn) as db:

        def pools() -> Any:
            return db.execute("SELECT queue::text, concurrency, code_source FROM pgworkd.pools ORDER BY 1").fetchall()

        waits_until(lambda: pools() == [("mail", 2, "settings")])
        settings('["mail=3", "hang=4"]')
        run.stop(signal.SIGHUP)
        assert run.event("settings.reloaded")["applied"] == {"queues": {"mail": 3, "hang": 4}}
        waits_until(lambda: pools() == [("hang", 4, "settings"), ("mail", 3, "settings")])
        settings('["mial"]')
        run.stop(signal.SIGHUP)
        assert (
            "queues (pgworkd.toml): no handler serves queue 'mial': did you mean 'mail'?"
            in (run.event("reload.rejected")["error"])
        )
        settings('["hang=4"]')
        run.stop(signal.SIGHUP)
        assert run.event("queue.removed")["queue"] == "mail"
        waits_until(lambda: pools() == [("hang", 4, "settings")])
    run.stop()
    assert run.ends() == 0
