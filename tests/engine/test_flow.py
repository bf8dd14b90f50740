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
from tests.kits.flow import Log, all_finished, fill, fleet, settings, take_ids
from tests.kits.verbs import complete, worker

pytestmark = pytest.mark.slow("limits of a fleet, watched while hundreds of jobs run")


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


@pytest.mark.fast
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


@pytest.mark.fast
async def test_a_limit_of_one_passes_between_daemons_without_waiting(dsn: str, db: asyncpg.Connection[Any]) -> None:
    log = Log()
    await settings(db, max_running=1)
    async with fleet(log, dsn, "ab", concurrency=4, poll_s=6.0):
        await fill(db, 60, "limit_key", "")
        await all_finished(db)
    assert len(log.runs) == 60
    assert log.most == 1
    assert log.took() < 6, "one poll would take as long"


@pytest.mark.fast
async def test_a_faster_rate_is_used_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    log = Log()
    await settings(db, rate=3, rate_period_s=3600.0)
    async with fleet(log, dsn, "ab"):
        await fill(db, 20, "limit_key", "")
        await until(lambda: db.fetchval("SELECT count(*) = 1 FROM pgworkd.finished_jobs"))
        await settings(db, rate=1000, rate_period_s=1.0)
        await all_finished(db, limit_s=2)
