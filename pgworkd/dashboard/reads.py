"""What a page asks the database: one read-only transaction for each part, so that one that fails leaves the others."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from pgworkd.admin.admin import Admin
from pgworkd.database.requests import RequestPool
from pgworkd.errors import AccessRefused, DatabaseUnavailable

T = TypeVar("T")
DEAD_MAX = 10_000
"""How many dead jobs a page groups: the newest ones, if there are more."""
KEPT_MAX = 300
"""Answers that are kept, for all pages together."""
Kept = OrderedDict[Hashable, tuple[float, Any]]
"""Answers by question, each with the time until which it is shown again."""


class Questions:
    """What one page asks."""

    def __init__(self, pool: RequestPool, kept: Kept) -> None:
        self._pool, self._kept = pool, kept
        self.failures: list[str] = []
        """What could not be read, and why."""
        self.answered = False
        """Whether anything could be read."""

    async def of(self, what: str, question: Callable[[Admin], Awaitable[T]]) -> T | None:
        """The answer to a question about `what`; None, and a note, if it takes too long, or the database refuses.

        Raises PgworkdError for other errors: they are the caller's.
        """
        try:
            async with self._pool.session() as connection:
                found: T | None = None
                try:
                    found = await question(Admin(connection))
                except AccessRefused as error:  # the role may read other things
                    self.failures.append(f"{what}: {error}")
                self.answered = True
                return found
        except DatabaseUnavailable as error:
            self.failures.append(f"{what}: {error}")
            return None

    async def kept(self, what: str, key: Hashable, for_s: float, question: Callable[[Admin], Awaitable[T]]) -> T | None:
        """The answer of `of`; it is given again for `for_s` seconds, to all who may ask for what `key` names."""
        place, now_s = (what, key), time.monotonic()
        found: T | None
        until_s, found = self._kept.get(place, (0.0, None))
        if until_s <= now_s and (found := await self.of(what, question)) is not None:
            self._kept[place] = now_s + for_s, found
            self._kept.move_to_end(place)
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        return found
