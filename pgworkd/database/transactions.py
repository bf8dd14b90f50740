"""Transactions on connections of a pool, each committed, or rolled back, as one.

asyncpg's errors in between pass through; the answer to a COMMIT that is lost is an `OutcomeUnknown`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import asyncpg

from pgworkd.database import session
from pgworkd.database.connection import PROBE_TIMEOUT_S, ConnectionOptions, connect
from pgworkd.database.driver_errors import BROKEN, is_answer, translate, unanswered
from pgworkd.database.session import Session

CUT_AFTER_S = 0.5
"""A stopped transaction waits this long for a connection that may be dead, then closes it: that also rolls back,
and the handler must have ended before the lease expires."""


PROVEN_S = 1.0
"""A connection that answered within this time is taken to answer still: what may be done once is sent on it at once."""


def terminate(connection: Any) -> None:
    """Closes a connection at once."""
    with contextlib.suppress(*BROKEN):  # it is closed already
        connection.terminate()


async def commit(connection: Any, transaction: Any, committing: Callable[[], anyio.CancelScope]) -> None:
    """Commits. Raises `OutcomeUnknown` where the answer is lost; the server's own errors pass through.

    `committing` makes the shielded scope in which the answer is awaited.
    """
    with committing() as limit:
        try:
            await transaction.commit()
        except Exception as error:
            if is_answer(error):
                raise
            raise unanswered(error) from error
    if limit.cancelled_caught:
        terminate(connection)
        raise unanswered(TimeoutError())


async def roll_back(connection: Any, transaction: Any) -> None:
    """Rolls back, to the savepoint of a nested one; a connection that does not answer soon is closed, which does so."""
    with anyio.CancelScope(shield=True), anyio.move_on_after(CUT_AFTER_S) as limit, contextlib.suppress(*BROKEN):
        await transaction.rollback()  # the error that led here is the one to raise
    if limit.cancelled_caught:
        terminate(connection)


async def _prove(connection: Any) -> None:
    """Finds out whether the connection answers, unless it has just done so."""
    if time.monotonic() - connection.used_at_s > PROVEN_S:
        await connection.execute("SELECT 1")


async def _begin(connection: Any) -> Any:
    """A transaction begun on the connection."""
    transaction = connection.transaction(isolation="read_committed")
    await transaction.start()
    return transaction


class _AgedConnection(Session):
    """A connection that records when it was made."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.made_at_s = time.monotonic()
        self.used_at_s = self.made_at_s
        """When it last answered."""
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
        self._is_as_new, self.used_at_s = True, time.monotonic()

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

    @property
    def used(self) -> int:
        """How many connections are in use now."""
        return self._max - self._free.value

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

    async def call(
        self,
        use: Callable[[Any], Awaitable[Any]],
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> Any:
        """Makes one call that is a transaction of its own, and leaves the session as it was. Waits as `begin`.

        Raises `OutcomeUnknown` where its answer is lost; the server's own errors pass through.
        """
        async with self._turn(waiting):
            connection, _ = await self._answering(_prove)
            try:
                with anyio.fail_after(self._command_timeout_s):
                    found = await use(connection)
                connection.leave_as_new()
                return found
            except BROKEN as error:
                if not is_answer(error):
                    terminate(connection)
                    raise unanswered(error) from error
                raise
            finally:
                await self._release(connection)

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
        connection, transaction = await self._answering(_begin)
        try:
            try:
                yield connection
            except BaseException:
                await roll_back(connection, transaction)
                raise
            await commit(connection, transaction, committing)
        finally:
            await self._release(connection)

    async def take(self) -> tuple[Any, Any]:
        """A connection, and a transaction begun on it, until `give_back` or `drop`. Waits, and raises, as `begin`."""
        await self._free.acquire()
        try:
            return await self._answering(_begin)
        except BaseException:
            self._free.release()
            raise

    async def give_back(self, connection: Any) -> None:
        """Returns a connection that was taken, and whose transaction has ended."""
        try:
            await self._release(connection)
        finally:
            self._free.release()

    def drop(self, connection: Any) -> None:
        """Closes a connection that was taken, at once, which rolls back."""
        terminate(connection)
        self._free.release()

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
                    terminate(connection)
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
            terminate(connection)  # forcibly: the pool's own way to expire connections waits for a graceful close

    async def _release(self, connection: Any) -> None:
        # The transaction has ended: a connection that cannot be reused does not concern the handler. The pool drops one
        # that its reset query finds spoilt.
        if getattr(connection, "has_codecs", False):
            terminate(connection)
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
            terminate(connection)
            raise
        return connection

    async def close(self) -> None:
        """Closes all connections forcibly: open transactions are rolled back."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None
