"""Following the rows of `queues` while the daemon runs: what a row says wins over the code, from the next claim on.

The rows come with each heartbeat, and a heartbeat comes at once when someone has changed one. The database itself
keeps to pauses and limits from their commit on; concurrency, backoff and how far ahead to claim are kept to here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import anyio

from pgworkd.database.heartbeat_store import Instructions
from pgworkd.engine.claim.pool import Pool
from pgworkd.words import events
from pgworkd.words.events import Events
from pgworkd.words.job import Reason

BACKOFF = ("backoff_s", "backoff_factor", "backoff_cap_s")
_END_S_MAX = 3600.0
_END_MARGIN_S = 0.005
"""The pause is over by the database's clock, not by ours."""
_NOTHING: Mapping[str, Any] = {}


class QueueOverrides:
    """What is in force in each queue of this daemon. Lives in the daemon's loop."""

    def __init__(self, events_: Events, ask: Callable[[], None]) -> None:
        """`ask` makes the next answer come now."""
        self.pools: Mapping[str, Pool] = {}
        self.backoffs: dict[str, dict[str, float]] = {}
        """By queue, what its row says of `BACKOFF`."""
        self.known = False
        """Before an answer for each queue nothing must be claimed: a row may say that less is to run than code says."""
        self.first = anyio.Event()
        """Comes with the first that leaves none out."""
        self._events = events_
        self._ask = ask
        self._rows: Mapping[str, Mapping[str, Any]] = {}
        self._asked: frozenset[str] | None = None  # the queues of which those are all the rows; None: any queue
        self._in_force: dict[str, dict[str, Any]] = {}
        self._reported: set[tuple[str, int, int]] = set()
        self._pause_ends: asyncio.TimerHandle | None = None

    def follow(self, wanted: Instructions) -> None:
        """Takes over what the database says."""
        was_known, self.known = self.known, True
        self._rows, self._asked = wanted.queues, wanted.asked
        for queue, pool in self.pools.items():
            self.apply(pool)
            self._compare(pool, wanted.differing.get(queue, ()))
        self._expect_end()
        if self.known:
            self.first.set()
            for pool in self.pools.values() if not was_known else ():
                pool.claim_soon()

    def apply(self, pool: Pool) -> None:
        """Brings a pool, that is perhaps new, to what is known of its queue, and states what that changes."""
        if self._asked is not None and pool.queue not in self._asked:
            self.known = False
            self._ask()
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
        """The daemon does not serve this queue any more."""
        self._in_force.pop(queue, None)
        self.backoffs.pop(queue, None)

    def stop(self) -> None:
        """Waits for no pause any more."""
        if self._pause_ends is not None:
            self._pause_ends.cancel()

    def _expect_end(self) -> None:
        """When the first of the pauses ends, the database is asked again."""
        self.stop()
        rows = [self._rows.get(queue, _NOTHING) for queue in self.pools]
        ends_s = min((row["pause_s"] for row in rows if "pause_s" in row), default=None)
        if ends_s is not None:
            in_s = min(float(ends_s) + _END_MARGIN_S, _END_S_MAX)
            self._pause_ends = asyncio.get_running_loop().call_later(in_s, self._ask)

    def _compare(self, pool: Pool, others: Any) -> None:
        """Warns, once for each value, of daemons whose code gives the queue another concurrency than ours."""
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
