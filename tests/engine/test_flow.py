"""Fleet-wide limits, rates and fair order with several daemons."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from pgworkd import App
from pgworkd.core.claims import ClaimOrder, Claims
from pgworkd.database.store import Store
from pgworkd.engine.claim import poll_mode, pool
from pgworkd.engine.life.daemon import Daemon
from tests.kits.apps import Gauge
from tests.kits.daemon import running, until
from tests.kits.flow import Log, all_finished, fill, fleet, most_in_window, observed, settings, take_ids
from tests.kits.verbs import complete, worker

pytestmark = pytest.mark.slow("limits of a fleet, watched while hundreds of jobs run")

STARTS = "SELECT started_at FROM pgworkd.finished_jobs"


async def test_four_daemons_never_exceed_a_limit_of_five(dsn: str, db: asyncpg.Connection[Any]) -> None:
    log = Log(took_s=0.003)
    await settings(db, max_running=5)
    async with observed(dsn) as observer, fleet(log, dsn, "abcd", poll_s=5.0):
        await fill(db, 300, "limit_key", "")
        await all_finished(db, 20)
    assert len(log.runs) == 300
    assert (observer.most, log.most) == (5, 5)
    assert observer.looks > 50
    assert log.took() < 15  # 60 hand-overs: 1.5 s in total, but five minutes if each waited for a poll


@pytest.mark.parametrize("bound_s", [0.0, 60.0], ids=["for no time", "for a minute"])
async def test_a_queue_at_its_limit_is_not_prefetched_for_a_while(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, bound_s: float
) -> None:
    """Such a claim would return nothing while it holds the queue's lock, for which all others wait."""
    asked: list[tuple[int, int]] = []  # how many jobs a claim asked for and got
    claim = Store.claim

    async def noted_claim(store: Store, order: ClaimOrder) -> Claims:
        claims = await claim(store, order)
        if order.queue:
            asked.append((order.limit, len(claims)))
        return claims

    monkeypatch.setattr(Store, "claim", noted_claim)
    monkeypatch.setattr(pool, "BOUND_S", bound_s)
    log = Log()
    await settings(db, max_running=15)
    await fill(db, 2000, "limit_key", "")
    async with fleet(log, dsn, "a"):
        await all_finished(db)
    assert len(log.runs) == 2000
    bound_at = next(number for number, (limit, got) in enumerate(asked) if got < limit)
    assert (max(limit for limit, _ in asked[bound_at + 1 :]) > 10) == (bound_s == 0)


async def test_freed_capacity_of_a_limit_is_filled_by_consecutive_claims(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More capacity becomes free at once than one claim can use: the second claim does not wait for the poll."""
    monkeypatch.setattr(pool, "CLAIM_MAX", 2)
    monkeypatch.setattr(poll_mode, "POLL_CAP_S", 60.0)
    app, gauge = App(), Gauge()

    @app.handler("q", concurrency=20)
    async def handle() -> None:
        await gauge()

    other = await worker(db)
    await settings(db, max_running=8)
    await fill(db, 100, "limit_key", "")
    theirs = await take_ids(db, other, 8)
    async with running(app, dsn, poll_s=60.0, shutdown_s=0) as (daemon, _):
        await until(lambda: _bound(daemon))
        await complete(db, theirs)
        await gauge.shows(8)


async def _bound(daemon: Daemon) -> bool:
    return daemon.pools["q"]._bound_until > 0 and daemon.pools["q"].quiet


async def test_a_limit_of_one_passes_between_daemons_without_waiting(dsn: str, db: asyncpg.Connection[Any]) -> None:
    log = Log()
    await settings(db, max_running=1)
    async with fleet(log, dsn, "ab", concurrency=4, poll_s=6.0):
        await fill(db, 60, "limit_key", "")
        await all_finished(db)
    assert len(log.runs) == 60
    assert log.most == 1
    assert log.took() < 6, "one poll would take as long"


async def test_each_key_has_its_own_limit_across_all_daemons(dsn: str, db: asyncpg.Connection[Any]) -> None:
    log = Log(took_s=0.003)
    await settings(db, limit_per_key=2)
    keys = "abcdefgh"
    async with fleet(log, dsn, "123"):
        await fill(db, 15, "limit_key", *keys)
        await all_finished(db)
    assert len(log.runs) == 15 * len(keys)
    for key in keys:
        edges = sorted([(run.began, 1) for run in log.of(key)] + [(run.ended, -1) for run in log.of(key)])
        at_once = most = 0
        for _, step in edges:
            at_once += step
            most = max(most, at_once)
        assert most <= 2
    assert log.most > 4, "different keys run side by side"


async def test_a_rate_is_respected_and_fully_used(dsn: str, db: asyncpg.Connection[Any]) -> None:
    log = Log()
    await settings(db, rate=50, rate_period_s=1.0)
    async with fleet(log, dsn, "ab"):
        await fill(db, 120, "limit_key", "")
        await all_finished(db)
    starts = [row["started_at"] for row in await db.fetch(STARTS)]
    for window_s in (0.1, 0.5, 1.0):
        assert most_in_window(starts, window_s) <= 5 + 50 * window_s
    assert log.took() < (120 - 5) / 50 * 2


async def test_a_rate_per_key_does_not_slow_other_keys(dsn: str, db: asyncpg.Connection[Any]) -> None:
    log = Log()
    await settings(db, rate_per_key=20, rate_per_key_period_s=1.0, rate_per_key_burst=2)
    async with fleet(log, dsn, "ab"):
        await fill(db, 22, "limit_key", *"uvwxyz")
        await all_finished(db)
    # of the claims, not of the handlers
    by_key = "SELECT count(*), extract(epoch FROM max(started_at) - min(started_at)) FROM pgworkd.finished_jobs"
    claims = await db.fetch(f"{by_key} GROUP BY limit_key")
    assert [count for count, _ in claims] == [22] * 6
    assert min(took_s for _, took_s in claims) > 0.9
    assert log.took() < 3  # one after another: 6


async def test_a_faster_rate_is_used_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    log = Log()
    await settings(db, rate=3, rate_period_s=3600.0)
    async with fleet(log, dsn, "ab"):
        await fill(db, 20, "limit_key", "")
        await until(lambda: db.fetchval("SELECT count(*) = 1 FROM pgworkd.finished_jobs"))
        await settings(db, rate=1000, rate_period_s=1.0)
        await all_finished(db, limit_s=2)


async def test_a_small_tenant_does_not_wait_for_a_big_one(dsn: str, db: asyncpg.Connection[Any]) -> None:
    log = Log(took_s=0.001)
    await settings(db, fair=True)
    async with fleet(log, dsn, "12"):
        await fill(db, 2000, "limit_key", "big")
        await until(lambda: db.fetchval("SELECT count(*) > 20 FROM pgworkd.finished_jobs"))
        before = len(log.runs)
        await fill(db, 10, "limit_key", "small")
        await until(lambda: db.fetchval("SELECT count(*) = 10 FROM pgworkd.finished_jobs WHERE limit_key = 'small'"))
        assert len(log.runs) < 1000, "the big one has not even come half-way"
        passed = [run.key for run in sorted(log.runs[before:], key=lambda run: run.began)]
        assert passed.index("small") < 600, "at most what was claimed ahead stands before it"
        await all_finished(db)
    assert len(log.runs) == 2010
