"""A job to be, as application code gives it, and as the row that an INSERT takes: checked before the round trip."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, get_args
from uuid import UUID

from pgworkd.errors import UsageError, delay_seconds
from pgworkd.words.payload import encode

NAME_CHARS_MAX, KEY_CHARS_MAX, ATTEMPTS_MAX, PRIORITY_MAX = 200, 512, 1000, 2**31 - 1
FIRST_INSTANT, END_OF_INSTANTS = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


OnFailedDependency = Literal["wait", "cancel", "run"]


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be, the arguments of `enqueue`. None leaves a thing to the database or the handler.

    queue, kind: 1 to 200 characters. payload, meta (tags, trace context): a dict of JSON values, a dataclass or a
    pydantic model, up to 1 MiB as JSON. priority: higher first, an int4. It starts at `run_at` (with a time zone, 1970
    to 2199), or after `delay` (seconds by the database's clock, 0 to 366 days), and not from `expires_at` on.
    max_attempts: 1 to 1000. timeout_s: per attempt, above 0, up to 366 days.

    Keys have 1 to 512 characters and are compared bytewise. dedupe_key: a queue takes one job per key until that is
    over or dead, and until `dedupe_until`, or for `dedupe_for` seconds from now on, also if it is over before.
    serialize_key: a queue runs one job per key at a time, in the order in which they are due; one that waits for its
    retry holds the key (on_retry="hold") or lets others pass ("yield"). limit_key: what the queue's limits per key
    and turns count by.

    after: ids of jobs that must complete first. on_failed_dependency: what happens to this job if one of them is
    dead, cancelled or expired: it stays blocked, and a retry of the other unblocks it ("wait"); it is cancelled within
    a minute or so ("cancel"); or it runs anyway ("run").
    """

    queue: str
    payload: object = None
    _: KW_ONLY
    kind: str | None = None
    priority: int = 0
    run_at: datetime | None = None
    delay: float | timedelta | None = None
    expires_at: datetime | None = None
    max_attempts: int | None = None
    timeout_s: float | timedelta | None = None
    dedupe_key: str | None = None
    meta: object = None
    serialize_key: str | None = None
    limit_key: str | None = None
    on_retry: Literal["hold", "yield"] = "hold"
    dedupe_until: datetime | None = None
    dedupe_for: float | timedelta | None = None
    after: Iterable[UUID] = ()
    on_failed_dependency: OnFailedDependency = "wait"


class Waits(NamedTuple):
    """The job of this number in a call waits for others."""

    number: int
    after: Sequence[UUID]
    on_failed_dependency: OnFailedDependency


NEW_JOB_FIELDS, KEYED_JOB_FIELDS = 11, 16
"""How many fields a row has: without and with what only jobs with keys have."""


def waits(job: NewJob, index: int = 0, at: str = "") -> Waits:
    """What the job waits for."""
    after = list(job.after) if isinstance(job.after, Iterable) else [None]
    if not all(isinstance(each, UUID) for each in after):
        raise UsageError(f"{at}after must be a list of jobs' ids, as enqueue() answers with them")
    if job.on_failed_dependency not in get_args(OnFailedDependency):
        raise UsageError(f"{at}on_failed_dependency must be one of {', '.join(get_args(OnFailedDependency))}")
    return Waits(index, after, job.on_failed_dependency)


def row(job: NewJob, at: str = "", payload: str | None = None) -> tuple[Any, ...]:
    """The job as text and numbers: NEW_JOB_FIELDS of them, or KEYED_JOB_FIELDS if it has any of the last five.

    `payload`: as text, if it has been encoded already.
    """
    if job.run_at is not None and job.delay is not None:
        raise UsageError(f"{at}run_at and delay are both given: pass one of them")
    if job.timeout_s is not None and job.timeout_s in (0, timedelta(0)):
        raise UsageError(f"{at}timeout_s is 0: pass more, or None for the handler's own")
    fields = (
        text(job.queue, f"{at}queue", NAME_CHARS_MAX),
        None if job.kind is None else text(job.kind, f"{at}kind", NAME_CHARS_MAX),
        _payload(job, at) if payload is None else payload,
        whole(job.priority, f"{at}priority", -PRIORITY_MAX - 1, PRIORITY_MAX),
        None if job.run_at is None else _instant(job.run_at, f"{at}run_at"),
        None if job.delay is None else delay_seconds(job.delay, f"{at}delay"),
        None if job.expires_at is None else _instant(job.expires_at, f"{at}expires_at"),
        None if job.max_attempts is None else whole(job.max_attempts, f"{at}max_attempts", 1, ATTEMPTS_MAX),
        None if job.timeout_s is None else max(delay_seconds(job.timeout_s, f"{at}timeout_s"), 1e-6),  # not 0 as real
        None if job.dedupe_key is None else text(job.dedupe_key, f"{at}dedupe_key", KEY_CHARS_MAX),
        None if job.meta is None else encode(job.meta, f"{at}meta"),
    )
    last = (job.serialize_key, job.limit_key, job.on_retry, job.dedupe_until, job.dedupe_for)
    return fields if last == _NO_KEYS else fields + _keys(job, at)


def _payload(job: NewJob, at: str) -> str:
    return "{}" if job.payload is None else encode(job.payload, f"{at}payload")


_NO_KEYS = (None, None, "hold", None, None)


def _keys(job: NewJob, at: str) -> tuple[Any, ...]:
    if job.on_retry not in ("hold", "yield"):
        raise UsageError(f'{at}on_retry must be "hold" or "yield"')
    if job.on_retry == "yield" and job.serialize_key is None:
        raise UsageError(f'{at}on_retry="yield" needs a serialize_key: without one there is nothing to hold')
    if job.dedupe_until is not None and job.dedupe_for is not None:
        raise UsageError(f"{at}dedupe_until and dedupe_for are both given: pass one of them")
    for name, value in (("dedupe_until", job.dedupe_until), ("dedupe_for", job.dedupe_for)):
        if value is not None and job.dedupe_key is None:
            raise UsageError(f"{at}{name} needs a dedupe_key: it says for how long that is taken")
    if job.dedupe_for is not None and job.dedupe_for in (0, timedelta(0)):
        raise UsageError(f"{at}dedupe_for is 0: pass more, or None to free the key when the job is over")
    return (
        None if job.serialize_key is None else text(job.serialize_key, f"{at}serialize_key", KEY_CHARS_MAX),
        None if job.limit_key is None else text(job.limit_key, f"{at}limit_key", KEY_CHARS_MAX),
        str(job.on_retry),
        None if job.dedupe_until is None else _instant(job.dedupe_until, f"{at}dedupe_until"),
        None if job.dedupe_for is None else delay_seconds(job.dedupe_for, f"{at}dedupe_for"),
    )


def new_job(job: Any, what: str) -> NewJob:
    """A NewJob, or a mapping with its arguments, as a NewJob; UsageError says what is wrong with `what`."""
    try:
        return job if isinstance(job, NewJob) else NewJob(**job)
    except TypeError as error:  # it says which key is unknown or missing, or that this is no mapping
        raise UsageError(f"{what} is not a job: {error}") from None


def text(value: object, what: str, chars_max: int) -> str:
    """The text, if it can be stored and has 1 to `chars_max` characters."""
    if not isinstance(value, str) or not 1 <= len(value) <= chars_max:
        raise UsageError(f"{what} must be text of 1 to {chars_max} characters")
    if not value.isprintable():  # neither is NUL or a lone surrogate: encode() refuses those in its words
        encode(value, what, object_only=False)
    return value


def whole(value: object, what: str, low: int, high: int) -> int:
    """The int, if it lies between the two."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{what} must be an int from {low} to {high}")
    return int(value)  # of an enum: psycopg takes no list of mixed types


def _instant(value: object, what: str) -> str:
    if not isinstance(value, datetime) or value.utcoffset() is None or not FIRST_INSTANT <= value < END_OF_INSTANTS:
        raise UsageError(f"{what} must be a datetime from 1970 to 2199 with a time zone: without one it is a guess")
    return value.astimezone(UTC).isoformat()


class _Ids:
    """Version 7 UUIDs (RFC 9562) as integers, each above all that this process has drawn before, in whatever thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """For a child that was forked: else it would go on where its parent does, or wait for a lock of its threads."""
        self._lock = threading.Lock()
        self._next = 0

    def draw(self, count: int) -> range:
        """This millisecond, 12 random bits, and on from a random start; in one that is not later: on from the last."""
        low = 0b10 << 62 | secrets.randbits(61)  # the variant; room above for the counts of all calls
        fresh = time.time_ns() // 1_000_000 << 80 | 7 << 76 | secrets.randbits(12) << 64 | low
        with self._lock:
            first = fresh if fresh >> 80 > self._next >> 80 else self._next + secrets.randbits(30)
            self._next = first + count
        return range(first, first + count)


_ids = _Ids()


os.register_at_fork(after_in_child=_ids.forget)


def new_ids(count: int) -> range:
    """Ids for jobs, as integers. They rise within a process; those of several hosts are ordered by their clocks."""
    return _ids.draw(count)
