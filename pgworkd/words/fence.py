"""What identifies an attempt to whoever ends it, and what its source is told when it has ended."""

from __future__ import annotations

from typing import NamedTuple, Protocol
from uuid import UUID

from pgworkd.words.job import Outcome
from pgworkd.words.registration import token_of


class Fence(NamedTuple):
    """What a settle, an extension or a report of progress must match: else the attempt is somebody else's by now."""

    job_id: UUID
    attempt: int
    worker_id: int = 0
    """0: of any worker."""
    token: UUID | None = None
    """Of the worker's registration; None: of any."""
    nonce: UUID | None = None
    """`jobs.assignment_id`, of an attempt with a lease of its own; None: it is leased with its worker."""

    @classmethod
    def of(cls, job_id: UUID, attempt: int, worker_id: int | None) -> Fence:
        """That of an attempt that is leased with its worker, a `Registration`."""
        return cls(job_id, attempt, worker_id or 0, token_of(worker_id))


class Settling(Protocol):
    """An attempt that has ended, for its source to store."""

    @property
    def fence(self) -> Fence:
        """Whose it is."""

    @property
    def outcome(self) -> Outcome:
        """How it has ended."""

    @property
    def began(self) -> float | None:
        """When its handler was called, on the monotonic clock; None: it was not, as far as is known."""


class Settlement(NamedTuple):
    """A `Settling` of no loop."""

    fence: Fence
    outcome: Outcome
    began: float | None = None
