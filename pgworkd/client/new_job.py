"""A job as application code describes it, and the row that the statements insert: checked before the round trip."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypedDict, get_args
from uuid import UUID

from pgworkd.core.payload import encode
from pgworkd.core.validation import closest, instant, text, whole
from pgworkd.errors import UsageError, delay_seconds

NAME_CHARS_MAX, KEY_CHARS_MAX, ATTEMPTS_MAX, PRIORITY_MAX = 200, 512, 1000, 2**31 - 1

OnFailedDependency = Literal["wait", "cancel", "run"]
OnDuplicate = Literal["raise", "skip", "replace", "reschedule"]
DedupeBy = Literal["payload"]


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to enqueue; its fields are the arguments of `enqueue`. None leaves a field to the database or the handler.

    queue, kind: 1 to 200 characters; kind None means the queue's own handler. payload, meta (tags, trace context): a
    dict of JSON values, a dataclass or a pydantic model, up to 1 MiB as JSON. priority: an int4, higher runs first.
    The job is due at `run_at` (with a time zone, 1970 to 2199), or after `delay` (seconds or a timedelta, 0 to 366
    days, by the database's clock), and expires if it has not started by `expires_at`. max_attempts: 1 to 1000.
    timeout_s: seconds or a timedelta per attempt, above 0, up to 366 days.

    Keys have 1 to 512 characters and are compared bytewise. dedupe_key: a queue accepts one job per key until that job
    has finished or is dead, and beyond that until `dedupe_until` (an instant), or for `dedupe_for` (seconds or a
    timedelta) from now on. serialize_key: jobs of a queue with the same key run one at a time, in the order in which
    they are due; a job that waits for its retry keeps the key (on_retry="hold") or lets others pass ("yield").
    dedupe_by="payload" in place of a dedupe_key: the key is made of kind and payload, so that a queue accepts one job
    with these. limit_key: what the queue's limits per key, and its fairness, count by.

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
    dedupe_by: DedupeBy | None = None
    after: Iterable[UUID] = ()
    on_failed_dependency: OnFailedDependency = "wait"


_NAMES = tuple(NewJob.__dataclass_fields__)


class JobOptions(TypedDict, total=False):
    """The keyword arguments of NewJob that describe the job by itself, for type checkers."""

    kind: str | None
    priority: int
    run_at: datetime | None
    delay: float | timedelta | None
    expires_at: datetime | None
    max_attempts: int | None
    timeout_s: float | timedelta | None
    dedupe_key: str | None
    meta: object
    serialize_key: str | None
    limit_key: str | None
    on_retry: Literal["hold", "yield"]
    dedupe_until: datetime | None
    dedupe_for: float | timedelta | None
    dedupe_by: DedupeBy | None


class EnqueueOptions(JobOptions, total=False):
    """All keyword arguments of NewJob."""

    after: Iterable[UUID]
    on_failed_dependency: OnFailedDependency


def _timeout(value: float | timedelta, what: str) -> float:
    if value in (0, timedelta(0)):
        raise UsageError(f"{what} is 0: pass more, or None for the handler's own")
    return max(delay_seconds(value, what), 1e-6)  # the column is a real, which would round less to 0


def _dedupe_for(value: float | timedelta, what: str) -> float:
    if value in (0, timedelta(0)):
        raise UsageError(f"{what} is 0: pass more, or None to free the key when the job has finished")
    return delay_seconds(value, what)


def _on_retry(value: object, what: str) -> str:
    if value not in ("hold", "yield"):
        raise UsageError(f'{what} must be "hold" or "yield"')
    return str(value)


def _dedupe_by(value: object, what: str) -> str:
    if value != "payload":
        raise UsageError(f'{what} must be "payload"')
    return "payload"


class Field(NamedTuple):
    """A field of a job as the statements take it."""

    name: str
    """The name of the field of NewJob."""
    parameter: str
    """The name of the parameter of pgworkd.enqueue(), without its p_."""
    type: Literal["text", "int", "float8", "timestamptz", "jsonb"]
    """The type of that parameter."""
    parse: Callable[[Any, str], Any]
    """The value as text or a number; UsageError, naming the field by the second argument, for an invalid one."""
    is_optional: bool = True


_name, _key = partial(text, chars_max=NAME_CHARS_MAX), partial(text, chars_max=KEY_CHARS_MAX)
FIELDS = (
    Field("queue", "queue", "text", _name, is_optional=False),
    Field("kind", "kind", "text", _name),
    Field("payload", "payload", "jsonb", encode),
    Field("priority", "priority", "int", partial(whole, low=-PRIORITY_MAX - 1, high=PRIORITY_MAX), is_optional=False),
    Field("run_at", "run_at", "timestamptz", instant),
    Field("delay", "delay_s", "float8", delay_seconds),
    Field("expires_at", "expires_at", "timestamptz", instant),
    Field("max_attempts", "max_attempts", "int", partial(whole, low=1, high=ATTEMPTS_MAX)),
    Field("timeout_s", "timeout_s", "float8", _timeout),
    Field("dedupe_key", "dedupe_key", "text", _key),
    Field("meta", "meta", "jsonb", encode),
    Field("serialize_key", "serialize_key", "text", _key),
    Field("limit_key", "limit_key", "text", _key),
    Field("on_retry", "on_retry", "text", _on_retry, is_optional=False),
    Field("dedupe_until", "dedupe_until", "timestamptz", instant),
    Field("dedupe_for", "dedupe_for_s", "float8", _dedupe_for),
    Field("dedupe_by", "dedupe_by", "text", _dedupe_by),
)
"""Every field that is stored with a job, in the order of a row and of the statements' parameters."""
QUEUE, PAYLOAD, PRIORITY, META = map([field.name for field in FIELDS].index, ("queue", "payload", "priority", "meta"))
"""The places of these fields in a row."""


class Waits(NamedTuple):
    """The job of this number in a call depends on others."""

    number: int
    after: Sequence[UUID]
    on_failed_dependency: OnFailedDependency


def waits(job: NewJob, index: int = 0, at: str = "") -> Waits:
    """What the job depends on; UsageError, with `at` before the field's name, for an invalid value."""
    after = list(job.after) if isinstance(job.after, Iterable) else [None]
    if not all(isinstance(each, UUID) for each in after):
        raise UsageError(f"{at}after must be a list of job ids, UUIDs as enqueue() returns them; UUID(text) makes one")
    if job.on_failed_dependency not in get_args(OnFailedDependency):
        raise UsageError(f"{at}on_failed_dependency must be one of {', '.join(get_args(OnFailedDependency))}")
    return Waits(index, after, job.on_failed_dependency)


def row(job: NewJob, at: str = "", payload: str | None = None) -> list[Any]:
    """The job as text and numbers, one for each of FIELDS; UsageError, with `at` before the field's name.

    `payload`: the payload as JSON text, if it has been encoded already.
    """
    _check_together(job, at)
    found = list(_fields_of(job))
    if payload is not None or found[PAYLOAD] is None:
        found[PAYLOAD] = payload or "{}"
        fields = _FIELDS_BESIDES
    else:
        fields = _ALL_FIELDS
    for place, name, parse, is_optional in fields:
        if (value := found[place]) is not None or not is_optional:
            found[place] = parse(value, at + name)
    return found


_fields_of = attrgetter(*(field.name for field in FIELDS))
_ALL_FIELDS = [(place, field.name, field.parse, field.is_optional) for place, field in enumerate(FIELDS)]
_FIELDS_BESIDES = [each for each in _ALL_FIELDS if each[0] != PAYLOAD]
"""The fields that are parsed when the payload has been encoded already."""


def _check_together(job: NewJob, at: str) -> None:
    """Raises UsageError for fields that exclude or need each other."""
    if job.run_at is not None and job.delay is not None:
        raise UsageError(f"{at}run_at and delay are both given: pass one of them")
    if job.dedupe_until is not None or job.dedupe_for is not None:
        if job.dedupe_until is not None and job.dedupe_for is not None:
            raise UsageError(f"{at}dedupe_until and dedupe_for are both given: pass one of them")
        if job.dedupe_key is None and job.dedupe_by is None:
            name = "dedupe_for" if job.dedupe_until is None else "dedupe_until"
            raise UsageError(f"{at}{name} needs a dedupe_key: it is the time for which the key stays taken")
    if job.dedupe_by is not None and job.dedupe_key is not None:
        raise UsageError(f"{at}dedupe_by and dedupe_key are both given: pass one of them")
    if job.on_retry == "yield" and job.serialize_key is None:
        raise UsageError(f'{at}on_retry="yield" needs a serialize_key: without one there is no key to yield')


def new_job(job: Any, what: str) -> NewJob:
    """A NewJob, or a mapping with its arguments, as a NewJob; UsageError, naming it `what`, if it is neither."""
    try:
        return job if isinstance(job, NewJob) else NewJob(**job)
    except TypeError as error:  # it says which key is missing, or that this is no mapping
        names = [key for key in job if isinstance(key, str)] if isinstance(job, Mapping) else []
        fault = unexpected(names, _NAMES)
        raise UsageError(f"{what} is not a job: {fault or error}") from None


def job_with(queue: str, payload: object, options: Mapping[str, Any]) -> NewJob:
    """A NewJob; TypeError that names an unknown option, and the one that may be meant."""
    try:
        return NewJob(queue, payload, **options)
    except TypeError:
        raise unexpected(options, _NAMES) or TypeError("queue and payload are given twice") from None


def unexpected(given: Iterable[str], known: Iterable[str]) -> TypeError | None:
    """The error for the first of these names that is not known; None if all are."""
    for name in sorted(set(given).difference(known)):
        meant = closest(name, known)
        return TypeError(f"unexpected keyword argument {name!r}" + (f": did you mean {meant!r}?" if meant else ""))
    return None


def check_on_duplicate(on_duplicate: object, job: NewJob) -> None:
    """Raises UsageError for an unknown value, or for a job without a dedupe_key."""
    if on_duplicate not in get_args(OnDuplicate):
        raise UsageError(f"on_duplicate must be one of {', '.join(get_args(OnDuplicate))}")
    if job.dedupe_key is None and job.dedupe_by is None:
        raise UsageError("on_duplicate needs a dedupe_key, or dedupe_by: without one there are no duplicates")


class _Ids:
    """Version 7 UUIDs (RFC 9562) as integers, each above all that any thread of this process has drawn before."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Resets a forked child, which would otherwise draw its parent's ids, or block on a lock of its threads."""
        self._lock = threading.Lock()
        self._next = 0

    def draw(self, count: int) -> range:
        """Draws ids: this millisecond, 12 random bits and a random start; after the last id if time stands still."""
        low = 0b10 << 62 | secrets.randbits(61)  # the variant; bits are left above for the counts of all calls
        fresh = time.time_ns() // 1_000_000 << 80 | 7 << 76 | secrets.randbits(12) << 64 | low
        with self._lock:
            first = fresh if fresh >> 80 > self._next >> 80 else self._next + secrets.randbits(30)
            self._next = first + count
        return range(first, first + count)


_ids = _Ids()


os.register_at_fork(after_in_child=_ids.forget)


def new_ids(count: int) -> range:
    """Ids for jobs, as integers: ascending within a process; ids of several hosts are ordered by their clocks."""
    return _ids.draw(count)
