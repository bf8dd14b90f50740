"""Tracing: each attempt of a job is a span of OpenTelemetry, in the trace of whoever enqueued the job.

A part of the daemon. `pgworkd run` adds it if the application has imported `opentelemetry` when it has been loaded; a
program that starts a `Daemon` by itself passes it: `Daemon(app, options, parts=(Tracing(),))`.

The names of spans and attributes are those of the semantic conventions for messaging:
https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from types import TracebackType
from typing import Any, Protocol
from uuid import UUID

import anyio
from opentelemetry import context as otel_context
from opentelemetry import trace as otel

from pgworkd.core import events, traces
from pgworkd.core.events import Events
from pgworkd.core.job import Ending, Outcome

__all__ = ["CHILD_S", "Tracing"]

CHILD_S = 300.0
"""A first attempt that starts within this many seconds of its enqueue is part of the same trace; others are linked."""
_ENDINGS = {Ending.SETTLED: "completed"}


class _Claimed(Protocol):
    """A claimed job as tracing reads it; instants are seconds since the epoch, of the database's clock."""

    @property
    def id(self) -> UUID: ...
    @property
    def kind(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def run_at(self) -> float: ...
    @property
    def created_at(self) -> float: ...
    @property
    def schedule(self) -> str | None: ...
    @property
    def meta(self) -> str | None: ...


class _Attempt(Protocol):
    @property
    def claimed(self) -> _Claimed: ...
    @property
    def queue(self) -> str: ...


class _Worker(Protocol):
    @property
    def clock_ahead_s(self) -> float: ...


class _Daemon(Protocol):
    @property
    def events(self) -> Events: ...
    @property
    def worker(self) -> _Worker: ...


class Tracing:
    """The part that traces the attempts of a daemon, as long as the daemon runs.

    `provider`: the TracerProvider to use; by default the global one, also if that is set later.
    """

    def __init__(self, provider: otel.TracerProvider | None = None) -> None:
        self._tracer = otel.get_tracer("pgworkd", version("pgworkd"), provider)
        self._open: set[_Span] = set()
        self._events = Events()

    async def run(self, daemon: _Daemon) -> None:
        """Traces until cancelled; then ends the spans of attempts that the daemon was torn down in."""
        self._events = daemon.events

        def follow(attempt: _Attempt) -> _Span | None:
            try:
                return self._begun(attempt, time.time() + daemon.worker.clock_ahead_s)
            except Exception as error:  # noqa: BLE001 - of the user's samplers and processors; the job runs without
                self._failed(error)
                return None

        daemon.events.tracer = follow
        try:
            await anyio.sleep_forever()
        finally:
            daemon.events.tracer = None
            for span in list(self._open):
                span.end(None)

    def _begun(self, attempt: _Attempt, now: float) -> _Span:
        """The span of an attempt that starts `now`, in seconds since the epoch by the database's clock."""
        claimed = attempt.claimed
        carrier = traces.read(claimed.meta)
        origin = None if carrier is None else traces.remote(carrier)
        prompt = claimed.attempt == 1 and claimed.schedule is None and now - claimed.created_at <= CHILD_S
        parent = otel_context.Context()  # without it, the span of the program that hosts the daemon would be the parent
        if origin is not None and prompt:
            parent = otel.set_span_in_context(otel.NonRecordingSpan(origin), parent)
        span = self._tracer.start_span(
            f"process {attempt.queue}",
            parent,
            otel.SpanKind.CONSUMER,
            {
                "messaging.system": "pgworkd",
                "messaging.operation.type": "process",
                "messaging.operation.name": "process",
                "messaging.destination.name": attempt.queue,
                "messaging.message.id": str(claimed.id),
                "pgworkd.job.kind": claimed.kind,
                "pgworkd.job.attempt": claimed.attempt,
                "pgworkd.job.wait_s": max(0.0, round(now - claimed.run_at, 6)),
            },
            [] if origin is None else [otel.Link(origin)],
        )
        followed = _Span(self, span)
        self._open.add(followed)
        return followed

    def _ended(self, followed: _Span, span: otel.Span, outcome: Outcome | None) -> None:
        if followed not in self._open:
            return
        self._open.remove(followed)
        try:
            _describe(span, outcome)
            span.end()
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._events.emit(events.HOOK_FAILED, hook="tracing", error=f"{type(error).__name__}: {error}")


class _Span:
    """The span of one attempt: a `pgworkd.core.traces.Trace`."""

    __slots__ = ("_context", "_span", "_token", "_tracing", "carrier", "ids")

    def __init__(self, tracing: Tracing, span: otel.Span) -> None:
        self._tracing = tracing
        self._span = span
        self._context = otel.set_span_in_context(span, otel_context.Context())
        self._token: Any = None
        self.carrier = traces.carrier_of(span.get_span_context())  # None: there is no SDK, and nobody sent a context
        self.ids: Mapping[str, str] = {} if self.carrier is None else traces.ids_of(self.carrier)

    def __enter__(self) -> None:
        self._token = otel_context.attach(self._context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        otel_context.detach(self._token)

    def end(self, outcome: Outcome | None) -> None:
        """Ends the span with what the outcome says; a second call does nothing."""
        self._tracing._ended(self, self._span, outcome)  # noqa: SLF001


def _describe(span: otel.Span, outcome: Outcome | None) -> None:
    if outcome is None:
        span.set_status(otel.StatusCode.ERROR, "the daemon was torn down before the attempt had ended")
        return
    span.set_attribute("pgworkd.job.outcome", _ENDINGS.get(outcome.ending, outcome.ending.value))
    if outcome.ending is not Ending.FAILED:
        return
    # Of the outcome, not the exception itself: one of a process exists only there, and passwords are redacted.
    error = outcome.error or {}
    pairs = (("exception.type", "type"), ("exception.message", "message"), ("exception.stacktrace", "traceback"))
    facts = {name: str(error[key]) for name, key in pairs if error.get(key)}
    span.add_event("exception", facts)
    span.set_attribute("error.type", str(error.get("type") or "_OTHER"))
    span.set_status(otel.StatusCode.ERROR, outcome.message)
