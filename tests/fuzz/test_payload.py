"""Any object and any text as a payload: it round-trips, or it is rejected with its path."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pgworkd.core.payload import BYTES_MAX, DEPTH_MAX, clean_text, decode, encode
from pgworkd.errors import InvalidPayload
from tests.kits.models import FUZZ, in_time, nowhere

__all__ = ["nowhere"]  # a fixture

LEAF = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just(10**4298))
STRANGE = st.one_of(st.binary(), st.decimals(), st.datetimes(), st.uuids(), st.complex_numbers(), st.just(object()))
KEY = st.one_of(st.text(), st.sampled_from(["", "a.b", "\\u0000", "NaN", "__proto__", "x" * 300]))


def trees(leaf: st.SearchStrategy[Any], key: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values as deep and wide as hypothesis likes."""
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner), st.dictionaries(key, inner), st.lists(inner, max_size=3).map(tuple), deep(inner)
        ),
        max_leaves=8,
    )


def deep(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A value nested in many lists."""

    def wrap(value: Any, depth: int) -> Any:
        for _ in range(depth):
            value = [value]
        return value

    return st.builds(wrap, inner, st.integers(1, DEPTH_MAX + 2))


def as_stored(value: Any) -> Any:
    """The value after a JSON round trip."""
    if isinstance(value, (list, tuple)):
        return [as_stored(each) for each in value]
    return {key: as_stored(each) for key, each in value.items()} if isinstance(value, dict) else value


@FUZZ
@given(st.dictionaries(KEY, trees(LEAF, KEY)))
def test_an_encoded_payload_round_trips(payload: dict[str, Any]) -> None:
    with in_time():
        try:
            text = encode(payload)
        except InvalidPayload as error:
            assert str(error).startswith("payload")
            return
        assert decode(text) == as_stored(payload)
    assert json.loads(text) == as_stored(payload)
    assert len(text.encode()) <= BYTES_MAX
    assert "\\u0000" not in text.replace("\\\\", "")


@FUZZ
@given(trees(st.one_of(LEAF, STRANGE), st.one_of(KEY, st.integers(), st.none(), st.tuples(st.text()))))
def test_any_object_is_encoded_or_rejected(value: Any) -> None:
    for object_only in (True, False):
        with in_time():
            try:
                text = encode(value, "result", object_only=object_only)
            except InvalidPayload as error:
                assert str(error).startswith("result")
                continue
        json.loads(text, parse_constant=_refuse)
        assert not object_only or text.startswith("{")


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def _with(text: str, at: int, more: str) -> str:
    return text[:at] + more + text[at:]


JSON_TEXT = st.one_of(
    st.text(),
    st.text(alphabet='{}[]",:0123456789.eE+-truefalsn\\ud8\x00 '),
    trees(LEAF, KEY).map(json.dumps),
    st.builds(_with, trees(LEAF, KEY).map(json.dumps), st.integers(0, 50), st.text()),
    st.sampled_from(["[" * 100_000, '{"a":' * 5000, "1" * 5000, '{"a": 1e999}', '{"a":1,"a":2}']),
    st.just('{"a":' + "9" * 4301 + "}"),
)


@FUZZ
@given(JSON_TEXT)
def test_any_text_is_decoded_like_json_or_rejected(text: str) -> None:
    with in_time():
        try:
            got = decode(text)
        except InvalidPayload as error:
            assert str(error).startswith("payload")
            return
    assert type(got) is dict
    assert _same(got, json.loads(text))


def _same(ours: Any, theirs: Any) -> bool:
    """Equal, NaN included, and of the same types."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours == theirs or (math.isnan(ours) and math.isnan(theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(each, theirs[key]) for key, each in ours.items())
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


@FUZZ
@given(st.text(), st.integers(3, 200))
def test_sanitized_text_is_storable_and_within_its_limit(text: str, bytes_max: int) -> None:
    shown = clean_text(text, bytes_max)
    assert len(shown.encode()) <= bytes_max
    assert "\0" not in shown
