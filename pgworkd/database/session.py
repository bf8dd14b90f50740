"""Session settings of our connections, overriding those of role, database and server.

Every setting that ends a statement, a transaction or an idle session, or changes what a transaction sees, is here.
"""

from __future__ import annotations

from typing import Any

from pgworkd.database import array_types

TRANSACTION_TIMEOUT_SINCE = 17
"""The version of Postgres that introduced transaction_timeout: older ones reject a connection that sets it."""
USER_TIMEOUT_MS = "10000"
"""The server ends a session whose client has read nothing for this long while an answer is being sent: a frozen client
cannot hold locks. Over TCP only; over a Unix socket claims rely on answers that fit into its buffer."""
TRANSACTION_SETTINGS = {"statement_timeout": "0", "tcp_user_timeout": "60000"}
"""In place of those, for sessions of handlers, which may fetch much and read it slowly."""
_NO_LIMIT = "SET transaction_timeout = 0;"


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


async def set_up(connection: Any) -> None:
    """Applies what cannot be set on connect, now that the server's version is known. Raises the driver's errors."""
    array_types.register(connection)
    if connection.get_server_version().major >= TRANSACTION_TIMEOUT_SINCE:
        await connection.execute(_NO_LIMIT)


async def set_up_lent(connection: Any) -> None:
    """The same for sessions that are lent out; and prepares a check that fails once they are spoilt.

    That is: under another user or role, with temporary tables, or without their prepared statements.
    """
    await set_up(connection)
    await connection.execute(_CHECK)


_CHECK = """DO $$ BEGIN EXECUTE format('PREPARE pgworkd_session AS SELECT 1 / (current_user = %L AND session_user = %L
    AND pg_my_temp_schema() = 0)::int', current_user, session_user); END $$"""
_IS_AS_LENT = "EXECUTE pgworkd_session;"


def reset_query(connection: Any, query: str) -> str:
    """The driver's query that resets a session, followed by what `set_up` sets. It fails if the session is spoilt."""
    limit = _NO_LIMIT if connection.get_server_version().major >= TRANSACTION_TIMEOUT_SINCE else ""
    return query + limit + _IS_AS_LENT
