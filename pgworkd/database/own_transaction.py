"""A transaction in which a job is claimed, runs and is settled: it stays open while the handler runs.

While it is open, the claim is nobody's but its own: the row is locked, and looks to others as it did before.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self

import anyio
import asyncpg

from pgworkd.database.driver_errors import translate
from pgworkd.database.transactions import TransactionPool, commit, roll_back
from pgworkd.errors import DatabaseUnavailable, PgworkdError


def _nothing() -> None:
    return None


class OwnTransaction:
    """One open transaction, on a connection of the pool. It has ended once `is_open` is False."""

    def __init__(self, pool: TransactionPool, connection: Any, transaction: Any) -> None:
        self._pool, self._connection, self._transaction = pool, connection, transaction
        self.is_open = True
        self._was_lent = False
        self._lost = _nothing
        connection.add_termination_listener(self._on_end)

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Calls `lost` if the connection breaks, or is closed by others, while the transaction is open."""
        self._lost = lost

    def _on_end(self, _: object) -> None:
        if self.is_open:
            self._lost()

    @classmethod
    async def begun(cls, pool: TransactionPool) -> Self:
        """A transaction that has begun. Waits for a connection. Raises `DatabaseUnavailable`."""
        return cls(pool, *await pool.take())

    async def fetch(self, sql: str, *args: object) -> list[Any]:
        """All rows of one statement. Raises PgworkdError, after which nothing else can be done here."""
        try:
            rows: list[Any] = await self._connection.fetch(sql, *args)
        except Exception as error:
            raise translate(error) from error
        return rows

    @contextlib.asynccontextmanager
    async def begin(
        self,
        committing: Callable[[], anyio.CancelScope],
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> AsyncIterator[Any]:
        """The connection: committed at the end of the block, rolled back to its beginning on an exception.

        Raises as `TransactionPool.begin` does, and never waits for a connection.
        """
        if not self.is_open:
            raise DatabaseUnavailable("the transaction in which the job was claimed has ended")
        self._was_lent, point = True, self._connection.transaction()
        try:
            await point.start()
            try:
                yield self._connection
            except BaseException:
                await roll_back(self._connection, point)
                raise
            await self.commit(committing)
        except BaseException:
            if not self._goes_on():
                self.abandon()
            raise

    def _goes_on(self) -> bool:
        try:
            return self.is_open and bool(self._connection.is_in_transaction())
        except asyncpg.InterfaceError:
            return False  # the connection has broken, and left the pool

    async def commit(
        self, committing: Callable[[], anyio.CancelScope] = lambda: anyio.CancelScope(shield=True)
    ) -> None:
        """Commits, and gives the connection back. Raises as `TransactionPool.begin` does."""
        try:
            await commit(self._connection, self._transaction, committing)
        except BaseException:
            self.abandon()
            raise
        await self._give_back()

    async def end(
        self, settle: Callable[[Any], Awaitable[str | None]], committing: Callable[[], anyio.CancelScope]
    ) -> str | None:
        """Commits what `settle` has done on the connection, and returns its answer; None: it has done nothing.

        Raises PgworkdError: `OutcomeUnknown` if it may have been done, with others it was not.
        """
        try:
            with committing() as limit:
                status = await settle(self._connection)
            if limit.cancelled_caught:
                raise TimeoutError
            if status is not None:
                await self.commit(committing)
        except PgworkdError:
            raise
        except Exception as error:
            raise translate(error) from error
        return status

    async def leave(self) -> None:
        """Rolls back, and gives the connection back."""
        await roll_back(self._connection, self._transaction)
        await self._give_back()

    def abandon(self) -> None:
        """Closes the connection at once, which rolls back. Does nothing once the transaction has ended."""
        if self.is_open:
            self.is_open = False
            self._pool.drop(self._connection)

    async def _give_back(self) -> None:
        self.is_open = False
        with contextlib.suppress(asyncpg.InterfaceError):  # it has broken, and left the pool
            self._connection.remove_termination_listener(self._on_end)
            if not self._was_lent:
                self._connection.leave_as_new()
        await self._pool.give_back(self._connection)
