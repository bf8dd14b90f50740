"""Encodes and decodes JSON for the database; errors name the path of the value at fault, before any round trip.

A value is checked level by level with fast built-ins, then written by pydantic's serializer, which is several times
faster than json.dumps but silently converts types that JSON does not have. Only suspicious values are walked node by
node, to find out whether something is wrong, and where.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from pydantic_core import from_json, to_json, to_jsonable_python

from pgworkd.core.json_text import JsonText
from pgworkd.errors import InvalidPayload

BYTES_MAX = 1024 * 1024
"""Size limit of a payload or result, in bytes of compact UTF-8."""
DEPTH_MAX = 64
"""Levels of nesting; an object that holds only plain values has depth 1."""
DIGITS_MAX = 4300
"""Maximum digits of an integer: Python's default limit."""
PRINTED_BYTES_MAX = 2 * BYTES_MAX
"""The schema's limit: Postgres prints a space after each comma and colon, and numbers without an exponent."""
WRAP = 'wrap it, for example {"value": [1, 2]}'
KEY_SHOWN_MAX = 40
PATH_SHOWN_MAX = 200

_EXPONENTS_FROM = PRINTED_BYTES_MAX // 64
"""Up to this size, numbers cannot exceed the limit when printed: 1e+308 grows by a factor of 45."""
_EXPONENT = re.compile(r'"(?:[^"\\]|\\.)*"|[0-9]e[+-]([0-9]{2,3})')
_HALF = "holds a lone surrogate (half a character)"
_LEAVES = frozenset({str, int, float, bool, type(None)})
_REMEDIES = {
    **dict.fromkeys(("bytes", "bytearray"), "encode it as text, for example base64"),
    **dict.fromkeys(("set", "frozenset"), "pass a list"),
    **dict.fromkeys(("Decimal", "UUID"), "pass str(value)"),
    **dict.fromkeys(("datetime", "date", "time"), "pass value.isoformat()"),
    "timedelta": "pass value.total_seconds()",
    "coroutine": "await it",
    "async_generator": "return a list of what it yields",
}


def encode_result(value: object) -> str:
    """A handler's return value as compact JSON text; types that JSON does not have are converted, as the work is done.

    As pydantic does: datetime, date, time and timedelta in ISO 8601; UUID, Decimal and Path as text; enums as their
    value, sets as arrays, bytes as UTF-8 text, models and dataclasses as objects; keys as text. For the rest see
    `encode`: raises InvalidPayload for NaN, NUL, a type unknown to pydantic, and values too large or too deep.
    """
    return encode(value, "result", object_only=False, convert=True)


def encode(value: object, what: str = "payload", *, object_only: bool = True, convert: bool = False) -> str:
    """`value` as compact JSON text for a jsonb column.

    Accepts JSON types (tuples become arrays), pydantic models and dataclasses at any level (serialized by alias); with
    `object_only` the outermost must be an object. jsonb keeps the digits of a number, not its type: the float 1e16 is
    read back as an integer. Raises InvalidPayload, whose path starts with `what`, for: another type, a key that is not
    text, NUL or a lone surrogate, NaN or infinity, a self-reference, an integer of more than DIGITS_MAX digits, more
    than DEPTH_MAX levels or BYTES_MAX bytes.
    """
    if type(value) is not dict and type(value) is JsonText:
        return _as_written(value, what, object_only=object_only)
    try:
        plain = value if type(value) is dict else _plain(value)
        if convert and not _is_plain(plain, what):
            _refuse(_inconvertible(plain, what, ()))
            plain = _jsonable(plain)
        if not _is_plain(plain, what):
            _refuse(_fault(plain, what, ()))
            plain = _jsonable(plain)
        data = to_json(plain)
        text = data.decode()
    except InvalidPayload:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(_fault(value, what, ()))
        raise InvalidPayload(what, _conversion_fault(error)) from None
    if object_only and text[0] != "{":
        raise InvalidPayload(what, f"is of type {type(value).__name__}: an object is needed, so {WRAP}")
    if len(data) > BYTES_MAX:
        raise _too_large(what, f"takes {len(data):,} bytes")
    if len(data) > _EXPONENTS_FROM and (more := _exponents(text)) and len(data) + more > PRINTED_BYTES_MAX:
        finding = f"takes {len(data) + more:,} bytes as Postgres prints numbers such as 1e300"
        raise InvalidPayload(what, f"{finding}, {PRINTED_BYTES_MAX:,} are allowed: pass such numbers as text")
    if is_suspicious(text):
        _refuse(_fault(plain, what, ()))
    return text


def _as_written(text: JsonText, what: str, *, object_only: bool) -> str:
    """The text itself, if it can be stored."""
    if len(text.encode(errors="surrogatepass")) > BYTES_MAX:
        raise InvalidPayload(what, f"takes more than the {BYTES_MAX:,} bytes that are allowed")
    encode(decode(str(text), what, object_only=object_only), what, object_only=object_only)
    return str(text)


def encode_plain(values: Sequence[object]) -> list[str] | None:
    """Payloads as by `encode`, all at once and at a fraction of the cost; None: use `encode` for each.

    Does not raise for invalid values: `encode` finds out which one is invalid, and why.
    """
    if not values or not _are_plain(values):
        return None
    try:
        texts = [to_json(value).decode() for value in values]
    except (TypeError, ValueError, RecursionError):
        return None
    # A character may take 4 bytes; payloads with large numbers are left to `encode`.
    if max(map(len, texts)) > min(BYTES_MAX // 4, _EXPONENTS_FROM) or is_suspicious("\n".join(texts)):
        return None
    return texts


def _are_plain(values: Sequence[object]) -> bool:
    """True if all are dicts of JSON types only, not too deep and together not too large. False is only a suspicion."""
    level: Sequence[Any] = values
    elements_max = BYTES_MAX // 2
    for depth in range(DEPTH_MAX):
        kinds = set(map(type, level))
        if not kinds <= ({dict, list, tuple} if depth else {dict}):
            return False
        dicts = [node for node in level if type(node) is dict]
        lists: list[Any] = [] if len(dicts) == len(level) else [node for node in level if type(node) is not dict]
        elements_max -= sum(map(len, dicts)) + sum(map(len, lists))
        if elements_max < 0 or not {str}.issuperset(map(type, chain.from_iterable(dicts))):
            return False
        children = list(chain(chain.from_iterable(map(dict.values, dicts)), chain.from_iterable(lists)))
        if _LEAVES.issuperset(map(type, children)):
            return True
        level = [child for child in children if type(child) not in _LEAVES]
    return False


def decode(text: str, what: str = "payload", *, object_only: bool = True) -> Any:
    """Decodes the text of a stored payload, which is an object, or of any value. Of equal keys the last one counts.

    Raises InvalidPayload, whose path starts with `what`, for what other clients could store and Python cannot use:
    integers of more than DIGITS_MAX digits, more than DEPTH_MAX levels (the same on every version of Python), with
    `object_only` anything except an object. A number with a fraction beyond 1.8e308 is read as infinity.
    """
    try:
        value = from_json(text, cache_strings="keys")
    except ValueError as error:
        remedy = 'JSON looks like {"to": 7}'
        if "recursion" in str(error) or "number" in str(error):
            remedy = f"integers may have {DIGITS_MAX} digits, nesting {DEPTH_MAX} levels"
        reason = _HALF if "hex escape" in str(error) else f"cannot be read: {error} ({remedy})"
        raise InvalidPayload(what, reason) from None
    if object_only and type(value) is not dict:
        raise InvalidPayload(what, f"is a JSON {_json_type(value)}: an object is needed, so {WRAP}")
    # Levels take two brackets each; those inside strings can only make the count too high.
    deep = len(text) > 2 * DEPTH_MAX and text.count("{") + text.count("[") > DEPTH_MAX
    if deep and not _is_plain(value, what, elements_max=len(text)):
        _refuse(_fault(value, what, ()))
    return value


def clean_text(text: str, bytes_max: int) -> str:
    """`text` as Postgres can store it, in at most `bytes_max` bytes of UTF-8.

    NUL and lone surrogates show as \\x00 and \\udc80. A cut falls between characters and is marked by a final
    '…', within the limit (which must be at least 3).
    """
    head = text[: bytes_max + 1]  # a character takes at least a byte: enough to detect that it is too long
    data = head.replace("\0", "\\x00").encode("utf-8", "backslashreplace")
    if len(data) > bytes_max:
        return data[: bytes_max - 3].decode("utf-8", "ignore") + "…"
    return data.decode()


def _plain(value: object) -> object:
    """A model or dataclass as plain JSON values; any other value unchanged."""
    cls = type(value)
    # Pydantic's models and dataclasses have this attribute.
    if cls not in _LEAVES and (hasattr(cls, "__pydantic_serializer__") or dataclasses.is_dataclass(cls)):
        return _jsonable(value)
    return value


def _jsonable(value: object) -> object:
    try:
        return to_jsonable_python(value, by_alias=True)
    except Exception as error:  # it runs the user's serializers and computed fields
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _is_plain(value: object, what: str, elements_max: int = BYTES_MAX // 2) -> bool:
    """True if `value` consists of JSON types only, with text as keys, and is not too deep.

    False is only a suspicion. Raises InvalidPayload for more elements than could fit (each takes at least two bytes),
    which also stops nested references to one list that would expand to gigabytes.
    """
    level: Collection[Any] = (value,)
    if _LEAVES.issuperset(map(type, level)):
        return True
    for _ in range(DEPTH_MAX):
        below: list[object] = []
        for node in level:
            kind = type(node)
            if kind is dict:
                try:
                    "".join(node)  # the fastest check that every key is text
                except TypeError:
                    return False
                children: Collection[object] = node.values()
            elif kind is list or kind is tuple:
                children = node
            else:
                return False
            elements_max -= len(children)
            if elements_max < 0:
                raise _too_large(what, "holds too many elements")
            if not _LEAVES.issuperset(map(type, children)):
                below += [child for child in children if type(child) not in _LEAVES]
        if not below:
            return True
        level = below
    return False


def is_suspicious(text: str) -> bool:
    """True if JSON `text` may contain NUL, NaN, infinity or a huge integer (or a string that looks like one)."""
    if "\\u0000" in text or "NaN" in text or "Infinity" in text:
        return True
    block = DIGITS_MAX // 2  # DIGITS_MAX digits in a row fill at least one aligned block of half that length
    return len(text) > DIGITS_MAX and any(text[at : at + block].isdigit() for at in range(0, len(text), block))


def _exponents(text: str) -> int:
    """A lower bound of the bytes that Postgres adds when printing the numbers of JSON `text`; 0 if that is harmless."""
    if (text.count("e+") + text.count("e-")) * 324 <= PRINTED_BYTES_MAX - len(text):
        return 0
    return sum(max(int(exponent) - 23, 0) for exponent in _EXPONENT.findall(text) if exponent)  # -1.23...e+45 has 24


def _inconvertible(node: object, path: str, above: tuple[int, ...]) -> tuple[str, str] | None:
    """The first value that pydantic cannot write, as (path, reason); plain JSON types are not checked."""
    if type(node) in _LEAVES or id(node) in above or len(above) > DEPTH_MAX:
        return None
    if isinstance(node, (dict, list, tuple)):
        children = node.items() if isinstance(node, dict) else enumerate(node)
        found = (_inconvertible(inner, _below(path, key), (*above, id(node))) for key, inner in children)
        return next(filter(None, found), None)
    name = type(node).__name__
    remedy = _REMEDIES.get(name, "return plain JSON types, a dataclass or a pydantic model")
    if isinstance(node, Iterator):  # it would be consumed here, maybe endlessly
        return path, f"is of type {name}, whose values are not taken: return a list of them"
    try:
        _jsonable(node)
    except (TypeError, ValueError, RecursionError):
        return path, f"is of type {name}, which cannot be written as JSON: {remedy}"
    return None


def _refuse(fault: tuple[str, str] | None) -> None:
    if fault is not None:
        raise InvalidPayload(*fault)


def _fault(node: object, path: str, above: tuple[int, ...]) -> tuple[str, str] | None:
    """The first thing wrong in `node` as (path, reason), or None; `above` are the ids around it."""
    if isinstance(node, str):
        reason = _text_fault(node)
        return (path, f"{reason}: remove it or encode the text") if reason else None
    if node is None or isinstance(node, (int, float)):
        return _number_fault(node, path)
    if id(node) in above:
        return path, "refers back to itself: break the cycle"
    try:
        inner = _plain(node)
    except (TypeError, ValueError, RecursionError) as error:
        return path, _conversion_fault(error)
    if inner is node and not isinstance(node, (dict, list, tuple)):
        name = type(node).__name__
        remedy = _REMEDIES.get(name, "pass plain JSON types, a dataclass or a pydantic model")
        return path, f"is of type {name}, which JSON does not know: {remedy}"
    if len(above) >= DEPTH_MAX:
        return path, f"is nested deeper than {DEPTH_MAX} levels: flatten it"
    if inner is not node:
        return _fault(inner, path, above)
    return _inner_fault(node, path, (*above, id(node)))


def _inner_fault(node: object, path: str, above: tuple[int, ...]) -> tuple[str, str] | None:
    if not isinstance(node, dict):
        children = enumerate(node) if isinstance(node, (list, tuple)) else ()
        found = (_fault(child, _shorter(f"{path}[{index}]"), above) for index, child in children)
        return next(filter(None, found), None)
    for key, child in node.items():
        if not isinstance(key, str):
            return path, f"has a key of type {type(key).__name__}: JSON keys are text, pass str(key)"
        inner_path = _below(path, key)
        if reason := _text_fault(key):
            return inner_path, f"is a key that {reason}: rename it"
        if fault := _fault(child, inner_path, above):
            return fault
    return None


def _text_fault(text: str) -> str | None:
    if "\0" in text:
        return "holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return _HALF
    return None


def _number_fault(node: float | None, path: str) -> tuple[str, str] | None:
    if isinstance(node, float) and not math.isfinite(node):
        return path, f"is {float(node)}, which JSON does not know: pass None/null or text"
    if isinstance(node, int) and node.bit_length() > DIGITS_MAX * 3 and abs(node) >= 10**DIGITS_MAX:
        return path, f"is an integer of more than {DIGITS_MAX} digits: pass it as text, for example hex(value)"
    return None


def _conversion_fault(error: Exception) -> str:
    return f"cannot be turned into JSON: {clean_text(str(error), 300)}"


def _too_large(what: str, finding: str) -> InvalidPayload:
    remedy = "store the data elsewhere and pass a reference"
    return InvalidPayload(what, f"{finding}, {BYTES_MAX:,} bytes are allowed: {remedy}")


def _below(path: str, key: object) -> str:
    if not isinstance(key, str):
        return _shorter(f"{path}[{repr(key)[:KEY_SHOWN_MAX]}]")
    named = key.isidentifier() and key.isascii() and len(key) <= KEY_SHOWN_MAX
    return _shorter(f"{path}.{key}" if named else f"{path}[{json.dumps(key[:KEY_SHOWN_MAX])}]")


def _shorter(path: str) -> str:
    return path if len(path) <= PATH_SHOWN_MAX else f"{path[:80]}…{path[-80:]}"


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
