"""Batches: trees of jobs, made, filled and sealed on the caller's own connection, in the caller's own transaction.

    async with batch(conn, "payroll", kind="calculate", on_complete={"queue": "report"}) as payroll:
        await payroll.child("cheques", kind="send_cheque", stream=True, final=True)
        await payroll.add({"employee": n} for n in range(100))

With a dedupe_key the tree may be there already: then ask `if payroll.created:` before adding.

At the end of the block the batch is sealed: it takes no more. Each job that completes in "payroll" adds one to
"cheques", with {"input": its payload, "result": its result}; when all is over the job of on_complete is inserted, once.
`conn` is what `pgworkd.client.enqueue` takes. What the driver raises passes through: SQLSTATE PW003 where a batch is
sealed, finished, cancelled or missing, 22023 for what can never be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol, Self
from uuid import UUID

from pgworkd.client.columns import parts
from pgworkd.client.connections import Step, answered, way
from pgworkd.client.new_job import NAME_CHARS_MAX, NEW_JOB_FIELDS, NewJob, new_ids, new_job, row, text, whole
from pgworkd.client.statements import styles
from pgworkd.errors import UsageError
from pgworkd.words.payload import encode
from pgworkd.words.validation import identity

FAILURES_MAX = 2**31 - 1

_CREATE = styles("""
SELECT CAST(id AS text), created
FROM pgworkd.create_batch(
    p_name => CAST($1 AS text), p_parent => CAST(CAST($2 AS text) AS uuid), p_queue => CAST($3 AS text),
    p_kind => CAST($4 AS text), p_stream => CAST($5 AS boolean), p_stream_kind => CAST($6 AS text),
    p_final => CAST($7 AS boolean), p_max_failures => CAST($8 AS int), p_dedupe_key => CAST($9 AS text),
    p_dedupe_until => CAST(CAST($10 AS text) AS timestamptz), p_dedupe_for_s => CAST($11 AS float8),
    p_on_complete => CAST(CAST($12 AS text) AS jsonb), p_on_failure => CAST(CAST($13 AS text) AS jsonb))""")
_ADD = styles("""
SELECT cardinality(pgworkd.add_jobs(
    CAST(CAST($1 AS text) AS uuid), p_ids => CAST(CAST($2 AS text[]) AS uuid[]),
    p_payloads => CAST(CAST($3 AS text[]) AS jsonb[]), p_queue => CAST($4 AS text), p_kind => CAST($5 AS text),
    p_priority => CAST($6 AS int), p_run_at => CAST(CAST($7 AS text) AS timestamptz), p_max_attempts => CAST($8 AS int),
    p_timeout_s => CAST($9 AS float8), p_meta => CAST(CAST($10 AS text) AS jsonb)))""")
_SEAL = styles("SELECT pgworkd.seal_batch(CAST(CAST($1 AS text) AS uuid))")
_CANCEL = styles("SELECT cancelled, requested, more FROM pgworkd.cancel_batch(CAST(CAST($1 AS text) AS uuid), 10000)")
_PROGRESS = styles("""
SELECT CAST(id AS text), name, depth, state, total, done, completed, dead, cancelled
FROM pgworkd.batch_tree(CAST(CAST($1 AS text) AS uuid))""")


class _Options(NamedTuple):
    """Of a batch to be, in the order of _CREATE."""

    stream: bool = False
    stream_kind: str | None = None
    final: bool = False
    max_failures: int | None = None
    dedupe_key: str | None = None
    dedupe_until: str | None = None
    dedupe_for_s: float | None = None
    on_complete: str | None = None
    on_failure: str | None = None


class Progress(NamedTuple):
    """What has become of a batch. `state`: open, sealed, cancelling, cancelled, completed (with failures).

    `done` of `total` jobs are over: completed, dead, or cancelled (expired ones among them).
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


class Cancelled(NamedTuple):
    """What a cancellation has done: jobs ended, and running ones asked to end. `more`: daemons see to the rest."""

    cancelled: int
    requested: int
    more: bool


class Kinds(Protocol):
    """What an app knows about kinds of jobs."""

    def queue_of(self, kind: str) -> str | None:
        """The queue of that kind's handler."""

    def stream_kind(self, parent: str, child: str) -> str | None:
        """The kind whose handler makes jobs of `child` from what completes in `parent`."""


class Batch:
    """A batch, by its id, on a connection. Making one asks nothing of the database.

    Methods answer at once where the connection is sync, else with what is to be awaited.
    """

    def __init__(
        self,
        conn: Any,
        batch_id: UUID,
        name: str = "",
        *,
        created: bool = False,
        seals: bool = True,
        kinds: Kinds | None = None,
    ) -> None:
        self.id = identity(batch_id, "batch_id")
        self.name = name
        self.created = created
        """False: it was there before, under its dedupe key or as a child of that name."""
        self.seals = seals
        """At the end of a block; one that its parent streams into is sealed by that one's end."""
        self._conn = conn
        self._way = way(conn)
        self._kinds = kinds

    def child(
        self,
        name: str,
        *,
        kind: str | None = None,
        queue: str | None = None,
        stream: bool = False,
        stream_kind: str | None = None,
        final: bool = False,
        max_failures: int | None = None,
    ) -> Any:
        """Makes a batch below this one, or finds the one of that name; a Batch, as from `batch()`.

        stream: each job that completes here adds one there: of its `kind`, or of `stream_kind`, which makes the real
        ones (see `App.stream`); it is sealed when this one is finished. Make it before this one has jobs.
        final: its results are the results of the tree. The rest as for `batch()`.
        """
        if stream and stream_kind is None and self._kinds is not None:
            stream_kind = self._kinds.stream_kind(self.name, name)
        options = _Options(bool(stream), stream_kind, bool(final), max_failures)
        return _open(self._conn, self.id, name, _queue(queue, kind, self._kinds), kind, options, self._kinds)

    def add(
        self,
        payloads: Iterable[object],
        *,
        kind: str | None = None,
        queue: str | None = None,
        priority: int = 0,
        run_at: datetime | None = None,
        max_attempts: int | None = None,
        timeout_s: float | timedelta | None = None,
        meta: object = None,
    ) -> Any:
        """Adds a job for each payload, all or none; their ids in that order.

        What the options are is said at `NewJob`; kind and queue are the batch's unless given. UsageError
        (InvalidPayload is one) names the payload at fault: "payloads[3].name ...".
        """
        job = NewJob(
            *(queue or "-", None),
            kind=kind,
            priority=priority,
            run_at=run_at,
            max_attempts=max_attempts,
            timeout_s=timeout_s,
            meta=meta,
        )
        _, _, _, _, due, _, _, attempts, limit_s, _, tags = row(job)
        options = (queue, kind, priority, due, attempts, limit_s, tags)
        encoded = [encode(payload, f"payloads[{i}]") for i, payload in enumerate(payloads)]
        ids = new_ids(len(encoded))
        rows = zip((f"{i:032x}" for i in ids), encoded, strict=True)
        steps: list[Step] = [partial(_added, self.id, part, options) for part in parts(rows, lambda r: len(r[1]))]
        return answered(self._way(self._conn, steps), lambda _: [UUID(int=i) for i in ids])

    def seal(self) -> Any:
        """From the commit on it takes no more, and is finished when its jobs are; False if it was sealed before."""
        return self._ask(_SEAL, lambda rows: bool(rows[0][0]))

    def cancel(self) -> Any:
        """Ends the batch and all below it: waiting jobs now, running ones are asked to; see `Cancelled`."""
        return self._ask(_CANCEL, lambda rows: Cancelled(*rows[0]))

    def progress(self) -> Any:
        """The Progress of this batch and of those below it, as a list, each before its children. Counts no jobs."""
        return self._ask(_PROGRESS, lambda rows: [Progress(UUID(found[0]), *found[1:]) for found in rows])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self.seals:
            self.seal()

    def _ask(self, statement: Any, answer: Callable[[list[Any]], Any]) -> Any:
        return answered(self._way(self._conn, [lambda: (statement, [str(self.id)])]), answer)


class Opening:
    """A batch to be, on an async connection: await it, or enter it."""

    def __init__(self, found: Coroutine[Any, Any, Batch]) -> None:
        self._found = found

    def __await__(self) -> Generator[Any, Any, Batch]:
        return self._found.__await__()

    async def __aenter__(self) -> Batch:
        self._batch = await self._found
        return self._batch

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None and self._batch.seals:
            await self._batch.seal()


def batch(
    conn: Any,
    name: str,
    *,
    kind: str | None = None,
    queue: str | None = None,
    dedupe_key: str | None = None,
    dedupe_until: datetime | None = None,
    dedupe_for: float | timedelta | None = None,
    max_failures: int | None = None,
    on_complete: NewJob | Mapping[str, Any] | None = None,
    on_failure: NewJob | Mapping[str, Any] | None = None,
    kinds: Kinds | None = None,
) -> Any:
    """Makes the root of a tree, or finds the one of that name that has the dedupe_key: a Batch; `created` tells which.

    To be awaited, or entered, if `conn` is async. Entered, it is sealed at the end of the block; an exception
    leaves it open, if it does not roll back the transaction.

    dedupe_key: an unfinished tree has it, and one that finished, until `dedupe_until`, or for `dedupe_for` seconds from
    now on; cancelled or deleted, a tree frees its key. One that is sealed takes no more (PW003).
    kind, queue: of its jobs, and of its children's, unless told otherwise; without a queue that of the kind's handler
    where `kinds` (an app) knows it, else the queue named like the kind, or the batch. max_failures: more dead jobs
    cancel the batch. on_complete: the job to insert when all of the tree is over; on_failure: the one to insert
    instead if anything died or was cancelled. Their payload gets a "batch" with id, name, state and counts.
    Raises at the call UsageError for a value out of bounds or a connection of unknown type.
    """
    keys = row(NewJob("-", kind=kind, dedupe_key=dedupe_key, dedupe_until=dedupe_until, dedupe_for=dedupe_for))
    until, for_s = keys[-2:] if len(keys) > NEW_JOB_FIELDS else (None, None)
    options = _Options(
        max_failures=max_failures,
        dedupe_key=dedupe_key,
        dedupe_until=until,
        dedupe_for_s=for_s,
        on_complete=_callback(on_complete, "on_complete"),
        on_failure=_callback(on_failure, "on_failure"),
    )
    return _open(conn, None, name, _queue(queue, kind, kinds) or name, kind, options, kinds)


def _open(
    conn: Any,
    parent: UUID | None,
    name: str,
    queue: str | None,
    kind: str | None,
    options: _Options,
    kinds: Kinds | None,
) -> Any:
    text(name, "name", NAME_CHARS_MAX)
    row(NewJob("-", kind=kind))  # for its refusals
    if queue is not None:
        text(queue, "queue", NAME_CHARS_MAX)
    if options.max_failures is not None:
        whole(options.max_failures, "max_failures", 0, FAILURES_MAX)
    where = (name, None if parent is None else str(parent), queue, kind)

    def made(rows: list[Any]) -> Batch:
        return Batch(conn, UUID(rows[0][0]), name, created=rows[0][1], seals=not options.stream, kinds=kinds)

    found = answered(way(conn)(conn, [lambda: (_CREATE, [*where, *options])]), made)
    return found if isinstance(found, Batch) else Opening(found)


def _added(batch_id: UUID, part: list[tuple[str, str]], options: tuple[Any, ...]) -> tuple[Any, Sequence[Any]]:
    ids, payloads = map(list, zip(*part, strict=True))
    return _ADD, [str(batch_id), ids, payloads, *options]


def _queue(queue: str | None, kind: str | None, kinds: Kinds | None) -> str | None:
    """Where jobs of that kind go unless it is said."""
    return queue if queue is not None or kind is None else (kinds and kinds.queue_of(kind)) or kind


def _callback(job: NewJob | Mapping[str, Any] | None, what: str) -> str | None:
    """A job to be inserted later, as JSON."""
    if job is None:
        return None
    job = new_job(job, what)
    payload = row(job, f"{what}.")[2]
    usual = NewJob(job.queue)
    given = {f.name: getattr(job, f.name) for f in fields(job) if getattr(job, f.name) != getattr(usual, f.name)}
    if wrong := sorted(given.keys() - _OF_CALLBACKS):
        raise UsageError(f"{what}.{wrong[0]} means nothing for a job that is inserted when a batch is over: drop it")
    if isinstance(job.timeout_s, timedelta):
        given["timeout_s"] = job.timeout_s.total_seconds()
    return encode({**given, "queue": job.queue, "payload": json.loads(payload)}, what)


_OF_CALLBACKS = {"kind", "payload", "priority", "max_attempts", "timeout_s", "meta", "serialize_key", "limit_key"}
