"""The beats of a remote daemon, sent by its heartbeat thread over a connection of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pgworkd.core.source import Instructions
from pgworkd.errors import WorkerLost
from pgworkd.remote.assignments import Assignments
from pgworkd.remote.client import GatewayAddress, GatewayClient


@dataclass(frozen=True, slots=True)
class RemoteInstructions(Instructions):
    """What a gateway says to a beat."""

    state: str = "run"
    """run; quiet: claim nothing more; stop: end."""
    gone: Sequence[tuple[UUID, int]] = ()
    """(id, attempt) of those that are not ours any more."""


async def beat(http: GatewayClient, held: Assignments, worker_id: int, state: str) -> dict[str, Any]:
    """The answer to a beat, which lists what the worker holds. Raises PgworkdError."""
    # A gateway of the first releases knows no other states.
    said = "running" if state == "blocked" else state
    claim_id = held.claim_id or None  # before the list
    body = {"assignments": held.listed(worker_id), "claim_id": claim_id, "state": said}
    answer: dict[str, Any] = await http.call("POST", f"/v1/workers/{worker_id:d}/beat", body, worker_id=worker_id)
    return answer


class GatewayHeartbeats:
    """One beat renews the lease and brings the instructions. Raises PgworkdError."""

    def __init__(self, gateway: GatewayAddress, limit_s: float, held: Assignments) -> None:
        self._http = GatewayClient(gateway, limit_s)
        self._held = held
        self._answer: dict[str, Any] = {}
        self._rows: dict[str, dict[str, Any]] = {}  # by queue, as the last gateway said that knew it

    async def heartbeat(self, worker_id: int, state: str) -> bool:
        """Renews the lease; False if the worker is lost."""
        try:
            self._answer = await beat(self._http, self._held, worker_id, state)
        except WorkerLost:
            return False
        return True

    async def instructions(self, worker_id: int, queues: Collection[str] | None = None) -> Instructions:
        """What the answer to that said."""
        answer = self._answer
        self._rows |= {queue: {**backoff, "paused": False} for queue, backoff in answer["backoffs"].items()}
        return RemoteInstructions(
            self._held.attempts(answer["cancel"]),
            dict(self._rows),
            state=answer["state"],
            gone=self._held.attempts(answer["gone"]),
        )

    async def close(self) -> None:
        """Closes the connection."""
        await self._http.close()
