"""Connections for requests from outside: transactions, sessions and quick reads of one pool."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio
import asyncpg

from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.database.driver_errors import BROKEN, translate
from pgworkd.database.transactions import TransactionPool, terminate
from pgworkd.errors import DatabaseBusy, DatabaseUnavailable

_ACTOR = "SELECT set_config('pgworkd.by', $1, false)"
_ACTOR_NOW = "SELECT set_config('pgworkd.by', $1, true)"


class RequestPool:
    """Connections for requests from outside: each request has one for as long as it needs it. Raises PgworkdError.

    A request that finds none free waits for `connect_timeout_s` at most.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        connections_max: int,
        turn: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
        *,
        only_reads: bool = False,
    ) -> None:
        """`turn`: entered before a connection is asked for, and left when it is given back.

        `only_reads`: the database refuses changes on these connections.
        """
        self._options, self._turn = options, turn
        self.connections_max = connections_max
        settings = {"default_transaction_read_only": "on"} if only_reads else {}
        self._pool = TransactionPool(
            options, connections_max, name="http", settings=settings, command_timeout_s=options.command_timeout_s
        )

    @property
    def used(self) -> int:
        """How many connections are in use now."""
        return self._pool.used

    @contextlib.asynccontextmanager
    async def transaction(self, by: str = "") -> AsyncIterator[Any]:
        """A connection of the driver in a transaction, which is committed at the end of the block.

        Until then nothing is done; `OutcomeUnknown` is raised where the answer to the COMMIT was lost. `by`: the actor
        that the audit records.
        """
        try:
            async with self._turn(), self._pool.begin(waiting=self._waiting) as connection:
                if by:
                    await connection.execute(_ACTOR_NOW, by)
                yield connection
                connection.leave_as_new()  # nothing that requests do lasts for longer than a transaction
        except BROKEN as error:
            raise translate(error) from error

    async def call(self, use: Callable[[Any], Awaitable[Any]]) -> Any:
        """Makes one call on a connection of the driver, a transaction of its own; `OutcomeUnknown` as `transaction`."""
        try:
            async with self._turn():
                return await self._pool.call(use, self._waiting)
        except BROKEN as error:
            raise translate(error) from error

    def lent(self, connection: Any) -> Connection:
        """The connection of a transaction, as a `Connection`, for calls that take one."""
        return _Lent(self._options, connection)

    @contextlib.asynccontextmanager
    async def session(self, by: str = "") -> AsyncIterator[Connection]:
        """A connection on which each statement is a transaction of its own; `by`: the actor that the audit records."""
        lent = self._pool.lend(lambda connection: connection.execute(_ACTOR, by), self._waiting)
        async with self._turn(), lent as connection:
            yield _Lent(self._options, connection)

    def lookups(self) -> Connection:
        """A connection for quick reads, each a transaction of its own on whichever connection is free."""
        return _Lookups(self._options, partial(self._pool.look_up, waiting=self._waiting))

    async def close(self) -> None:
        """Closes all connections forcibly."""
        await self._pool.close()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            with anyio.fail_after(self._options.connect_timeout_s):
                yield
        except TimeoutError:
            raise DatabaseBusy("all connections to the database are in use", sqlstate="53300") from None


def _is_closed(connection: Any) -> bool:
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:  # the pool has taken it back, as the server has ended the session
        return True


class _Lent(Connection):
    """A connection of a pool; once it is broken, it stays so."""

    def __init__(self, options: ConnectionOptions, connection: Any) -> None:
        super().__init__(options, "")
        self._connection = connection

    async def _ready(self) -> Any:
        if self._connection is None or _is_closed(self._connection):
            raise DatabaseUnavailable("the connection to the database was lost")
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            terminate(connection)


class _Lookups(Connection):
    """Quick reads on connections of a pool."""

    def __init__(self, options: ConnectionOptions, look_up: Callable[[Callable[[Any], Any]], Awaitable[Any]]) -> None:
        super().__init__(options, "")
        self._look_up = look_up

    async def _call(self, use: Callable[[Any], Any], deadline_s: float | None = None) -> Any:
        return await self._look_up(use)
