"""Connections to Postgres: with `driver_errors` the only module that imports asyncpg.

A `Connection` connects when it is first needed, and again after it broke. A call is never cancelled half-way: it runs
shielded, to its answer or its deadline. Errors are translated to the project's own; see `driver_errors`.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import asyncpg

from pgworkd.database import session
from pgworkd.database.driver_errors import BROKEN, DROP_SESSION, is_answer, sqlstate_of, translate, unanswered
from pgworkd.errors import DatabaseUnavailable, UsageError
from pgworkd.settings import tls
from pgworkd.words.dsn import dsn_fault
from pgworkd.words.redaction import hide

Row = Sequence[Any]
_Wanted = asyncpg.connect_utils.SessionAttribute

PROBE_TIMEOUT_S = 4.0
"""An idle connection that does not answer within this is replaced: cheap, while a dead one delays every job."""
CUT_AFTER_S = 0.5
"""A stopped transaction waits this long for a connection that may be dead, then closes it: that also rolls back,
and the handler must have ended before the lease expires."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect. All times in seconds; `command_timeout_s` bounds every single call.

    `lock_timeout_s`: how long a statement waits for each lock; None: as long as the statement may take.
    `by`: the actor that the audit records; "": the database's user.
    `any_server`: accept a read-only server if none of the DSN's hosts is writable.
    """

    dsn: str = field(repr=False)
    connect_timeout_s: float = 10.0
    command_timeout_s: float = 10.0
    lock_timeout_s: float | None = None
    by: str = ""
    any_server: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for a malformed DSN: the driver would quote it, with its password."""
        if fault := dsn_fault(self.dsn):
            raise UsageError(f"the DSN {fault}")
        hide(self.dsn)

    def settings(self, name: str) -> dict[str, str]:
        """The settings of a session; see `session`."""
        # The server gives up a little before we do, so that no call that timed out here still runs there.
        return session.settings(name, self.command_timeout_s * 0.8, self.by, self.lock_timeout_s)


async def connect(options: ConnectionOptions, name: str) -> asyncpg.Connection[Any]:
    """Opens a connection to a writable server, within `connect_timeout_s`.

    With `any_server` to a read-only one, if no host of the DSN is writable: last, as it may lag behind. Raises
    asyncpg's errors, for callers to `translate`.
    """
    try:
        return await _connect(options, name, _Wanted.read_write)
    except (asyncpg.TargetServerAttributeNotMatched, OSError) as error:
        # The driver raises the OSError of a host that is down even if another one, a read-only one, answered.
        if not options.any_server or isinstance(error, TimeoutError):
            raise
    return await _connect(options, name, _Wanted.any)


async def _connect(options: ConnectionOptions, name: str, wanted: _Wanted) -> asyncpg.Connection[Any]:
    with anyio.fail_after(options.connect_timeout_s + 1):
        try:
            connection: asyncpg.Connection[Any] = await asyncpg.connect(
                **tls.driver_arguments(options.dsn),
                timeout=options.connect_timeout_s,
                command_timeout=options.command_timeout_s,
                server_settings=options.settings(name),
                target_session_attrs=wanted,
            )
        except ssl.SSLError:
            raise  # it may also be a ValueError: an invalid certificate
        except ValueError as error:  # of the driver's parser: for PGPORT=x just the text of int()
            raise asyncpg.ClientConfigurationError(str(error)) from None
        try:
            await session.set_up(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection


class Connection:
    """One connection for one kind of call; calls wait for each other in order. Raises PgworkdError."""

    def __init__(self, options: ConnectionOptions, name: str) -> None:
        self._options = options
        self._name = name
        self._lock = anyio.Lock(fast_acquire=True)
        self._connection: asyncpg.Connection[Any] | None = None

    async def fetch(self, sql: str, *args: object) -> list[Row]:
        """All rows of one statement, which is a transaction of its own."""
        rows: list[Row] = await self._call(lambda c: c.fetch(sql, *args))
        return rows

    async def value(self, sql: str, *args: object) -> Any:
        """The first column of the first row; None if there is no row."""
        return await self._call(lambda c: c.fetchval(sql, *args))

    async def script(self, sql: str) -> None:
        """Many statements in one transaction, without arguments; may take an hour."""
        await self._call(lambda c: c.execute(sql, timeout=3600), deadline_s=3600)

    async def _call(self, use: Callable[[Any], Any], deadline_s: float | None = None) -> Any:
        async with self._lock:
            connection = await self._ready()
            deadline = anyio.current_time() + (deadline_s or self._options.command_timeout_s + 2)
            with anyio.CancelScope(shield=True, deadline=deadline):
                try:
                    return await use(connection)
                except Exception as error:
                    if not is_answer(error):
                        # The outcome is unknown, and so is the state of the session: never use it again.
                        self._drop()
                        raise unanswered(error) from error
                    if sqlstate_of(error) in DROP_SESSION:
                        self._drop()
                    raise translate(error) from error
            self._drop()
            raise unanswered(TimeoutError())

    async def _ready(self) -> asyncpg.Connection[Any]:
        if self._connection is None or self._connection.is_closed():
            try:
                self._connection = await connect(self._options, self._name)
            except Exception as error:
                raise translate(error) from error
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def close(self) -> None:
        """Closes the connection gracefully within a second, else forcibly."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with anyio.CancelScope(shield=True), anyio.move_on_after(2):
            try:
                await connection.close(timeout=1)
            except BROKEN:
                connection.terminate()


class Listener:
    """A direct connection that listens on one channel, and can be probed."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options

    @contextlib.asynccontextmanager
    async def listen(
        self, channel: str, received: Callable[[str], None], lost: Callable[[], None]
    ) -> AsyncIterator[Callable[[], Any]]:
        """Listens while the context lasts; yields an async probe that raises `DatabaseUnavailable` if the connection is
        dead.

        `received` gets each payload, `lost` is called when the connection is seen to break; both in the loop. The
        LISTEN has taken effect when the context is entered.
        """
        connection: asyncpg.Connection[Any] | None = None

        async def probe() -> None:
            if connection is None or connection.is_closed():
                raise DatabaseUnavailable("the listening connection was closed")
            try:
                await connection.execute("SELECT 1", timeout=min(PROBE_TIMEOUT_S, self._options.command_timeout_s))
            except Exception as error:
                raise translate(error) from error

        try:
            try:
                connection = await connect(self._options, "listen")
                connection.add_termination_listener(lambda _: lost())
                await connection.add_listener(channel, lambda *a: received(str(a[3])))
            except Exception as error:
                raise translate(error) from error
            yield probe
        finally:
            if connection is not None:
                # There is nothing to lose, and a graceful close could hang on a dead connection.
                connection.terminate()


def _terminate(connection: Any) -> None:
    with contextlib.suppress(*BROKEN):  # it is closed already
        connection.terminate()


class _AgedConnection(asyncpg.Connection):
    """A connection that records when it was made."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.made_at_s = time.monotonic()

    def get_reset_query(self) -> str:
        return session.reset_query(self, super().get_reset_query())


class TransactionPool:
    """A small pool of connections for handlers that write in the transaction that completes their job.

    They are opened as needed, so there are as many as handlers in a transaction at once, and `connections_max` at most;
    a handler that finds none free waits for one.
    """

    def __init__(self, options: ConnectionOptions, connections_max: int) -> None:
        self._options = options
        self._max = connections_max
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
        try:
            self._free.acquire_nowait()
        except anyio.WouldBlock:
            with waiting():
                await self._free.acquire()
        try:
            async with self._transaction(committing) as connection:
                yield connection
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
        """A connection with a transaction begun on it. The first one tried may have died while it was idle."""
        pool = await self._ready()
        for limit_s in (min(PROBE_TIMEOUT_S, self._options.command_timeout_s), self._options.command_timeout_s):
            connection = await self._acquire(pool)
            transaction = connection.transaction(isolation="read_committed")
            begun = False
            try:
                with anyio.fail_after(limit_s):
                    await transaction.start()
                begun = True
                return connection, transaction
            except BROKEN as error:
                problem = translate(error)
                self._suspect_s = time.monotonic()
            finally:
                if not begun:
                    _terminate(connection)
                    await self._release(connection)
        raise problem

    async def _acquire(self, pool: asyncpg.Pool[Any]) -> Any:
        while True:
            try:
                connection: Any = await pool.acquire(timeout=self._options.connect_timeout_s)
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
        # The transaction has ended: a connection that cannot be reused does not concern the handler.
        with anyio.CancelScope(shield=True), contextlib.suppress(*BROKEN):
            if self._pool is not None:
                await self._pool.release(connection, timeout=CUT_AFTER_S)

    async def _ready(self) -> asyncpg.Pool[Any]:
        async with self._lock:
            if self._pool is None:
                try:
                    self._pool = asyncpg.create_pool(
                        **tls.driver_arguments(self._options.dsn),
                        min_size=0,
                        max_size=self._max,
                        timeout=self._options.connect_timeout_s,
                        command_timeout=self._options.command_timeout_s * 6,
                        server_settings=self._options.settings("transaction") | session.TRANSACTION_SETTINGS,
                        target_session_attrs=_Wanted.read_write,
                        connection_class=_AgedConnection,
                        init=session.set_up,
                    )
                    await self._pool
                except UsageError as error:  # of the address, which is in its frames
                    raise translate(error) from error
            return self._pool

    async def close(self) -> None:
        """Closes all connections forcibly: open transactions are rolled back."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None
