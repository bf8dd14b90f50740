"""The span of an enqueue (`enqueue {queue}`, PRODUCER), whose context goes with the jobs; None while tracing is off.

Tracing is on where the program has imported OpenTelemetry and a span is current. The attributes are those of the
semantic conventions for messaging: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from uuid import UUID

from pgworkd.client.new_job import META, QUEUE
from pgworkd.core import traces
from pgworkd.core.spans import OpenSpan, begin

Way = Callable[[Any, Any], Any]
"""Runs steps on a connection; what `connections.way` returns."""


class Producing:
    """A span that has been started; `over` runs the statements and ends it."""

    __slots__ = ("_span", "carrier")

    def __init__(self, span: OpenSpan) -> None:
        self._span = span
        self.carrier = span.carrier
        """The trace context that the jobs take with them."""

    def over(self, run: Way, conn: Any, steps: Any, id_of: Callable[[list[Any]], str] | None = None) -> Any:
        """Runs the statements in the span, as `run(conn, steps)`; `id_of`: the job's id, from the rows."""
        try:
            found = run(conn, steps)
        except BaseException as error:
            self._failed(error)
            raise
        if not isinstance(found, list):
            return self._over_async(found, id_of)
        self._end(found, id_of)
        return found

    async def _over_async(
        self, found: Coroutine[Any, Any, list[Any]], id_of: Callable[[list[Any]], str] | None
    ) -> list[Any]:
        try:
            rows = await found
        except BaseException as error:
            self._failed(error)
            raise
        self._end(rows, id_of)
        return rows

    def named(self, queue: str | None) -> None:
        """Notes the queue of all the jobs, known only now; None: they are of several."""
        if queue is None:
            self._span.note({}, "enqueue")
        else:
            self._span.note({"messaging.destination.name": queue}, f"enqueue {queue}")

    def counted(self, jobs: int) -> None:
        """Notes how many jobs the span enqueues, if they are several."""
        if jobs != 1:
            self._span.note({"messaging.batch.message_count": jobs})

    def _end(self, rows: list[Any], id_of: Callable[[list[Any]], str] | None) -> None:
        if id_of is not None:
            self._span.note({"messaging.message.id": id_of(rows)})
        self._span.end()

    def _failed(self, error: BaseException) -> None:
        self._span.raised(error)
        self._span.end()


def producing(queue: str | None, job_id: UUID | None = None) -> Producing | None:
    """Starts the span below the current one; None without OpenTelemetry or without a current span."""
    if (trace := traces.api()) is None or not trace.get_current_span().get_span_context().is_valid:
        return None
    attributes = {
        "messaging.system": "pgworkd",
        "messaging.operation.type": "send",
        "messaging.operation.name": "enqueue",
    }
    if queue is not None:
        attributes["messaging.destination.name"] = queue
    if job_id is not None:
        attributes["messaging.message.id"] = str(job_id)
    span = begin("enqueue" if queue is None else f"enqueue {queue}", "PRODUCER", attributes)
    return None if span is None else Producing(span)


def traced(fields: list[Any], job_id: UUID | None = None) -> Producing | None:
    """The span of one job, with its context put into the meta of this row; None without OpenTelemetry or a span.

    Also None for a job whose caller has given it a context: it belongs to another trace.
    """
    if traces.api() is None or traces.is_given(fields[META]):
        return None
    if (span := producing(fields[QUEUE], job_id)) is not None:
        fields[META] = traces.added(fields[META], span.carrier)
    return span


def traced_all(rows: Sequence[list[Any]]) -> tuple[Producing | None, Sequence[list[Any]]]:
    """The span of several jobs, and the rows with its context; the rows given are left as they are."""
    if not rows or (span := producing(None)) is None:
        return None, rows
    queues = {row[QUEUE] for row in rows}
    span.named(queues.pop() if len(queues) == 1 else None)
    span.counted(len(rows))
    return span, [[*row[:META], traces.added(row[META], span.carrier), *row[META + 1 :]] for row in rows]


def ran(
    run: Way, conn: Any, steps: Any, span: Producing | None, id_of: Callable[[list[Any]], str] | None = None
) -> Any:
    """Runs the steps, in this span if there is one, as `run(conn, steps)`; `id_of` as of `Producing.over`."""
    return run(conn, steps) if span is None else span.over(run, conn, steps, id_of)


def first_id(rows: list[Any]) -> str:
    """The id of a job, which is the first value of the first row."""
    return str(rows[0][0])
