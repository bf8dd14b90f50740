"""The span of an enqueue (`enqueue {queue}`, PRODUCER), whose context goes with the jobs; None while tracing is off.

Tracing is on where the program has imported OpenTelemetry and a span is current. The attributes are those of the
semantic conventions for messaging: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from uuid import UUID

from pgworkd.client.new_job import META, QUEUE
from pgworkd.core import traces
from pgworkd.core.error_report import describe_error

_log = logging.getLogger("pgworkd.tracing")
_tracer: tuple[Any, Any] | None = None
"""The last provider, and its tracer: making one costs as much as a span."""

Way = Callable[[Any, Any], Any]
"""Runs steps on a connection; what `connections.way` returns."""


class Producing:
    """A span that has been started; `over` runs the statements and ends it."""

    __slots__ = ("_span", "_trace", "carrier")

    def __init__(self, trace: Any, span: Any, carrier: traces.Carrier) -> None:
        self._trace = trace
        self._span = span
        self.carrier = carrier
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
        self._span.update_name("enqueue" if queue is None else f"enqueue {queue}")
        if queue is not None:
            self._span.set_attribute("messaging.destination.name", queue)

    def counted(self, jobs: int) -> None:
        """Notes how many jobs the span enqueues, where the call takes several."""
        self._span.set_attribute("messaging.batch.message_count", jobs)

    def _end(self, rows: list[Any], id_of: Callable[[list[Any]], str] | None) -> None:
        if id_of is not None:
            self._span.set_attribute("messaging.message.id", id_of(rows))
        _guarded(self._span.end)

    def _failed(self, error: BaseException) -> None:
        facts = describe_error(error)  # without the passwords of addresses
        pairs = (("type", facts.type), ("message", facts.message), ("stacktrace", facts.traceback))
        self._span.add_event("exception", {f"exception.{name}": value for name, value in pairs})
        self._span.set_attribute("error.type", facts.type)
        self._span.set_status(self._trace.StatusCode.ERROR, facts.summary)
        _guarded(self._span.end)


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
    name = "enqueue" if queue is None else f"enqueue {queue}"
    start = _tracer_of(trace).start_span
    span = _guarded(lambda: start(name, kind=trace.SpanKind.PRODUCER, attributes=attributes))
    carrier = None if span is None else traces.carrier_of(span.get_span_context())
    return None if carrier is None else Producing(trace, span, carrier)


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


def _tracer_of(trace: Any) -> Any:
    global _tracer  # noqa: PLW0603 - a cache
    provider = trace.get_tracer_provider()
    if _tracer is None or _tracer[0] is not provider:
        _tracer = provider, provider.get_tracer("pgworkd")
    return _tracer[1]


def _guarded(call: Callable[[], Any]) -> Any:
    """The result of a call; None if it raises: a broken processor of spans must not keep jobs from being enqueued."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - of the user's samplers and processors
        _log.exception("a span of an enqueue is lost")
        return None
