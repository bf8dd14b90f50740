"""Spans of what pgworkd does for others: an enqueue, a request it answers, a message it sends.

None is made, and nothing imported, where the program has not imported OpenTelemetry: see `traces.api`. A sampler or
processor of the user's that raises costs the span, never the work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from pgworkd.core import traces
from pgworkd.core.error_report import describe_error

_log = logging.getLogger("pgworkd.tracing")
_tracer: tuple[Any, Any] | None = None
"""The last provider, and its tracer: making one costs as much as a span."""

Attributes = Mapping[str, str | int]


class OpenSpan:
    """A span that has begun. `carrier`: its context, for jobs and messages to take with them."""

    __slots__ = ("_span", "_trace", "carrier")

    def __init__(self, trace: Any, span: Any, carrier: traces.Carrier) -> None:
        self._trace, self._span = trace, span
        self.carrier = carrier

    def note(self, attributes: Attributes, name: str | None = None) -> None:
        """Adds attributes, and gives the span a name if there is a better one now."""
        if name is not None:
            self._span.update_name(name)
        self._span.set_attributes(attributes)

    def fail(self, kind: str, said: str = "") -> None:
        """Notes that it failed: `kind` is the attribute error.type."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._trace.StatusCode.ERROR, said)

    def raised(self, error: BaseException) -> None:
        """Notes the exception that ended it, without the passwords of addresses."""
        facts = describe_error(error)
        pairs = (("type", facts.type), ("message", facts.message), ("stacktrace", facts.traceback))
        self._span.add_event("exception", {f"exception.{name}": value for name, value in pairs})
        self.fail(facts.type, facts.summary)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes it the current span within the block, and does not end it."""
        with self._trace.use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield

    def end(self) -> None:
        """Ends the span."""
        _guarded(self._span.end)


def begin(name: str, kind: str, attributes: Attributes, parent: traces.Carrier | None = None) -> OpenSpan | None:
    """Begins a span below the current one, or below `parent`, of another process; None without OpenTelemetry.

    `kind`: PRODUCER, SERVER or CLIENT. Also None without an SDK if there is no context to pass on.
    """
    if (trace := traces.api()) is None:
        return None
    context = None if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(traces.remote(parent)))
    start, kind_ = _tracer_of(trace).start_span, getattr(trace.SpanKind, kind)
    span = _guarded(lambda: start(name, context, kind_, attributes))
    carrier = None if span is None else traces.carrier_of(span.get_span_context())
    return None if carrier is None else OpenSpan(trace, span, carrier)


def _tracer_of(trace: Any) -> Any:
    global _tracer  # noqa: PLW0603 - a cache
    provider = trace.get_tracer_provider()
    if _tracer is None or _tracer[0] is not provider:
        _tracer = provider, provider.get_tracer("pgworkd", version("pgworkd"))
    return _tracer[1]


def _guarded(call: Callable[[], Any]) -> Any:
    """The result of a call; None if it raises."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - of the user's samplers and processors
        _log.exception("a span is lost")
        return None
