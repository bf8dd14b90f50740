"""Results of any common type are stored: rejecting one would only repeat work already done."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import uuid

import pytest

from pgworkd.core.payload import encode, encode_result
from pgworkd.errors import InvalidPayload


@dataclasses.dataclass
class _Receipt:
    at: datetime.datetime
    ids: set[uuid.UUID]


class _Colour(enum.Enum):
    RED = "red"


_AT = datetime.datetime(2026, 11, 21, 7, 0, tzinfo=datetime.UTC)
_ID = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (_AT, "2026-11-21T07:00:00Z"),
        (_AT.date(), "2026-11-21"),
        (_AT.time(), "07:00:00"),
        (datetime.timedelta(seconds=90), "PT1M30S"),
        (_ID, str(_ID)),
        (decimal.Decimal("1.50"), "1.50"),
        ({7}, [7]),
        (frozenset({7}), [7]),
        (_Colour.RED, "red"),
        (pathlib.Path("/tmp/x"), "/tmp/x"),  # noqa: S108 - no file
        (b"abc", "abc"),
        (_Receipt(_AT, {_ID}), {"at": "2026-11-21T07:00:00Z", "ids": [str(_ID)]}),
        ({7: [{"at": (_AT,)}]}, {"7": [{"at": ["2026-11-21T07:00:00Z"]}]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_result_of_a_common_type_is_stored_as_pydantic_writes_it(value: object, stored: object) -> None:
    assert json.loads(encode_result(value)) == stored
    assert json.loads(encode_result({"deep": [value]})) == {"deep": [stored]}


class _Odd:
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (_Odd(), "result is of type _Odd, which cannot be written as JSON: return plain JSON types"),
        ({"at": _AT, "odd": [_Odd()]}, "result.odd[0] is of type _Odd"),
        (
            {"at": _AT, "raw": b"\xff"},
            "result.raw is of type bytes, which cannot be written as JSON: encode it",
        ),
        ((n for n in range(3)), "result is of type generator, whose values are not taken: return a list"),
        ([_AT, float("nan")], "result[1] is nan"),
        ([_AT, "\0"], "result[1] holds a NUL character"),
        ([_AT, ["x" * (1 << 20)]], "bytes are allowed"),
    ],
    ids=["odd", "deep", "bytes", "generator", "nan", "nul", "large"],
)
def test_an_unstorable_result_is_rejected_with_its_path_and_a_remedy(value: object, said: str) -> None:
    with pytest.raises(InvalidPayload) as caught:
        encode_result(value)
    assert said in str(caught.value)


def test_a_payload_is_not_converted() -> None:
    """An unsupported payload is rejected before any work is done, and its caller can convert it."""
    with pytest.raises(InvalidPayload, match="isoformat"):
        encode({"at": _AT})
