"""The lease thread's own way to the database."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.database.schema import VERSION
from pgworkd.words.registration import token_of

_WANTED = """SELECT cancel_ids, cancel_attempts, settings, settings_version, differing,
    (SELECT version FROM pgworkd.schema_version) FROM pgworkd.wanted($1, $2, $3)"""


@dataclass(frozen=True, slots=True)
class Instructions:
    """What the database tells a worker that has renewed its lease."""

    cancels: Sequence[tuple[UUID, int]]
    queues: dict[str, dict[str, Any]]
    """Rows of `queues` by name, without what is NULL; always `paused`, and `pause_s` if the pause has an end."""
    differing: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """By queue: other workers, and the concurrency that their code gives it, where that is not ours."""
    schema_version: int = VERSION
    """Of the database."""
    asked: frozenset[str] | None = None
    """Of which queues `queues` says everything; None: of all."""


class HeartbeatStore:
    """One link, two verbs."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._connection = Connection(options, "lease")
        self._settings_version: str | None = None  # of the rows of `queues` that we have
        self._asked: frozenset[str] | None = None  # of these
        self._queues: dict[str, dict[str, Any]] = {}

    async def heartbeat(self, worker_id: int, state: str) -> bool:
        """Renews the lease; False if the worker is lost."""
        return bool(
            await self._connection.value("SELECT pgworkd.heartbeat($1, $2, $3)", worker_id, token_of(worker_id), state)
        )

    async def wanted(self, worker_id: int, queues: Collection[str] | None = None) -> Instructions:
        """What the worker should know, of these queues (None: of all)."""
        asked = None if queues is None else frozenset(queues)
        known = self._settings_version if asked == self._asked else None
        rows = await self._connection.fetch(_WANTED, worker_id, known, None if asked is None else sorted(asked))
        ids, attempts, settings, settings_version, differing, version = rows[0]
        if settings is not None:  # else they are as they were
            self._queues, self._settings_version, self._asked = json.loads(settings), settings_version, asked
        cancels = tuple(zip(ids, attempts, strict=True))
        return Instructions(
            cancels, self._queues, json.loads(differing), VERSION if version is None else version, asked
        )

    async def close(self) -> None:
        """Closes the link."""
        await self._connection.close()
