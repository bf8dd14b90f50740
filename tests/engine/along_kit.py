"""Settles that take a claim along, as a daemon makes them, and a way to make them one by one."""

from __future__ import annotations

import asyncio
import math
from typing import Any, NamedTuple

import anyio
import pytest

from pgworkd import pace
from pgworkd.daemon import Daemon
from tests.engine.ahead_kit import Waiters
from tests.kit import until

ALL_OVER = "SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"
UNTOLD = {"heartbeat_s": 900.0, "lease_s": 3600.0, "poll_s": 60.0}
"""The daemon hears of nothing by its heartbeat, nor by looking, however long a test takes."""


class Call(NamedTuple):
    """One settle with a claim along, and what came of it."""

    settled: list[Any]
    limit: int
    claimed: int | None
    error: Exception | None


def calls_of(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Each call of that kind, when it has been answered."""
    calls: list[Call] = []
    store = daemon._store
    original = store.settle_and_claim

    async def listening(ids: Any, attempts: Any, results: Any, order: Any) -> Any:
        try:
            won, claimed = await original(ids, attempts, results, order)
        except Exception as error:
            calls.append(Call(list(ids), order.limit, None, error))
            raise
        calls.append(Call(list(ids), order.limit, len(claimed), None))
        return won, claimed

    monkeypatch.setattr(store, "settle_and_claim", listening)
    return calls


def let_go(waiters: Waiters) -> None:
    """Those that run return; the next wait."""
    go_on, waiters.gauge.go_on = waiters.gauge.go_on, anyio.Event()
    go_on.set()


async def at_rest(daemon: Daemon) -> None:
    """Waits until the pool has no room to claim for, and nothing left to say: the next claim is the settle's."""
    await until(lambda: daemon.pools["q"]._slots.ask_below is not None)


async def warmed_up() -> None:
    """A daemon that has just started uses its connections once, by itself: waits until that is over."""
    await until(lambda: all(task.get_name() != "warm-up" for task in asyncio.all_tasks()))


def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool claims for its free slots only, however quick its jobs are."""
    monkeypatch.setattr(pace, "WORTHWHILE", math.inf)
