"""Batches: trees of jobs, created, filled and sealed on the caller's own connection, in the caller's own transaction.

    async with batch(conn, "payroll", kind="calculate", on_complete={"queue": "report"}) as payroll:
        await payroll.child("cheques", kind="send_cheque", stream=True, final=True)
        await payroll.add({"employee": n} for n in range(100))

With a dedupe_key the tree may exist already: check `if payroll.created:` before adding.

At the end of the block the batch is sealed: it accepts no more jobs. Each job that completes in "payroll" adds one to
"cheques", with {"input": its payload, "result": its result}. When all jobs have finished, the job of on_complete is
inserted, once. `conn` is any connection that `pgworkd.client.enqueue` accepts. Errors of the driver pass through:
SQLSTATE PW003 where a batch is sealed, finished, cancelled or missing (see `pgworkd.errors.SQLSTATES`), 22023 for
invalid arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any, Generic, NamedTuple, Never, Self, TypeVar, Unpack, overload
from uuid import UUID

from pgworkd.client.batch_types import AddOptions, BatchOptions, Cancelled, ChildOptions, Kinds, Progress
from pgworkd.client.connections import AnyAsyncConnection, SyncConnection, answered, way
from pgworkd.client.enqueueing import Enqueued
from pgworkd.client.items import Items, values_of
from pgworkd.client.new_job import META, NAME_CHARS_MAX, PAYLOAD, NewJob, OnDuplicate, new_job, row, unexpected
from pgworkd.client.statements import BATCH_PROGRESS, CANCEL_BATCH, CREATE_BATCH, SEAL_BATCH
from pgworkd.client.tracing import producing, ran
from pgworkd.core.payload import encode
from pgworkd.core.traces import added, current_context
from pgworkd.core.validation import identity, text, whole
from pgworkd.errors import UsageError

FAILURES_MAX = 2**31 - 1


class _Creation(NamedTuple):
    """How to create a batch, in the order of CREATE_BATCH."""

    stream: bool = False
    stream_kind: str | None = None
    final: bool = False
    max_failures: int | None = None
    dedupe_key: str | None = None
    dedupe_until: str | None = None
    dedupe_for_s: float | None = None
    on_complete: str | None = None
    on_failure: str | None = None
    max_attempts: int | None = None
    meta: str | None = None


Conn_co = TypeVar("Conn_co", covariant=True)
SyncT = TypeVar("SyncT", bound=SyncConnection)
AsyncT = TypeVar("AsyncT", bound=AnyAsyncConnection)


class Batch(Generic[Conn_co]):
    """A batch, by its id, on a connection. The constructor sends nothing to the database.

    Methods return their answer where the connection is sync, an awaitable of it where it is async. (The overloads for
    Batch[Never] match only a connection of type Any.)
    """

    def __init__(
        self,
        conn: Conn_co,
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
        """False: the batch existed before, with the same dedupe key, or as a child of that name."""
        self.seals = seals
        """Whether the end of a block seals the batch; one that its parent streams into is sealed by the parent."""
        self._conn = conn
        self._way = way(conn)
        self._kinds = kinds

    @overload
    def child(self: Batch[Never], name: str, **options: Unpack[ChildOptions]) -> Any: ...
    @overload
    def child(self: Batch[SyncConnection], name: str, **options: Unpack[ChildOptions]) -> Batch[SyncConnection]: ...
    @overload
    def child(
        self: Batch[AnyAsyncConnection], name: str, **options: Unpack[ChildOptions]
    ) -> Opening[AnyAsyncConnection]: ...
    def child(self, name: str, **options: Unpack[ChildOptions]) -> Any:
        """Creates a batch below this one, or returns the one of that name; to be awaited, or entered, if async.

        stream: each job that completes in this batch adds one to the child: of its `kind`, or of `stream_kind`, whose
        handler makes the child's jobs (see `App.stream`). The child is sealed when this batch has finished. Create it
        before this batch has jobs. final: its results are the results of the tree. kind, queue, max_failures,
        max_attempts, meta: as for `batch()`.
        """
        stream_kind = options.get("stream_kind")
        if options.get("stream") and stream_kind is None and self._kinds is not None:
            stream_kind = self._kinds.stream_kind(self.name, name)
        kind, max_failures = options.get("kind"), options.get("max_failures")
        queue = _queue(options.get("queue"), kind, self._kinds)
        _known(options, ChildOptions)
        creation = _Creation(bool(options.get("stream")), stream_kind, bool(options.get("final")), max_failures)
        creation = creation._replace(**_of_jobs(options))
        return _open(self._conn, self.id, name, queue, kind, creation, self._kinds)

    @overload
    def add(
        self: Batch[Never], payloads: Iterable[object], *, on_duplicate: Any = None, **options: Unpack[AddOptions]
    ) -> Any: ...
    @overload
    def add(
        self: Batch[SyncConnection],
        payloads: Iterable[object],
        *,
        on_duplicate: None = None,
        **options: Unpack[AddOptions],
    ) -> list[UUID]: ...
    @overload
    def add(
        self: Batch[SyncConnection],
        payloads: Iterable[object],
        *,
        on_duplicate: OnDuplicate,
        **options: Unpack[AddOptions],
    ) -> list[Enqueued]: ...
    @overload
    def add(
        self: Batch[AnyAsyncConnection],
        payloads: Iterable[object],
        *,
        on_duplicate: None = None,
        **options: Unpack[AddOptions],
    ) -> Coroutine[Any, Any, list[UUID]]: ...
    @overload
    def add(
        self: Batch[AnyAsyncConnection],
        payloads: Iterable[object],
        *,
        on_duplicate: OnDuplicate,
        **options: Unpack[AddOptions],
    ) -> Coroutine[Any, Any, list[Enqueued]]: ...
    def add(
        self, payloads: Iterable[object], *, on_duplicate: OnDuplicate | None = None, **options: Unpack[AddOptions]
    ) -> Any:
        """Adds a job for each payload, all or none; their ids in that order, with `on_duplicate` an Enqueued for each.

        The options are those of `NewJob`; kind and queue default to the batch's. dedupe_key, serialize_key: a key, or
        a list with one for each payload. A dedupe key is unique in its batch (and queue), so has at most 475
        characters; on_duplicate: as for `enqueue()`. A serialize key is one of the queue. UsageError (InvalidPayload
        is one) names the invalid payload: "payloads[3].name ...".
        """
        _known(options, AddOptions)
        encoded = [encode(payload, f"payloads[{i}]") for i, payload in enumerate(payloads)]
        items = Items(self.id, encoded, options, on_duplicate)
        if (span := producing(options.get("queue"))) is not None:
            items.trace(span.carrier)
            span.counted(len(encoded))
        return answered(ran(self._way, self._conn, items.steps(), span), items.answer)

    @overload
    def seal(self: Batch[Never]) -> Any: ...
    @overload
    def seal(self: Batch[SyncConnection]) -> bool: ...
    @overload
    def seal(self: Batch[AnyAsyncConnection]) -> Coroutine[Any, Any, bool]: ...
    def seal(self) -> Any:
        """Closes the batch to further jobs, from the commit on; it finishes with its jobs. False if sealed before."""
        return self._ask(SEAL_BATCH, lambda rows: bool(rows[0][0]))

    @overload
    def cancel(self: Batch[Never]) -> Any: ...
    @overload
    def cancel(self: Batch[SyncConnection]) -> Cancelled: ...
    @overload
    def cancel(self: Batch[AnyAsyncConnection]) -> Coroutine[Any, Any, Cancelled]: ...
    def cancel(self) -> Any:
        """Cancels the batch and all below it: waiting jobs at once; running ones are asked to stop."""
        return self._ask(CANCEL_BATCH, lambda rows: Cancelled(*rows[0]))

    @overload
    def progress(self: Batch[Never]) -> Any: ...
    @overload
    def progress(self: Batch[SyncConnection]) -> list[Progress]: ...
    @overload
    def progress(self: Batch[AnyAsyncConnection]) -> Coroutine[Any, Any, list[Progress]]: ...
    def progress(self) -> Any:
        """The progress of this batch and of those below it, parents before children. Reads counters, no jobs."""
        return self._ask(BATCH_PROGRESS, lambda rows: [Progress(UUID(found[0]), *found[1:]) for found in rows])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self.seals:
            self._seal()

    def _seal(self) -> Any:
        return self._ask(SEAL_BATCH, lambda rows: bool(rows[0][0]))

    def _ask(self, statement: Any, answer: Callable[[list[Any]], Any]) -> Any:
        return answered(self._way(self._conn, [lambda: (statement, [str(self.id)])]), answer)


class Opening(Generic[Conn_co]):
    """A batch that is created, or found, when this is awaited or entered; of an async connection."""

    def __init__(self, found: Coroutine[Any, Any, Batch[Conn_co]]) -> None:
        self._found = found

    def __await__(self) -> Generator[Any, Any, Batch[Conn_co]]:
        return self._found.__await__()

    async def __aenter__(self) -> Batch[Conn_co]:
        self._batch = await self._found
        return self._batch

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None and self._batch.seals:
            await self._batch._seal()  # noqa: SLF001


@overload
def batch(conn: SyncT, name: str, *, kinds: Kinds | None = None, **options: Unpack[BatchOptions]) -> Batch[SyncT]: ...
@overload
def batch(
    conn: AsyncT, name: str, *, kinds: Kinds | None = None, **options: Unpack[BatchOptions]
) -> Opening[AsyncT]: ...
def batch(conn: Any, name: str, *, kinds: Kinds | None = None, **options: Unpack[BatchOptions]) -> Any:
    """Creates the root of a tree, or returns that of its name, queue and dedupe_key; `created` tells which.

    A Batch if `conn` is sync; to be awaited, or entered, if it is async. The end of a block seals it; an exception
    leaves it open, if it does not roll back the transaction.

    kind, queue: of its jobs, and of its children's by default. Without a queue, that of the kind's handler, if
    `kinds` (an app) knows it, else the queue named as the kind, or as the batch. dedupe_key: taken while the tree is
    unfinished, and after that until `dedupe_until` (an instant), or for `dedupe_for` (seconds or a timedelta) from now
    on, or for as long as the tree is kept (dedupe_for="kept"); a tree that is cancelled or deleted frees its key. A
    tree found sealed accepts no jobs (PW003).
    max_attempts: of its jobs that do not say. meta: facts about the batch, as JSON, that its progress shows.
    max_failures: the batch is cancelled when more jobs than that are dead. on_complete: the job to insert when the
    whole tree has finished; on_failure: the job to insert instead if any job died or was cancelled. Their payload gets
    a "batch" with id, name, state and counts.

    Raises UsageError at the call for an invalid value or an unsupported connection.
    """
    _known(options, BatchOptions)
    kind, queue = options.get("kind"), options.get("queue")
    key: dict[str, Any] = {name: options.get(name) for name in ("dedupe_key", "dedupe_until", "dedupe_for")}
    is_kept = key["dedupe_for"] == "kept"
    values = values_of(NewJob("-", kind=kind, **key | ({"dedupe_for": 1} if is_kept else {})))
    creation = _Creation(
        max_failures=options.get("max_failures"),
        dedupe_key=values["dedupe_key"],
        dedupe_until="infinity" if is_kept else values["dedupe_until"],
        dedupe_for_s=None if is_kept else values["dedupe_for"],
        on_complete=_callback(options.get("on_complete"), "on_complete"),
        on_failure=_callback(options.get("on_failure"), "on_failure"),
        **_of_jobs(options),
    )
    return _open(conn, None, name, _queue(queue, kind, kinds) or name, kind, creation, kinds)


def _of_jobs(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a batch that are as those of a job, checked as these are."""
    values = values_of(NewJob("-", max_attempts=options.get("max_attempts"), meta=options.get("meta")))
    return {name: values[name] for name in ("max_attempts", "meta")}


def _known(options: Mapping[str, Any], known: Any) -> None:
    if (error := unexpected(options, known.__annotations__)) is not None:
        raise error


def _open(
    conn: Any,
    parent: UUID | None,
    name: str,
    queue: str | None,
    kind: str | None,
    creation: _Creation,
    kinds: Kinds | None,
) -> Any:
    text(name, "name", NAME_CHARS_MAX)
    row(NewJob(queue if queue is not None else "-", kind=kind))  # raises UsageError
    if creation.max_failures is not None:
        whole(creation.max_failures, "max_failures", 0, FAILURES_MAX)
    where = (name, None if parent is None else str(parent), queue, kind)

    def made(rows: list[Any]) -> Batch[Any]:
        return Batch(conn, UUID(rows[0][0]), name, created=rows[0][1], seals=not creation.stream, kinds=kinds)

    found = answered(way(conn)(conn, [lambda: (CREATE_BATCH, [*where, *creation])]), made)
    return found if isinstance(found, Batch) else Opening(found)


def _queue(queue: str | None, kind: str | None, kinds: Kinds | None) -> str | None:
    """The queue for jobs of the kind: the given one, that of its handler, or the one named as the kind."""
    return queue if queue is not None or kind is None else (kinds and kinds.queue_of(kind)) or kind


def _callback(job: NewJob | Mapping[str, Any] | None, what: str) -> str | None:
    """A job to be inserted later, as JSON."""
    if job is None:
        return None
    job = new_job(job, what)
    checked = row(job, f"{what}.")
    usual = NewJob(job.queue)
    given = {f.name: getattr(job, f.name) for f in fields(job) if getattr(job, f.name) != getattr(usual, f.name)}
    if wrong := sorted(given.keys() - _OF_CALLBACKS):
        raise UsageError(f"{what}.{wrong[0]} has no meaning for a job that is inserted when a batch finishes: drop it")
    if isinstance(job.timeout_s, timedelta):
        given["timeout_s"] = job.timeout_s.total_seconds()
    carrier = current_context()
    texts = {"payload": checked[PAYLOAD], "meta": checked[META] if carrier is None else added(checked[META], carrier)}
    plain = encode({**{name: given[name] for name in given.keys() - texts.keys()}, "queue": job.queue}, what)
    # Payload and meta as the texts they are: read as Python's numbers, they would lose digits.
    return plain[:-1] + "".join(f', "{name}": {text}' for name, text in texts.items() if text is not None) + "}"


_OF_CALLBACKS = {"kind", "payload", "priority", "max_attempts", "timeout_s", "meta", "serialize_key", "limit_key"}
