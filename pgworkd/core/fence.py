"""What identifies an attempt to whoever ends it, and what its source is told when it has ended."""

from __future__ import annotations

from typing import NamedTuple, Protocol
from uuid import UUID

from pgworkd.core.job import Outcome
from pgworkd.core.registration import token_of


class Fence(NamedTuple):
    """What a settle, an extension or a report of progress must match: else the attempt is somebody else's by now."""

    job_id: UUID
    attempt: int
    worker_id: int = 0
    """The worker whose attempt it is; 0: any."""
    token: UUID | None = None
    """The token of the worker's registration; None: any."""
    nonce: UUID | None = None
    """`jobs.assignment_id`, of an attempt with a lease of its own; None: it is leased with its worker."""

    @classmethod
    def of(cls, job_id: UUID, attempt: int, worker_id: int | None) -> Fence:
        """The fence of an attempt that is leased with its worker, a `Registration`."""
        return cls(job_id, attempt, worker_id or 0, token_of(worker_id))


class Settling(Protocol):
    """An attempt that has ended, for its source to store."""

    outcome: Outcome

    @property
    def job_id(self) -> UUID:
        """The id of the attempt's job."""

    @property
    def number(self) -> int:
        """The number of the attempt."""

    @property
    def fence(self) -> Fence:
        """The fence that the settle must match."""

    @property
    def started(self) -> float | None:
        """When the attempt's handler was called, on the monotonic clock; None: it was not, as far as is known."""


class Settlement:
    """A `Settling` of somebody who has no more than its fence."""

    def __init__(self, fence: Fence, outcome: Outcome, started: float | None = None) -> None:
        self.fence, self.outcome, self.started = fence, outcome, started
        self.job_id, self.number = fence.job_id, fence.attempt
