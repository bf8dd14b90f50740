"""The queues that this daemon serves: owner of their pools, which are added and removed while it runs.

A queue that is removed *drains*: its pool claims nothing more and releases what has not begun; when all that ran has
ended and is settled, the pool ends. A queue that is added again before that simply goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
from anyio.abc import TaskGroup

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.job import Reason
from pgworkd.database.reconnect import Outage
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.claim.pool import Pool
from pgworkd.engine.life.queue_overrides import QueueOverrides
from pgworkd.engine.registry import Registry
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.settings.queue import number

DRAIN_POLL_S = 0.02
"""How often a draining pool is checked."""


class QueueSet:
    """The pools of a daemon, by queue. Lives in the daemon's loop; the heartbeat thread may read `pools`."""

    def __init__(
        self,
        app: Registry,
        in_flight: InFlight,
        events_: Events,
        *,
        make: Callable[[str, int], Pool],
        drop: Callable[[str], Awaitable[None]],
        refresh: Callable[[], None],
    ) -> None:
        """`make` makes a pool of a queue with that many slots, `drop` removes its row from the database.

        `refresh` asks the database for the rows of `queues` now.
        """
        self.pools: dict[str, Pool] = {}
        """The pools by queue, including those that drain."""
        self.overrides = QueueOverrides(self.pools, events_, refresh)
        self._app = app
        self._in_flight = in_flight
        self._events = events_
        self._make = make
        self._drop = drop
        self._tasks: TaskGroup | None = None
        self._drained: dict[str, anyio.Event] = {}

    @property
    def slots(self) -> dict[str, int]:
        """The concurrency of each queue by code and settings, without overrides."""
        return {queue: pool.code_concurrency for queue, pool in self.pools.items() if not pool.closed}

    @property
    def names(self) -> list[str]:
        """The queues, including those that drain. May be called from any thread."""
        return list(self.pools)

    @property
    def running(self) -> int:
        """Handlers that have been called and have not returned. May be called from any thread."""
        return sum(pool.running for pool in list(self.pools.values()))

    @property
    def quiet(self) -> bool:
        """True when no handler runs and no claim is under way."""
        return all(pool.quiet for pool in self.pools.values())

    # All pools at once.

    def claim_soon(self) -> None:
        """Wakes all claim loops: something may have changed."""
        for pool in self.pools.values():
            pool.claim_soon()

    def release_unstarted(self, reason: Reason) -> None:
        """Releases everything that was claimed and has not begun."""
        for pool in self.pools.values():
            pool.release_unstarted(reason)

    def forget_announcements(self) -> None:
        """Announces all pools again: the database may have lost their rows."""
        for pool in self.pools.values():
            pool.forget_announcement()

    def completed(self, batch: Sequence[Attempt]) -> None:
        """Wakes the pools that may claim more, now that these attempts are settled."""
        for attempt in batch:
            if attempt.claimed.serialize_key or attempt.claimed.is_suspect:
                self.claim_soon()  # the next suspect, or the next job of the key, may run
                return
        for queue in {attempt.queue for attempt in batch}:
            if (pool := self.pools.get(queue)) is not None and pool.limited:
                pool.claim_soon()

    # Adding and removing queues.

    def start(self, tasks: TaskGroup) -> None:
        """Lets all pools claim."""
        self._tasks = tasks
        for pool in self.pools.values():
            tasks.start_soon(self._serve, pool, name=f"pool {pool.queue}")

    def serve(self, queues: Mapping[str, int | None] | None) -> None:
        """Serves exactly these queues from now on (None: all of the app's); removes others without waiting for them.

        Raises UsageError, and changes nothing, when no handler serves one of them.
        """
        wanted = self._checked(queues)
        for queue, (slots, source) in wanted.items():
            self._add(queue, slots, source)
        for queue in self.slots.keys() - wanted.keys():
            self.close(queue)

    def add(self, queue: str, slots: int | None) -> None:
        """Adds a queue, or changes the slots of one that is served already. Raises UsageError."""
        for name, (number_of, source) in self._checked({queue: slots}).items():
            self._add(name, number_of, source)

    def close(self, queue: str) -> anyio.Event:
        """Begins to drain a queue; the event is set when nothing of it is left here. Raises UsageError."""
        pool = self.pools.get(queue)
        if pool is None:
            raise UsageError(f"queue {queue!r} is not served here; these are: {', '.join(self.pools) or 'none'}")
        drained = self._drained.setdefault(queue, anyio.Event())
        pool.close()
        if self._tasks is None:
            self._remove(pool)
        return drained

    def _checked(self, queues: Mapping[str, int | None] | None) -> dict[str, tuple[int, str]]:
        """The slots of each queue, and their source. Raises UsageError."""
        for queue, slots in (queues or {}).items():
            if slots is not None:
                number("concurrency", slots, f"slots of queue {queue!r}")
        stated = {handler.queue for handler in self._app.handlers.values() if handler.concurrency is not None}
        sources = {
            queue: "settings" if (queues or {}).get(queue) else "code" if queue in stated else "default"
            for queue in self._app.queues()
        }
        return {queue: (slots, sources[queue]) for queue, slots in self._app.slots(queues).items()}

    def _add(self, queue: str, slots: int, source: str) -> None:
        pool = self.pools.get(queue)
        is_new = pool is None
        if pool is None:
            pool = self.pools[queue] = self._make(queue, slots)
        elif (pool.code_concurrency, pool.code_source, pool.closed) == (slots, source, False):
            return
        if self._tasks is not None and (is_new or pool.closed):
            self._events.emit(events.QUEUE_ADDED, queue=queue, concurrency=slots)
        pool.code_concurrency, pool.code_source, pool.closed = slots, source, False
        if (drained := self._drained.pop(queue, None)) is not None:
            drained.set()  # it no longer drains: nothing is left to wait for
        self.overrides.apply(pool)
        pool.forget_announcement()
        if self._tasks is not None and is_new:
            self._tasks.start_soon(self._serve, pool, name=f"pool {queue}")

    async def _serve(self, pool: Pool) -> None:
        """Runs a pool until it has been closed and drained."""
        outage = Outage(f"remove {pool.queue}", self._events)
        try:
            async with anyio.create_task_group() as tasks:
                while not pool.closed or not await self._is_drained(pool, outage):
                    await pool.run(tasks)
                self._remove(pool)
                tasks.cancel_scope.cancel()  # its idle runner tasks
        finally:
            if (drained := self._drained.get(pool.queue)) is not None and self.pools.get(pool.queue) is pool:
                drained.set()  # the daemon ends, and the pool with it

    async def _is_drained(self, pool: Pool, outage: Outage) -> bool:
        """True when nothing of a closed pool is left, here and in the database; False if it was opened again."""
        while pool.closed:
            if pool.quiet and all(attempt.queue != pool.queue for attempt in self._in_flight):
                try:
                    await self._drop(pool.queue)
                except PgworkdError as error:
                    await outage.wait(error)
                else:
                    outage.passed()
                    return pool.closed
            else:
                await anyio.sleep(DRAIN_POLL_S)
        return False

    def _remove(self, pool: Pool) -> None:
        del self.pools[pool.queue]
        self.overrides.forget(pool.queue)
        self._events.emit(events.QUEUE_REMOVED, queue=pool.queue)
        if (drained := self._drained.pop(pool.queue, None)) is not None:
            drained.set()
