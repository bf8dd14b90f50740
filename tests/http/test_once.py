"""Idempotency-Key: a call that is repeated is answered as before, and does nothing again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from pgworkd.gateway.api.request import once
from tests.kits.gateway import also, calling, token

Db: TypeAlias = "asyncpg.Connection[Any]"
NDJSON = {"Content-Type": "application/x-ndjson"}
LINE = b'{"queue": "q"}\n'
LINES = "".join(json.dumps({"queue": "q", "payload": {"n": n}}) + "\n" for n in range(3000)).encode()
CALLS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "/v1/jobs": ("/v1/jobs", lambda _: {"queue": "q"}),
    "/v1/jobs/bulk": ("/v1/jobs/bulk", lambda _: {"jobs": [{"queue": "q"}, {"queue": "q"}]}),
    "/v1/jobs/stream": ("/v1/jobs/stream", lambda _: LINES),
    "/v1/workflows": ("/v1/workflows", lambda _: {"jobs": [{"name": "a", "queue": "q"}]}),
    "/v1/batches": ("/v1/batches", lambda _: {"name": "b", "payloads": [{}, {}]}),
    "/v1/batches/{batch_id}/children": ("/v1/batches/{root}/children", lambda _: {"name": "c", "payloads": [{}]}),
    "/v1/batches/{batch_id}/jobs": ("/v1/batches/{root}/jobs", lambda _: {"payloads": [{}, {}]}),
    "/v1/jobs/{job_id}/replay": ("/v1/jobs/{ended}/replay", lambda _: None),
    "/v1/schedules/{name}/run": ("/v1/schedules/s/run", lambda _: None),
}
"""Each route that takes a key, with a call of it."""
NO_JOBS = {"/v1/workers", "/v1/tokens"}
"""Routes that answer 201, and create no job."""


async def sent(call: Any, path: str, body: Any, key: str) -> Any:
    """The answer to a call."""
    headers = {"Idempotency-Key": key}
    if isinstance(body, bytes):
        return await call("POST", path, content=body, headers=headers | NDJSON)
    return await call("POST", path, body, headers=headers)


@pytest.fixture
async def prepared(dsn: str, db: Db) -> dict[str, str]:
    """What the paths name: a batch, a job that has ended, and a schedule."""
    async with calling(dsn) as call:
        root = (await call.ok("POST", "/v1/batches", {"name": "root", "queue": "q"}))["id"]
        ended = (await call.ok("POST", "/v1/jobs", {"queue": "q"}))["id"]
        await call.ok("DELETE", f"/v1/jobs/{ended}")
        await call.ok("PUT", "/v1/schedules/s", {"queue": "q", "every_s": 86400})
    return {"root": root, "ended": ended}


async def jobs(db: Db) -> int:
    """How many jobs there are."""
    return int(await db.fetchval("SELECT count(*) FROM pgworkd.jobs"))


async def test_every_route_that_creates_jobs_takes_a_key(dsn: str) -> None:
    async with calling(dsn) as call:
        paths = (await call.ok("GET", "/v1/openapi.json"))["paths"]
    creates = {path for path, methods in paths.items() if "201" in methods.get("post", {}).get("responses", {})}
    takes = {
        path
        for path in paths
        for each in paths[path].get("post", {}).get("parameters", ())
        if each["name"] == "Idempotency-Key"
    }
    assert creates - NO_JOBS == takes == CALLS.keys()


@pytest.mark.parametrize("route", CALLS)
async def test_a_call_with_a_key_is_done_once(dsn: str, db: Db, prepared: dict[str, str], route: str) -> None:
    path, body_of = CALLS[route]
    path, body = path.format_map(prepared), body_of(route)
    async with calling(dsn) as call, calling(dsn) as other_gateway:
        first = await sent(call, path, body, "k")
        assert first.status_code == 201, first.text
        created = await jobs(db)
        for again in (call, also(other_gateway, call.token)):
            answer = await sent(again, path, body, "k")
            kept = {name: answer.headers.get(name) for name in ("location", "content-type")}
            assert (answer.status_code, answer.content) == (201, first.content)
            assert kept == {name: first.headers.get(name) for name in kept}
        assert await jobs(db) == created

        all_at_once = await asyncio.gather(*(sent(call, path, body, "other") for _ in range(6)))
        done = [answer for answer in all_at_once if answer.status_code != 503]  # a caller has one stream here
        assert len({answer.content for answer in done}) == 1
        assert {answer.status_code for answer in done} <= {200, 201}
        created, someone = await jobs(db), also(call, await token(dsn))
        assert (await sent(someone, path, body, "k")).is_success, "a key is its caller's own"
        assert (await jobs(db) > created) == (route != "/v1/batches/{batch_id}/children")


async def test_a_key_of_another_call_is_refused(dsn: str, db: Db, prepared: dict[str, str]) -> None:
    async with calling(dsn) as call:
        await call.ok("POST", "/v1/jobs", {"queue": "q"}, headers={"Idempotency-Key": "k"})
        for route, (path, body_of) in CALLS.items():
            body = {"queue": "q", "priority": 1} if route == "/v1/jobs" else body_of(route)
            refused = await sent(call, path.format_map(prepared), body, "k")
            assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (409, "key-reused"), route
        assert await jobs(db) == 1
        for wrong in ("", "x" * 256):
            status, slug, found = await call.problem(
                "POST", "/v1/jobs", {"queue": "q"}, headers={"Idempotency-Key": wrong}
            )
            assert (status, slug, found["errors"][0]["in"]) == (422, "invalid", "header/Idempotency-Key")


@pytest.mark.parametrize(
    "other",
    [LINES + LINE, LINE * 2999, b"", b'{"queue": "other"}\n'],
    ids=len,
)
async def test_a_key_of_another_stream_is_refused(dsn: str, db: Db, other: bytes) -> None:
    async with calling(dsn) as call:
        assert (await sent(call, "/v1/jobs/stream", LINES, "k")).status_code == 201
        refused = await sent(call, "/v1/jobs/stream", other, "k")
        assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (409, "key-reused")
        assert (await sent(call, "/v1/jobs/stream", LINES, "k")).json() == {"created": 3000}
        assert await jobs(db) == 3000


async def test_a_call_that_failed_leaves_its_key_free(dsn: str, db: Db) -> None:
    key = {"Idempotency-Key": "k"}
    async with calling(dsn) as call:
        for _ in range(2):
            assert (await call.problem("POST", "/v1/jobs", {"queue": ""}, headers=key))[0] == 422
        missing = {"queue": "q", "after": [str(UUID(int=1))]}
        assert (await call.problem("POST", "/v1/jobs", missing, headers=key))[1] == "unknown-dependency"
        await call.ok("POST", "/v1/jobs", {"queue": "q"}, headers=key)
        assert await db.fetchval("SELECT count(*) FROM pgworkd.idempotent_calls") == 1


async def test_keys_are_kept_for_a_day(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        first = await call.ok("POST", "/v1/jobs", {"queue": "q"}, headers={"Idempotency-Key": "k"})
        await db.execute("UPDATE pgworkd.idempotent_calls SET at = at - interval '23 hours'")
        await db.execute("SELECT pgworkd.prune(30, 30)")
        assert await call.ok("POST", "/v1/jobs", {"queue": "q"}, headers={"Idempotency-Key": "k"}) == first
        await db.execute("UPDATE pgworkd.idempotent_calls SET at = at - interval '2 hours'")
        await db.execute("SELECT pgworkd.prune(30, 30)")
        assert await call.ok("POST", "/v1/jobs", {"queue": "q"}, headers={"Idempotency-Key": "k"}) != first


async def test_a_call_whose_key_is_under_way_does_not_wait_for_long(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "UNDER_WAY_S", 0.05)
    headers = {"Idempotency-Key": "first"}
    async with calling(dsn) as call:
        await call.ok("POST", "/v1/jobs", {"queue": "q"}, headers=headers)
        async with db.transaction():
            await db.execute(
                "INSERT INTO pgworkd.idempotent_calls SELECT caller, 'k', sha256 FROM pgworkd.idempotent_calls"
            )
            status, slug, _ = await call.problem("POST", "/v1/jobs", {"queue": "q"}, headers={"Idempotency-Key": "k"})
            assert (status, slug) == (503, "key-in-use")
            await db.execute("DELETE FROM pgworkd.idempotent_calls WHERE key = 'k'")
        await call.ok("POST", "/v1/jobs", {"queue": "q"}, headers={"Idempotency-Key": "k"})


async def test_tokens_of_one_long_name_have_keys_apart(dsn: str) -> None:
    async with calling(dsn) as call:
        callers = [also(call, await token(dsn, name="n" * 200)) for _ in range(2)]
        body, headers = {"queue": "q"}, {"Idempotency-Key": "k"}
        assert len({(await each.ok("POST", "/v1/jobs", body, headers=headers))["id"] for each in callers}) == 2
