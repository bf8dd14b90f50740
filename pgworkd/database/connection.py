"""Connections to Postgres: with `driver_errors` the only module that imports asyncpg.

A `Connection` connects when it is first needed, and again after it broke. A call is never cancelled half-way: it runs
shielded, to its answer or its deadline. Errors are translated to the project's own; see `driver_errors`.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import asyncpg

from pgworkd.core.dsn import dsn_fault
from pgworkd.database import session
from pgworkd.database.addresses import Search, Toward
from pgworkd.database.driver_errors import (
    BROKEN,
    DROP_SESSION,
    is_answer,
    sqlstate_of,
    translate,
    unanswered,
)
from pgworkd.database.session import Session, opened
from pgworkd.errors import DatabaseUnavailable, UsageError
from pgworkd.process import forks
from pgworkd.process.redaction import hide
from pgworkd.settings import tls
from pgworkd.settings.conninfo import Host, conninfo

Row = Sequence[Any]

PROBE_TIMEOUT_S = 4.0
"""An idle connection that does not answer within this is replaced: cheap, while a dead one delays every job."""
OTHERS_S = 1.0
"""How long a server that will do, but is not the preferred one, waits for a better one to answer."""


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


async def connect(
    options: ConnectionOptions,
    name: str,
    *,
    kind: type[Session] = Session,
    settings: Mapping[str, str] = {},
    command_timeout_s: float | None = None,
) -> Session:
    """Opens a connection to a writable server, within `connect_timeout_s`. No other place opens one.

    With `any_server` to one that only reads, if none that can write answers soon: last, as it may lag behind; first, if
    target_session_attrs says so. `kind`: of the connection; `settings`: of the session, beside those of the options.
    Raises asyncpg's errors, for callers to `translate`.
    """
    told = conninfo(options.dsn)
    arguments = {
        "dsn": told.for_driver,
        "ssl": tls.verification(told),
        "timeout": None,  # each address has a limit of its own
        "command_timeout": command_timeout_s or options.command_timeout_s,
        "connection_class": kind,
    }
    wanted = {**options.settings(name), **settings}
    wanted["application_name"] = f"{wanted['application_name']} {told.application_name}".strip()[:63]
    place = (told.hosts, told.parameters.get("dbname"), told.parameters.get("user"))  # poolers have modes for each
    for_standby = options.any_server and told.prefers_standby
    found: list[Session] = []

    async def open_at(host: Host, address: str) -> Session:
        there = {"host": host.name, "port": host.port, "loop": Toward(told, address)}
        connection = await opened(partial(_driver_connect, arguments | there), wanted, place)
        if connection.only_reads == for_standby:
            return connection
        if options.any_server:
            found.append(connection)
            patience.deadline = min(patience.deadline, anyio.current_time() + OTHERS_S)
        else:
            connection.terminate()
        raise asyncpg.TargetServerAttributeNotMatched

    try:
        with anyio.CancelScope() as patience:
            search = Search(told, open_at, for_standby=for_standby, drop=Session.terminate)
            found.insert(0, await search.run(options.connect_timeout_s))
    except Exception:
        if not found:
            raise
    except BaseException:
        for each in found:
            each.terminate()
        raise
    for each in found[1:]:
        each.terminate()
    return found[0]


async def _driver_connect(arguments: Mapping[str, Any], settings: Mapping[str, str]) -> Session:
    """Opens a session that no child that is forked from now on keeps open."""
    with forks.opening():
        try:
            connection: Session = await asyncpg.connect(**arguments, server_settings=dict(settings))
        except ssl.SSLError:
            raise  # it may also be a ValueError: an invalid certificate
        except ValueError as error:  # of the driver's parser
            raise asyncpg.ClientConfigurationError(str(error)) from None
        driver: Any = connection
        forks.keep_private(driver._transport.get_extra_info("socket"), opened=True)  # noqa: SLF001 - no other way
        return connection


class Connection:
    """One connection for one kind of call; calls wait for each other in order. Raises PgworkdError."""

    def __init__(self, options: ConnectionOptions, name: str) -> None:
        self._options = options
        self._name = name
        self._lock = anyio.Lock(fast_acquire=True)
        self._connection: Session | None = None
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

    async def _ready(self) -> Session:
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
        connection: Session | None = None

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
