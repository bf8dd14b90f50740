"""Connections to Postgres: the only module that imports asyncpg.

A `Link` is one connection that is made when it is first needed and made anew after it broke. A call on it
is never cancelled half-way: it runs shielded, to its answer or to its deadline. Errors leave here as the
project's own: `DatabaseUnavailable` (try again), `WorkerLost`, `SchemaError`, `DatabaseError` (do not).
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import asyncpg

from .dsn import dsn_fault
from .errors import (
    BatchClosed,
    DatabaseError,
    DatabaseUnavailable,
    NotWaiting,
    PgworkdError,
    SchemaError,
    UsageError,
    WorkerLost,
)

Row = Sequence[Any]

# SQLSTATEs (https://www.postgresql.org/docs/current/errcodes-appendix.html) after which the same call may
# succeed: connection lost, resources short, operator intervention, deadlock, lock or statement time-out.
_TRANSIENT_CLASSES = ("08", "53", "57", "58", "40")
_TRANSIENT = {"55P03", "25006", "25P03", "XX000"}
_SCHEMA_MISSING = {"42P01", "42883", "3F000", "42703"}
_CREDENTIALS = {"28P01", "28000", "3D000", "42501"}
# After these the session itself is suspect: a standby, a server going down, a statement cut off.
_DROP_SESSION = {"25006", "57P01", "57P02", "57P03", "57014", "25P03"}


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How to connect. All times in seconds; `command_timeout_s` bounds every single call.

    `by`: in whose name the audit of operators' acts is written; without it, the database's user.
    """

    dsn: str
    connect_timeout_s: float = 10.0
    command_timeout_s: float = 10.0
    by: str = ""

    def __post_init__(self) -> None:
        """Raises UsageError for a DSN that makes no sense: the driver would quote it, password and all."""
        if fault := dsn_fault(self.dsn):
            raise UsageError(f"the DSN {fault}")

    def settings(self, name: str) -> dict[str, str]:
        """Session settings: whatever the database's defaults are, the engine runs under these."""
        # The server gives up a little before we do, so that a call that timed out has not gone on unseen.
        statement_ms = int(self.command_timeout_s * 800)
        return {
            "application_name": f"pgworkd {name}"[:63],
            "statement_timeout": str(statement_ms),
            "lock_timeout": str(statement_ms),
            "idle_in_transaction_session_timeout": "0",
            "default_transaction_isolation": "read committed",
            "synchronous_commit": "on",
            "timezone": "UTC",
            "tcp_keepalives_idle": "10",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
            **({"pgworkd.by": self.by} if self.by else {}),
        }


def translate(error: BaseException) -> Exception:
    """The project's error for one of asyncpg's, with the remedy in its text and no password."""
    if isinstance(error, asyncpg.PostgresError):
        return _translate_server_error(error)
    if isinstance(error, TimeoutError):
        return DatabaseUnavailable("the database did not answer in time")
    if isinstance(error, ssl.SSLError):
        return DatabaseUnavailable(f"TLS to the database failed: {error}")
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return DatabaseUnavailable("this server only reads (a standby?): connect to the primary")
    if isinstance(error, asyncpg.ClientConfigurationError):
        return UsageError(f"the DSN cannot be used: {error}{_read_besides()}")
    if isinstance(error, ValueError):
        return DatabaseError(str(error), sqlstate="22000")  # an argument that the driver cannot encode
    if isinstance(error, (OSError, asyncpg.InterfaceError)):
        return DatabaseUnavailable(f"no connection to the database: {error}")
    return DatabaseUnavailable(f"{type(error).__name__}: {error}")


def _read_besides() -> str:
    """The variables that may be at fault in place of the DSN."""
    names = sorted(name for name in os.environ if name.startswith("PG") and not name.startswith("PGWORKD_"))
    return f" (the driver also reads {', '.join(names)} from the environment)" if names else ""


_REFUSALS: dict[str, type[PgworkdError]] = {"PW002": NotWaiting, "PW003": BatchClosed}


def _translate_server_error(error: asyncpg.PostgresError) -> Exception:
    code = str(getattr(error, "sqlstate", "") or "")
    text = str(error)
    if code == "PW001":
        return WorkerLost(text)
    if code in _REFUSALS:
        return _REFUSALS[code](". ".join(map(str.strip, text.split("\nHINT:"))))
    if code in _SCHEMA_MISSING:
        return SchemaError(f"{text}: is the schema installed and current? Run: pgworkd migrate")
    if code[:2] in _TRANSIENT_CLASSES or code in _TRANSIENT:
        return DatabaseUnavailable(f"{text} ({code})")
    if code in _CREDENTIALS:
        return UsageError(f"the database refused us: {text} ({code}); check user, password, database and grants")
    return DatabaseError(text, sqlstate=code, constraint=getattr(error, "constraint_name", None))


async def connect(options: LinkOptions, name: str) -> asyncpg.Connection[Any]:
    """Opens a connection to a server that can write, within `connect_timeout_s`.

    Raises asyncpg's errors; callers go through `translate`.
    """
    with anyio.fail_after(options.connect_timeout_s + 1):
        try:
            return await asyncpg.connect(
                options.dsn,
                timeout=options.connect_timeout_s,
                command_timeout=options.command_timeout_s,
                server_settings=options.settings(name),
                target_session_attrs=asyncpg.connect_utils.SessionAttribute.read_write,
            )
        except ssl.SSLError:
            raise  # it may be a ValueError, too: a certificate is not what it should be
        except ValueError as error:  # of the driver's parser: of PGPORT=x it tells only what int() says
            raise asyncpg.ClientConfigurationError(str(error)) from None


class Link:
    """One connection for one kind of call; calls wait for each other in order."""

    def __init__(self, options: LinkOptions, name: str) -> None:
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
                except asyncpg.PostgresError as error:
                    code = str(getattr(error, "sqlstate", ""))
                    if code in _DROP_SESSION or code.startswith("08"):
                        self._drop()
                    raise translate(error) from error
                except Exception as error:
                    # The call's fate is unknown, so is the session's: never use it again.
                    self._drop()
                    raise translate(error) from error
            self._drop()
            raise translate(TimeoutError())

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
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection.terminate()


class Listener:
    """A direct connection that listens on one channel and can prove that it still hears."""

    def __init__(self, options: LinkOptions) -> None:
        self._options = options

    @contextlib.asynccontextmanager
    async def listen(
        self, channel: str, heard: Callable[[str], None], cut: Callable[[], None]
    ) -> AsyncIterator[Callable[[], Any]]:
        """Listens while the context lasts; yields an async probe that raises `DatabaseUnavailable` if the line is dead.

        `heard` gets each payload, `cut` is called when the line is seen to break; both in the loop. The LISTEN has
        taken effect when the context is entered.
        """
        connection: asyncpg.Connection[Any] | None = None

        async def probe() -> None:
            if connection is None or connection.is_closed():
                raise DatabaseUnavailable("the listening connection was closed")
            try:
                await connection.execute("SELECT 1")
            except Exception as error:
                raise translate(error) from error

        try:
            try:
                connection = await connect(self._options, "listen")
                connection.add_termination_listener(lambda _: cut())
                await connection.add_listener(channel, lambda *a: heard(str(a[3])))
            except Exception as error:
                raise translate(error) from error
            yield probe
        finally:
            if connection is not None:
                # Nothing to lose here, and a polite close could hang on a dead line.
                connection.terminate()


class Transactions:
    """A small pool of connections for handlers that write in the transaction that completes their job."""

    def __init__(self, options: LinkOptions, connections_max: int) -> None:
        self._options = options
        self._max = connections_max
        self._pool: asyncpg.Pool[Any] | None = None
        self._lock = anyio.Lock()

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        """A connection inside a transaction: committed at the end of the block, rolled back on an exception.

        Raises `DatabaseUnavailable` when none is free or can be made within `connect_timeout_s`.
        """
        pool = await self._ready()
        try:
            connection = await pool.acquire(timeout=self._options.connect_timeout_s)
        except Exception as error:
            raise translate(error) from error
        try:
            transaction = connection.transaction(isolation="read_committed")
            await transaction.start()
            try:
                yield connection
            except BaseException:
                with anyio.CancelScope(shield=True), anyio.move_on_after(2):
                    await self._rollback(transaction)
                raise
            with anyio.CancelScope(shield=True):
                await transaction.commit()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(3):
                await pool.release(connection, timeout=2)

    async def _rollback(self, transaction: Any) -> None:
        # A connection that is gone has rolled back by itself; the error that led here is the one to show.
        with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await transaction.rollback()

    async def _ready(self) -> asyncpg.Pool[Any]:
        async with self._lock:
            if self._pool is None:
                self._pool = asyncpg.create_pool(
                    self._options.dsn,
                    min_size=0,
                    max_size=self._max,
                    timeout=self._options.connect_timeout_s,
                    command_timeout=self._options.command_timeout_s * 6,
                    server_settings=self._options.settings("transaction") | {"statement_timeout": "0"},
                )
                await self._pool
            return self._pool

    async def close(self) -> None:
        """Cuts all connections: open transactions roll back."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None
