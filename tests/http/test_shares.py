"""One caller cannot hurt another: whatever one token does at its worst, others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import anyio
import pytest

from pgworkd.gateway.api.request import access as checks
from pgworkd.gateway.api.routes import bulk
from tests.kits.daemon import until
from tests.kits.gateway import Caller, also, calling, token
from tests.kits.verbs import Db, insert
from tests.kits.workers import registered

pytestmark = pytest.mark.slow("each fills a gateway with requests that wait")

NDJSON = {"Content-Type": "application/x-ndjson"}
LINE = b'{"queue": "crawl"}\n'
CONNECTIONS = 5
LOCKED = "SELECT count(*) >= 3 FROM pg_locks WHERE NOT granted"
HELD = """
    SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"""


def silent(first: bytes = b"") -> AsyncIterator[bytes]:
    """A body that does not end."""

    async def body() -> AsyncIterator[bytes]:
        if first:
            yield first
        await anyio.sleep_forever()

    return body()


async def _streams(call: Caller, _: Db) -> list[Awaitable[Any]]:
    return [call("POST", "/v1/jobs/stream", content=silent(), headers=NDJSON) for _ in range(20)]


async def _streams_with_jobs(call: Caller, _: Db) -> list[Awaitable[Any]]:
    return [call("POST", "/v1/jobs/stream", content=silent(LINE * 2_000), headers=NDJSON) for _ in range(20)]


async def _slow_bodies(call: Caller, _: Db) -> list[Awaitable[Any]]:
    headers = {"Content-Type": "application/json"}
    return [call("POST", "/v1/jobs", content=silent(b'{"queue": '), headers=headers) for _ in range(20)]


async def _followers(call: Caller, _: Db) -> list[Awaitable[Any]]:
    return [call("GET", "/v1/events?of=audit&of=workers&for_s=600") for _ in range(20)]


async def _waits(call: Caller, _: Db) -> list[Awaitable[Any]]:
    job = (await call.ok("POST", "/v1/jobs", {"queue": "crawl"}))["id"]
    return [call("GET", f"/v1/jobs/{job}?wait_s=60") for _ in range(20)]


async def _locked(call: Caller, db: Db) -> list[Awaitable[Any]]:
    """Each waits for a key that somebody has inserted and not committed."""
    await db.execute("INSERT INTO pgworkd.jobs (queue, dedupe_key) VALUES ('crawl', 'k')")
    return [call("POST", "/v1/jobs", {"queue": "crawl", "dedupe_key": "k"}) for _ in range(20)]


HOGS: dict[str, tuple[Callable[[Caller, Db], Awaitable[list[Awaitable[Any]]]], Callable[[Any, Db], Any]]] = {
    "streams without jobs": (_streams, lambda gateway, _: gateway.streams.taken),
    "streams with jobs": (_streams_with_jobs, lambda gateway, _: gateway.streams.taken),
    "bodies that do not end": (_slow_bodies, lambda _, __: True),
    "followers of lists": (_followers, lambda gateway, _: gateway.waits.taken),
    "waits for a job": (_waits, lambda gateway, _: gateway.waits.taken),
    "enqueues that wait for a lock": (_locked, lambda _, db: db.fetchval(LOCKED)),
}
"""By name, the requests, and what is true once they hold what they can."""


@contextlib.asynccontextmanager
async def hogging(call: Caller, requests: list[Awaitable[Any]]) -> AsyncIterator[None]:
    """The gateway has them all, and not answered them, or has refused them, within the block."""
    transport: Any = call.client._transport
    app, has = transport.app, 0

    async def counted(*request: Any) -> None:
        nonlocal has
        has += 1
        await app(*request)

    async def run(each: Awaitable[Any]) -> None:
        await each

    async with anyio.create_task_group() as tasks:
        transport.app = counted
        for each in requests:
            tasks.start_soon(run, each)
        await until(lambda: has == len(requests))
        transport.app = app
        yield
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("how", HOGS)
async def test_what_one_token_does_at_its_worst_leaves_others_alone(dsn: str, db: Db, how: str) -> None:
    transaction = db.transaction()
    async with calling(dsn, workers=True, connections_max=CONNECTIONS, waiters_max=10) as other:
        worker = await registered(other)
        hog = also(other, await token(dsn, {"enqueue": ["crawl"], "read": None}, "hog"))
        await transaction.start()
        requests, hold = HOGS[how]
        async with hogging(other, await requests(hog, db)):
            await until(lambda: hold(other.client._transport.app.gateway, db))  # type: ignore[attr-defined]
            for _ in range(3):
                began = time.monotonic()
                assert (await other("POST", "/v1/jobs", {"queue": "mail"})).status_code == 201
                assert (await other("GET", "/v1/queues")).status_code == 200
                await worker.beat()
                assert await worker.claim() == []
                assert time.monotonic() - began < 5, "a beat takes a second at most"
        await transaction.rollback()


async def test_a_worker_beats_with_a_new_token_while_all_connections_are_in_use(dsn: str, db: Db) -> None:
    transaction = db.transaction()
    async with calling(dsn, workers=True, connections_max=1) as other:
        worker, new = await registered(other), also(other, await token(dsn))
        await transaction.start()
        async with hogging(other, await _locked(other, db)):
            with anyio.fail_after(5):
                worker.call = new
                await worker.beat()
        await transaction.rollback()


async def test_who_has_no_place_is_told_so(dsn: str, db: Db) -> None:
    async with calling(dsn, connections_max=10, waiters_max=10) as other:
        hog = also(other, await token(dsn, name="hog"))
        follows = [hog("GET", "/v1/events?of=audit&for_s=600") for _ in range(5)]
        streams = [hog("POST", "/v1/jobs/stream", content=silent(), headers=NDJSON)]
        async with hogging(other, [*follows, *streams]):
            for number in range(3):  # by then it has gone as far as it can
                assert (await other("POST", "/v1/jobs", {"queue": "mail", "dedupe_key": f"{number}"})).is_success
            assert await db.fetchval(HELD) == 0, "a stream without jobs holds nothing of the database"
            assert (await hog.problem("GET", "/v1/events?of=audit&for_s=0.1"))[:2] == (503, "too-many-waiters")
            refused = await hog("POST", "/v1/jobs/stream", content=LINE, headers=NDJSON)
            assert (refused.status_code, refused.json()["type"]) == (503, "/v1/problems/too-many-streams")
            assert (await other("GET", "/v1/events?of=audit&for_s=0.1")).status_code == 200
            assert (await other("POST", "/v1/jobs/stream", content=LINE, headers=NDJSON)).status_code == 201
        assert (await hog("POST", "/v1/jobs/stream", content=LINE, headers=NDJSON)).status_code == 201


async def test_a_claim_that_does_not_wait_needs_no_place(dsn: str) -> None:
    async with calling(dsn, workers=True, waiters_max=1) as call:
        one, two = await registered(call), await registered(call)
        async with hogging(call, [one.claim(wait_s=30)]):
            assert call.client._transport.app.gateway.claims.taken == 1  # type: ignore[attr-defined]
            assert await two.claim() == []
            asked = {"worker": two.id, "queues": two.queues, "wait_s": 5}
            assert (await call.problem("POST", "/v1/claims", asked, headers=two.headers))[:2] == (
                503,
                "too-many-waiters",
            )


async def test_a_new_token_is_served_beside_a_flood_of_wrong_ones(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from one address, as behind a proxy; and cost the database a question at a time."""
    asked, most = 0, 0
    known = checks.TokenOperations.known

    async def counted(tokens: Any, ids: Any) -> Any:
        nonlocal asked, most
        asked, most = asked + 1, max(most, len(ids))
        return await known(tokens, ids)

    monkeypatch.setattr(checks.TokenOperations, "known", counted)
    async with calling(dsn) as call:
        over = False

        async def flood(number: int) -> None:
            guess = 0
            while not over:
                guess += 1
                text = f"pgw_{number:06}{guess:06}_".replace("0", "o").replace("1", "l") + "x" * 40
                assert (await also(call, text)("GET", "/v1/queues")).status_code in (401, 429)

        async with asyncio.TaskGroup() as tasks:
            for number in range(30):
                tasks.create_task(flood(number))
            await until(lambda: asked > 2)
            for number in range(5):
                new = also(call, await token(dsn, name=f"new {number}"))
                began = time.monotonic()
                assert (await new("GET", "/v1/queues")).status_code == 200
                assert time.monotonic() - began < 2
            over = True
        assert most > 5, "those that come meanwhile are one question"


async def test_a_stream_ends_when_its_token_is_revoked(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("access", "waiting"):
        monkeypatch.setattr(f"pgworkd.gateway.api.request.{place}.CHECKED_S", 0.2)
    async with calling(dsn) as call:
        other = also(call, await token(dsn))
        async with asyncio.TaskGroup() as tasks:
            body = silent(LINE * bulk.LINES_STEP)
            stream = tasks.create_task(other("POST", "/v1/jobs/stream", content=body, headers=NDJSON))
            await until(lambda: call.client._transport.app.gateway.streams.taken == 1)  # type: ignore[attr-defined]
            await call.ok("DELETE", f"/v1/tokens/{other.token.split('_')[1]}")
            with anyio.fail_after(10):
                assert (await stream).status_code == 401
        assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_a_body_that_takes_long_is_no_use_once_its_token_is_revoked(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("access", "route"):
        monkeypatch.setattr(f"pgworkd.gateway.api.request.{place}.CHECKED_S", 0.001)
    async with calling(dsn) as call:
        other, arrived, go_on = also(call, await token(dsn)), anyio.Event(), anyio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'{"queue": "q"'
            arrived.set()
            await go_on.wait()
            yield b"}"

        async with asyncio.TaskGroup() as tasks:
            headers = {"Content-Type": "application/json"}
            slow = tasks.create_task(other("POST", "/v1/jobs", content=body(), headers=headers))
            await arrived.wait()
            await call.ok("DELETE", f"/v1/tokens/{other.token.split('_')[1]}")
            go_on.set()
        assert (slow.result().status_code, await db.fetchval("SELECT count(*) FROM pgworkd.jobs")) == (401, 0)


async def test_a_stream_that_trickles_is_cut_off(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BODY_S", 0.2)

    async def trickle() -> AsyncIterator[bytes]:
        while True:
            yield LINE
            await anyio.sleep(0.1)

    async with calling(dsn) as call:
        with anyio.fail_after(10):
            answer = await call("POST", "/v1/jobs/stream", content=trickle(), headers=NDJSON)
        assert (answer.status_code, answer.json()["type"]) == (408, "/v1/problems/body-too-slow")


async def test_where_jobs_are_sent_is_not_for_who_operates_a_queue(dsn: str, db: Db) -> None:
    """The endpoint of another queue would sign what it is sent: a forged message for its receiver."""
    async with calling(dsn) as call:
        await call.ok("PUT", "/v1/endpoints/billing", {"url": "https://billing.example.com/", "unsigned": True})
        narrow = also(call, await token(dsn, {"operate": ["crawl*"], "enqueue": ["crawl*"]}))
        for value in ("billing", "no such", None):
            code, slug, found = await narrow.problem("PATCH", "/v1/queues/crawl-1", {"endpoint": value})
            assert (code, slug, found["scope"]) == (403, "forbidden", "admin")
        await call.ok("PATCH", "/v1/queues/crawl-1", {"endpoint": "billing"})
        assert await db.fetchval("SELECT endpoint FROM pgworkd.queues WHERE name = 'crawl-1'") == "billing"


async def test_what_is_in_other_queues_is_as_if_it_were_not_there(dsn: str, db: Db) -> None:
    """Jobs to wait for, schedules, and the keys of batches: a token learns nothing of them, and takes nothing over."""
    async with calling(dsn, workers=True) as call:
        (secret,) = await insert(db, queue="secret")
        await call.ok("PUT", "/v1/schedules/nightly", {"queue": "secret", "every_s": 60})
        scopes = {scope: ["mine*"] for scope in ("enqueue", "operate", "work")}
        mine = also(call, await token(dsn, scopes))
        after = {"queue": "mine", "after": [str(secret)]}
        nobody = {"queue": "mine", "after": [str(UUID(int=7))]}
        worker = await registered(mine, {"mine": 1})
        await insert(db, queue="mine")
        (got,) = await worker.claim()
        calls: tuple[tuple[str, Callable[[Any], Any]], ...] = (
            ("/v1/jobs", lambda job: job),
            ("/v1/jobs/bulk", lambda job: {"jobs": [job]}),
            ("/v1/workflows", lambda job: {"jobs": [job | {"name": "a"}]}),
            (f"/v1/assignments/{got['assignment']}/complete", lambda job: {"enqueue": [job]}),
        )
        for path, body in calls:
            hidden = await mine.problem("POST", path, body(after))
            missing = await mine.problem("POST", path, body(nobody))
            assert hidden[:2] == missing[:2] == (422, "unknown-dependency")
            assert hidden[2]["detail"].replace(str(secret), nobody["after"][0]) == missing[2]["detail"]
        line = await mine("POST", "/v1/jobs/stream", content=json.dumps(after), headers=NDJSON)
        assert line.status_code == 422
        assert (await call("POST", "/v1/jobs", after)).status_code == 201, "who may see it may wait for it"

        assert (await mine.problem("GET", "/v1/schedules/nightly"))[0] in (403, 404)
        code, slug, found = await mine.problem("PUT", "/v1/schedules/nightly", {"queue": "mine", "every_s": 60})
        assert (code, slug) == (409, "conflict")
        assert "secret" not in json.dumps(found)

        batch = {"name": "payroll", "queue": "secret", "dedupe_key": "2026-12", "payloads": [{}]}
        await mine.ok("POST", "/v1/batches", batch | {"queue": "mine"})
        assert (await call.ok("POST", "/v1/batches", batch))["created"], "its payloads are not dropped without a word"
        assert (await mine.ok("POST", "/v1/batches", batch | {"queue": "mine"}))["created"] is False


async def test_a_follower_whose_token_is_revoked_ends_beside_a_flood_of_wrong_ones(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.gateway.api.request.streams.CHECK_S", 0.2)
    monkeypatch.setattr(checks, "FAILURES_PER_S", 0.01)
    monkeypatch.setattr(checks, "CHECKED_S", 0.2)
    async with calling(dsn) as call:
        follower = also(call, await token(dsn))
        async with asyncio.TaskGroup() as tasks:
            stream = tasks.create_task(follower("GET", "/v1/events?of=audit&for_s=60"))
            await until(lambda: call.client._transport.app.gateway.waits.taken == 1)  # type: ignore[attr-defined]
            for _ in range(checks.FAILURES_MAX + 5):
                await also(call, "wrong")("GET", "/v1/queues")
            await call.ok("DELETE", f"/v1/tokens/{follower.token.split('_')[1]}")
            with anyio.fail_after(10):
                await stream
