"""Session settings of our connections, overriding those of role, database and server.

Every setting that ends a statement, a transaction or an idle session, or changes what a transaction sees, is here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Hashable, Mapping

import asyncpg

from pgworkd.database import array_types
from pgworkd.errors import UsageError

TRANSACTION_TIMEOUT_SINCE = 17
"""The version of Postgres that introduced transaction_timeout: older ones reject a connection that sets it."""
USER_TIMEOUT_MS = "10000"
"""The server ends a session whose client has read nothing for this long while an answer is being sent: a frozen client
cannot hold locks. Over TCP only; over a Unix socket claims rely on answers that fit into its buffer."""
TRANSACTION_SETTINGS = {"statement_timeout": "0", "tcp_user_timeout": "60000"}
"""Settings for sessions of handlers, which may fetch much and read it slowly."""
_NO_LIMIT = "SET transaction_timeout = 0;"
_ROUNDS = 5
REFUSED = "unsupported startup parameter"
"""What pgbouncer's error says of settings that it does not know."""
SHARED = (
    "the DSN leads to a connection pooler in transaction mode{}: daemons and commands need sessions of their own, so "
    "give them the address of Postgres itself, or of a pool in session mode; applications may use this one"
)
NOT_PREPARED = {"42P05", "26000"}
"""SQLSTATEs of a pooler in transaction mode for statements that another of its clients prepared."""
_CHECK = """DO $$ BEGIN EXECUTE format('PREPARE pgworkd_session AS SELECT 1 / (current_user = %L AND session_user = %L
    AND pg_my_temp_schema() = 0)::int', current_user, session_user); END $$"""
_IS_AS_LENT = "EXECUTE pgworkd_session;"
_pooled: set[Hashable] = set()
"""Servers that are reached through poolers in session mode, as far as this process knows."""

Connect = Callable[[Mapping[str, str]], Awaitable["Session"]]


class Session(asyncpg.Connection):
    """A connection of the driver whose settings may have been made after it was opened."""

    made_sql = ""
    """The settings that a reset must make again."""
    only_reads = False
    """Whether the server, or this session, refuses to write."""

    def get_reset_query(self) -> str:
        """Returns the driver's reset query, followed by our settings where it undoes them."""
        query: str = super().get_reset_query()
        return query + self.made_sql


def settings(
    name: str, statement_timeout_s: float, by: str = "", lock_timeout_s: float | None = None
) -> dict[str, str]:
    """Settings for a connection named `name`; `by`: the actor that the audit records."""
    statement_ms = str(int(statement_timeout_s * 1000))
    return {
        "application_name": f"pgworkd {name}"[:63],
        "statement_timeout": statement_ms,
        "lock_timeout": statement_ms if lock_timeout_s is None else str(int(lock_timeout_s * 1000)),
        "idle_in_transaction_session_timeout": "0",
        "idle_session_timeout": "0",
        "default_transaction_isolation": "read committed",
        "synchronous_commit": "on",
        "timezone": "UTC",
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": USER_TIMEOUT_MS,
        **({"pgworkd.by": by} if by else {}),
    }


async def opened(connect: Connect, wanted: Mapping[str, str], place: Hashable) -> Session:
    """A session with the `wanted` settings; `connect` opens one with those that it is given.

    A pooler refuses or ignores them, so behind one they are made by SET, in sessions that are ours alone: UsageError if
    they are not. `place`: what is connected to. Raises the driver's errors.
    """
    if place not in _pooled:
        try:
            connection = await connect(wanted)
        except asyncpg.PostgresError as error:
            if REFUSED not in str(error):
                raise
        else:
            if await _is_direct(connection):
                return connection
            connection.terminate()
        await _refuse_shared(connect)
        _pooled.add(place)
    name = "application_name"
    connection = await connect({name: wanted[name]})
    quoted = {key: value.replace("'", "''") for key, value in wanted.items()}
    await _is_direct(connection, "".join(f"SET {key} = '{value}';" for key, value in quoted.items()))
    return connection


async def keep_as_lent(connection: Session) -> None:
    """Makes the reset of a session fail once it is spoilt.

    That is: under another user or role, with temporary tables, or without its prepared statements.
    """
    await connection.execute(_CHECK)
    connection.made_sql += _IS_AS_LENT


async def _is_direct(connection: Session, sql: str = "") -> bool:
    """Makes settings, now that the server's version is known. True if no pooler is between the server and us."""
    try:
        array_types.register(connection)
        if connection.get_server_version().major >= TRANSACTION_TIMEOUT_SINCE:
            sql += _NO_LIMIT
        connection.made_sql = sql
        pid = connection.get_server_pid()  # a pooler makes up its own
        is_direct = await connection.execute(f"{sql}SELECT WHERE pg_backend_pid() = {pid}") == "SELECT 1"
        known = connection.get_settings() if is_direct else None
        if (standby := getattr(known, "in_hot_standby", None)) is None:
            standby = await connection.fetchval("SHOW in_hot_standby")
        only_reads = getattr(known, "default_transaction_read_only", "") == "on"
        connection.only_reads = only_reads or standby == "on"
    except BaseException:
        connection.terminate()
        raise
    return is_direct


async def _refuse_shared(connect: Connect) -> None:
    """UsageError if two connections are given the same session of the server, or one is given several, in turn."""
    with contextlib.ExitStack() as stack:
        one = await connect({})
        stack.callback(one.terminate)
        other = await connect({})
        stack.callback(other.terminate)
        try:
            for _ in range(_ROUNDS):
                seen = [await each.fetchval("SELECT pg_backend_pid()") for each in (one, one, other)]
                if seen[0] != seen[1] or seen[1] == seen[2]:
                    raise UsageError(SHARED.format(""))
        except asyncpg.PostgresError as error:
            if error.sqlstate in NOT_PREPARED:
                raise UsageError(SHARED.format(f" ({str(error).splitlines()[0]})")) from None
            raise
