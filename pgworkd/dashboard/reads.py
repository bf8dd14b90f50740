"""What a page asks the database: one read-only transaction for each part, so that one that fails leaves the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from pgworkd.admin.admin import Admin
from pgworkd.database.requests import RequestPool
from pgworkd.errors import DatabaseUnavailable

T = TypeVar("T")
DEAD_MAX = 10_000
"""Of more dead jobs a page shows the groups of the newest ones only."""


class Questions:
    """What one page asks."""

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool
        self.failures: list[str] = []
        """What could not be read, and why."""
        self.answered = False
        """Whether anything could be read."""

    async def of(self, what: str, question: Callable[[Admin], Awaitable[T]]) -> T | None:
        """The answer to a question about `what`; None if it takes too long, or nothing answers: a note says so.

        Raises PgworkdError for other errors: they are the caller's.
        """
        try:
            async with self._pool.session() as connection:
                found = await question(Admin(connection))
                self.answered = True
                return found
        except DatabaseUnavailable as error:
            self.failures.append(f"{what}: {error}")
            return None
