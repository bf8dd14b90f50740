"""The trace context in `meta`: what is read, what is written, and what is left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace as otel

from pgworkd.client import new_job, tracing
from pgworkd.core import traces
from tests.kits.models import examples

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def meta(**fields: Any) -> str:
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (PARENT, PARENT),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"cc-{TRACE}-{SPAN}-01-of a later version", PARENT),
        (f"cc-{TRACE}-{SPAN}-01", PARENT),
    ],
)
def test_valid_contexts_are_read(given: str, read: str) -> None:
    assert traces.read(meta(traceparent=given, other=1)) == {"traceparent": read}


WRONG = [
    "",
    "00",
    PARENT[:-1],
    PARENT + " ",
    PARENT + "\n",
    " " + PARENT,
    PARENT.upper(),
    PARENT + "-x",
    PARENT + "0",
    f"ff-{TRACE}-{SPAN}-01",
    f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"0x-{TRACE}-{SPAN}-01",
    f"00-{TRACE}-{SPAN}-zz",
    f"00-{TRACE[:-1]}٣-{SPAN}-01",
    f"cc-{TRACE}-{SPAN}-01x",
    PARENT * 20_000,
    None,
    True,
    7,
    1e300,
    [],
    [PARENT],
    {"traceparent": PARENT},
]


@pytest.mark.parametrize("given", WRONG, ids=lambda value: repr(value)[:40])
def test_garbage_is_no_context(given: Any) -> None:
    assert traces.read(meta(traceparent=given, tracestate="a=1")) is None


@pytest.mark.parametrize(
    "given",
    [
        None,
        "{}",
        "[]",
        "7",
        '"traceparent"',
        meta(tags=[1]),
        meta(inner={"traceparent": PARENT}),
        '{"traceparent":' + "9" * 5000 + "}",
        '{"traceparent":' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=lambda value: str(value)[:40],
)
def test_there_may_be_none(given: str | None) -> None:
    assert traces.read(given) is None


@given(st.text() | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{30,34}-[0-9a-f]{14,18}-[0-9a-f]{1,3}.?", fullmatch=True))
@examples(300)
def test_what_is_read_is_valid_for_opentelemetry(text: str) -> None:
    carrier = traces.read(meta(traceparent=text, tracestate=text))
    if carrier is not None:
        assert traces.remote(carrier).is_valid
        assert traces.carrier_of(traces.remote(carrier)) == carrier


@pytest.mark.parametrize("state", ["a=1", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "a=1, b@c=2"])
def test_a_tracestate_goes_along(state: str) -> None:
    carrier = traces.read(meta(traceparent=PARENT, tracestate=state))
    assert carrier == {"traceparent": PARENT, "tracestate": state}
    assert len(traces.remote(carrier).trace_state) == state.count("=")


@pytest.mark.parametrize("state", [7, None, "a", "A=1", "a=1;b=2", "a=\n", "a=" + "x" * 600, ["a=1"], "a=1\x00"])
def test_a_wrong_tracestate_is_dropped_and_the_parent_kept(state: Any) -> None:
    assert traces.read(meta(traceparent=PARENT, tracestate=state)) == {"traceparent": PARENT}


CARRIER = {"traceparent": PARENT, "tracestate": "a=1"}

METAS = [None, "{}", '{"tags":["a"]}', '{"inner":{"traceparent":"x"}}', '{"a":"traceparent"}']


@pytest.mark.parametrize("given", METAS)
def test_a_context_is_added_to_the_meta_of_a_job(given: str | None) -> None:
    assert json.loads(traces.added(given, CARRIER)) == {**json.loads(given or "{}"), **CARRIER}


@pytest.mark.parametrize("own", [{"traceparent": "garbage"}, {"traceparent": None}, {"tracestate": "b=2"}])
def test_what_the_caller_has_given_is_left_alone(own: dict[str, Any]) -> None:
    given = json.dumps({**own, "tags": 1}, separators=(",", ":"))
    assert traces.added(given, CARRIER) == given


def test_nothing_is_added_where_it_might_be_too_much() -> None:
    given = json.dumps({"text": "x" * traces.META_CHARS_MAX})
    assert traces.added(given, CARRIER) == given


def test_without_a_span_there_is_no_context() -> None:
    assert traces.current_context() is None
    assert traces.current_ids() is None
    assert tracing.producing("q") is None
    fields = new_job.row(new_job.NewJob("q"))
    before = [*fields]
    assert tracing.traced(fields) is None
    assert fields == before


def test_a_context_can_be_made_current() -> None:
    with traces.current(CARRIER):
        assert traces.current_context() == CARRIER
        assert traces.current_ids() == {"trace_id": TRACE, "span_id": SPAN}
    assert not otel.get_current_span().get_span_context().is_valid


class Broken(otel.TracerProvider):
    def get_tracer(self, *_: Any, **__: Any) -> Any:
        return self

    def start_span(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError


def test_a_broken_tracer_does_not_keep_jobs_from_being_enqueued(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otel, "get_tracer_provider", Broken)
    with traces.current(CARRIER):
        assert tracing.producing("q") is None
    assert "a span is lost" in caplog.text


OFF = """
import sys
import pgworkd, pgworkd.cli.serve, pgworkd.client, pgworkd.engine.life.daemon, pgworkd.engine.run.process_child
from pgworkd.cli.serve import _tracing
from pgworkd.client import new_job, tracing
from pgworkd.core import traces
fields = new_job.row(new_job.NewJob("q"))
before = list(fields)
assert tracing.traced(fields) is None and fields == before
assert traces.api() is None and traces.current_context() is None and _tracing() == ()
with traces.current({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}):
    pass
found = [name for name in sys.modules if name.startswith("opentelemetry") or name == "pgworkd.tracing"]
assert not found, found
sys.modules["opentelemetry.trace"] = type(sys)("opentelemetry.trace")  # as while another thread is importing it
assert traces.api() is None
del sys.modules["opentelemetry.trace"]
import opentelemetry.trace
assert traces.api() is opentelemetry.trace
assert [type(part).__module__ for part in _tracing()] == ["pgworkd.tracing"]
"""


def test_nothing_is_imported_and_nothing_done_unless_the_program_has_imported_opentelemetry() -> None:
    done = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
