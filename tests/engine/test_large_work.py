"""Large payloads and results: there is always progress, and what is buffered is bounded in bytes."""

from __future__ import annotations

from typing import Any, TypeAlias

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.engine.run import large_payloads
from pgworkd.engine.settle import settler
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.proxy import Proxy

pytestmark = pytest.mark.slow("payloads of megabytes over a slow connection")

Db: TypeAlias = "asyncpg.Connection[Any]"

MIB = 1024 * 1024
RANDOM = """SELECT string_agg(md5(random()::text), '') FROM generate_series(1, $1::int / 32)"""
"""Characters that compression does not shrink."""


async def insert_large(db: Db, queue: str, count: int, size: int, meta: int = 0) -> None:
    """Numbered jobs whose payloads (and meta) take about `size` (`meta`) bytes."""
    text, more = await db.fetchval(RANDOM, size), await db.fetchval(RANDOM, meta)
    await db.execute(
        """INSERT INTO pgworkd.jobs (queue, payload, meta)
           SELECT $1::text, jsonb_build_object('text', $2::text, 'n', n), jsonb_build_object('meta', $3::text)
           FROM generate_series(1, $4::int) n""",
        queue,
        text or "",
        more or "",
        count,
    )


async def completed(db: Db) -> int:
    return int(await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed'"))


async def test_large_payloads_over_a_slow_connection_run_one_after_another(dsn: str, db: Db) -> None:
    """Together they would take 10 s, longer than the statement timeout; each takes a quarter of a second."""
    app, begun = App(), list[int]()

    @app.handler("large", concurrency=50)
    async def large(payload: dict[str, Any]) -> None:
        begun.append(payload["n"])

    @app.handler("small")
    async def small() -> None: ...

    await insert_large(db, "large", 50, MIB - 100)
    async with Proxy(dsn) as proxy, running(app, proxy.dsn, shutdown_s=0.1):
        proxy.bytes_per_s = 4 * MIB
        await until(lambda: len(begun) >= 3)
        await until(waits_for_status(db, await insert(db, "small"), "completed"), limit_s=3)
        assert len(begun) < 50, "not slow enough to prove anything"
        proxy.bytes_per_s = 1 << 40
    assert begun == list(range(1, len(begun) + 1))


async def test_large_results_are_stored_without_delaying_other_jobs(dsn: str, db: Db) -> None:
    app, result = App(), {"text": (await db.fetchval(RANDOM, MIB - 100))}

    @app.handler("large", concurrency=40)
    async def large() -> dict[str, Any]:
        return result

    @app.handler("small")
    async def small() -> None: ...

    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'large' FROM generate_series(1, 40)")
    async with Proxy(dsn) as proxy:
        proxy.bytes_per_s = 8 * MIB
        async with running(app, proxy.dsn) as (_, recorder):
            await until(lambda: completed(db))
            await until(waits_for_status(db, await insert(db, "small"), "completed"), limit_s=15)
            assert await completed(db) < 41, "not slow enough to prove anything"
            proxy.bytes_per_s = 1 << 40
            await until(lambda: _all(db, 41))
    assert not recorder.all(events.DATABASE_UNAVAILABLE)


async def _all(db: Db, count: int) -> bool:
    return await completed(db) == count


async def test_waiting_outcomes_are_bounded_in_bytes(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing can be settled, no more jobs run than fit, however many are prefetched; then all complete."""
    monkeypatch.setattr(settler, "CAPACITY_BYTES", 4 * MIB)
    app, ran, result = App(), list[int](), {"text": "x" * (MIB // 2)}

    @app.handler("large", concurrency=4)
    async def large() -> dict[str, Any]:
        ran.append(1)
        return result

    async with running(app, dsn) as (daemon, _):
        async with db.transaction():
            await db.execute("LOCK TABLE pgworkd.finished_jobs IN SHARE MODE")
            other = await asyncpg.connect(dsn)
            await other.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'large' FROM generate_series(1, 80)")
            await other.close()
            await until(lambda: daemon._settler.full)
            for _ in range(20):
                await anyio.sleep(0.01)
                assert len(ran) <= 8 + 2 + 4 + 4  # buffer, flush in progress, one per slot and claim
        await until(lambda: _all(db, 80))


async def test_a_read_fetches_as_many_next_payloads_as_fit(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of a few kilobytes do not cost a round trip each."""
    app, seen, reads = App(), list[tuple[int, int]](), list[int]()

    @app.handler("middling", concurrency=2)
    async def middling(payload: dict[str, Any], job: Job) -> None:
        seen.append((payload["n"], len(job.meta["meta"])))

    await insert_large(db, "middling", 400, 10_000, 3200)
    async with running(app, dsn, queues={}) as (daemon, _):
        store = daemon._store
        read = store.payloads

        async def counted(*args: Any) -> Any:
            rows = await read(*args)
            assert sum(len(row[1] or "") + len(row[2] or "") for row in rows[:-1]) < large_payloads.READ_BYTES
            reads.append(len(rows))
            return rows

        monkeypatch.setattr(store, "payloads", counted)
        daemon.add_queue("middling")
        await until(lambda: len(seen) == 400)
    assert sorted(seen) == [(n, 3200) for n in range(1, 401)]
    assert len(reads) < 100


async def test_jobs_whose_payloads_are_being_read_are_released_at_a_stop(dsn: str, db: Db) -> None:
    app = App()

    @app.handler("large", concurrency=20)
    async def large() -> None: ...

    await insert_large(db, "large", 20, MIB - 100)
    async with Proxy(dsn) as proxy:
        async with running(app, proxy.dsn, shutdown_s=30):
            proxy.bytes_per_s = MIB // 2  # a payload takes two seconds
            before = await until(lambda: completed(db))
        done = await completed(db)
    assert 1 <= before <= done <= before + 3, "what waited for its payload at the stop was run"
    rows = await db.fetch("SELECT status::text, failures FROM pgworkd.jobs")
    assert [tuple(row) for row in rows] == [("pending", 0)] * (20 - done)
