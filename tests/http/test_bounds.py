"""What is refused before any route: hosts, pages of other sites, large heads, smuggled paths."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import asyncpg
import pytest

from pgworkd.gateway.api.request.bounds import HEADER_BYTES_MAX
from tests.kits.daemon import insert
from tests.kits.gateway import calling


@pytest.mark.parametrize(
    ("host", "served"),
    [
        *((host, True) for host in ("localhost", "LOCALHOST:7433", "127.0.0.1:1", "[::1]", "[::1]:80")),
        *((host, False) for host in ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "", "localhost@x")),
        *((host, False) for host in ("[::1", "10.0.0.1", "localhost:80:80", "127.1", "2130706433")),
    ],
)
async def test_only_hosts_of_the_list_are_served(dsn: str, host: str, served: bool) -> None:
    """A page whose name was pointed to 127.0.0.1 afterwards sends that name."""
    async with calling(dsn) as call:
        answer = await call("GET", "/v1/queues", headers={"Host": host})
        assert (answer.status_code != 421) == served


@pytest.mark.parametrize(
    ("headers", "served"),
    [
        ({}, True),
        ({"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "none"}, True),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://localhost:1"}, False),
        ({"Origin": "http://localhost.evil.example"}, False),
    ],
)
async def test_pages_of_other_sites_change_nothing(dsn: str, headers: dict[str, str], served: bool) -> None:
    async with calling(dsn) as call:
        answer = await call("POST", "/v1/queues/q/pause?create=true", headers=headers)
        assert (answer.status_code == 200) == served, answer.text
        assert (await call("GET", "/v1/queues", headers=headers)).status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_no_preflight_is_answered_with_permission(dsn: str) -> None:
    async with calling(dsn) as call:
        asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
        answer = await call("OPTIONS", "/v1/jobs", headers=asked)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_large_heads_are_refused(dsn: str) -> None:
    async with calling(dsn) as call:
        fits = await call("GET", "/v1/queues", headers={"X-Filler": "x" * (HEADER_BYTES_MAX - 1000)})
        assert fits.status_code == 200
        for more in ({"X-Filler": "x" * HEADER_BYTES_MAX}, {f"X-{n}": "x" * 100 for n in range(400)}):
            assert (await call.problem("GET", "/v1/queues", headers=more))[:2] == (431, "headers-too-large")


async def test_each_answer_says_that_it_is_not_to_be_stored_or_guessed_at(dsn: str) -> None:
    ids = set[str]()
    async with calling(dsn) as call:
        for path in ("/healthz", "/v1/queues", "/v1/nope", "/v1/queues/%FF"):
            answer = await call("GET", path)
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-request-id"] not in ids
            ids.add(answer.headers["x-request-id"])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/%2e%2e/metrics",
        "//v1/tokens",
        "/v1//tokens",
        "/v1/tokens/",
        "/V1/tokens",
        "/v1/jobs%2Fbulk",
        "/v1%2Ftokens",
        "/v1/tokens%00",
        "/v1/tokens%0a",
        "/v1/tokens;x=1",
        "/v1/%74okens%2f",
        "/v1/queues/%EE%80%80s",
        "/v1/jobs%0A",
        "/v1/queues/%FF%FE",
        "/v1/queues/%00",
        "/v1/tokens%EF%BC%8F",
    ],
)
async def test_odd_paths_lead_nowhere(dsn: str, path: str) -> None:
    async with calling(dsn) as call:
        answer = await call("GET", path)
        assert answer.status_code in (404, 405, 422), answer.text
        assert answer.headers["content-type"] == "application/problem+json"


async def test_unknown_methods_and_paths_are_problems(dsn: str) -> None:
    async with calling(dsn) as call:
        code, slug, _ = await call.problem("PUT", "/v1/queues")
        assert (code, slug) == (405, "method-not-allowed")
        assert (await call.problem("BREW", "/v1/queues"))[0] == 405
        assert (await call.problem("GET", "/v1/problems/nope"))[:2] == (404, "not-found")


async def test_a_method_that_a_path_has_not_is_answered_with_those_that_it_has(dsn: str) -> None:
    async with calling(dsn, workers=True) as call:
        for method, path, allowed in (
            ("PUT", "/v1/jobs", "GET, POST"),
            ("DELETE", "/v1/queues/q", "GET, PATCH"),
            ("POST", "/healthz", "GET"),
        ):
            assert (await call(method, path)).headers["allow"] == allowed


async def test_a_parameter_that_a_route_has_not_is_refused_and_nothing_done(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    await insert(db, "q")
    async with calling(dsn) as call:
        all_of_it = {"queue": "q", "status": "pending"}
        for query, hint in (
            ("dryrun=true", "did you mean dry_run?"),
            ("x=1&dry_run=true", "it takes background, dry_run"),
        ):
            code, slug, found = await call.problem("POST", f"/v1/jobs/cancel?{query}", all_of_it)
            assert (code, slug) == (422, "invalid")
            assert hint in found["errors"][0]["detail"]
        assert (await call.problem("GET", "/v1/queues?queue=q"))[0] == 422
        twice = await call.problem("GET", "/v1/jobs?queue=q&queue=r")
        assert twice[2]["errors"] == [{"in": "query/queue", "detail": "it is given twice: give it once"}]
        assert await call.ok("GET", "/v1/jobs?queue=q&status=pending")
        assert (await call.ok("POST", "/v1/jobs/cancel?dry_run=true", all_of_it))["matches"] == 1
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'pending'") == 1


async def test_text_that_has_no_utf8_is_told_as_it_came(dsn: str) -> None:
    headers = {"Content-Type": "application/json"}
    body = b'{"queue": "q", "status": "\\ud800"}'
    async with calling(dsn) as call:
        for operation in ("cancel", "retry", "discard"):
            answer = await call("POST", f"/v1/jobs/{operation}", content=body, headers=headers)
            assert answer.status_code == 422, answer.text
            assert "\\ud800" in answer.text


async def test_each_problem_has_its_page(dsn: str) -> None:
    from pgworkd.gateway.api.request.problems import PROBLEMS

    async with calling(dsn) as call:
        for slug, kind in PROBLEMS.items():
            page = (await call("GET", f"/v1/problems/{slug}")).text
            assert kind.title in page
            assert kind.remedy in page


async def test_mounted_below_another_application(dsn: str) -> None:
    import contextlib

    import httpx
    from fastapi import FastAPI

    from pgworkd.core.access import Access
    from pgworkd.http import asgi

    gateway = asgi(dsn, authorize=lambda _: Access.full("ours"))

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> Any:
        async with gateway.running():
            yield

    app = FastAPI(lifespan=lifespan)
    app.mount("/inner/jobs", gateway)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://any.example") as client,
    ):
        made = await client.post("/inner/jobs/v1/jobs", json={"queue": "q"})
        assert made.status_code == 201
        assert (await client.get(made.headers["location"])).json()["queue"] == "q"
        problem = (await client.get("/inner/jobs/v1/jobs/00000000-0000-0000-0000-000000000000")).json()
        assert (await client.get(problem["type"])).status_code == 200
        assert (await client.get("/inner/jobs/v1/queues/a%2Fb")).status_code == 404


@pytest.mark.parametrize(
    "name", ["a/b", "a\nb", "a\n", "a\r\nb", "\ue000", "a\ue000sb", "\x01\x7f", "e\u0301", "/" * 200, "a b?c#d%2F"]
)
async def test_any_name_can_be_used_in_a_path(dsn: str, name: str) -> None:
    async with calling(dsn) as call:
        await call.ok("POST", "/v1/jobs", {"queue": name})
        place = f"/v1/queues/{quote(name, safe='')}"
        assert (await call.ok("GET", place))["queue"] == name
        assert (await call.ok("POST", f"{place}/pause"))["queue"] == name
        assert (await call.problem("GET", f"/v1/schedules/{quote(name, safe='')}"))[0] == 404
        too_long = quote((name * 201)[:201], safe="")
        assert (await call.problem("GET", f"/v1/queues/{too_long}"))[0] == 422


@pytest.mark.parametrize("host", ["10.0.0.7:7433", "", None])
async def test_probes_are_answered_under_any_host(dsn: str, host: str | None) -> None:
    """Load balancers ask by address, and HAProxy without a host."""
    async with calling(dsn) as call:
        for method in ("GET", "HEAD"):
            for path in ("/healthz", "/readyz", "/healthz?x=1"):
                request = call.client.build_request(method, path, headers={"Host": host or ""})
                if host is None:
                    del request.headers["host"]
                answer = await call.client.send(request)
                assert answer.status_code == 200, (method, path)
        asked = {"Host": host} if host else {"Host": ""}
        assert (await call("GET", "/metrics", headers=asked)).status_code == (421 if host else 200)
        assert (await call("GET", "/v1/queues", headers=asked)).status_code == 421


async def test_head_is_answered_as_get(dsn: str) -> None:
    async with calling(dsn) as call:
        for path in ("/v1/queues", "/v1/queues/nothing", "/metrics"):
            got, head = await call("GET", path), await call("HEAD", path)
            assert (head.status_code, head.headers["content-type"]) == (got.status_code, got.headers["content-type"])
        assert (await call("HEAD", "/v1/events?of=audit")).status_code == 405, "it would not end"
