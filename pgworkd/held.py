"""The attempts this daemon holds, from the claim to the settled row."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import anyio

from .job import Job, Reason
from .store import Claimed


class Held:
    """One attempt in our hands.

    Written by its runner, but for `reason`, which whoever ends the run early writes through `stop()`.
    """

    __slots__ = ("claimed", "flagged", "job", "queue", "reason", "scope", "settled", "started")

    def __init__(self, claimed: Claimed, queue: str) -> None:
        self.claimed = claimed
        self.queue = queue
        self.job: Job | None = None
        self.scope: anyio.CancelScope | None = None
        self.reason: Reason | None = None
        self.started: float | None = None
        """On the loop's clock, when the handler was called; None: still waits for a slot."""
        self.settled = False
        """The handler has completed the job itself, in its own transaction."""
        self.flagged = False
        """Has been reported as slow."""

    def facts(self) -> dict[str, object]:
        """What every event about this attempt says."""
        claimed = self.claimed
        return {"job_id": str(claimed.id), "queue": self.queue, "kind": claimed.kind, "attempt": claimed.attempt}

    def stop(self, reason: Reason) -> None:
        """Asks the run to end; the first reason stands. Loop and process runs are cancelled, threads told."""
        if self.reason is None:
            self.reason = reason
            if self.job is not None:
                self.job.stopping.set()
            if self.scope is not None:
                self.scope.cancel()


class Holdings:
    """All attempts held by this daemon. Pools add, the settler removes, all in the daemon's loop."""

    def __init__(self) -> None:
        self._by_id: dict[UUID, Held] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._by_id.values()))

    def add(self, held: Held) -> None:
        """Notes a claimed attempt. An older attempt of the same job, if we still hold one, is ours no more."""
        older = self._by_id.get(held.claimed.id)
        if older is not None:
            older.stop(Reason.FENCE)
        self._by_id[held.claimed.id] = held

    def remove(self, held: Held) -> None:
        """Forgets a settled attempt."""
        if self._by_id.get(held.claimed.id) is held:
            del self._by_id[held.claimed.id]

    def find(self, job_id: UUID, attempt: int) -> Held | None:
        """The attempt, if we hold it."""
        held = self._by_id.get(job_id)
        return held if held is not None and held.claimed.attempt == attempt else None

    def running(self) -> list[Held]:
        """Those whose handler has been called and has not come back."""
        return [h for h in self._by_id.values() if h.started is not None and h.scope is not None]

    def stop_all(self, reason: Reason) -> None:
        """Asks every run to end."""
        for held in self:
            held.stop(reason)
