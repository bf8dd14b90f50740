"""Outcomes that wait to be settled, in flushes of bounded size; queues with a large backlog are served in rotation."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from pgworkd.engine.settle.item import Item
from pgworkd.errors import PgworkdError

Ended = TypeVar("Ended", bound=Item)
FLUSH_MAX = 1_000
FLUSH_BYTES = 1024 * 1024
"""Maximum size of a flush of more than one job: over a slow connection, or on a server that compresses each result and
copies each payload to the history, a larger one would exceed the statement time-out."""
BURST_ITERATIONS_MAX = 8
"""Loop iterations for which a flush waits while each adds outcomes: quick jobs of one claim end within a few."""


@dataclass(slots=True)
class Flush:
    """The course of one flush: after more than `failures_max` failures in a row the rest of it is delayed."""

    failures_max: float
    failures: int = 0  # in a row, since part of it was settled
    error: PgworkdError | None = None


class _Lane(Generic[Ended]):
    """A lane of flushes, in the order in which the outcomes came."""

    def __init__(self) -> None:
        self._last: list[Ended] = []
        self._last_bytes = 0
        self._before: deque[tuple[list[Ended], int]] = deque()  # earlier flushes, each with its bytes

    def add(self, item: Ended, size: int) -> None:
        if self._last and (self._last_bytes + size > FLUSH_BYTES or len(self._last) >= FLUSH_MAX):
            self._begin()
        self._last.append(item)
        self._last_bytes += size

    def _begin(self) -> None:
        self._before.append((self._last, self._last_bytes))
        self._last, self._last_bytes = [], 0

    def first(self, most: int) -> tuple[list[Ended], int]:
        """The first flush, or its first `most` items, and its bytes; empty if nothing waits."""
        if self._before:
            items, size = self._before.popleft()
        else:
            (items, size), self._last, self._last_bytes = (self._last, self._last_bytes), [], 0
        if len(items) > most:
            left = items[most:]
            left_bytes = sum(item.size for item in left)
            self._before.appendleft((left, left_bytes))
            items, size = items[:most], size - left_bytes
        return items, size

    @property
    def waits(self) -> bool:
        """True if any outcome waits."""
        return bool(self._last or self._before)


class Flushes(_Lane[Ended]):
    """Outcomes in flushes, bounded in jobs and bytes, of at least one job. This is on the hot path of every job.

    Up to one flush's bytes wait together, whatever their queue. Beyond that each queue has a lane of its own, and the
    lanes are served round robin: a queue with large results, or very many, does not hold up the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        """Bytes of all outcomes that wait."""
        self.count = 0
        """Outcomes that wait."""
        self._of_queue: dict[str, _Lane[Ended]] = {}
        self._rotation: deque[_Lane[Ended]] = deque()  # the lanes that are not empty; the first is next
        self._small_next = True

    def put(self, item: Ended) -> None:
        """Adds an outcome to the last flush, or to a new one."""
        size = item.size
        self.bytes += size
        self.count += 1
        if self.bytes > FLUSH_BYTES:
            self._lane(item.queue).add(item, size)
            return
        if len(self._last) >= FLUSH_MAX:
            self._begin()
        self._last.append(item)
        self._last_bytes += size

    async def rest_of_burst(self, most: int) -> None:
        """Yields to the loop while that adds outcomes, up to `most`: two flushes cost more than one."""
        count = 0
        for _ in range(BURST_ITERATIONS_MAX):
            if not count < self.count < most:
                return
            count = self.count
            await asyncio.sleep(0)

    def take(self, most: int) -> list[Ended]:
        """The next flush, or its first `most` items; empty if nothing waits."""
        if not self._rotation or (self._small_next and self.waits):
            items, size = self.first(most)
            self._small_next = False
        else:
            lane = self._rotation.popleft()
            items, size = lane.first(most)
            if lane.waits:
                self._rotation.append(lane)
            self._small_next = True
        self.count -= len(items)
        self.bytes -= size
        return items

    def _lane(self, queue: str) -> _Lane[Ended]:
        lane = self._of_queue.setdefault(queue, _Lane[Ended]())
        if not lane.waits:
            self._rotation.append(lane)
        return lane
