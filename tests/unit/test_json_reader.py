"""The strict reader of bodies against Python's own: the same values and the same refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.core import json_reader
from tests.kits.models import FUZZ

NAMES = st.sampled_from(["a", "b c", 'q"', "é", "\\", "", "kind", "a\nb"]) | st.text(max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def is_taken(text: str) -> Any:
    """What Python reads; ValueError, as a value, for what is no JSON or has two members of one name."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("twice")
        return dict(pairs)

    def refused(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refused)
    except ValueError:
        return ValueError


def is_read(text: str) -> Any:
    try:
        return json_reader.read(text)
    except ValueError:
        return ValueError


def both_ways(text: str) -> tuple[Any, Any, Any]:
    """Of a text and Python's reading: as it is; and beside a member that is passed on, which is read otherwise."""
    inside = f'{{"payload":1,"inside":{text}}}'
    passed = is_read(inside)
    found = passed | {"payload": 1} if isinstance(passed, dict) else passed
    return is_read(text) == is_taken(text), found == is_taken(inside), found


def written(value: Any, indent: int | None, *, ascii_only: bool) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ascii_only)


@FUZZ
@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans())
def test_whatever_is_json_is_read_as_python_reads_it(value: Any, indent: int | None, ascii_only: Any) -> None:
    text = written(value, indent, ascii_only=ascii_only)
    assert is_read(text) == value
    assert both_ways(text) == (True, True, {"payload": 1, "inside": value})


@FUZZ
@given(VALUES, st.sampled_from([None, 1]), st.data())
def test_a_text_that_was_changed_is_refused_where_python_refuses_it(value: Any, indent: int | None, data: Any) -> None:
    text = written(value, indent, ascii_only=False)
    at = data.draw(st.integers(0, len(text)))
    put = data.draw(st.sampled_from([*'",:\\{}[] \n\x01é0-', "", '"a":', ",,", "NaN", "\t"]))
    changed = text[:at] + put + text[at + data.draw(st.integers(0, 2)) :]
    assert both_ways(changed)[:2] == (True, True)


@pytest.mark.parametrize(("opens", "inmost", "closes"), [("[", "", "]"), ("[", "1", "]"), ('{"a":', "{}", "}")])
def test_as_many_levels_are_read_whichever_way(opens: str, inmost: str, closes: str) -> None:
    for levels in range(1, 40):
        text = opens * levels + inmost + closes * levels
        deeper = f'[{text}, {{"payload": 1}}]'
        assert (is_read(deeper) is ValueError) == (is_read(f"[{text}]") is ValueError), levels
        assert (is_read(text) is ValueError) == (levels + (inmost != "") > json_reader.DEPTH_MAX), levels


def test_values_that_are_passed_on_keep_their_text() -> None:
    text = '{"kind" : "k", "payload" :{"price": 1.10, "a":[1 ,2]} , "result":null,"payloads":[ {"n": 1e2 } ,{}]}'
    assert json_reader.read(text) == {
        "kind": "k",
        "payload": '{"price": 1.10, "a":[1 ,2]}',
        "result": None,
        "payloads": ['{"n": 1e2 }', "{}"],
    }
