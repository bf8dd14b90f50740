"""Endpoints: where the jobs of queues are sent by HTTP, and how each fares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pgworkd.admin.queries import read
from pgworkd.core import validation
from pgworkd.database.connection import Connection
from pgworkd.errors import DatabaseError, UsageError

_COLUMNS = """SELECT e.name::text, e.url, e.mode, e.timeout_s, e.callback_timeout_s, e.headers::text, e.secret_name,
        e.unsigned, e.allow_private, e.strict_results,
        CASE WHEN e.disabled_at IS NOT NULL THEN 'disabled' WHEN e.paused_until > pgworkd.clock() THEN 'paused'
             ELSE 'live' END,
        CASE WHEN e.disabled_at IS NOT NULL THEN e.disabled_why
             WHEN e.paused_until > pgworkd.clock() THEN e.paused_why END,
        extract(epoch FROM e.disabled_at)::float8,
        CASE WHEN e.paused_until > pgworkd.clock() THEN extract(epoch FROM e.paused_until)::float8 END,
        ARRAY(SELECT q.name::text FROM pgworkd.queues q WHERE q.endpoint = e.name ORDER BY q.name)
    FROM pgworkd.endpoints e"""
_FIND = _COLUMNS + " ORDER BY e.name LIMIT $1"
_ONE = _COLUMNS + " WHERE e.name = $1::text"
_SET = "SELECT pgworkd.set_endpoint($1::text, $2::text::jsonb, $3)"


class EndpointRow(NamedTuple):
    """An endpoint. `state`: live, paused or disabled; `reason`: why it is not live."""

    name: str
    url: str
    mode: str
    timeout_s: float
    callback_timeout_s: float
    headers: dict[str, str]
    secret_name: str | None
    unsigned: bool
    allow_private: bool
    strict_results: bool
    state: str
    reason: str | None
    disabled_at: datetime | None
    paused_until: datetime | None
    queues: Sequence[str]


class EndpointOperations:
    """`admin.endpoints`. Raises the errors of `Admin`. Who writes needs the role of a gateway, or the owner's."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(self, limit: int = 1000) -> list[EndpointRow]:
        """All endpoints by name, at most `limit` (1 to ROWS_MAX)."""
        validation.bounded(limit)
        return [read(EndpointRow, row) for row in await self._connection.fetch(_FIND, limit)]

    async def get(self, name: str) -> EndpointRow | None:
        """One endpoint; None if there is none of that name."""
        rows = await self._connection.fetch(_ONE, validation.name(name))
        return read(EndpointRow, rows[0]) if rows else None

    async def put(self, name: str, columns: Mapping[str, Any], *, create: bool = True) -> bool:
        """Changes these columns of an endpoint, or, with `create`, makes it; None restores a default.

        False: there is none of that name, and `create` is false. DatabaseError names the constraint that a value does
        not meet; addresses are judged by those who send.
        """
        wanted = validation.text(name, "the endpoint's name", 200)
        return bool(await self._connection.value(_SET, wanted, json.dumps(dict(columns)), create))

    async def disable(self, name: str, why: str = "by an operator") -> bool:
        """Disables an endpoint and pauses its queues; False: there is none of that name, or it is disabled already."""
        sql = "SELECT pgworkd.disable_endpoint($1::text, $2::text)"
        return bool(await self._connection.value(sql, validation.name(name), validation.text(why, "the reason", 500)))

    async def enable(self, name: str) -> bool:
        """Enables an endpoint and ends its pause, and those of its queues; False: there is none of that name."""
        return bool(await self._connection.value("SELECT pgworkd.enable_endpoint($1::text)", validation.name(name)))

    async def remove(self, name: str) -> bool:
        """Deletes an endpoint; False: there is none of that name. UsageError while a queue is sent to it."""
        try:
            sql = "SELECT pgworkd.remove_endpoint($1::text)"
            return bool(await self._connection.value(sql, validation.name(name)))
        except DatabaseError as error:
            if error.constraint == "queue_endpoint_must_exist":
                said = "queues are still sent there: pgworkd queues set QUEUE --unset endpoint"
                raise UsageError(said) from None
            raise
