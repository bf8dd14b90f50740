"""The heartbeat thread's own connection: renewing the lease, fetching instructions."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from typing import Any

from pgworkd.core.registration import token_of
from pgworkd.core.source import Instructions
from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.database.schema import VERSION

_INSTRUCTIONS = """SELECT cancel_ids, cancel_attempts, settings, settings_version, differing,
    (SELECT version FROM pgworkd.schema_version), date_part('epoch', pgworkd.clock_after_waiting())
    FROM pgworkd.wanted($1, $2, $3)"""


class HeartbeatStore:
    """The calls of a heartbeat thread, on one connection. Raises PgworkdError."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._connection = Connection(options, "lease")
        self._settings_version: str | None = None  # version of the rows of `queues` that we have
        self._asked: frozenset[str] | None = None  # the queues of those rows
        self._queues: dict[str, dict[str, Any]] = {}

    async def heartbeat(self, worker_id: int, state: str) -> bool:
        """Renews the lease; False if the worker is lost."""
        return bool(
            await self._connection.value("SELECT pgworkd.heartbeat($1, $2, $3)", worker_id, token_of(worker_id), state)
        )

    async def instructions(self, worker_id: int, queues: Collection[str] | None = None) -> Instructions:
        """The instructions for this worker, with the rows of these queues (None: all)."""
        asked = None if queues is None else frozenset(queues)
        known = self._settings_version if asked == self._asked else None
        asked_at = time.time()
        rows = await self._connection.fetch(_INSTRUCTIONS, worker_id, known, None if asked is None else sorted(asked))
        clock_ahead_s = rows[0][-1] - (asked_at + time.time()) / 2
        ids, attempts, settings, settings_version, differing, version = rows[0][:-1]
        if settings is not None:  # else they have not changed
            self._queues, self._settings_version, self._asked = json.loads(settings), settings_version, asked
        cancels = tuple(zip(ids, attempts, strict=True))
        schema = VERSION if version is None else version
        return Instructions(cancels, self._queues, json.loads(differing), schema, asked, clock_ahead_s)

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()
