"""What requests and answers of operators look like."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import Field, WithJsonSchema

from pgworkd.admin.background import BackgroundOperation
from pgworkd.admin.dead import DeadGroup
from pgworkd.admin.queries import AuditRow, ListedSchedule, QueueRow, WorkerRow
from pgworkd.admin.tokens import TokenRow
from pgworkd.core.job import Status
from pgworkd.core.recurrence import MISSED_GRACE_S
from pgworkd.core.validation import ROWS_MAX
from pgworkd.gateway.api.models.jobs import (
    Answer,
    Attempts,
    Delay,
    Id,
    Instant,
    Key,
    Limit,
    Model,
    Name,
    Payload,
    Period,
    Priority,
)
from pgworkd.settings.queue import COLUMN_TYPES


class FilterIn(Model):
    """The jobs to operate on: by `ids`, or all that match the rest."""

    ids: list[Id] | None = Field(None, min_length=1, max_length=ROWS_MAX)
    queue: Name | None = None
    kind: Name | None = None
    key: Key | None = Field(None, description="Any of a job's three keys")
    batch: Id | None = None
    group: Annotated[int, Field(ge=1, lt=2**63)] | None = Field(
        None, description="For retry and discard: of this group of errors, `group` of /v1/dead"
    )
    status: Annotated[str, WithJsonSchema({"type": "string", "enum": [*Status]})] | None = None
    all_queues: bool = Field(False, description="Needed for a filter without queue, kind, key, batch and group")
    limit: Limit = Field(ROWS_MAX, description="Jobs in this call")


class Operated(Answer):
    """What was done; `more`: there may be further jobs that match. Call again until it is false."""

    done: int
    outcomes: dict[str, int]
    refused: list[dict[str, str]]
    more: bool


class Matches(Answer):
    """The jobs that match. `exact`: False if there are more than `matches`."""

    matches: int
    exact: bool
    sample: list[UUID]


class OperationOut(Answer, row=BackgroundOperation):
    """An operation in the background. `done`, `requested` (running, asked to stop) and `refused` count jobs so far.

    `expected`: jobs that matched at the start, null for more than could be counted at once. `left_behind`: locked ones
    are tried again.
    """

    what: Literal["cancel", "retry", "discard"]
    status: Status | None
    state: Literal["running", "stopped", "finished"]


class OperationsOut(Answer):
    """Operations in the background."""

    operations: list[OperationOut]


class Depth(Answer):
    """Jobs that could run now."""

    depth: int


class SettingOut(Answer):
    """An effective setting. `from`: row, code, settings or default."""

    value: Any
    source: str = Field(alias="from")


class QueueOut(Answer, row=QueueRow):
    """A queue. `oldest_due_s`: seconds the oldest due job has waited."""

    settings: dict[str, SettingOut]


class QueuesOut(Answer):
    """Queues."""

    queues: list[QueueOut]


class QueueSettings(Model, optional=COLUMN_TYPES):
    """Settings of a queue for all daemons, named as the columns of `queues`; null: what the code says."""

    endpoint: Name | None = Field(None, description="Its jobs are pushed there")
    serialize_scope: Name | None = Field(None, description="Its serialize keys are those of all queues of this scope")


class PauseIn(Model):
    """The length of a pause: one of the two, or until resumed."""

    for_s: Period | None = None
    until: Instant | None = None


class ScheduleIn(Model):
    """A recurring rule: `cron` in `timezone`, or `every_s`.

    missed_grace_s: with missed "skip", how late an occurrence may still run. wait_for_retries: no next occurrence while
    one is retried.
    """

    queue: Name
    kind: Name | None = None
    payload: Payload = None
    cron: Annotated[str, Field(max_length=200)] | None = None
    every_s: Annotated[int, Field(ge=1, le=366 * 86_400)] | None = None
    timezone: Annotated[str, Field(max_length=100)] = "UTC"
    missed: Literal["skip", "once", "all"] = "skip"
    missed_grace_s: Annotated[float, Field(ge=0, le=366 * 86_400)] = MISSED_GRACE_S
    wait_for_retries: bool = False
    priority: Priority = 0
    max_attempts: Attempts | None = None
    timeout_s: Period | None = None
    enabled: bool = True


class EnableIn(Model):
    """Whether the schedule gets further occurrences."""

    enabled: bool


class ScheduleOut(Answer, row=ListedSchedule):
    """A schedule. `source`: code or sql. `next_at`: when its pending occurrence is due; `status`: of that job."""

    source: Literal["code", "sql"]
    status: Status | None


class SchedulesOut(Answer):
    """Schedules, by name."""

    schedules: list[ScheduleOut]


class NextOut(Answer):
    """The next occurrences of a schedule."""

    next: list[datetime]


class Removed(Answer):
    """The schedule or endpoint is gone."""

    name: str
    removed: bool


class WorkerOut(Answer, row=WorkerRow):
    """A worker."""

    kind: Literal["daemon", "gateway", "remote"] = Field(description="remote: it works through a gateway")
    state: Literal["running", "blocked", "stopping", "vanished", "lost"] = Field(
        description="blocked: its event loop; vanished: somebody deleted its row; lost: it is presumed dead"
    )


class WorkersOut(Answer):
    """Workers."""

    workers: list[WorkerOut]


class DeadGroupOut(Answer, row=DeadGroup):
    """Dead jobs of one queue, kind and group of errors; `group` null: not counted yet. `sample`: who died last."""


class DeadOut(Answer):
    """Groups of dead jobs; the totals count all there are, listed or not."""

    groups: list[DeadGroupOut]
    groups_total: int
    dead_total: int


class MuteIn(Model):
    """The group of errors to mute, and for how long; 0: alert again."""

    group: Annotated[int, Field(ge=1, lt=2**63)]
    for_s: Delay


class Muted(Answer):
    """The group of errors, and for how long it is muted."""

    group: int
    for_s: float


class AuditEntry(Answer, row=AuditRow):
    """Who did what; `before` and `after`: of what changed."""

    before: Any
    after: Any


class AuditOut(Answer):
    """Entries, the newest first."""

    entries: list[AuditEntry]


class TokenIn(Model):
    """A token to add: whom it is for, and what it allows: scopes with the queues that each is for, null for all."""

    name: Name
    scopes: dict[str, list[Name] | None] = Field(min_length=1, examples=[{"enqueue": ["mail", "report-*"]}])
    expires_at: Instant | None = None


class TokenMade(Answer):
    """The token: shown once."""

    id: str
    token: str


class TokenOut(Answer, row=TokenRow):
    """A token without its secret."""

    state: Literal["live", "expired", "revoked"]


class TokensOut(Answer):
    """Tokens, the newest first."""

    tokens: list[TokenOut]


class Revoked(Answer):
    """The token is revoked."""

    id: str
    revoked: bool
