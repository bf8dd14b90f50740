"""What our connections set, whatever role, database and server say: the engine runs under these.

Every setting that ends a statement, a transaction or an idle session, or changes what a transaction sees, is here.
"""

from __future__ import annotations

from typing import Any

TRANSACTION_TIMEOUT_SINCE = 17
"""The version of Postgres that knows transaction_timeout: older ones refuse a connection that names it."""
_NO_LIMIT = "SET transaction_timeout = 0;"


def settings(name: str, statement_timeout_s: float, by: str = "") -> dict[str, str]:
    """For the start of a session of part `name`; `by`: in whose name the audit is written."""
    statement_ms = str(int(statement_timeout_s * 1000))
    return {
        "application_name": f"pgworkd {name}"[:63],
        "statement_timeout": statement_ms,
        "lock_timeout": statement_ms,
        "idle_in_transaction_session_timeout": "0",
        "idle_session_timeout": "0",
        "default_transaction_isolation": "read committed",
        "synchronous_commit": "on",
        "timezone": "UTC",
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
        **({"pgworkd.by": by} if by else {}),
    }


async def lift_limits(connection: Any) -> None:
    """Sets, once the server's version is known, what cannot be set at the start. Raises the driver's errors."""
    if connection.get_server_version().major >= TRANSACTION_TIMEOUT_SINCE:
        await connection.execute(_NO_LIMIT)


def reset_query(connection: Any, query: str) -> str:
    """The driver's query that makes a session as it was at its start, and then as `lift_limits` left it."""
    return query + _NO_LIMIT if connection.get_server_version().major >= TRANSACTION_TIMEOUT_SINCE else query
