"""Shares: one caller cannot use up what all need."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import anyio

from pgworkd.errors import DatabaseBusy
from pgworkd.gateway.api.request.problems import Problem


class Shares:
    """Shares for what may last long: `most` in all, of which one caller may have half."""

    def __init__(self, most: int, slug: str) -> None:
        """`slug`: the problem of who finds none."""
        self._most, self._slug = most, slug
        self._of = Counter[str]()

    @property
    def taken(self) -> int:
        """How many are taken."""
        return self._of.total()

    @contextlib.contextmanager
    def place(self, caller: str | None) -> Iterator[None]:
        """Holds a place within the block; `caller` None: of all callers together. Raises Problem."""
        name = "" if caller is None else caller
        if self.taken >= self._most:
            raise Problem(self._slug, f"{self.taken:,} are here already")
        if caller is not None and self._of[name] >= max(1, self._most // 2):
            raise Problem(self._slug, f"{self._of[name]:,} of yours are here already: others need the rest")
        self._of[name] += 1
        try:
            yield
        finally:
            self._of[name] -= 1
            if not self._of[name]:
                del self._of[name]


class Turns:
    """Turns at `most` connections: a caller that has three quarters of them waits behind its own requests."""

    def __init__(self, most: int, limit_s: float) -> None:
        """`limit_s`: how long a turn is waited for."""
        self._each, self._limit_s = max(1, most * 3 // 4), limit_s
        self._of: dict[str, anyio.Semaphore] = {}

    @contextlib.asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Waits until the caller may take one more, which lasts until the end of the block. Raises DatabaseBusy."""
        turns = self._of.setdefault(caller, anyio.Semaphore(self._each))
        try:
            turns.acquire_nowait()
        except anyio.WouldBlock:
            with anyio.move_on_after(self._limit_s) as limit:
                await turns.acquire()
            if limit.cancelled_caught:
                said = "your other requests use all connections that one caller may have"
                raise DatabaseBusy(said, sqlstate="53300") from None
        try:
            yield
        finally:
            turns.release()
            if turns.value == self._each:  # nobody has one, or waits
                self._of.pop(caller, None)
