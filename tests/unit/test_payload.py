"""What may be stored, what is rejected, and the error messages."""

import dataclasses
import enum
import json
import math
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, computed_field

from pgworkd.core.payload import BYTES_MAX, DEPTH_MAX, DIGITS_MAX, clean_text, decode, encode, encode_plain
from pgworkd.errors import InvalidPayload, UsageError


class Color(enum.Enum):
    RED = 1


class Mood(str, enum.Enum):  # noqa: UP042 - the older way is the one to be met
    GOOD = "good"


class Note(BaseModel):
    id: int
    written: datetime
    text: str = Field(default="", alias="noteText")


class Broken(BaseModel):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def total(self) -> int:
        raise KeyError("no total")


@dataclasses.dataclass
class Box:
    content: object


Pair = namedtuple("Pair", "left right")


def nested(levels: int, kind: type = dict) -> object:
    value: object = 1
    for _ in range(levels):
        value = {"a": value} if kind is dict else [value]
    return value


def kind_of(value: object) -> str:
    return type(value).__name__


def cycle() -> dict[str, object]:
    value: dict[str, object] = {"list": [1, 2]}
    value["list"] = [1, {"again": value}]
    return value


def lists_within(levels: int) -> list[object]:
    """Two to the power of `levels` elements, in a few bytes of memory."""
    value: list[object] = []
    for _ in range(levels):
        value = [value, value]
    return value


SHARED = [1, {"x": 2}]
SOUND = {
    "empty": {},
    "flat": {"note": 7, "text": "hello", "ratio": 0.5, "ok": True, "nothing": None},
    "unicode": {"ключ": "😀 \u2028 \x7f", "": "\x01\t"},
    "backslash": {"literal": "\\u0000", "a\\u0000b": 1},
    "words that look like numbers": {"NaN": "Infinity", "-Infinity": ["NaN"]},
    "digits in a string": {"digits": "9" * 20_000},
    "the largest integer": {"n": 10**DIGITS_MAX - 1, "m": -(10**DIGITS_MAX) + 1},
    "brackets in strings": {"text": "[{" * 1000},
    "deepest object": nested(DEPTH_MAX),
    "deepest list": {"a": nested(DEPTH_MAX - 1, list)},
    "wide": {"rows": [{"id": i, "tags": ["x"]} for i in range(500)]},
    "shared but no cycle": {"a": SHARED, "b": [SHARED, SHARED]},
    "extreme floats": {"a": 1.7976931348623157e308, "b": 5e-324, "c": -0.0},
    "largest": {"a": "x" * (BYTES_MAX - len('{"a":""}'))},
}


@pytest.mark.parametrize("value", SOUND.values(), ids=SOUND.keys())
def test_json_values_round_trip(value):
    text = encode(value)
    assert decode(text) == value
    assert json.loads(text) == value
    assert "\n" not in text


def test_the_text_is_compact():
    assert encode({"a": [1, 2], "ü": None}) == '{"a":[1,2],"ü":null}'


UNSOUND = [
    (
        {"items": [{"name": "ok"}, {"name": "a\0b"}]},
        "payload.items[1].name",
        "holds a NUL character: remove it",
    ),
    ({"a": {"b\0": 1}}, 'payload.a["b\\u0000"]', "is a key that holds a NUL"),
    ({"a": ["x", "\ud800"]}, "payload.a[1]", "holds a lone surrogate"),
    ({"\udc00": 1}, 'payload["\\udc00"]', "is a key that holds a lone surrogate"),
    ({"a": math.nan}, "payload.a", "is nan"),
    ({"a": [1, math.inf]}, "payload.a[1]", "is inf"),
    ({"a": -math.inf}, "payload.a", "is -inf"),
    ({"a": b"x"}, "payload.a", "is of type bytes, which JSON does not know: encode it as text"),
    ({"a": {1}}, "payload.a", "is of type set, which JSON does not know: pass a list"),
    ({"a": Decimal(1)}, "payload.a", "is of type Decimal, which JSON does not know: pass str(value)"),
    ({"a": UUID(int=1)}, "payload.a", "is of type UUID, which JSON does not know: pass str(value)"),
    ({"a": datetime.now(UTC)}, "payload.a", "which JSON does not know: pass value.isoformat()"),
    ({"a": timedelta(1)}, "payload.a", "which JSON does not know: pass value.total_seconds()"),
    ({"a": Path("/x")}, "payload.a", "which JSON does not know: pass plain JSON types"),
    ({"a": Color.RED}, "payload.a", "is of type Color"),
    ({"a": object()}, "payload.a", "is of type object"),
    ({"a": Note}, "payload.a", "which JSON does not know"),
    ({"a": (x for x in ())}, "payload.a", "is of type generator"),
    ({1: 2}, "payload", "has a key of type int: JSON keys are text"),
    ({"a": [{None: 1}]}, "payload.a[0]", "has a key of type NoneType"),
    ({"a": {(1, 2): 1}}, "payload.a", "has a key of type tuple"),
    ({"a": {True: 1}}, "payload.a", "has a key of type bool"),
    (cycle(), "payload.list[1].again", "refers back to itself"),
    (nested(DEPTH_MAX + 1), "payload" + ".a" * DEPTH_MAX, "is nested deeper than 64 levels"),
    ({"a": nested(DEPTH_MAX, list)}, "payload.a" + "[0]" * (DEPTH_MAX - 1), "is nested deeper"),
    (nested(100_000), "payload" + ".a" * DEPTH_MAX, "is nested deeper"),
    ({"a": "x" * BYTES_MAX}, "payload", "takes 1,048,584 bytes, 1,048,576 bytes are allowed: store the data"),
    ({"a": "ü" * (BYTES_MAX // 2)}, "payload", "takes 1,048,584 bytes"),
    ({"a": [0] * BYTES_MAX}, "payload", "holds too many elements"),
    ({"a": lists_within(60)}, "payload", "holds too many elements"),
    ({"a": 10**DIGITS_MAX}, "payload.a", "is an integer of more than 4300 digits: pass it as text"),
    ({"a": [0, -(10**5000)]}, "payload.a[1]", "is an integer of more than 4300 digits"),
    ({"text": "x" * 3000, "a": 10**DIGITS_MAX}, "payload.a", "is an integer of more than 4300 digits"),
    ({"a": Box({1: object()})}, "payload.a", "cannot be turned into JSON"),
    ({"a": Box(math.nan)}, "payload.a.content", "is nan"),
    ({"a": Box("\0")}, "payload.a.content", "holds a NUL"),
    ({"a": [Broken()]}, "payload.a[0]", "cannot be turned into JSON: KeyError: 'no total'"),
    (Broken(), "payload", "cannot be turned into JSON: KeyError"),
    ([1], "payload", "is of type list: an object is needed, so wrap it, for example "),
    (None, "payload", "is of type NoneType: an object is needed, so wrap it, for example "),
    ("{", "payload", "is of type str: an object is needed, so wrap it, for example "),
    (b"{}", "payload", "is of type bytes"),
]


@pytest.mark.parametrize(("value", "path", "reason"), UNSOUND, ids=[f"{p[:30]} {r[:30]}" for _, p, r in UNSOUND])
def test_other_values_are_rejected_with_their_path_and_a_remedy(value, path, reason):
    with pytest.raises(InvalidPayload) as caught:
        encode(value)
    assert caught.value.path == path
    assert reason in caught.value.reason
    assert str(caught.value) == f"{path} {caught.value.reason}"
    assert len(str(caught.value)) < 600
    str(caught.value).encode()  # the message itself can be stored and printed


def test_a_long_path_is_shortened_in_the_middle():
    value: object = "\0"
    for _ in range(30):
        value = {"a_rather_long_name_of_a_field": value}
    with pytest.raises(InvalidPayload) as caught:
        encode(value)
    assert caught.value.path.startswith("payload.a_rather")
    assert caught.value.path.count("…") == 1
    assert len(caught.value.path) < 200


def test_payload_errors_are_usage_and_value_errors_and_can_be_pickled():
    error = pickle.loads(pickle.dumps(InvalidPayload("payload.a", "is bad")))  # noqa: S301
    assert (error.path, error.reason, str(error)) == ("payload.a", "is bad", "payload.a is bad")
    assert isinstance(error, UsageError)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("value", [None, 1, "x", [], [1, {"a": 2}], False, 0.5, {}], ids=str)
def test_a_result_may_be_any_json(value):
    assert json.loads(encode(value, "result", object_only=False)) == value


@pytest.mark.parametrize("value", ["a\0", math.nan, 10**5000, "\ud800", object(), [Color.RED], nested(65)], ids=kind_of)
def test_a_result_is_validated_like_a_payload(value):
    with pytest.raises(InvalidPayload, match=r"^result"):
        encode(value, "result", object_only=False)


def test_models_and_dataclasses_are_accepted_at_any_level():
    note = Note(id=1, written=datetime(2026, 1, 2, tzinfo=UTC), noteText="hi")
    plain = {"id": 1, "written": "2026-01-02T00:00:00Z", "noteText": "hi"}
    assert decode(encode(note)) == plain
    assert decode(encode({"notes": [note, {"deep": Box(note)}]})) == {"notes": [plain, {"deep": {"content": plain}}]}
    assert Note.model_validate(decode(encode(note))) == note


def test_subclasses_of_json_types_are_accepted():
    value = {"a": Mood.GOOD, Mood.GOOD: OrderedDict(x=1), "b": defaultdict(int, y=2), "c": Pair(1, (2,))}
    assert decode(encode(value)) == {"a": "good", "good": {"x": 1}, "b": {"y": 2}, "c": [1, [2]]}


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None, exclude_categories=()), max_size=5)
    | st.sampled_from([b"x", {1}, Color.RED])
)
keys = st.text(st.characters(codec=None, exclude_categories=()), max_size=3) | st.sampled_from([1, None])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


def storable(value: object) -> bool:
    """The same rules as a slow and simple reference."""
    match value:
        case None | bool() | int():
            return True
        case float():
            return math.isfinite(value)
        case str():
            return all(char != "\0" and not "\ud800" <= char <= "\udfff" for char in value)
        case list():
            return all(map(storable, value))
        case dict():
            return all(isinstance(key, str) and storable(key) and storable(inner) for key, inner in value.items())
    return False


@given(st.dictionaries(keys, values, max_size=4))
def test_a_value_either_round_trips_or_is_rejected(value):
    if storable(value):
        assert decode(encode(value)) == value
    else:
        with pytest.raises(InvalidPayload, match=r"^payload"):
            encode(value)


UNREADABLE = [
    ("[1]", "is a JSON array"),
    ('"x"', "is a JSON string"),
    ("null", "is a JSON null"),
    ("true", "is a JSON boolean"),
    ("7", "is a JSON number"),
    ('{"a":' + "9" * 5000 + "}", "number out of range"),
    ('{"a":' + "[" * 64 + "]" * 64 + "}", "is nested deeper than 64 levels"),
    ('{"a":' * 65 + "1" + "}" * 65, "is nested deeper than 64 levels"),
    ('{"a":' + "[" * 1000 + "]" * 1000 + "}", "cannot be read"),
    ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "cannot be read"),
    ('{"a":', "cannot be read"),
    ("", "cannot be read"),
    ('{"a":NaN} x', "cannot be read"),
    ("{to: 7}", 'cannot be read: key must be a string at line 1 column 2 (JSON looks like {"to": 7})'),
]


@pytest.mark.parametrize(("text", "reason"), UNREADABLE, ids=[text[:12] or "empty" for text, _ in UNREADABLE])
def test_stored_values_that_python_cannot_represent_are_rejected_on_reading(text, reason):
    with pytest.raises(InvalidPayload) as caught:
        decode(text)
    assert reason in caught.value.reason
    assert caught.value.path.startswith("payload")


def test_reading_accepts_the_same_depth_and_size_as_writing():
    assert decode('{"a":' + "[" * 63 + "]" * 63 + "}") == {"a": nested_empty(63)}
    assert decode('{"a": ' + "9" * DIGITS_MAX + ', "a": 1, "b": "[[[["}') == {"a": 1, "b": "[[[["}
    many = "[" + ",".join(["[]"] * 530_000) + "]"  # more elements than we would write, but it is already stored
    assert len(decode(f'{{"a":{many}}}')["a"]) == 530_000


def nested_empty(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("text", "bytes_max", "cleaned"),
    [
        ("plain", 10, "plain"),
        ("a\0b", 10, "a\\x00b"),
        ("a\udc80b", 10, "a\\udc80b"),
        ("1234567890", 10, "1234567890"),
        ("12345678901", 10, "1234567…"),
        ("ääääää", 10, "äää…"),
        ("😀😀😀", 10, "😀…"),
        ("x" * 50_000_000, 5, "xx…"),
        ("\0" * 100, 10, "\\x00\\x0…"),
        ("anything", 3, "…"),
        ("", 3, ""),
    ],
)
def test_text_is_sanitized_and_truncated_between_characters(text, bytes_max, cleaned):
    assert clean_text(text, bytes_max) == cleaned


@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=30), st.integers(3, 40))
def test_sanitized_text_always_fits_and_can_be_stored(text, bytes_max):
    cleaned = clean_text(text, bytes_max)
    assert len(cleaned.encode()) <= bytes_max
    assert "\0" not in cleaned
    if storable(text) and len(text.encode()) <= bytes_max:
        assert cleaned == text


@pytest.mark.parametrize("number", [1e308, -1e-300, 1.7976931348623157e308])
def test_numbers_with_exponents_are_measured_as_postgres_prints_them(number: float) -> None:
    fits = 2 * BYTES_MAX // len(f"{Decimal(repr(number)):f}")
    too_many, allowed = {"a": [number] * (fits * 5 // 4)}, {"a": [number] * (fits * 9 // 10)}
    with pytest.raises(InvalidPayload, match=r"takes 2,\d+,\d+ bytes as Postgres prints .* 2,097,152 are allowed"):
        encode(too_many)
    assert encode_plain([too_many]) is None
    as_text = {"a": f'"{number!r}"' * 20_000}
    for value in (allowed, as_text, {"a": [1e16] * 100_000}):
        assert json.loads(encode(value)) == value
