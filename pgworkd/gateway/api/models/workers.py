"""What requests and answers of remote workers look like."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from pgworkd.core.job import Status
from pgworkd.core.json_text import JsonText
from pgworkd.gateway.api.models.jobs import (
    Answer,
    Delay,
    DependentJob,
    Id,
    Model,
    Name,
    ProblemOut,
    shown,
    without_prefix,
)

QUEUES_MAX, SLOTS_MAX = 100, 10_000
"""Queues of one worker, and its slots for each."""
ALL_SLOTS_MAX = 50_000
"""Slots of one worker."""
KINDS_MAX = 1_000
"""Kinds with max_attempts of their own."""
CLAIM_MAX = 100
"""Jobs of one claim."""
SETTLES_MAX = 1_000
"""Settles of one call."""
LISTED_MAX = 100_000
"""Assignments in one beat: as many as a worker has slots, and those whose settles were not answered."""
ClaimId = Annotated[int, Field(ge=1, le=2**31 - 1)]
ASSIGNMENT_CHARS_MAX = 200
LEASE_S_MIN, LEASE_S_MAX = 10, 3600
"""Bounds of a worker's lease, which is judged every few seconds: a shorter one would promise more than it keeps."""
OWN_LEASE_S_MAX = 31_622_400
"""The longest lease of one attempt: a year."""


def _json(value: object) -> JsonText | None:
    if value is not None and not isinstance(value, JsonText):
        raise ValueError("must be JSON")
    return value


AssignmentText = Annotated[str, Field(max_length=ASSIGNMENT_CHARS_MAX)]
Result = Annotated[Any, AfterValidator(_json)]
LongText = Annotated[str, BeforeValidator(lambda text: "" if text is None else text)]
"""A text of which the beginning or end is kept; null, which some clients send, is an empty one."""
WorkerId = Annotated[int, Field(ge=1, le=10**9)]
State = Literal["run", "quiet", "stop"]
OwnLease = Annotated[float, Field(ge=LEASE_S_MIN, le=OWN_LEASE_S_MAX)]


class QueuesIn(Model):
    """The queues that a worker serves."""

    queues: dict[Name, Annotated[int, Field(ge=1, le=SLOTS_MAX)]] = Field(
        min_length=1, max_length=QUEUES_MAX, description="How many jobs of each queue it runs at once, at most"
    )

    @field_validator("queues")
    @classmethod
    def _bounded(cls, queues: dict[str, int]) -> dict[str, int]:
        if (slots := sum(queues.values())) > ALL_SLOTS_MAX:
            raise ValueError(f"the slots of all queues together are {slots:,}, and {ALL_SLOTS_MAX:,} are allowed")
        return queues


class WorkerIn(QueuesIn):
    """A worker to register."""

    name: Name = Field(description="What people call it, such as its host's name; it need not be unique")
    lease_s: Annotated[float, Field(ge=LEASE_S_MIN, le=LEASE_S_MAX)] = Field(
        30.0, description="A worker that has not beaten for this long is presumed dead, and its jobs are taken back"
    )
    version: Annotated[str, Field(max_length=100)] = ""


class WorkerMade(Answer):
    """The new worker. `secret`: the value of the header Pgworkd-Secret in its calls; `beat_every_s`: how often to."""

    worker: int
    secret: str
    lease_s: float
    beat_every_s: float


class ClaimIn(Model):
    """A claim: jobs of the first of these queues that has any; or one job."""

    worker: WorkerId
    queues: list[Name] | None = Field(None, min_length=1, max_length=QUEUES_MAX)
    job: Annotated[Id, BeforeValidator(without_prefix)] | None = Field(
        None,
        description="In place of `queues`: claim this job, whatever is due before it; a UUID, or job_ and a UUID",
    )
    claim_id: ClaimId | None = Field(
        None, description="The worker's number for this claim, which rises with each; beats refer to it"
    )
    max: Annotated[int, Field(ge=1, le=CLAIM_MAX)] = Field(1, description="Jobs, and no more than it has free slots")
    wait_s: Annotated[float, Field(ge=0, le=60)] = Field(0, description="Seconds to wait for a job")
    lease: Literal["worker", "job"] = Field(
        "worker", description="job: each attempt has a lease of its own, of lease_s, and outlives the worker"
    )
    lease_s: OwnLease | None = Field(None, description="Needed for lease job, and only there")
    max_attempts: dict[Name, Annotated[int, Field(ge=1, le=1000)]] = Field(
        default_factory=dict,
        max_length=KINDS_MAX,
        description="By kind, after how many failures a job is dead if neither it nor its queue says; default 3",
    )

    @model_validator(mode="after")
    def _one_way(self) -> ClaimIn:
        if (self.queues is None) == (self.job is None):
            raise ValueError("give either queues or job")
        if self.job is not None and (self.wait_s or self.max > 1):
            raise ValueError("a claim of one job has neither max nor wait_s: it is answered at once")
        return self


class AssignedJob(Answer):
    """The job of an assignment."""

    id: UUID
    queue: str
    kind: str
    payload: dict[str, Any]
    meta: dict[str, Any] | None
    attempt: int
    failures: int
    max_attempts: int
    priority: int
    run_at: datetime
    created_at: datetime
    schedule: str | None
    occurrence: datetime | None


class AssignmentOut(Answer):
    """An attempt. `assignment`: what it settles by; `deadline_s`: seconds from the claim until it counts as failed."""

    assignment: str
    job: AssignedJob
    deadline_s: float | None


class Claimed(Answer):
    """What the worker is given, and what it is to do; `cancel`: assignments to stop."""

    assignments: list[AssignmentOut]
    state: State
    cancel: list[str]


class ProgressIn(Model):
    """The progress of an attempt."""

    assignment: AssignmentText
    done: Annotated[float, Field(ge=0, le=1)]
    message: Annotated[str, shown(500), Field(max_length=500)] = ""


class BeatIn(Model):
    """A worker's beat: its state, and what it runs."""

    assignments: list[AssignmentText] | None = Field(
        None,
        max_length=LISTED_MAX,
        description="All that it holds, each until its settle was answered",
    )
    claim_id: ClaimId | None = Field(
        None,
        description="With `assignments`: the last claim whose answer it has read or given up, as all before it. What "
        "those claims took and the list does not have is taken back",
    )
    progress: list[ProgressIn] = Field(default_factory=list, max_length=SETTLES_MAX)
    state: Literal["running", "stopping"] = "running"


class BeatOut(Answer):
    """The lease lasts for `lease_s` from the moment at which this beat was sent.

    `state`: quiet, claim nothing more; stop, and end. `cancel`: stop these, then fail or release them. `gone`: of those
    in `assignments` and `progress`; stop these, and do not settle them: they are not yours, or not any more.
    `backoffs`: by queue, as far as this gateway knows it, what operators have set of backoff_s, backoff_factor and
    backoff_cap_s; for workers that compute delays themselves. `listed`: it is stored that all of `assignments` has
    begun; false: list what you have stopped again.
    """

    lease_s: float
    state: State
    backoffs: dict[str, dict[str, float]]
    cancel: list[str]
    gone: list[str]
    listed: bool


class CompleteIn(Model):
    """The result of an attempt."""

    result: Result = Field(None, description="Any JSON, up to 1 MiB; its numbers keep their digits")
    enqueue: list[DependentJob] = Field(
        default_factory=list, max_length=SETTLES_MAX, description="Jobs to create in the same transaction"
    )


class FailIn(Model):
    """Why an attempt has failed."""

    type: Annotated[str, shown(200), Field(min_length=1, max_length=200)] = Field(
        "Error", description="The error's class"
    )
    message: LongText = Field("", description="4 KiB of it are kept")
    traceback: LongText = Field("", description="16 KiB of it are kept")
    retryable: bool = Field(True, description="False: the job is dead at once")
    retry_in_s: Delay | None = Field(None, description="Default: by the backoff of the queue")


class ReleaseIn(Model):
    """Gives an attempt back without a failure."""

    delay_s: Delay | None = Field(None, description="Seconds until it is due again; default: it keeps its place")
    reason: Annotated[str, shown(1000), Field(max_length=1000)] | None = Field(
        None, description="Shown as the job's last error, where people should know why it waits"
    )


class ExtendIn(Model):
    """Renews the lease of an attempt that has one of its own."""

    lease_s: OwnLease | None = Field(None, description="Default: as long as before")


class Extended(Answer):
    """`left_s`: seconds until its lease, or its deadline, ends; null: it is leased with its worker.

    `cancel`: an operator wants it to end.
    """

    left_s: float | None
    cancel: bool


class SettledOut(Answer):
    """The job's new status. `repeated`: the same had been settled before."""

    status: Status
    repeated: bool


class SettlementIn(CompleteIn, FailIn, ReleaseIn):
    """One of many settles: the members of complete, fail or release."""

    assignment: AssignmentText
    outcome: Literal["complete", "fail", "release"]


class Misfit(NamedTuple):
    """One of many that is not of the form that it must have. `assignment`: as it was sent, or empty."""

    assignment: str
    error: ValidationError


def _apart(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    try:
        return handler(value)
    except ValidationError as error:
        named = value.get("assignment") if isinstance(value, dict) else None
        return Misfit(named if isinstance(named, str) else "", error)


class SettlementsIn(Model):
    """Settles, each for itself: of one that is not of this form, the answer says so."""

    settlements: list[Annotated[SettlementIn, WrapValidator(_apart)]] = Field(min_length=1, max_length=SETTLES_MAX)


class SettlementOut(Answer):
    """What became of one: its new `status`, or a `problem`."""

    assignment: str
    status: Status | None
    repeated: bool
    problem: ProblemOut | None


class SettlementsOut(Answer):
    """The results of settles, in the order of the call."""

    settlements: list[SettlementOut]


class Served(Answer):
    """The queues that the worker serves from now on."""

    queues: dict[str, int]


class SignedOff(Answer):
    """How many jobs the worker still had."""

    given_back: int


class AskIn(Model):
    """What a worker is to do: claim nothing more (quiet), end (stop), or go on (null)."""

    state: Literal["quiet", "stop"] | None


class Asked(Answer):
    """The worker learns it with its next beat."""

    worker: int
    state: Literal["quiet", "stop"] | None
