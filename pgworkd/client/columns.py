"""Many jobs as the columns of an INSERT: what they have in common is checked once, the rest column by column.

Checking job by job and field by field costs more than Postgres needs to store them. So the jobs of a statement are
split into columns, in C; a column that is the same for all jobs, as most are, becomes one value. Anything unusual is
checked row by row instead, which also finds which job is invalid, and why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import islice, repeat
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from uuid import UUID, SafeUUID

from pgworkd.client.new_job import (
    FIELDS,
    KEY_CHARS_MAX,
    NAME_CHARS_MAX,
    PAYLOAD,
    PRIORITY_MAX,
    NewJob,
    Waits,
    new_ids,
    new_job,
    row,
    waits,
)
from pgworkd.client.tracing import Producing
from pgworkd.core.payload import encode, encode_plain
from pgworkd.core.traces import added
from pgworkd.errors import UsageError

STATEMENT_ROWS, STATEMENT_CHARS = 5_000, 8 * 1024 * 1024  # more is no faster, but costs the server memory
_STEP_ROWS = 100
"""Jobs drawn and encoded between two yields to the event loop; also how soon large payloads are noticed."""
_NAMES = tuple(field.name for field in FIELDS)
QUEUE_COLUMN, _META = map([name for name in _NAMES if name != "payload"].index, ("queue", "meta"))
"""The places of queue and meta in `Columns`, which keep payloads apart."""
_TEXTS = {
    **dict.fromkeys(("queue", "kind"), NAME_CHARS_MAX),
    **dict.fromkeys(("dedupe_key", "serialize_key", "limit_key"), KEY_CHARS_MAX),
}
Item = TypeVar("Item")
_taken_apart = attrgetter(*_NAMES)


class _Drawn(NamedTuple):
    """A job, its payload as text, and how many characters it sends."""

    job: NewJob
    payload: str
    chars: int


class Columns(NamedTuple):
    """The jobs of one statement: for each field except the payload a list, or an empty one and the common value."""

    ids: range
    payloads: Sequence[str]
    alike: Sequence[Any]
    varying: Sequence[Sequence[Any]]

    @property
    def values(self) -> list[Any]:
        """The statement's parameters."""
        ids = "\n".join([f"{i:032x}" for i in self.ids])
        return [*self.alike, ids, "\n".join(self.payloads), *self.varying]  # compact JSON holds no line break


def parts(items: Iterable[Item], chars: Callable[[Item], int]) -> list[list[Item]]:
    """The items in lists, each small enough for one statement."""
    lists, sum_chars = list[list[Item]](), 0
    for item in items:
        size = chars(item)
        if not lists or len(lists[-1]) == STATEMENT_ROWS or sum_chars + size > STATEMENT_CHARS:
            lists.append([])
            sum_chars = 0
        lists[-1].append(item)
        sum_chars += size
    return lists


def of_rows(ids: range, rows: Sequence[Sequence[Any]]) -> Columns:
    """Rows of `new_job` as columns."""
    columns = list(zip(*rows, strict=True))
    payloads = columns.pop(PAYLOAD)
    same = [column.count(column[0]) == len(column) for column in columns]
    alike = [column[0] if one else None for column, one in zip(columns, same, strict=True)]
    return Columns(ids, payloads, alike, [[] if one else list(col) for col, one in zip(columns, same, strict=True)])


def _of_jobs(ids: range, jobs: Sequence[NewJob], payloads: Sequence[str]) -> Columns | None:
    """The jobs as columns; None if they differ in a field that has to be checked one by one."""
    first = row(jobs[0], payload=payloads[0])
    alike, varying = list[Any](), list[Sequence[Any]]()
    for name, column, value in zip(_NAMES, zip(*map(_taken_apart, jobs), strict=True), first, strict=True):
        if name == "payload":
            continue
        if len(set(map(id, column))) == 1:  # equal would not be enough: True is 1, and one hour is in two folds
            alike.append(value)
            varying.append([])
        elif name in _TEXTS and _are_texts(column, _TEXTS[name]):
            one = len(set(column)) == 1
            alike.append(value if one else None)
            varying.append([] if one else list(column))
        elif name == "priority" and set(map(type, column)) == {int}:
            if not -PRIORITY_MAX - 1 <= min(column) <= max(column) <= PRIORITY_MAX:
                return None
            alike.append(None)
            varying.append(list(column))
        else:
            return None
    return Columns(ids, payloads, alike, varying)


def _are_texts(column: Sequence[Any], chars_max: int) -> bool:
    """Whether every value is text that can be stored: then checking the first one is enough."""
    if set(map(type, column)) != {str}:
        return False
    lengths = set(map(len, column))
    return 1 <= min(lengths) <= max(lengths) <= chars_max and "".join(column).isprintable()


class ManyJobs:
    """The jobs of one call, drawn when they are needed, as many as one statement takes at a time."""

    def __init__(self, jobs: Iterable[NewJob | Mapping[str, Any]], span: Producing | None = None) -> None:
        self.ids: list[UUID] = []
        self.span = span
        """The span whose context the jobs get, if any."""
        self._queue: str | None = None
        """The queue of all jobs so far; None: of several."""
        self.waiting: list[Waits] = []
        self.waiting_ids: dict[int, int] = {}  # by the numbers of the jobs with dependencies
        self._jobs = iter(jobs)
        self._left: list[_Drawn] = []  # drawn, but too large for the previous statement

    def __bool__(self) -> bool:
        """Whether there are more jobs."""
        self._left = self._left or self._draw([], 1)
        return bool(self._left)

    def columns(self) -> Generator[None, None, Columns]:
        """The jobs of the next statement (there must be some); yields in between, so that other tasks can run."""
        part = list[_Drawn]()
        chars = 0
        while more := self._left or self._draw(part, min(_STEP_ROWS, STATEMENT_ROWS - len(part))):
            self._left = []
            for number, drawn in enumerate(more):
                if part and chars + drawn.chars > STATEMENT_CHARS:
                    self._left = more[number:]
                    break
                part.append(drawn)
                chars += drawn.chars
            if self._left or len(part) == STATEMENT_ROWS:
                break
            yield
        return self._stored(part)

    def _stored(self, part: Sequence[_Drawn]) -> Columns:
        jobs, payloads, _ = zip(*part, strict=True)
        ids, first = new_ids(len(jobs)), len(self.ids)
        try:
            found = _of_jobs(ids, jobs, payloads) or of_rows(
                ids, [row(job, payload=text) for job, text in zip(jobs, payloads, strict=True)]
            )
            for number in [n for n, job in enumerate(jobs) if job.after]:
                self.waiting.append(waits(jobs[number], first + number, f"jobs[{first + number}]."))
                self.waiting_ids[first + number] = ids[number]
        except UsageError:
            self._name(jobs)
            raise
        self.ids += uuids(ids)
        return found if self.span is None else self._traced(found, self.span)

    def _traced(self, found: Columns, span: Producing) -> Columns:
        queue = found.alike[QUEUE_COLUMN]  # None: they differ
        self._queue = queue if self._queue == queue or len(self.ids) == len(found.ids) else None
        span.named(self._queue)
        span.counted(len(self.ids))
        alike, varying = [*found.alike], [*found.varying]
        if varying[_META]:
            varying[_META] = [added(meta, span.carrier) for meta in varying[_META]]
        else:
            alike[_META] = added(alike[_META], span.carrier)
        return found._replace(alike=alike, varying=varying)

    def _draw(self, part: Sequence[_Drawn], count: int) -> list[_Drawn]:
        """The next jobs, at most `count`, with their payloads encoded; UsageError names the first invalid one."""
        raw = list(islice(self._jobs, count))
        try:
            jobs = [job if type(job) is NewJob else new_job(job, "a job") for job in raw]
            payloads = [{} if job.payload is None else job.payload for job in jobs]
            texts = encode_plain(payloads) or [encode(payload) for payload in payloads]
            return [
                _Drawn(job, text, len(text) + (0 if job.meta is None else len(encode(job.meta, "meta"))))
                for job, text in zip(jobs, texts, strict=True)
            ]
        except UsageError:
            self._name([*(drawn.job for drawn in part), *raw])
            raise

    def _name(self, jobs: Iterable[NewJob | Mapping[str, Any]]) -> None:
        """Raises UsageError for the first invalid job, named as in "jobs[17].queue"."""
        for number, job in enumerate(jobs, len(self.ids)):
            known = new_job(job, f"jobs[{number}]")
            row(known, f"jobs[{number}].")
            if known.after:
                waits(known, number, f"jobs[{number}].")


def uuids(ids: range) -> list[UUID]:
    """The numbers as UUIDs, as UUID(int=...) makes them, at a tenth of its cost, most of which is checks."""
    made = [object.__new__(UUID) for _ in ids]
    for name, values in (("int", ids), ("is_safe", repeat(SafeUUID.unknown))):
        deque(map(getattr(UUID, name).__set__, made, values), 0)
    return made
