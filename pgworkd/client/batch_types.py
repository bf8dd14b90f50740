"""What callers pass to the batch API, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypedDict
from uuid import UUID

from pgworkd.client.new_job import DedupeBy, NewJob

Keys: TypeAlias = str | Sequence[str] | None
"""A key of all jobs of a call, or a list with one for each."""


class Progress(NamedTuple):
    """The progress of a batch: `done` of `total` jobs have finished: completed, dead or cancelled (or expired).

    `state`: open, sealed, cancelling, cancelled, completed or completed with failures. `depth`: 0 for a root. `meta`:
    JSON text.
    """

    id: UUID
    name: str
    depth: int
    state: str
    total: int
    done: int
    completed: int
    dead: int
    cancelled: int
    meta: str | None = None

    @property
    def finished(self) -> bool:
        """True when it has ended, in whichever way: cancelled, completed or completed with failures.

        A retry of one of its dead jobs opens a finished batch again.
        """
        return self.state in ("cancelled", "completed", "completed with failures")


class Cancelled(NamedTuple):
    """What a cancellation did: jobs cancelled, and running jobs asked to stop. `more`: daemons cancel the rest."""

    cancelled: int
    requested: int
    more: bool


class Kinds(Protocol):
    """What an app knows about kinds of jobs."""

    def queue_of(self, kind: str) -> str | None:
        """The queue of that kind's handler."""

    def stream_kind(self, parent: str, child: str) -> str | None:
        """The kind whose handler makes jobs of `child` from each job that completes in `parent`."""


class BatchOptions(TypedDict, total=False):
    """The keyword arguments of `batch()`."""

    kind: str | None
    queue: str | None
    dedupe_key: str | None
    dedupe_until: datetime | None
    dedupe_for: float | timedelta | Literal["kept"] | None
    max_failures: int | None
    max_attempts: int | None
    meta: object
    on_complete: NewJob | Mapping[str, Any] | None
    on_failure: NewJob | Mapping[str, Any] | None


class ChildOptions(TypedDict, total=False):
    """The keyword arguments of `Batch.child()`."""

    kind: str | None
    queue: str | None
    stream: bool
    stream_kind: str | None
    final: bool
    max_failures: int | None
    max_attempts: int | None
    meta: object


class AddOptions(TypedDict, total=False):
    """The keyword arguments of `Batch.add()`."""

    kind: str | None
    queue: str | None
    priority: int
    run_at: datetime | None
    max_attempts: int | None
    timeout_s: float | timedelta | None
    meta: object
    dedupe_key: Keys
    dedupe_by: DedupeBy | None
    dedupe_until: datetime | None
    dedupe_for: float | timedelta | None
    serialize_key: Keys
    on_retry: Literal["hold", "yield"]
    limit_key: str | None
