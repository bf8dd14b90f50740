"""Who may call what: the whole table of routes, called with each scope."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import pytest

from pgworkd.admin import Admin
from pgworkd.core.access import SCOPES, Access
from pgworkd.core.assignment import sealed
from pgworkd.core.fence import Fence
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.remote_store import RemoteStore
from pgworkd.gateway.api.app import Application, asgi
from pgworkd.gateway.api.request import access as checks
from pgworkd.gateway.api.request.access import Rate
from pgworkd.gateway.api.request.gateway import Gateway, GatewayOptions
from pgworkd.gateway.api.request.problems import Problem
from tests.kits.gateway import ALL, Caller, also, calling, token
from tests.kits.schema import granted

pytestmark = pytest.mark.slow("each calls the whole table of routes")

ID = str(UUID(int=7))
ASSIGNMENT = sealed(Fence(UUID(int=7), 1, 7, UUID(int=1)))
OPEN = {"/healthz", "/readyz", "/v1/problems/{slug}"}
BODIES: dict[str, Any] = {
    "POST /v1/jobs": {"queue": "q"},
    "PUT /v1/jobs/{job_id}": {"queue": "q"},
    "PATCH /v1/jobs/{job_id}": {"priority": 1},
    "POST /v1/jobs/bulk": {"jobs": [{"queue": "q"}]},
    "POST /v1/workflows": {"jobs": [{"name": "a", "queue": "q"}]},
    "POST /v1/batches": {"name": "q"},
    "POST /v1/batches/{batch_id}/children": {"name": "q"},
    "POST /v1/batches/{batch_id}/jobs": {"payloads": [{}]},
    **{f"POST /v1/jobs/{each}": {"queue": "q"} for each in ("retry", "cancel", "discard", "undepend")},
    "PATCH /v1/queues/{queue}": {"concurrency": 1},
    "PUT /v1/schedules/{name}": {"queue": "q", "every_s": 60},
    "PATCH /v1/schedules/{name}": {"enabled": True},
    "POST /v1/dead/mute": {"group": 1, "for_s": 1.0},
    "PUT /v1/endpoints/{name}": {"url": "https://example.com/", "unsigned": True},
    "POST /v1/tokens": {"name": "x", "scopes": {"read": None}},
    "POST /v1/workers": {"name": "w", "queues": {"q": 1}},
    "POST /v1/claims": {"worker": 7, "queues": ["q"]},
    "POST /v1/workers/{worker_id}/beat": {},
    "PUT /v1/workers/{worker_id}/queues": {"queues": {"q": 1}},
    "POST /v1/workers/{worker_id}/ask": {"state": "quiet"},
    "POST /v1/settlements": {"settlements": [{"assignment": "a", "outcome": "complete"}]},
} | {f"POST /v1/assignments/{{assignment}}/{how}": {} for how in ("complete", "fail", "release", "extend")}
QUERIES = {"/v1/events": "?of=audit&for_s=0.1", "/v1/debug/profile": "?seconds=1"}
NEEDS = {
    "enqueue": {"POST /v1/jobs", "PUT /v1/jobs/{job_id}", "POST /v1/jobs/bulk", "POST /v1/jobs/stream"}
    | {"POST /v1/workflows", "POST /v1/batches", "POST /v1/batches/{batch_id}/children"}
    | {"POST /v1/batches/{batch_id}/jobs", "POST /v1/batches/{batch_id}/seal"}
    | {"DELETE /v1/jobs/{job_id}", "POST /v1/batches/{batch_id}/cancel", "DELETE /v1/batches/{batch_id}"},
    "operate": {"DELETE /v1/jobs/{job_id}", "PATCH /v1/jobs/{job_id}", "POST /v1/jobs/{job_id}/replay"}
    | {f"POST /v1/jobs/{each}" for each in ("retry", "cancel", "discard", "undepend")}
    | {"POST /v1/batches/{batch_id}/cancel", "DELETE /v1/batches/{batch_id}"}
    | {"PATCH /v1/queues/{queue}", "POST /v1/queues/{queue}/pause", "POST /v1/queues/{queue}/resume"}
    | {"PUT /v1/schedules/{name}", "PATCH /v1/schedules/{name}", "DELETE /v1/schedules/{name}"}
    | {"POST /v1/operations/{operation_id}/stop"}
    | {"POST /v1/endpoints/{name}/disable", "POST /v1/endpoints/{name}/enable"}
    | {"POST /v1/schedules/{name}/run", "POST /v1/dead/mute", "POST /v1/workers/{worker_id}/ask"}
    | {"POST /v1/jobs/{job_id}/stack", "GET /v1/jobs/{job_id}/stack"},
    "read": {
        "GET /v1/jobs",
        "GET /v1/jobs/{job_id}",
        "GET /v1/jobs/{job_id}/explain",
        "GET /v1/batches/{batch_id}",
        "GET /v1/queues",
    }
    | {"GET /v1/batches"}
    | {"GET /v1/queues/{queue}", "GET /v1/schedules", "GET /v1/schedules/{name}", "GET /v1/schedules/{name}/next"}
    | {"GET /v1/operations", "GET /v1/operations/{operation_id}"}
    | {"GET /v1/workers", "GET /v1/dead", "GET /v1/audit", "GET /v1/events"},
    "payload": {"GET /v1/jobs/{job_id}/result", "GET /v1/batches/{batch_id}/results"},
    "metrics": {"GET /v1/queues/{queue}/depth", "GET /metrics"},
    "admin": {"GET /v1/tokens", "POST /v1/tokens", "DELETE /v1/tokens/{token_id}", "GET /v1/endpoints"}
    | {"GET /v1/endpoints/{name}", "GET /v1/debug/stacks", "GET /v1/debug/profile"}
    | {"PUT /v1/endpoints/{name}", "DELETE /v1/endpoints/{name}"},
    "work": {"POST /v1/workers", "POST /v1/claims", "POST /v1/workers/{worker_id}/beat"}
    | {"PUT /v1/workers/{worker_id}/queues", "DELETE /v1/workers/{worker_id}", "POST /v1/settlements"}
    | {f"POST /v1/assignments/{{assignment}}/{how}" for how in ("complete", "fail", "release", "extend")},
}
"""Every route that needs a token, by the scopes with any of which it may be called."""


def routes() -> Iterator[tuple[str, str]]:
    api = asgi("postgresql://nobody@localhost/none").api
    found = api.openapi()["paths"]
    for path, methods in found.items():
        for method in methods:
            yield method.upper(), path


async def tried(call: Caller, method: str, path: str) -> httpx.Response:
    place = path.replace("{queue}", "q").replace("{name}", "s")
    place = place.replace("{worker_id}", "7").replace("{operation_id}", "7").replace("{assignment}", ASSIGNMENT)
    place = re.sub(r"\{\w+_id\}", ID, place) + QUERIES.get(path, "")
    body = BODIES.get(f"{method} {path}")
    more: dict[str, Any] = {}
    if path.endswith("/stream"):
        more = {"content": '{"queue": "q"}', "headers": {"Content-Type": "application/x-ndjson"}}
    return await call(method, place, body, **more)


def test_every_route_is_in_the_table() -> None:
    every = {f"{method} {path}" for method, path in routes() if path not in OPEN}
    assert set().union(*NEEDS.values()) == every
    assert NEEDS.keys() == SCOPES.keys()


async def test_no_route_answers_without_a_token_or_with_a_wrong_one(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "FAILURES_MAX", 10_000)
    async with calling(dsn, workers=True) as call:
        right = call.token
        wrong = ["", "x", "pgw_", right[:-1], right + "x", "pgw_aaaaaaaaaaaa_" + right.rpartition("_")[2]]
        for method, path in routes():
            if path in OPEN:
                continue
            assert (await call.client.request(method, path.replace("{", "").replace("}", ""))).status_code in (401, 404)
            for text in wrong:
                answer = await tried(also(call, text), method, path)
                assert answer.status_code == 401, (method, path, text)
                assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_token_of_one_scope_calls_its_routes_only(dsn: str, scope: str) -> None:
    async with calling(dsn, {scope: None}, workers=True) as call:
        for method, path in routes():
            if path in OPEN:
                continue
            answer = await tried(call, method, path)
            allowed = f"{method} {path}" in NEEDS[scope]
            assert (answer.status_code != 403) == allowed, (method, path, answer.text)
            assert answer.status_code < 500


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_token_of_another_queue_sees_and_changes_nothing_of_this_one(dsn: str, scope: str) -> None:
    async with calling(dsn, {scope: ["other"]}, workers=True) as call:
        for method, path in routes():
            if path in OPEN or path.startswith("/v1/tokens"):
                continue
            answer = await tried(call, method, path)
            if path == "/v1/settlements" and answer.status_code == 200:
                assert answer.json()["settlements"][0]["problem"]["status"] == 422
            elif answer.status_code == 200:  # lists show what may be seen: nothing
                assert path in ("/v1/queues", "/v1/schedules", "/v1/operations")
                assert list(answer.json().values()) == [[]]
            else:
                mine = {409, 422} if scope == "work" and f"{method} {path}" in NEEDS["work"] else set()
                assert answer.status_code in {403, 404, *mine}, (method, path, answer.text)


@pytest.mark.parametrize("name", ["ma*l", "[m]ail", "m?il", "mail"])
def test_queues_are_patterns_as_in_a_shell(name: str) -> None:
    access = Access("x", {"read": [name]})
    assert access.allows("read", "mail")
    assert not access.allows("read", "MAIL")
    assert not access.allows("read", "mail2") or name == "ma*l2"
    assert not access.allows("read")
    assert not access.allows("enqueue", "mail")


async def test_a_revoked_token_is_refused_within_seconds(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.CHECKED_S < 10
    monkeypatch.setattr(checks, "CHECKED_S", 0.05)
    async with calling(dsn) as call:
        other = also(call, await token(dsn, {"read": None}))
        await other.ok("GET", "/v1/queues")
        await call.ok("DELETE", f"/v1/tokens/{other.token.split('_')[1]}")
        until = time.monotonic() + 10
        while (await other("GET", "/v1/queues")).status_code != 401:
            assert time.monotonic() < until


async def test_a_token_is_looked_up_once_for_all_who_call_at_once(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = 0
    look_up = checks.Tokens._look_up

    async def counted(self: checks.Tokens, token_id: str) -> Any:
        nonlocal looked_up
        looked_up += 1
        return await look_up(self, token_id)

    monkeypatch.setattr(checks.Tokens, "_look_up", counted)
    async with calling(dsn) as call, asyncio.TaskGroup() as tasks:
        for _ in range(50):
            tasks.create_task(call.ok("GET", "/v1/queues/q/depth"))
    assert looked_up == 1


async def test_an_expired_token_is_refused(dsn: str) -> None:
    async with Admin(ConnectionOptions(dsn)) as admin:
        expires = await admin._connection.value("SELECT pgworkd.clock() + interval '0.2 s'")
        text = str(await admin.tokens.add("x", ALL, expires))
    async with calling(dsn) as first:
        call = also(first, text)
        until = time.monotonic() + 20
        while (await call("GET", "/v1/queues")).status_code != 401:
            assert time.monotonic() < until


async def test_guessing_is_slowed_down_per_address(dsn: str) -> None:
    async with calling(dsn) as call:
        guess = also(call, "pgw_aaaaaaaaaaaa_" + "x" * 40)
        codes = [(await guess("GET", "/v1/queues")).status_code for _ in range(checks.FAILURES_MAX + 5)]
        assert codes.count(401) == checks.FAILURES_MAX
        last = await guess("GET", "/v1/queues")
        assert (last.status_code, int(last.headers["retry-after"]) >= 1) == (429, True)


async def test_who_is_known_is_not_held_up_by_the_wrong_tokens_of_others(dsn: str) -> None:
    """All of them may come through one proxy."""
    async with calling(dsn) as call:
        await call.ok("GET", "/v1/queues")
        guess = also(call, call.token[:-1] + ("a" if call.token[-1] != "a" else "b"))
        codes = {(await guess("GET", "/v1/queues")).status_code for _ in range(checks.FAILURES_MAX + 5)}
        assert codes == {401, 429}
        await call.ok("GET", "/v1/queues")


async def test_requests_of_one_token_are_metered_and_others_are_not_held_up(dsn: str) -> None:
    async with calling(dsn, requests_per_s=2.0) as call:
        other = also(call, await token(dsn))
        codes = [(await call("GET", "/v1/problems/x")).status_code for _ in range(5)]
        assert codes == [404] * 5, "open routes are not metered"
        codes = [(await call("GET", "/v1/queues/q/depth")).status_code for _ in range(6)]
        assert codes[:2] == [200, 200]
        assert 429 in codes
        assert (await other("GET", "/v1/queues/q/depth")).status_code == 200


def test_a_rate_gives_its_burst_and_then_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(checks.time, "monotonic", lambda: now)
    rate = Rate(per_s=2.0, burst=4, keys_max=2)
    passed = 0
    for _ in range(1000):
        if rate.wait_s("a") == 0:
            rate.count("a")
            passed += 1
        now += 0.01
    assert passed == 4 + 19
    for key in ("b", "c", "d"):
        rate.count(key)
    assert len(rate._full_at) == 2


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_application_says_itself_who_may_do_what(dsn: str, is_async: bool) -> None:
    def sync(request: Any) -> Access:
        user = request.headers.get("x-user")
        if user is None:
            raise Problem("unauthenticated")
        return Access(user, {"read": None} if user == "viewer" else ALL)

    async def later(request: Any) -> Access:
        return sync(request)

    options = GatewayOptions(ConnectionOptions(dsn), connections_max=2)
    app = Application(Gateway(options, later if is_async else sync))
    transport = httpx.ASGITransport(app=app)
    async with app.running(), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        job = {"queue": "q"}
        assert (await client.post("/v1/jobs", json=job)).status_code == 401
        assert (await client.post("/v1/jobs", json=job, headers={"X-User": "viewer"})).status_code == 403
        assert (await client.post("/v1/jobs", json=job, headers={"X-User": "chief"})).status_code == 201


async def test_the_role_gateway_suffices_for_every_route(dsn: str) -> None:
    db = await asyncpg.connect(dsn)
    try:
        async with (
            granted(dsn, db) as roles,
            calling(dsn, database=ConnectionOptions(roles.dsn("gateway")), workers=True) as call,
        ):
            await call.ok("POST", "/v1/jobs", {"queue": "q"})
            for method, path in routes():
                answer = await tried(call, method, path)
                assert answer.status_code in (200, 201, 404, 409, 422), (method, path, answer.text)
    finally:
        db.terminate()


async def test_a_gateway_whose_role_lacks_rights_says_so(dsn: str) -> None:
    """It is its operator's mistake, not the caller's, nor one of an application that checks callers by itself."""
    db = await asyncpg.connect(dsn)
    try:
        async with granted(dsn, db) as roles, calling(dsn, database=ConnectionOptions(roles.dsn("worker"))) as call:
            code, slug, found = await call.problem("GET", "/v1/queues")
            assert (code, slug) == (403, "forbidden")
            assert "permission denied for table tokens (42501); check user" in found["detail"]
    finally:
        db.terminate()


@pytest.mark.parametrize(("parts", "absent"), [("api", "/v1/workers/7/beat"), ("workers", "/v1/jobs")])
async def test_a_gateway_serves_the_parts_that_it_is_asked_for(dsn: str, parts: str, absent: str) -> None:
    async with calling(dsn, api=parts == "api", workers=parts == "workers") as call:
        for path in ("/v1/jobs", "/v1/workers/7/beat"):
            answer = await call("POST", path, {"queue": "q"})
            assert (answer.status_code == 404) == (path == absent), path
        described = (await call.ok("GET", "/v1/openapi.json"))["paths"]
        assert ("/v1/jobs" in described, "/v1/claims" in described) == (parts == "api", parts == "workers")


async def test_a_padded_token_is_taken_and_not_remembered_as_it_was_sent(dsn: str) -> None:
    async with calling(dsn) as call:
        tokens = call.client._transport.app.gateway._authorize  # type: ignore[attr-defined]
        for padding in (1, 2, 5_000, 6_000):
            headers = {"Authorization": "Bearer" + " " * padding + call.token}
            assert (await call("GET", "/v1/queues", headers=headers)).status_code == 200
        assert sum(map(len, tokens._right)) < 4 * 100


async def test_who_has_no_token_makes_the_database_do_nothing(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An assignment of a job that was pushed needs no token: where nothing ever was, that is asked now and then."""
    asked = 0
    find = RemoteStore.find_standing

    async def counted(store: Any, *args: Any) -> Any:
        nonlocal asked
        asked += 1
        return await find(store, *args)

    monkeypatch.setattr(RemoteStore, "find_standing", counted)
    async with calling(dsn, workers=True) as call:
        for _ in range(20):
            answer = await call.client.post(f"/v1/assignments/{ASSIGNMENT}/complete", json={})
            assert answer.status_code == 401
    assert asked == 1
