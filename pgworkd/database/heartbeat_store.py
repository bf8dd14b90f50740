"""The heartbeat thread's own connections: renewing the lease, fetching instructions, answering for stacks."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from typing import Any
from uuid import UUID

from pgworkd.core.registration import token_of
from pgworkd.core.source import Instructions
from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.database.schema import VERSION

_INSTRUCTIONS = """SELECT cancel_ids, cancel_attempts, stack_ids, stack_attempts, settings, settings_version, differing,
    (SELECT version FROM pgworkd.schema_version), date_part('epoch', pgworkd.clock_after_waiting())
    FROM pgworkd.wanted($1, $2, $3)"""

_ANSWER_STACK = "SELECT pgworkd.answer_stack($1, $2, $3, $4, $5)"


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
        ids, attempts, stack_ids, stack_attempts, settings, settings_version, differing, version = rows[0][:-1]
        if settings is not None:  # else they have not changed
            self._queues, self._settings_version, self._asked = json.loads(settings), settings_version, asked
        cancels = tuple(zip(ids, attempts, strict=True))
        stacks = tuple(zip(stack_ids, stack_attempts, strict=True))
        schema = VERSION if version is None else version
        return Instructions(cancels, self._queues, json.loads(differing), schema, asked, clock_ahead_s, stacks)

    async def answer_stack(self, worker_id: int, job_id: UUID, attempt: int, stack: str) -> bool:
        """Stores the stack that was asked for; False if it is not asked for any more, or not of this worker."""
        token = token_of(worker_id)
        return bool(await self._connection.value(_ANSWER_STACK, job_id, attempt, worker_id, token, stack))

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()
