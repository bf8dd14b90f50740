"""Connections to Postgres: with `driver_errors` the only module that imports asyncpg.

A `Connection` is one connection that is made when it is first needed and made anew after it broke. A call on it
is never cancelled half-way: it runs shielded, to its answer or to its deadline. Errors leave here as the
project's own; see `driver_errors`.
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
"""A line that was idle and has not answered by then is replaced: cheap, and on a dead one every job waits."""
CUT_AFTER_S = 0.5
"""So long a transaction that ends early waits for a line that may be dead, then cuts it: that rolls back, too, and who
was told to stop must be out before the lease is over."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect. All times in seconds; `command_timeout_s` bounds every single call.

    `lock_timeout_s`: how long a statement waits for each lock; without it, as long as it may take at all.
    `by`: in whose name the audit of operators' acts is written; without it, the database's user.
    `any_server`: a server that only reads will do where none of the DSN's hosts can write.
    """

    dsn: str = field(repr=False)
    connect_timeout_s: float = 10.0
    command_timeout_s: float = 10.0
    lock_timeout_s: float | None = None
    by: str = ""
    any_server: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for a DSN that makes no sense: the driver would quote it, password and all."""
        if fault := dsn_fault(self.dsn):
            raise UsageError(f"the DSN {fault}")
        hide(self.dsn)

    def settings(self, name: str) -> dict[str, str]:
        """Session settings: whatever the database's defaults are, the engine runs under these."""
        # The server gives up a little before we do, so that a call that timed out has not gone on unseen.
        return session.settings(name, self.command_timeout_s * 0.8, self.by, self.lock_timeout_s)


async def connect(options: ConnectionOptions, name: str) -> asyncpg.Connection[Any]:
    """Opens a connection to a server that can write, within `connect_timeout_s`.

    With `any_server` to one that only reads, if no host of the DSN can write: what it shows may be behind, so it comes
    last. Raises asyncpg's errors; callers go through `translate`.
    """
    try:
        return await _connect(options, name, _Wanted.read_write)
    except (asyncpg.TargetServerAttributeNotMatched, OSError) as error:
        # Of a host that is down the driver tells even where another one answered, which only reads.
        if not options.any_server or isinstance(error, TimeoutError):
            raise
    return await _connect(options, name, _Wanted.any)


async def _connect(options: ConnectionOptions, name: str, wanted: _Wanted) -> asyncpg.Connection[Any]:
    with anyio.fail_after(options.connect_timeout_s + 1):
        try:
            connection = await asyncpg.connect(
                options.dsn,
                timeout=options.connect_timeout_s,
                command_timeout=options.command_timeout_s,
                server_settings=options.settings(name),
                ssl=tls.verification(options.dsn),
                target_session_attrs=wanted,
            )
        except ssl.SSLError:
            raise  # it may be a ValueError, too: a certificate is not what it should be
        except ValueError as error:  # of the driver's parser: of PGPORT=x it tells only what int() says
            raise asyncpg.ClientConfigurationError(str(error)) from None
        try:
            await session.lift_limits(connection)
        except BaseException:
            connection.terminate()
            raise
        return connection


class Connection:
    """One connection for one kind of call; calls wait for each other in order."""

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
        """Many statements in one transaction, without arguments; no time limit but the server's."""
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
                        # The call's fate is unknown, so is the session's: never use it again.
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
        """Closes politely within a second, or cuts."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with anyio.CancelScope(shield=True), anyio.move_on_after(2):
            try:
                await connection.close(timeout=1)
            except BROKEN:
                connection.terminate()


class Listener:
    """A direct connection that listens on one channel and can prove that it still hears."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options

    @contextlib.asynccontextmanager
    async def listen(
        self, channel: str, received: Callable[[str], None], lost: Callable[[], None]
    ) -> AsyncIterator[Callable[[], Any]]:
        """Listens while the context lasts; yields an async probe that raises `DatabaseUnavailable` if the line is dead.

        `received` gets each payload, `lost` is called when the line is seen to break; both in the loop. The LISTEN has
        taken effect when the context is entered.
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
                # Nothing to lose here, and a polite close could hang on a dead line.
                connection.terminate()


def _cut(connection: Any) -> None:
    with contextlib.suppress(*BROKEN):  # it has gone by itself
        connection.terminate()


class _AgedConnection(asyncpg.Connection):
    """A connection that knows its age."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.made_at_s = time.monotonic()

    def get_reset_query(self) -> str:
        return session.reset_query(self, super().get_reset_query())


class TransactionPool:
    """A small pool of connections for handlers that write in the transaction that completes their job.

    They are made as they are needed, so there are as many as handlers are in a transaction at once, and
    `connections_max` at most; a handler that finds none free waits for one.
    """

    def __init__(self, options: ConnectionOptions, connections_max: int) -> None:
        self._options = options
        self._max = connections_max
        self._free = anyio.Semaphore(connections_max, fast_acquire=True)
        self._pool: asyncpg.Pool[Any] | None = None
        self._lock = anyio.Lock()
        self._suspect_s = 0.0
        """Connections made before may be dead, as one of them was; on the monotonic clock."""

    @contextlib.asynccontextmanager
    async def begin(
        self,
        committing: Callable[[], anyio.CancelScope] = lambda: anyio.CancelScope(shield=True),
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> AsyncIterator[Any]:
        """A connection inside a transaction: committed at the end of the block, rolled back on an exception.

        Waits, within `waiting()`, until one is free. Raises `DatabaseUnavailable` when none can be made within
        `connect_timeout_s`, and at the end `OutcomeUnknown` when the answer to the COMMIT is lost. What the driver
        raises in between passes through. `committing` makes the shielded scope in which that answer is awaited.
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
        connection, transaction = await self._begun()
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
                _cut(connection)
                raise unanswered(TimeoutError())
        finally:
            await self._release(connection)

    async def _begun(self) -> tuple[Any, Any]:
        """A connection, and the transaction that has begun on it. The first may have died while it was idle."""
        pool = await self._ready()
        for limit_s in (min(PROBE_TIMEOUT_S, self._options.command_timeout_s), self._options.command_timeout_s):
            connection = await self._acquired(pool)
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
                    _cut(connection)
                    await self._release(connection)
        raise problem

    async def _acquired(self, pool: asyncpg.Pool[Any]) -> Any:
        while True:
            try:
                connection: Any = await pool.acquire(timeout=self._options.connect_timeout_s)
            except Exception as error:
                raise translate(error) from error
            if connection.made_at_s >= self._suspect_s:
                return connection
            _cut(connection)  # at once: the pool's own way to be rid of old ones waits for a goodbye

    async def _roll_back(self, connection: Any, transaction: Any) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(CUT_AFTER_S) as limit, contextlib.suppress(*BROKEN):
            await transaction.rollback()  # what led here is the error to show
        if limit.cancelled_caught:
            _cut(connection)

    async def _release(self, connection: Any) -> None:
        # It is over, one way or the other: a connection that cannot be used again is no news for the handler.
        with anyio.CancelScope(shield=True), contextlib.suppress(*BROKEN):
            if self._pool is not None:
                await self._pool.release(connection, timeout=CUT_AFTER_S)

    async def _ready(self) -> asyncpg.Pool[Any]:
        async with self._lock:
            if self._pool is None:
                self._pool = asyncpg.create_pool(
                    self._options.dsn,
                    min_size=0,
                    max_size=self._max,
                    timeout=self._options.connect_timeout_s,
                    command_timeout=self._options.command_timeout_s * 6,
                    server_settings=self._options.settings("transaction")
                    | {"statement_timeout": "0", "tcp_user_timeout": session.TRANSACTION_USER_TIMEOUT_MS},
                    ssl=tls.verification(self._options.dsn),
                    target_session_attrs=_Wanted.read_write,
                    connection_class=_AgedConnection,
                    init=session.lift_limits,
                )
                await self._pool
            return self._pool

    async def close(self) -> None:
        """Cuts all connections: open transactions roll back."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None
