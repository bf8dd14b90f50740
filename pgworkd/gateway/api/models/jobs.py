"""What requests and answers look like. Names end in their unit; instants are RFC 3339 with a time zone.

Types and bounds are checked here, where the description of the interface comes from; what belongs together is checked
by the verbs, as for every caller.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_type_hints
from uuid import UUID

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from pgworkd.admin.explained import Explanation
from pgworkd.admin.queries import EnqueuedJob, JobDetails, JobRow
from pgworkd.admin.stacks import Stack
from pgworkd.client.new_job import ATTEMPTS_MAX, KEY_CHARS_MAX, NAME_CHARS_MAX, NewJob
from pgworkd.core import traces
from pgworkd.core.job import Status
from pgworkd.core.json_text import JsonText
from pgworkd.core.payload import WRAP
from pgworkd.core.validation import ROWS_MAX
from pgworkd.errors import DELAY_S_MAX

BULK_MAX = 10_000
"""Jobs in one call."""


def without_prefix(value: object) -> object:
    """The id of a job as others write it, with a prefix, without that."""
    return value.removeprefix("job_") if isinstance(value, str) else value


def _text_only(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("must be text")  # noqa: TRY004 - pydantic reports it
    return value


_INSTANT = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?([Zz]|[+-]\d\d:\d\d)")
"""RFC 3339; seconds may be left out."""


def _instant(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("must be text")  # noqa: TRY004 - pydantic reports it
    if not _INSTANT.fullmatch(value):  # a number would count as seconds since the epoch
        raise ValueError("must be an instant with its zone, such as 2026-11-29T12:00:00Z (in a URL, + is sent as %2B)")
    return value


def shown(chars_max: int) -> BeforeValidator:
    """Text for people: a lone surrogate in it is not refused, but shown as its escape."""

    def escaped(value: object) -> object:
        if isinstance(value, str) and not value.isascii() and len(value) <= chars_max:
            return value.encode("utf-8", "backslashreplace").decode()[:chars_max]
        return value

    return BeforeValidator(escaped)


def _object(value: object) -> JsonText:
    if not isinstance(value, JsonText) or not value.startswith("{"):
        raise ValueError(f"must be a JSON object: {WRAP}")
    return value


Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
Key = Annotated[str, Field(min_length=1, max_length=KEY_CHARS_MAX)]
Instant = Annotated[AwareDatetime, BeforeValidator(_instant), Field(strict=False)]
Id = Annotated[UUID, BeforeValidator(_text_only), Field(strict=False)]
Payload = Annotated[Any, AfterValidator(_object), WithJsonSchema({"type": "object"})]
Delay = Annotated[float, Field(ge=0, le=DELAY_S_MAX)]
Period = Annotated[float, Field(gt=0, le=DELAY_S_MAX)]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Attempts = Annotated[int, Field(ge=1, le=ATTEMPTS_MAX)]
Limit = Annotated[int, Field(ge=1, le=ROWS_MAX)]


class Model(BaseModel):
    """A request: no unknown members, no conversions. `optional`: its first members, by type; null is the default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def __init_subclass__(cls, optional: Mapping[str, Any] = MappingProxyType({}), **config: Any) -> None:
        super().__init_subclass__(**config)
        cls.__annotations__ = {name: kind | None for name, kind in optional.items()} | cls.__annotations__
        for name in optional.keys() - vars(cls):
            setattr(cls, name, None)


class Answer(BaseModel):
    """An answer; newer versions may add members.

    One that shows a row of `Admin` names its class: `row`, whose fields come first, but for those in `without`.
    """

    def __init_subclass__(cls, row: type | None = None, without: Collection[str] = (), **config: Any) -> None:
        super().__init_subclass__(**config)
        if row is not None:
            shown = {name: kind for name, kind in get_type_hints(row).items() if name not in without}
            cls.__annotations__ = shown | cls.__annotations__  # pydantic reads them after this


def with_trace(given: dict[str, Any]) -> dict[str, Any]:
    """The members of a job with the trace context of the request in its `meta`, unless that has one of its own."""
    if (carrier := traces.RECEIVED.get()) is not None:
        given["meta"] = JsonText(traces.added(given.get("meta"), carrier))
    return given


class AnyJob(Model):
    """The fields of a job that any call may give."""

    queue: Name
    kind: Name | None = Field(None, description="What the job is for; default: the queue's own handler")
    payload: Payload = Field(None, description="Up to 1 MiB, 64 levels; its numbers keep their digits")
    meta: Payload | None = Field(None, description="Tags, trace context")
    priority: Priority = Field(0, description="Higher runs first")
    run_at: Instant | None = None
    delay_s: Delay | None = Field(None, description="Seconds from now by the database's clock, in place of run_at")
    expires_at: Instant | None = Field(None, description="Expires if it has not started by then")
    max_attempts: Attempts | None = None
    timeout_s: Period | None = Field(None, description="Seconds per attempt")
    dedupe_key: Key | None = Field(None, description="The queue accepts one unfinished job per key")
    dedupe_by: Literal["payload"] | None = Field(
        None, description="In place of a dedupe key: it is made of kind and payload"
    )
    dedupe_until: Instant | None = Field(None, description="How long a finished job keeps its key")
    dedupe_for_s: Period | None = Field(None, description="The same in seconds from now")
    serialize_key: Key | None = Field(None, description="Jobs with the same key run one at a time")
    limit_key: Key | None = Field(None, description="What the queue's limits per key count by")
    on_retry: Literal["hold", "yield"] = "hold"

    def options(self) -> dict[str, Any]:
        """The fields that were given, as the arguments of NewJob; without the queue and the payload."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        for name, ours in (("delay_s", "delay"), ("dedupe_for_s", "dedupe_for")):
            if name in given:
                given[ours] = given.pop(name)
        for name in ("queue", "payload", "on_duplicate", "name"):
            given.pop(name, None)
        return with_trace(given)

    def job(self) -> NewJob:
        """The job as a NewJob."""
        return NewJob(self.queue, self.payload, **self.options())


OnFailedDependency = Annotated[
    Literal["wait", "cancel", "run"], Field(description="What happens if a job of `after` fails for good")
]


class OnceJob(AnyJob):
    """A job whose id the caller has made."""


class DependentJob(AnyJob):
    """A job that may wait for others."""

    after: list[Id] = Field(default_factory=list, max_length=BULK_MAX, description="Jobs that must complete first")
    on_failed_dependency: OnFailedDependency = "wait"


class JobIn(DependentJob):
    """A job to create."""

    on_duplicate: Literal["raise", "skip", "replace", "reschedule"] | None = Field(
        None, description="What to do if the dedupe key is taken; default: refuse (409 duplicate-key)"
    )


class JobsIn(Model):
    """Jobs to create, all or none."""

    jobs: list[DependentJob] = Field(max_length=BULK_MAX)


class Step(AnyJob):
    """A job of a workflow."""

    name: Name
    after: list[Name] = Field(default_factory=list, max_length=1000, description="Names of steps, or ids of jobs")
    on_failed_dependency: OnFailedDependency = "wait"


class WorkflowIn(Model):
    """Jobs that depend on each other, by name: created all or none."""

    jobs: list[Step] = Field(min_length=1, max_length=BULK_MAX)


class Edit(Model):
    """Fields of a waiting job to change."""

    payload: Payload = None
    run_at: Instant | None = None
    delay_s: Delay | None = None
    priority: Priority | None = None


class Created(Answer, row=EnqueuedJob):
    """The job's id: of a new one (`created`), or of the one with that dedupe key, which may have been `changed`."""

    changed: bool = False


class CreatedOnce(Answer):
    """The job of that id."""

    id: UUID
    created: bool
    status: Status
    keep_s: float | None = Field(
        description="For this long after its end the job is remembered, and a repetition does nothing; "
        "null: for as long as the history is kept (setting keep_days)"
    )


class Changed(Answer):
    """The names of the fields that differ now."""

    id: UUID
    changed: list[str]


class Ended(Answer):
    """`cancelled`, or `requested` of a running job."""

    id: UUID
    outcome: Literal["cancelled", "requested"]


class Ids(Answer):
    """The ids of the new jobs, in their order."""

    ids: list[UUID]


class Counted(Answer):
    """How many jobs are new."""

    created: int


class Names(Answer):
    """The ids of the new jobs, by name."""

    ids: dict[str, UUID]


class JobOut(Answer, row=JobDetails, without=("worker_id", "payload", "meta", "result", "errors")):
    """A job. `payload`, `meta`, `result` and `errors` are there for scope `payload` only."""

    status: Status
    payload: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None
    result: Any = None
    errors: list[Any] | None = None


class ReasonOut(Answer, row=Explanation):
    """A reason why a job does not run, enough by itself, and what ends it."""


class Explained(Answer):
    """Why a job does not run; without a reason the next claim takes it."""

    id: UUID
    reasons: list[ReasonOut]


class StackOut(Answer, row=Stack):
    """Where in its code a running job is, as its worker answers within a heartbeat; `stack` is null until then."""


class JobLine(Answer, row=JobRow):
    """A job in a list."""

    status: Status


class JobPage(Answer):
    """Jobs, the newest first. `next`: the cursor of the next page, which may be there although this one is empty."""

    jobs: list[JobLine]
    next: str | None


class Result(Answer):
    """What the job's handler returned."""

    id: UUID
    result: Any


class Waiting(Answer):
    """The job has not finished."""

    id: UUID
    status: Status


class ProblemOut(Answer):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[dict[str, str]] = []
