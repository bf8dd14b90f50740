"""Live lists over HTTP: what a page that stays open sees, and what it costs the database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import httpx
import pytest

from pgworkd.core.access import Access
from pgworkd.errors import DatabaseUnavailable
from pgworkd.gateway.api.request import live_lists
from pgworkd.gateway.api.request.gateway import Gateway
from pgworkd.gateway.api.request.live_lists import LiveList
from pgworkd.gateway.api.routes import events
from tests.http.test_server import stack
from tests.kits.daemon import insert, until
from tests.kits.gateway import LIMIT_S, Scopes, also, calling, served, token
from tests.kits.proxy import Proxy

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

Event = tuple[str, Any]


def parsed(text: str) -> list[Event]:
    """The events of a stream that has ended."""
    found = []
    for block in text.split("\n\n")[:-1]:
        first, _, second = block.partition("\n")
        found.append((first.removeprefix("event: "), json.loads(second.removeprefix("data: "))))
    return found


async def read(answer: httpx.Response) -> AsyncIterator[Event]:
    """The events of a stream as they come."""
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def test_each_list_is_told_at_once_as_its_own_route_answers_it(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await insert(db, "mail")
    async with calling(dsn) as call:
        await call.ok("POST", "/v1/queues/mail/pause")
        answer = await call("GET", "/v1/events?of=queues&of=workers&of=dead&of=audit&for_s=1")
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = dict(parsed(answer.text))
        assert found.keys() == {"queues", "workers", "dead", "audit"}
        queues = (await call.ok("GET", "/v1/queues"))["queues"]
        assert [{**row, "oldest_due_s": 0, "sample_age_s": 0} for row in found["queues"]] == [
            {**row, "oldest_due_s": 0, "sample_age_s": 0} for row in queues
        ]
        assert found["audit"] == (await call.ok("GET", "/v1/audit"))["entries"]
        assert found["dead"] == (await call.ok("GET", "/v1/dead"))["groups"]


async def test_a_change_is_told_within_seconds_and_no_change_is_not(dsn: str, db: asyncpg.Connection[Any]) -> None:
    headers = {"Authorization": f"Bearer {await token(dsn)}"}
    with await asyncio.to_thread(lambda: stack(served(dsn))) as (_, address):
        async with (
            httpx.AsyncClient(base_url=address, headers=headers, timeout=LIMIT_S) as client,
            client.stream("GET", "/v1/events?of=audit&of=queues") as answer,
            asyncio.timeout(LIMIT_S),
        ):
            stream = read(answer)
            first = dict([await anext(stream), await anext(stream)])
            assert first["queues"] == []
            assert [entry["what"] for entry in first["audit"]] == ["token"]
            await client.post("/v1/queues/mail/pause?create=true")
            told = dict([await anext(stream), await anext(stream)])
            assert told["audit"][0]["what"] == "queue"
            assert told["queues"][0]["paused"]


@pytest.mark.parametrize(
    ("scopes", "of", "status"),
    [
        ({"read": None}, "queues", 200),
        ({"read": None}, "audit", 200),
        ({"read": ["mail"]}, "queues", 200),
        ({"read": ["mail"]}, "audit", 403),
        ({"read": ["mail"]}, "queues&of=dead", 403),
        ({"operate": None}, "queues", 403),
        ({"read": None}, "payloads", 422),
    ],
)
async def test_a_caller_sees_the_queues_of_its_token_only(dsn: str, scopes: Scopes, of: str, status: int) -> None:
    db = await asyncpg.connect(dsn)
    for queue in ("mail", "secret"):
        await insert(db, queue, json.dumps({"card": 4111}))
    await db.close()
    async with calling(dsn) as call:
        job = (await call.ok("POST", "/v1/jobs", {"queue": "secret", "payload": {"card": 4111}}))["id"]
        await call.ok("PATCH", f"/v1/jobs/{job}", {"payload": {"card": 4222}})
        answer = await also(call, await token(dsn, scopes))("GET", f"/v1/events?of={of}&for_s=1")
        assert answer.status_code == status
        assert "4111" not in answer.text
        if status == 200 and of == "queues":
            seen = {row["queue"] for row in dict(parsed(answer.text))["queues"]}
            assert seen == ({"mail", "secret"} if scopes["read"] is None else {"mail"})


async def test_a_revoked_token_ends_the_stream(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pgworkd.gateway.api.request import access

    monkeypatch.setattr(access, "CHECKED_S", 0.05)
    monkeypatch.setattr("pgworkd.gateway.api.request.streams.CHECK_S", 0.05)
    async with calling(dsn) as call, asyncio.TaskGroup() as tasks:
        other = also(call, await token(dsn, {"read": None}))
        stream = tasks.create_task(other("GET", "/v1/events?of=queues&for_s=86400"))
        gateway: Gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        await until(lambda: gateway.waiters == 1)
        await call.ok("DELETE", f"/v1/tokens/{other.token.split('_')[1]}")
        async with asyncio.timeout(LIMIT_S):
            assert (await stream).status_code == 200


async def test_who_may_do_less_goes_on_as_long_as_the_lists_may_be_read(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("request.waiting.CHECKED_S", "request.streams.CHECK_S"):
        monkeypatch.setattr(f"pgworkd.gateway.api.{place}", 0.05)
    async with calling(dsn) as call, asyncio.TaskGroup() as tasks:
        gateway: Gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        allowed, asked = Access.full("u"), 0

        def authorize(_: Any) -> Access:
            nonlocal asked
            asked += 1
            return allowed

        gateway._authorize = authorize
        stream = tasks.create_task(call("GET", "/v1/events?of=queues&for_s=86400"))
        await until(lambda: gateway.waiters == 1)
        allowed, asked = Access("u", {"read": ("q",)}), 0
        await until(lambda: asked > 3)
        assert not stream.done()
        allowed = Access("u", {"work": None})
        assert (await stream).status_code == 200


async def test_a_gateway_that_stops_ends_its_streams(dsn: str) -> None:
    async with calling(dsn) as call, asyncio.TaskGroup() as tasks:
        gateway: Gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        stream = tasks.create_task(call("GET", "/v1/events?of=queues"))
        await until(lambda: gateway.waiters == 1)
        gateway.stop_waiting()
        async with asyncio.timeout(LIMIT_S):
            assert (await stream).status_code == 200
            assert (await call("GET", "/v1/events?of=queues")).text == "", "one that comes later"


async def test_many_that_follow_cost_what_one_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_lists, "PERIOD_S", 0.01)
    reads, rows = 0, [{"n": 0, "oldest_due_s": 0.0}]

    async def read_it() -> list[dict[str, Any]]:
        nonlocal reads
        reads += 1
        return [dict(row) for row in rows]

    one = LiveList(read_it)
    told: list[int] = []

    async def follow() -> None:
        async for found in one.follow():
            assert isinstance(found, list)
            told.append(found[0]["n"])

    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(one.run())
        followers = [tasks.create_task(follow()) for _ in range(100)]
        await until(lambda: told.count(0) == 100)
        before = reads
        await until(lambda: reads >= before + 5)
        assert told.count(0) == 100, "nothing has changed"
        rows[0]["oldest_due_s"] = 1.0
        before = reads
        await until(lambda: reads >= before + 3)
        assert told.count(0) == 100, "an age is no news"
        rows[0]["n"] = 1
        await until(lambda: told.count(1) == 100)
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        await until(lambda: not one._wanted.is_set())
        before = reads
        await asyncio.sleep(0.1)
        assert reads <= before + 1, "nobody follows"
        reader.cancel()


async def test_who_comes_while_a_reader_pauses_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_lists, "PERIOD_S", 60.0)
    monkeypatch.setattr(live_lists, "PAUSE_MAX_S", 60.0)

    async def read_it() -> list[dict[str, Any]]:
        return [{"n": 1}]

    one = LiveList(read_it)
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(one.run())
        for _ in range(3):  # each the only one, after the one before has left
            stream = one.follow()
            async with asyncio.timeout(LIMIT_S):
                assert await anext(stream) == [{"n": 1}]
            await stream.aclose()
        reader.cancel()


async def test_who_has_newer_rows_is_not_told_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is opened while others have it open must not go back to what was before it."""
    monkeypatch.setattr(live_lists, "PERIOD_S", 0.01)
    rows, allowed = [{"n": 1}], asyncio.Event()
    allowed.set()

    async def read_it() -> list[dict[str, Any]]:
        found = [dict(row) for row in rows]
        await allowed.wait()
        return found

    one = LiveList(read_it)
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(one.run())
        first = one.follow(newer=True)
        async with asyncio.timeout(LIMIT_S):
            assert await anext(first) == [{"n": 1}]
            allowed.clear()
            await until(lambda: one._was_read and one._rows == [{"n": 1}])
            rows[0]["n"] = 2
            second = one.follow(newer=True)
            told = tasks.create_task(anext(second))
            await asyncio.sleep(0)
            allowed.set()
            assert await told == [{"n": 2}]
        await first.aclose()
        await second.aclose()
        reader.cancel()


async def test_a_slow_read_is_made_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_lists, "PERIOD_S", 0.0)
    began: list[float] = []

    async def slow() -> list[dict[str, Any]]:
        began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.02)
        return []

    one = LiveList(slow)
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(one.run())
        stream = one.follow()
        await anext(stream)
        await until(lambda: len(began) >= 3)
        reader.cancel()
        await stream.aclose()
    assert began[2] - began[1] >= 0.02 * live_lists.SHARE


async def test_a_list_that_cannot_be_read_says_so_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_lists, "PERIOD_S", 0.01)
    away = False

    async def read_it() -> list[dict[str, Any]]:
        if away:
            raise DatabaseUnavailable("away")
        return [{"n": 1}]

    one = LiveList(read_it)
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(one.run())
        stream = one.follow()
        assert await anext(stream) == [{"n": 1}]
        away = True
        assert isinstance(await anext(stream), DatabaseUnavailable)
        away = False
        assert await anext(stream) == [{"n": 1}]
        reader.cancel()
        await stream.aclose()


async def test_a_database_that_is_away_is_a_problem_in_the_stream(dsn: str) -> None:
    headers = {"Authorization": f"Bearer {await token(dsn)}"}
    limits = {"PGWORKD_CONNECT_TIMEOUT_S": "1", "PGWORKD_COMMAND_TIMEOUT_S": "1"}
    async with Proxy(dsn) as proxy:
        with await asyncio.to_thread(lambda: stack(served(proxy.dsn, **limits))) as (_, address):
            async with (
                httpx.AsyncClient(base_url=address, headers=headers, timeout=LIMIT_S) as client,
                client.stream("GET", "/v1/events?of=queues") as answer,
                asyncio.timeout(LIMIT_S),
            ):
                stream = read(answer)
                assert await anext(stream) == ("queues", [])
                proxy.mode = "refuse"
                proxy.cut()
                name, problem = await anext(stream)
                assert (name, problem["type"]) == ("problem", "/v1/problems/unavailable")
                proxy.mode = "pass"
                while name != "queues":
                    name, _ = await anext(stream)


async def test_a_list_is_encoded_once_for_all_who_may_see_the_same(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = 0
    to_json = events.to_json

    def counted(value: Any) -> str:
        nonlocal encoded
        encoded += isinstance(value, list)
        return to_json(value)

    monkeypatch.setattr(events, "to_json", counted)
    async with calling(dsn) as call:
        await call.ok("POST", "/v1/queues/mail/pause?create=true")
        await call.ok("POST", "/v1/queues/bulk/pause?create=true")
        callers = [call, *[also(call, await token(dsn, {"read": [queue]})) for queue in ("mail", "bulk")]]
        answers = await asyncio.gather(
            *(each("GET", "/v1/events?of=queues&for_s=0.8") for each in callers for _ in range(20))
        )
        seen = [{row["queue"] for row in parsed(answer.text)[0][1]} for answer in answers]
        assert seen == [{"bulk", "mail"}] * 20 + [{"mail"}] * 20 + [{"bulk"}] * 20
    assert encoded <= 3 * 2, "of 60 followers; the list may be read twice"
