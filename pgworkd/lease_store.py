"""The lease thread's own way to the database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from .link import Link, LinkOptions


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """What the database tells a worker whose lease it renewed."""

    lease_s: float
    cancels: Sequence[tuple[UUID, int]]
    queues: dict[str, dict[str, Any]]
    """Rows of `queues` by name, without what is NULL; always `paused`, and `pause_s` if the pause has an end."""
    differing: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """By queue: other workers, and the concurrency that their code gives it, where that is not ours."""


class LeaseStore:
    """One link, one verb."""

    def __init__(self, options: LinkOptions) -> None:
        self._link = Link(options, "lease")

    async def heartbeat(self, worker_id: int, state: str) -> HeartbeatAnswer | None:
        """Renews the lease; None if the worker is lost."""
        rows = await self._link.fetch(
            "SELECT lease_s, cancel_ids, cancel_attempts, settings, differing FROM pgworkd.heartbeat($1, $2)",
            worker_id,
            state,
        )
        if not rows:
            return None
        lease_s, ids, attempts, settings, differing = rows[0]
        cancels = tuple(zip(ids, attempts, strict=True))
        return HeartbeatAnswer(lease_s, cancels, json.loads(settings), json.loads(differing))

    async def close(self) -> None:
        """Closes the link."""
        await self._link.close()
