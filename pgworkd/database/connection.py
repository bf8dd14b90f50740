"""Connections to Postgres: with `driver_errors` the only module that imports asyncpg.

A `Connection` connects when it is first needed, and again after it broke. A call is never cancelled half-way: it runs
shielded, to its answer or its deadline. Errors are translated to the project's own; see `driver_errors`.
"""

from __future__ import annotations

import contextlib
import ssl
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
        self.answers = 0
        """How many calls the server has answered without an error."""

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
                    found = await use(connection)
                    self.answers += 1
                    return found
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
