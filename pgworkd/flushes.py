"""Outcomes that wait to be settled, in the order in which they came, gathered to flushes of a bounded size."""

from __future__ import annotations

from collections import deque

from .delayed import Item, size_of

FLUSH_MAX = 1_000
FLUSH_BYTES = 1024 * 1024
"""A flush of more than one job has no more to store: a slow connection, or a server that compresses each result and
copies each payload to the history, would need longer for it than a statement may take."""


class Flushes:
    """Each is bounded in jobs and bytes, but has at least one job. What each job costs here, all jobs pay."""

    def __init__(self) -> None:
        self.bytes = 0
        """Of all that waits here."""
        self._count = 0
        self._last: list[Item] = []
        self._last_bytes = 0
        self._flushes: deque[tuple[list[Item], int]] = deque()  # each with its bytes; those before the last

    def __len__(self) -> int:
        return self._count

    def put(self, item: Item) -> None:
        """Adds one to the last flush, or begins another."""
        size = size_of(item)
        if self._last and (self._last_bytes + size > FLUSH_BYTES or len(self._last) >= FLUSH_MAX):
            self._flushes.append((self._last, self._last_bytes))
            self._last, self._last_bytes = [], 0
        self._last.append(item)
        self._last_bytes += size
        self.bytes += size
        self._count += 1

    def take(self, most: int) -> list[Item]:
        """The first flush, or the first so many of it; empty if nothing waits."""
        if self._flushes:
            items, size = self._flushes.popleft()
        else:
            (items, size), self._last, self._last_bytes = (self._last, self._last_bytes), [], 0
        if len(items) > most:
            left = items[most:]
            left_bytes = sum(map(size_of, left))
            self._flushes.appendleft((left, left_bytes))
            items, size = items[:most], size - left_bytes
        self._count -= len(items)
        self.bytes -= size
        return items
