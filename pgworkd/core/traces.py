"""The trace context of a job: W3C `traceparent` and `tracestate` in its `meta`, and what of OpenTelemetry is current.

Nothing here imports OpenTelemetry. It is used once the program has imported `opentelemetry.trace` by itself; until then
`api()` is one look into a dictionary that finds nothing, and everything else is left out.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol

from pgworkd.core.job import Outcome

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
TRACEPARENT_CHARS, TRACESTATE_CHARS_MAX = 55, 512
"""A traceparent of version 00; and how much of a tracestate W3C asks everyone to carry."""
_HEADERS = (b"traceparent", b"tracestate")
META_CHARS_MAX = 32 * 1024
"""A larger `meta` is stored as it is: with ours it might exceed the limit of the column, and an insert would fail."""

# https://www.w3.org/TR/trace-context/#traceparent-header. Later versions may append fields, which are not read.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER = rf"[ \t]*(?:[a-z0-9][a-z0-9_\-*/@]{{0,255}}={_VALUE})?[ \t]*"
_TRACESTATE = re.compile(f"{_MEMBER}(?:,{_MEMBER}){{0,31}}")

Carrier = Mapping[str, str]
"""`traceparent`, valid, and perhaps `tracestate`."""
RECEIVED = ContextVar[Carrier | None]("received", default=None)
"""The context that came with the request by which jobs are made, in a program that makes them for others."""


class Trace(Protocol):
    """Follows one attempt. Entering it makes its context current for the handler; none of its methods raises."""

    @property
    def ids(self) -> Mapping[str, str]:
        """trace_id and span_id in hexadecimal, for log lines."""

    @property
    def carrier(self) -> Carrier | None:
        """The context to give to another process; None if there is none."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def end(self, outcome: Outcome | None) -> None:
        """Ends the trace of the attempt; None: its daemon was torn down before."""


def api() -> Any:
    """The module `opentelemetry.trace`, if the program has imported it, all of it; else None."""
    found = sys.modules.get("opentelemetry.trace")
    return found if found is not None and hasattr(found, "use_span") else None  # else another thread imports it now


def current_context() -> Carrier | None:
    """The context that is current here, as `meta` holds it; None without OpenTelemetry or a span."""
    if (trace := api()) is None:
        return None
    return carrier_of(trace.get_current_span().get_span_context())


def carrier_of(context: Any) -> Carrier | None:
    """A SpanContext as `meta` holds it; None if it is invalid."""
    if not context.is_valid:
        return None
    carrier = {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state and len(state := context.trace_state.to_header()) <= TRACESTATE_CHARS_MAX:
        carrier[TRACESTATE] = state
    return carrier


def current_ids() -> Mapping[str, str] | None:
    """trace_id and span_id of the span that is current here; None without one."""
    carrier = current_context()
    return None if carrier is None else ids_of(carrier)


def ids_of(carrier: Carrier) -> Mapping[str, str]:
    """trace_id and span_id of a context."""
    _, trace_id, span_id, _ = carrier[TRACEPARENT].split("-")
    return {"trace_id": trace_id, "span_id": span_id}


def read(meta: str | None) -> Carrier | None:
    """The context in a job's `meta`, which anyone may have written; None if there is none, or it is invalid.

    By W3C's rules a tracestate is dropped when it is invalid, and ignored without a valid traceparent.
    """
    if meta is None or TRACEPARENT not in meta:
        return None
    try:
        fields = json.loads(meta)
    except (ValueError, RecursionError):  # such as an integer of more digits than Python reads
        return None
    return checked(fields.get(TRACEPARENT), fields.get(TRACESTATE)) if isinstance(fields, dict) else None


def checked(parent: object, state: object) -> Carrier | None:
    """The context of these values of traceparent and tracestate, whatever they are; as of `read`."""
    found = _TRACEPARENT.fullmatch(parent) if isinstance(parent, str) else None
    if found is None or (found[1] == "00" and found[5]):
        return None
    carrier = {TRACEPARENT: f"00{found[0][2:TRACEPARENT_CHARS]}"}
    if isinstance(state, str) and len(state) <= TRACESTATE_CHARS_MAX and _TRACESTATE.fullmatch(state):
        carrier[TRACESTATE] = state
    return carrier


def received(headers: Iterable[tuple[bytes, bytes]]) -> Carrier | None:
    """The context in the headers of a request (names in lower case); None if there is none, or it is invalid."""
    found = [(name, value.decode("latin-1")) for name, value in headers if name in _HEADERS]
    parents = [value for name, value in found if name == _HEADERS[0]]
    states = ",".join(value for name, value in found if name == _HEADERS[1])  # may be sent in parts
    return checked(parents[0], states or None) if len(parents) == 1 else None


def added(meta: str | None, carrier: Carrier) -> str:
    """`meta` (compact JSON of an object) with the context; unchanged if its caller has given one, even a wrong one."""
    if len(carrier) == 1:
        ours = f'{{"{TRACEPARENT}":"{carrier[TRACEPARENT]}"}}'  # in the path of every enqueue
    else:
        ours = json.dumps(carrier, separators=(",", ":"))
    if meta is None or meta == "{}":
        return ours
    if len(meta) > META_CHARS_MAX or is_given(meta):
        return meta
    return f"{ours[:-1]},{meta[1:]}"


def is_given(meta: str | None) -> bool:
    """True if `meta` (JSON of an object) has a traceparent or tracestate of its own."""
    if meta is None or not (TRACEPARENT in meta or TRACESTATE in meta):
        return False
    fields = json.loads(meta)
    return TRACEPARENT in fields or TRACESTATE in fields


def remote(carrier: Carrier) -> Any:
    """The SpanContext that a carrier names, as one of another process; `api()` must not be None."""
    trace = api()
    _, trace_id, span_id, flags = carrier[TRACEPARENT].split("-")
    state = trace.TraceState.from_header([carrier[TRACESTATE]]) if TRACESTATE in carrier else None
    return trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16)), state)


@contextlib.contextmanager
def current(carrier: Carrier | None) -> Iterator[None]:
    """Makes a context current in this block, if OpenTelemetry is imported here."""
    if carrier is None or (trace := api()) is None:
        yield
        return
    with trace.use_span(trace.NonRecordingSpan(remote(carrier))):
        yield
