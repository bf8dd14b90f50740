"""What requests and answers about batches look like."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import Field

from pgworkd.admin.batches import DeletedSome, ResultRow, TreeRow
from pgworkd.client.batch_types import Progress
from pgworkd.client.new_job import NewJob, OnDuplicate
from pgworkd.errors import UsageError
from pgworkd.gateway.api.models.jobs import (
    BULK_MAX,
    Answer,
    Attempts,
    Ids,
    Instant,
    Key,
    Model,
    Name,
    Payload,
    Period,
    Priority,
    with_trace,
)

Keys = Key | Annotated[list[Key], Field(max_length=BULK_MAX)]


class Callback(Model):
    """A job to insert when a tree has finished; its payload gets a `batch` with id, name, state and counts."""

    queue: Name
    kind: Name | None = None
    payload: Payload = None
    meta: Payload | None = None
    priority: Priority = 0
    max_attempts: Attempts | None = None
    timeout_s: Period | None = None
    serialize_key: Key | None = None
    limit_key: Key | None = None

    def job(self) -> NewJob:
        """The job as a NewJob."""
        given = {name: getattr(self, name) for name in self.model_fields_set if name != "queue"}
        return NewJob(self.queue, **with_trace(given))


class AnyBatch(Model):
    """The members that roots and children have in common."""

    name: Name
    kind: Name | None = Field(None, description="Of its jobs, and of its children's by default")
    queue: Name | None = Field(None, description="Default: the one named as the kind, or as the batch")
    max_failures: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        None, description="The batch is cancelled when more jobs than that are dead"
    )
    max_attempts: Attempts | None = Field(None, description="Of its jobs that do not say")
    meta: Payload | None = Field(None, description="Facts about the batch")
    payloads: list[Payload] = Field(default_factory=list, max_length=BULK_MAX, description="A job for each")
    jobs: list[AddIn] = Field(default_factory=list, max_length=100, description="More jobs, as they are added later")
    children: list[ChildIn] = Field(default_factory=list, max_length=100)
    sealed: bool = Field(False, description="Accept no further jobs")


class ChildIn(AnyBatch):
    """A batch below another."""

    stream: bool = Field(False, description="Each job that completes in the parent adds one here")
    stream_kind: Name | None = Field(None, description="Whose handler makes these jobs")
    final: bool = Field(False, description="Its results are those of the tree")

    def options(self) -> dict[str, Any]:
        """The members as the arguments of Batch.child."""
        names = ("kind", "queue", "max_failures", "max_attempts", "meta", "stream", "stream_kind", "final")
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}


class BatchIn(AnyBatch):
    """A root to create, with all below it."""

    dedupe_key: Key | None = None
    dedupe_until: Instant | None = None
    dedupe_for_s: Period | None = None
    dedupe_for: Literal["kept"] | None = Field(None, description="In place of a time: for as long as the tree is kept")
    on_complete: Callback | None = Field(None, description="When all jobs of the tree have finished")
    on_failure: Callback | None = Field(None, description="In place of that, if any job died or was cancelled")

    def options(self) -> dict[str, Any]:
        """The members as the arguments of batch()."""
        names = ("kind", "queue", "max_failures", "max_attempts", "meta", "dedupe_key", "dedupe_until")
        found: dict[str, Any] = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        callbacks = {"on_complete": self.on_complete, "on_failure": self.on_failure}
        found |= {name: job.job() for name, job in callbacks.items() if job is not None}
        if self.dedupe_for_s is not None and self.dedupe_for is not None:
            raise UsageError("dedupe_for_s and dedupe_for are both given: pass one of them")
        kept = self.dedupe_for_s if self.dedupe_for is None else self.dedupe_for
        return found if kept is None else found | {"dedupe_for": kept}


class AddIn(Model):
    """Jobs for a batch."""

    payloads: list[Payload] = Field(max_length=BULK_MAX)
    kind: Name | None = None
    queue: Name | None = None
    priority: Priority = 0
    run_at: Instant | None = None
    max_attempts: Attempts | None = None
    timeout_s: Period | None = None
    meta: Payload | None = None
    dedupe_key: Keys | None = Field(None, description="One for each payload: of unfinished jobs one in the batch")
    dedupe_by: Literal["payload"] | None = Field(None, description="In place of that: made of kind and payload")
    dedupe_until: Instant | None = Field(None, description="How long a finished job keeps its key")
    dedupe_for_s: Period | None = Field(None, description="The same in seconds from now")
    serialize_key: Keys | None = Field(None, description="One for all, or one for each payload")
    on_retry: Literal["hold", "yield"] = "hold"
    limit_key: Key | None = None
    on_duplicate: OnDuplicate | None = Field(None, description="If a dedupe key is taken; default: refuse all")

    def options(self) -> dict[str, Any]:
        """The members as the arguments of Batch.add."""
        given = {name: getattr(self, name) for name in self.model_fields_set if name != "payloads"}
        if "dedupe_for_s" in given:
            given["dedupe_for"] = given.pop("dedupe_for_s")
        return with_trace(given)


class Added(Ids):
    """The ids of the jobs, in their order. With `on_duplicate`: which are new; others are the holders of the keys.

    `changed`: which of these were changed as asked. A job that runs, or has ended, is not.
    """

    created: list[bool] | None = None
    changed: list[bool] | None = None


class BatchMade(Answer):
    """The batch, and all below it that are new, by path: {"payroll": ..., "payroll/cheques": ...}."""

    id: UUID
    created: bool
    ids: dict[str, UUID]


class Sealed(Answer):
    """`sealed`: False if it was closed before."""

    id: UUID
    sealed: bool


class BatchState(Answer, row=Progress):
    """The progress of one batch: `done` of `total` jobs have finished. `meta`: for the scope payload."""

    state: Literal["open", "sealed", "cancelling", "cancelled", "completed", "completed with failures"]
    meta: dict[str, Any] | None


class BatchOut(BatchState):
    """A batch, and all `below` it; `finished`: of it and all of these."""

    finished: bool
    below: list[BatchState]


TreeState = Literal["running", "cancelling", "cancelled", "completed", "completed with failures"]


class TreeOut(Answer, row=TreeRow):
    """A tree of batches, by its root. `meta`: for the scope payload."""

    state: TreeState
    meta: dict[str, Any] | None


class TreePage(Answer):
    """Trees; `next`: the cursor of the next page, null after the last one."""

    batches: list[TreeOut]
    next: UUID | None


class ResultOut(Answer, row=ResultRow, without=("batch_id",)):
    """A completed job of a batch."""

    payload: dict[str, Any]
    result: Any


class ResultsPage(Answer):
    """Results; `next`: the cursor of the next page, null if this was the last for now."""

    results: list[ResultOut]
    next: str | None


class BatchCancelled(Answer):
    """Jobs cancelled, and running jobs asked to stop. `more`: daemons cancel the rest, or call again."""

    id: UUID
    cancelled: int
    requested: int
    more: bool


class Deleted(Answer, row=DeletedSome):
    """How many batches and jobs were deleted. `more`: call again."""
