"""Transactions on connections of a pool, for handlers and for requests: each is committed, or rolled back, as one.

asyncpg's errors in between pass through; the answer to a COMMIT that is lost is an `OutcomeUnknown`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio
import asyncpg

from pgworkd.database import session
from pgworkd.database.connection import PROBE_TIMEOUT_S, Connection, ConnectionOptions, connect
from pgworkd.database.driver_errors import BROKEN, is_answer, translate, unanswered
from pgworkd.database.session import Session
from pgworkd.errors import DatabaseBusy, DatabaseUnavailable

CUT_AFTER_S = 0.5
"""A stopped transaction waits this long for a connection that may be dead, then closes it: that also rolls back,
and the handler must have ended before the lease expires."""


def _terminate(connection: Any) -> None:
    with contextlib.suppress(*BROKEN):  # it is closed already
        connection.terminate()


def _is_closed(connection: Any) -> bool:
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:  # the pool has taken it back, as the server has ended the session
        return True


class _AgedConnection(Session):
    """A connection that records when it was made."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.made_at_s = time.monotonic()
        self.has_codecs = False
        """True if a borrower has set codecs of its own, which no reset undoes."""
        self._is_as_new = False

    async def set_type_codec(self, *args: Any, **settings: Any) -> None:
        self.has_codecs = True
        await super().set_type_codec(*args, **settings)

    async def set_builtin_type_codec(self, *args: Any, **settings: Any) -> None:
        self.has_codecs = True
        await super().set_builtin_type_codec(*args, **settings)

    def leave_as_new(self) -> None:
        """Notes that what was done on the connection since the last release has left no trace in its session."""
        self._is_as_new = True

    def get_reset_query(self) -> str:
        is_as_new, self._is_as_new = self._is_as_new, False
        return "" if is_as_new else super().get_reset_query()


class TransactionPool:
    """A small pool of connections for handlers that write in the transaction that completes their job.

    They are opened as needed, so there are as many as handlers in a transaction at once, and `connections_max` at most;
    a handler that finds none free waits for one.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        connections_max: int,
        *,
        name: str = "transaction",
        settings: dict[str, str] = session.TRANSACTION_SETTINGS,
        command_timeout_s: float | None = None,
    ) -> None:
        """`name` and `settings`: of the sessions, beside those of `ConnectionOptions.settings`.

        `command_timeout_s`: of one statement in a transaction; None: that of `options` six times over.
        """
        self._options = options
        self._max = connections_max
        self._command_timeout_s = command_timeout_s or options.command_timeout_s * 6
        self._name, self._session = name, settings
        self._free = anyio.Semaphore(connections_max, fast_acquire=True)
        self._pool: asyncpg.Pool[Any] | None = None
        self._lock = anyio.Lock()
        self._suspect_s = 0.0
        """Connections made before this may be dead, as one of them was; on the monotonic clock."""

    @contextlib.asynccontextmanager
    async def begin(
        self,
        committing: Callable[[], anyio.CancelScope] = lambda: anyio.CancelScope(shield=True),
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> AsyncIterator[Any]:
        """A connection inside a transaction: committed at the end of the block, rolled back on an exception.

        Waits, within `waiting()`, until one is free. Raises `DatabaseUnavailable` when none can be opened within
        `connect_timeout_s`, and at the end `OutcomeUnknown` when the answer to the COMMIT is lost. The driver's errors
        in between pass through. `committing` makes the shielded scope in which that answer is awaited.
        """
        async with self._turn(waiting), self._transaction(committing) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def lend(
        self,
        first: Callable[[Any], Awaitable[Any]],
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> AsyncIterator[Any]:
        """A connection on which `first` has been run, without a transaction. Raises and waits as `begin` does."""
        async with self._turn(waiting):
            connection, _ = await self._answering(first)
            try:
                yield connection
            finally:
                await self._release(connection)

    async def look_up(
        self,
        use: Callable[[Any], Awaitable[Any]],
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> Any:
        """Makes one quick read, which may be done twice, and leaves the session as it was. Waits as `begin`."""
        async with self._turn(waiting):
            connection, found = await self._answering(use)
            connection.leave_as_new()
            await self._release(connection)
            return found

    @contextlib.asynccontextmanager
    async def _turn(self, waiting: Callable[[], contextlib.AbstractContextManager[None]]) -> AsyncIterator[None]:
        try:
            self._free.acquire_nowait()
        except anyio.WouldBlock:
            with waiting():
                await self._free.acquire()
        try:
            yield
        finally:
            self._free.release()

    @contextlib.asynccontextmanager
    async def _transaction(self, committing: Callable[[], anyio.CancelScope]) -> AsyncIterator[Any]:
        connection, transaction = await self._begin()
        try:
            try:
                yield connection
            except BaseException:
                await self._roll_back(connection, transaction)
                raise
            with committing() as limit:
                try:
                    await transaction.commit()
                except Exception as error:
                    if is_answer(error):
                        raise
                    raise unanswered(error) from error
            if limit.cancelled_caught:
                _terminate(connection)
                raise unanswered(TimeoutError())
        finally:
            await self._release(connection)

    async def _begin(self) -> tuple[Any, Any]:
        """A connection with a transaction begun on it."""

        async def begun(connection: Any) -> Any:
            transaction = connection.transaction(isolation="read_committed")
            await transaction.start()
            return transaction

        return await self._answering(begun)

    async def _answering(self, first: Callable[[Any], Awaitable[Any]]) -> tuple[Any, Any]:
        """Lends a connection, and what `first` returned on it. The first one tried may have died while it was idle."""
        pool = await self._ready()
        for limit_s in (min(PROBE_TIMEOUT_S, self._options.command_timeout_s), self._options.command_timeout_s):
            connection = await self._acquire(pool)
            answered = False
            try:
                with anyio.fail_after(limit_s):
                    found = await first(connection)
                answered = True
                return connection, found
            except BROKEN as error:
                problem = translate(error)
                problem.__cause__ = error  # by which a caller tells what the server answered
                self._suspect_s = time.monotonic()
            finally:
                if not answered:
                    _terminate(connection)
                    await self._release(connection)
        raise problem

    async def _acquire(self, pool: asyncpg.Pool[Any]) -> Any:
        while True:
            try:
                connection: Any = await pool.acquire(timeout=self._options.connect_timeout_s + 1)
            except Exception as error:
                raise translate(error) from error
            if connection.made_at_s >= self._suspect_s:
                return connection
            _terminate(connection)  # forcibly: the pool's own way to expire connections waits for a graceful close

    async def _roll_back(self, connection: Any, transaction: Any) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(CUT_AFTER_S) as limit, contextlib.suppress(*BROKEN):
            await transaction.rollback()  # the error that led here is the one to raise
        if limit.cancelled_caught:
            _terminate(connection)

    async def _release(self, connection: Any) -> None:
        # The transaction has ended: a connection that cannot be reused does not concern the handler. The pool drops one
        # that its reset query finds spoilt.
        if getattr(connection, "has_codecs", False):
            _terminate(connection)
        with anyio.CancelScope(shield=True), contextlib.suppress(*BROKEN):
            if self._pool is not None:
                await self._pool.release(connection, timeout=CUT_AFTER_S)

    async def _ready(self) -> asyncpg.Pool[Any]:
        async with self._lock:
            if self._pool is None:
                self._pool = asyncpg.create_pool(
                    min_size=0, max_size=self._max, connect=self._open, connection_class=_AgedConnection
                )
                await self._pool
            return self._pool

    async def _open(self, *_: object, **__: object) -> Any:
        limit_s = self._command_timeout_s
        connection = await connect(
            self._options, self._name, kind=_AgedConnection, settings=self._session, command_timeout_s=limit_s
        )
        try:
            await session.keep_as_lent(connection)
        except BaseException:
            _terminate(connection)
            raise
        return connection

    async def close(self) -> None:
        """Closes all connections forcibly: open transactions are rolled back."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None


_ACTOR = "SELECT set_config('pgworkd.by', $1, false)"


class RequestPool:
    """Connections for requests from outside: each request has one for as long as it needs it. Raises PgworkdError.

    A request that finds none free waits for `connect_timeout_s` at most.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        connections_max: int,
        turn: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`turn`: entered before a connection is asked for, and left when it is given back."""
        self._options, self._turn = options, turn
        self._pool = TransactionPool(
            options, connections_max, name="http", settings={}, command_timeout_s=options.command_timeout_s
        )

    @contextlib.asynccontextmanager
    async def transaction(self, by: str = "") -> AsyncIterator[Any]:
        """A connection of the driver in a transaction, which is committed at the end of the block.

        Until then nothing is done; `OutcomeUnknown` is raised where the answer to the COMMIT was lost. `by`: the actor
        that the audit records.
        """
        try:
            async with self._turn(), self._pool.begin(waiting=self._waiting) as connection:
                if by:
                    await connection.execute(_ACTOR, by)  # undone at the release
                yield connection
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
            _terminate(connection)


class _Lookups(Connection):
    """Quick reads on connections of a pool."""

    def __init__(self, options: ConnectionOptions, look_up: Callable[[Callable[[Any], Any]], Awaitable[Any]]) -> None:
        super().__init__(options, "")
        self._look_up = look_up

    async def _call(self, use: Callable[[Any], Any], deadline_s: float | None = None) -> Any:
        return await self._look_up(use)
