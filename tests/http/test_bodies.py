"""Bodies: JSON read strictly, and bad ones of every sort."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.core.json_reader import RAW
from pgworkd.core.json_text import JsonText
from pgworkd.core.payload import encode
from pgworkd.errors import InvalidPayload
from pgworkd.gateway.api.request import bodies
from pgworkd.gateway.api.request.problems import pointer
from tests.kits.gateway import calling

JSON = {"Content-Type": "application/json"}
names = st.sampled_from([*RAW, "payloads", "queue", "a", "ü"]) | st.text(max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


def plain(value: Any) -> Any:
    if isinstance(value, JsonText):
        return json.loads(value)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


BAD = {
    "empty": (b"", (422,)),
    "not JSON": (b"hello", (400,)),
    "cut": (b'{"queue": "q"', (400,)),
    "two values": (b'{"queue": "q"} {}', (400,)),
    "a list": (b"[]", (422,)),
    "a number": (b"7", (422,)),
    "null": (b"null", (422,)),
    "NaN": (b'{"queue": "q", "priority": NaN}', (400,)),
    "infinity in a payload": (b'{"queue": "q", "payload": {"a": -Infinity}}', (400,)),
    "twice the same name": (b'{"queue": "a", "queue": "b"}', (400,)),
    "twice in a payload": (b'{"queue": "a", "payload": {"b": [{"x": 1, "x": 2}]}}', (400,)),
    "an unknown member": (b'{"queue": "q", "queeu": "r"}', (422,)),
    "text for a number": (b'{"queue": "q", "priority": "1"}', (422,)),
    "a number for text": (b'{"queue": 1}', (422,)),
    "true for a number": (b'{"queue": "q", "priority": true}', (422,)),
    "a fraction for an integer": (b'{"queue": "q", "priority": 1.5}', (422,)),
    "a huge number": (b'{"queue": "q", "priority": 9007199254740993}', (422,)),
    "a number that no float holds": (b'{"queue": "q", "payload": {"a": 1e400}}', (422,)),
    "a number in text for an instant": (b'{"queue": "q", "run_at": "0.5"}', (422,)),
    "an instant without its zone": (b'{"queue": "q", "run_at": "2026-11-29T12:00:00"}', (422,)),
    "5,000 digits": (b'{"queue": "q", "priority": ' + b"9" * 5000 + b"}", (400,)),
    "5,000 digits in a payload": (b'{"queue": "q", "payload": {"a": ' + b"9" * 5000 + b"}}", (422,)),
    "1e5000 in a payload": (b'{"queue": "q", "payload": {"a": 1e5000}}', (422,)),
    "65 levels": (b'{"queue": "q", "payload": ' + b'{"a":' * 65 + b"1" + b"}" * 66, (422,)),
    "100,000 levels": (b'{"queue": "q", "payload": ' + b"[" * 100_000, (400,)),
    "100,000 levels outside": (b"[" * 100_000, (400,)),
    "NUL in a name": (b'{"queue": "a\\u0000b"}', (422,)),
    "NUL in a payload": (b'{"queue": "q", "payload": {"a": "\\u0000"}}', (422,)),
    "a lone surrogate in a name": (b'{"queue": "\\ud800"}', (422,)),
    "a lone surrogate in a payload": (b'{"queue": "q", "payload": {"a": "\\udc00"}}', (422,)),
    "not UTF-8": (b'{"queue": "\xff"}', (400,)),
    "UTF-16": ('{"queue": "q"}'.encode("utf-16"), (400,)),
    "a byte order mark": (b'\xef\xbb\xbf{"queue": "q"}', (400,)),
    "a payload that is a list": (b'{"queue": "q", "payload": []}', (422,)),
    "a payload of a mebibyte": (b'{"queue": "q", "payload": {"a": "' + b"x" * 1024 * 1024 + b'"}}', (422,)),
    "a local time": (b'{"queue": "q", "run_at": "2031-01-01T00:00:00"}', (422,)),
    "a number for an instant": (b'{"queue": "q", "run_at": 1}', (422,)),
    "the year 2200": (b'{"queue": "q", "run_at": "2200-01-01T00:00:00Z"}', (422,)),
    "a negative delay": (b'{"queue": "q", "delay_s": -1}', (422,)),
    "a long name": (b'{"queue": "' + b"q" * 201 + b'"}', (422,)),
    "an id that is none": (b'{"queue": "q", "after": ["x"]}', (422,)),
    "on_duplicate without a key": (b'{"queue": "q", "on_duplicate": "skip"}', (422,)),
}


HALF = "holds a lone surrogate (half a character)"
SAID = {
    "empty": '"The body is empty: send a JSON object"',
    **dict.fromkeys(("a list", "a number"), '"A JSON object is needed"'),
    "NaN": "NaN is no JSON: write null or text (line 1, column 28)",
    "a lone surrogate in a name": HALF,
    "a lone surrogate in a payload": HALF,
    "a payload that is a list": 'must be a JSON object: wrap it, for example {\\"value\\": [1, 2]}',
    "an unknown member": '{"pointer":"/queeu","detail":"There is no such member"}',
    "a number that no float holds": "payload.a is inf, which JSON does not know: pass None/null or text",
    "5,000 digits": "an integer may have 4,300 digits (line 1, column 28)",
}


async def test_bad_bodies_are_refused_with_what_to_do_and_create_nothing(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with calling(dsn) as call:
        for what, (body, codes) in BAD.items():
            answer = await call("POST", "/v1/jobs", content=body, headers=JSON)
            assert answer.status_code in codes, (what, answer.text)
            found = answer.json()
            assert found["detail"], what
            assert SAID.get(what, "") in answer.text, (what, answer.text)
            assert len(answer.content) < 3000, what
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_a_compressed_body_is_refused_by_the_name_of_its_coding(dsn: str) -> None:
    async with calling(dsn) as call:
        for coding, status in (("gzip", 415), ("br", 415), ("identity", 400)):
            headers = JSON | {"Content-Encoding": coding}
            answer = await call("POST", "/v1/jobs", content=gzip.compress(b'{"queue": "q"}'), headers=headers)
            assert (answer.status_code, coding in answer.json()["detail"]) == (status, status == 415)
        assert (await call("POST", "/v1/jobs", content=b'{"queue": "q"}', headers=headers)).status_code == 201


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large_is_refused_as_soon_as_that_is_known(dsn: str, declared: bool) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 65_536
            yield b" " * 65_536

    async with calling(dsn) as call:
        size = bodies.BODY_BYTES_MAX
        headers = JSON | ({"Content-Length": str(size + 1)} if declared else {})
        answer = await call("POST", "/v1/jobs", content=endless(), headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (413, "/v1/problems/body-too-large")
        assert sent <= (65_536 if declared else size + 2 * 65_536)
        fits = await call("POST", "/v1/jobs", content=b" " * (size - 14) + b'{"queue": "q"}', headers=JSON)
        assert fits.status_code == 201


async def test_a_body_that_stops_coming_is_given_up(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import anyio

    async def slow() -> Any:
        yield b"{"
        await anyio.sleep(3600)

    monkeypatch.setattr(bodies, "BODY_S", 0.1)
    async with calling(dsn) as call:
        assert (await call.problem("POST", "/v1/jobs", content=slow(), headers=JSON))[:2] == (408, "body-too-slow")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None])
async def test_a_body_that_a_form_could_send_is_not_read(dsn: str, kind: str | None) -> None:
    async with calling(dsn) as call:
        headers = {} if kind is None else {"Content-Type": kind}
        found = await call.problem("POST", "/v1/jobs", content=b'{"queue": "q"}', headers=headers)
        assert found[0] == 415


def test_pointers() -> None:
    assert pointer("payload.items[3].name") == "/payload/items/3/name"
    assert pointer('payload["a/b ~"].c') == "/payload/a~1b ~0/c"
    assert pointer("jobs[17].payload") == "/jobs/17/payload"


@given(values, st.text(max_size=60), st.integers(0, 8))
def test_every_fault_has_a_pointer(value: Any, name: str, depth: int) -> None:
    wrong: Any = {name: {"\0": value}}
    for _ in range(depth):
        wrong = {name: wrong}
    with pytest.raises(InvalidPayload) as refused:
        encode(wrong)
    assert pointer(refused.value.path).startswith("/payload")


async def test_a_body_that_no_route_would_read_is_refused(dsn: str) -> None:
    async with calling(dsn) as call:
        paths = (await call.ok("GET", "/v1/openapi.json"))["paths"]
        bodiless = [
            (method.upper(), re.sub(r"\{\w+_id\}", str(UUID(int=7)), path))
            for path, methods in paths.items()
            for method, described in methods.items()
            if method in ("post", "put", "patch") and "requestBody" not in described
        ]
        assert len(bodiless) > 5
        for method, path in bodiless:
            status, slug, problem = await call.problem(method, path, {"delay_s": 5})
            assert (status, slug) == (422, "invalid"), path
            assert "takes no body" in problem["detail"]
            for fine in ({}, None):
                assert "takes no body" not in (await call(method, path, fine)).text, path


@pytest.mark.parametrize("at", ["0.5", "1767225600", "2026-11-29", "yesterday"])
async def test_a_list_since_what_is_no_instant_is_refused(dsn: str, at: str) -> None:
    async with calling(dsn) as call:
        for name in ("since", "until"):
            assert (await call.problem("GET", f"/v1/jobs?{name}={at}"))[:2] == (422, "invalid")
        assert (
            await call("GET", "/v1/jobs?since=2026-11-29T12:00:00Z&until=2026-11-29T12:00%2B01:00")
        ).status_code == 200
