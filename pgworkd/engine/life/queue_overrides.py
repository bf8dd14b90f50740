"""Follows the rows of `queues` while the daemon runs: a row overrides the code, from the next claim on.

The rows come with each heartbeat, and a change of a row triggers a heartbeat at once. Pauses and limits are enforced by
the database itself from their commit on; concurrency, backoff and how far ahead to claim are enforced here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.job import Reason
from pgworkd.core.source import Instructions
from pgworkd.engine.claim.claim_loop import ClaimLoop

BACKOFF = ("backoff_s", "backoff_factor", "backoff_cap_s")
_END_S_MAX = 3600.0
_END_MARGIN_S = 0.005
"""Margin at the end of a pause, which ends by the database's clock, not by ours."""
_NOTHING: Mapping[str, Any] = {}


class QueueOverrides:
    """The settings in force in each queue of this daemon. Lives in the daemon's loop."""

    def __init__(self, pools: Mapping[str, ClaimLoop], events_: Events, refresh: Callable[[], None]) -> None:
        """`refresh` asks the database for the rows now."""
        self.backoffs: dict[str, dict[str, float]] = {}
        """The values of `BACKOFF` that the row of each queue sets."""
        self.known = False
        """False until the rows of all queues are known: nothing may be claimed, a row may allow less than the code."""
        self.first = anyio.Event()
        """Set as soon as `known` is true for the first time."""
        self._pools = pools
        self._events = events_
        self._refresh = refresh
        self._rows: Mapping[str, Mapping[str, Any]] = {}
        self._asked: frozenset[str] | None = None  # the queues that the rows are complete for; None: all
        self._in_force: dict[str, dict[str, Any]] = {}
        self._reported: set[tuple[str, int, int]] = set()
        self._pause_ends: asyncio.TimerHandle | None = None

    def follow(self, instructions: Instructions) -> None:
        """Applies the rows that the database has sent."""
        was_known, self.known = self.known, True
        self._rows, self._asked = instructions.queues, instructions.asked
        for queue, pool in self._pools.items():
            self.apply(pool)
            self._compare(pool, instructions.differing.get(queue, ()))
        self._schedule_pause_end()
        if self.known:
            self.first.set()
            for pool in self._pools.values() if not was_known else ():
                pool.claim_soon()

    def apply(self, pool: ClaimLoop) -> None:
        """Applies what is known of a pool's queue to that pool, which may be new, and reports what changes."""
        if self._asked is not None and pool.queue not in self._asked:
            self.known = False
            self._refresh()
        row = self._rows.get(pool.queue, _NOTHING)
        now = {name: value for name, value in row.items() if name not in ("limited", "pause_s") and value is not False}
        now |= {"concurrency": row.get("concurrency") or pool.code_concurrency, "paused": bool(row.get("paused"))}
        was = self._in_force.get(pool.queue) or {"concurrency": pool.concurrency, "paused": pool.paused}
        if now == was:
            return
        self._in_force[pool.queue] = now
        pool.concurrency, pool.paused, pool.limited = now["concurrency"], now["paused"], bool(row.get("limited"))
        if pool.paused or pool.limited:
            pool.release_unstarted(Reason.ELSEWHERE)  # claimed ahead when that was allowed
        self.backoffs[pool.queue] = {name: row[name] for name in BACKOFF if name in row}
        pool.forget_announcement()
        names = [name for name in (*now, *(was.keys() - now.keys())) if now.get(name) != was.get(name)]
        self._events.emit(
            events.QUEUE_SETTINGS,
            queue=pool.queue,
            concurrency=pool.concurrency,
            paused=pool.paused,
            changed={name: now.get(name) for name in names},
            was={name: was.get(name) for name in names},
        )

    def forget(self, queue: str) -> None:
        """Drops what is known of a queue that the daemon no longer serves."""
        self._in_force.pop(queue, None)
        self.backoffs.pop(queue, None)

    def stop(self) -> None:
        """Cancels the timer for the end of a pause."""
        if self._pause_ends is not None:
            self._pause_ends.cancel()

    def _schedule_pause_end(self) -> None:
        """Asks the database again when the first pause ends."""
        self.stop()
        rows = [self._rows.get(queue, _NOTHING) for queue in self._pools]
        ends_s = min((row["pause_s"] for row in rows if "pause_s" in row), default=None)
        if ends_s is not None:
            in_s = min(float(ends_s) + _END_MARGIN_S, _END_S_MAX)
            self._pause_ends = asyncio.get_running_loop().call_later(in_s, self._refresh)

    def _compare(self, pool: ClaimLoop, others: Any) -> None:
        """Warns, once for each value, of workers whose code gives the queue another concurrency than ours."""
        workers: dict[int, list[str]] = {}
        for worker, theirs in others:
            workers.setdefault(theirs, []).append(worker)
        for theirs, names in workers.items():
            if (key := (pool.queue, pool.code_concurrency, theirs)) in self._reported:
                continue
            self._reported.add(key)
            self._events.emit(
                events.QUEUE_DIFFERS,
                queue=pool.queue,
                ours=pool.code_concurrency,
                theirs=theirs,
                workers=sorted(names)[:10],
                row=self._rows.get(pool.queue, _NOTHING).get("concurrency"),
            )
