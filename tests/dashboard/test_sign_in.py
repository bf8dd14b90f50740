"""Who looks: what a proxy says counts from that proxy alone; who may not look any more does not."""

from __future__ import annotations

import re
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI

from pgworkd.admin import Admin
from pgworkd.core.access import Access
from pgworkd.database.connection import ConnectionOptions
from pgworkd.gateway.api.app import asgi
from pgworkd.gateway.api.request.gateway import GatewayOptions
from pgworkd.gateway.api.request.live_lists import LiveLists
from tests.kits import verbs as v
from tests.kits.daemon import until
from tests.kits.gateway import served, token
from tests.kits.verbs import Db

BY_PROXY = {"PGWORKD_HTTP_PROXIES": "127.0.0.1", "PGWORKD_HTTP_USER_HEADER": "X-Forwarded-User"}


@pytest.mark.parametrize(("scopes", "pause"), [("read", 403), ("read,operate", 303)])
async def test_a_proxy_says_who_looks(dsn: str, db: Db, scopes: str, pause: int) -> None:
    await v.one(db)
    with served(dsn, "--with", "dashboard", **BY_PROXY, PGWORKD_HTTP_USER_SCOPES=scopes) as (_, address):
        for peer, status in (("127.0.0.1", 200), ("127.0.0.2", 303)):
            transport = httpx.AsyncHTTPTransport(local_address=peer)
            headers = {"X-Forwarded-User": "ann@example.com", "X-Forwarded-Prefix": "/jobs"}
            async with httpx.AsyncClient(transport=transport, base_url=address, headers=headers) as client:
                page = await client.get("/")
                assert page.status_code == status
                assert ('href="/jobs/queues"' in page.text) is (status == 200)
                answer = await client.post("/queues/q/pause", data={"for_s": "60", "back": "/"})
                assert answer.status_code == (pause if status == 200 else 303)
    async with Admin(ConnectionOptions(dsn)) as admin:
        assert [each.who for each in await admin.audit()] == ["ann@example.com"] * (pause == 303)


async def test_an_application_that_mounts_the_pages_says_who_looks(dsn: str, db: Db) -> None:
    await v.one(db)

    def authorize(request: Any) -> Access:
        scopes = {"read": None, "operate": None} if "user" in request.headers else {}
        return Access(request.headers.get("user", "nobody"), scopes)

    gateway = asgi(GatewayOptions(ConnectionOptions(dsn), workers=False, dashboard=True), authorize=authorize)
    app = FastAPI()
    app.mount("/ops", gateway)
    transport = httpx.ASGITransport(app=app)
    async with gateway.running(), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        refused = await client.get("/ops/queues")
        assert (refused.status_code, "needs the scope read" in refused.text) == (403, True)
        client.headers["user"] = "ann"
        page = await client.get("/ops/queues?search=x")
        places = re.findall(r'(?:href|src|action|connect)="([^"#][^"]*)"', page.text)
        assert [place for place in places if not place.startswith("/ops/")] == []
        for place in places:
            if "/static/" in place or place in ("/ops/jobs", "/ops/"):
                assert (await client.get(place)).status_code == 200, place
        paused = await client.post("/ops/queues/q/pause", data={"for_s": "60", "back": "/queues?search=x"})
        assert paused.headers["location"] == "/ops/queues?search=x"
        assert "queue q is paused" in (await client.get(paused.headers["location"])).text


def test_a_start_without_tokens_prints_an_address_unless_it_goes_to_the_journal(dsn: str) -> None:
    def printed(**environ: str) -> str:
        with served(dsn, "--with", "dashboard", **environ) as (process, address):
            assert httpx.get(f"{address}/sign-in", timeout=30).status_code == 200
            process.terminate()
            assert process.stdout is not None
            return process.stdout.read()

    assert "/sign-in?once=" in printed()
    assert "once=" not in printed(JOURNAL_STREAM="8:1")


async def test_a_revoked_token_ends_the_pages_that_are_open(dsn: str) -> None:
    mine = await token(dsn, {"read": None})
    with served(dsn, "--with", "dashboard") as (_, address):
        async with httpx.AsyncClient(base_url=address, timeout=30) as client:
            await client.post("/sign-in", data={"token": mine})
            async with client.stream("GET", "/queues", headers={"Accept": "text/event-stream"}) as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                pieces = stream.aiter_text()
                assert "<h1>Queues</h1>" in await anext(pieces)
                async with Admin(ConnectionOptions(dsn)) as admin:
                    await admin.tokens.revoke(mine.split("_")[1])
                with anyio.fail_after(20):
                    assert [piece async for piece in pieces if "<h1>Sign" in piece] == []
            assert (await client.get("/queues")).status_code == 303


async def test_a_hundred_viewers_are_one_reader_and_the_last_one_ends_it() -> None:
    lists, reads = LiveLists(), 0

    async def read() -> list[dict[str, Any]]:
        nonlocal reads
        reads += 1
        return [{"html": "x"}]

    async with anyio.create_task_group() as tasks:
        seen = [0] * 100

        async def look(number: int) -> None:
            async for _ in lists.follow("page", read, tasks):
                seen[number] += 1

        async with anyio.create_task_group() as viewers:
            for number in range(100):
                viewers.start_soon(look, number)
            await until(lambda: all(seen))
            assert reads == 1
            viewers.cancel_scope.cancel()
        await until(lambda: not lists._lists)
    assert reads <= 3
