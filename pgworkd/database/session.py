"""What our connections set, whatever role, database and server say: the engine runs under these.

Every setting that ends a statement, a transaction or an idle session, or changes what a transaction sees, is here.
"""

from __future__ import annotations

from typing import Any

TRANSACTION_TIMEOUT_SINCE = 17
"""The version of Postgres that knows transaction_timeout: older ones refuse a connection that names it."""
USER_TIMEOUT_MS = "10000"
"""The server ends a session whose client has taken nothing in for this long while an answer is on its way: a frozen
client cannot hold locks. Only over TCP; over a Unix socket claims rely on answers that fit into its buffer."""
TRANSACTION_USER_TIMEOUT_MS = "60000"
"""The same for sessions of handlers, which may fetch much and be slow to take it in."""
_NO_LIMIT = "SET transaction_timeout = 0;"


def settings(
    name: str, statement_timeout_s: float, by: str = "", lock_timeout_s: float | None = None
) -> dict[str, str]:
    """For the start of a session of part `name`; `by`: in whose name the audit is written."""
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


async def lift_limits(connection: Any) -> None:
    """Sets, once the server's version is known, what cannot be set at the start. Raises the driver's errors."""
    if connection.get_server_version().major >= TRANSACTION_TIMEOUT_SINCE:
        await connection.execute(_NO_LIMIT)


def reset_query(connection: Any, query: str) -> str:
    """The driver's query that makes a session as it was at its start, and then as `lift_limits` left it."""
    return query + _NO_LIMIT if connection.get_server_version().major >= TRANSACTION_TIMEOUT_SINCE else query
