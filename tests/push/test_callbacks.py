"""Jobs whose end comes later, by a callback: it finds its attempt whatever has become of who sent it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pgworkd.core import events
from pgworkd.core.job import Reason
from tests.kits.daemon import cancel, insert, until, waits_for_status
from tests.kits.downstream import Downstream, Writer, answer_of, message_of, serving
from tests.kits.gateway import Caller, calling
from tests.kits.push import pushing, put_endpoint
from tests.kits.verbs import Db

pytestmark = pytest.mark.slow("a gateway and a daemon for each")

HOLDERS = "SELECT DISTINCT w.name FROM pgworkd.jobs j JOIN pgworkd.workers w ON w.id = j.worker_id"
ACCEPTED = answer_of(202, {"later": True})


@pytest.fixture
async def down(db: Db) -> AsyncIterator[Downstream]:
    """A service that accepts whatever comes; jobs of the queue q are sent there."""
    async with serving(Downstream(ACCEPTED)) as server:
        await put_endpoint(db, "later", server.url, "q", mode="callback")
        yield server


async def back(call: Caller, down: Downstream, how: str, body: Any = None, request: int = -1) -> httpx.Response:
    """A callback for one of the requests, as the service makes it: without a token."""
    await until(lambda: len(down.requests) > (request if request >= 0 else 0))
    url = message_of(down.requests[request])["callback"]["url"]
    return await call.client.post(f"{url}/{how}", json=body or {})


async def _job(db: Db, job_id: Any) -> tuple[Any, ...]:
    sql = "SELECT status, attempts, failures, result::text FROM pgworkd.all_jobs WHERE id = $1"
    return tuple(await db.fetchrow(sql, job_id) or ())


@pytest.mark.fast
async def test_a_callback_completes_the_job_and_the_slot_is_free_until_then(dsn: str, db: Db, down: Downstream) -> None:
    await db.execute("""SELECT pgworkd.set_queue('q', '{"concurrency": 1}')""")
    async with calling(dsn, workers=True) as call, pushing(dsn) as (daemon, seen):
        first = await insert(db, "q")
        await seen.wait(events.JOB_HANDED_OVER, job_id=str(first))
        second = await insert(db, "q")
        await seen.wait(events.JOB_HANDED_OVER, job_id=str(second))
        shown = await call.ok("GET", f"/v1/jobs/{second}")
        assert shown["waits"] == "its endpoint has it, and has not called back yet", shown
        assert len(daemon.in_flight) == 0
        assert await db.fetch(HOLDERS) == [("push",)]
        answer = await back(call, down, "complete", {"result": {"n": 1}}, request=0)
        assert answer.json() == {"status": "completed", "repeated": False}
        answer = await back(call, down, "complete", {"result": {"n": 1}}, request=0)
        assert answer.json() == {"status": "completed", "repeated": True}
        assert await _job(db, first) == ("completed", 1, 0, '{"n": 1}')
        assert (await _job(db, second))[0] == "running"
    assert message_of(down.requests[0])["callback"]["timeout_s"] == 300


async def test_a_failure_says_whether_to_try_again_and_the_next_attempt_has_its_own_callback(
    dsn: str, db: Db, down: Downstream
) -> None:
    async with calling(dsn, workers=True) as call, pushing(dsn):
        job_id = await insert(db, "q", max_attempts=5)
        failed = {"type": "Overloaded", "message": "later", "retry_in_s": 0}
        assert (await back(call, down, "fail", failed)).json()["status"] == "failed"
        await until(lambda: len(down.requests) == 2)
        urls = [message_of(each)["callback"]["url"] for each in down.requests]
        assert urls[0] != urls[1]
        stale = await back(call, down, "complete", {}, request=0)
        assert (stale.status_code, stale.json()["type"].rpartition("/")[2]) == (409, "stale-assignment")
        hopeless = {"type": "Unknown", "message": "no such invoice", "retryable": False}
        assert (await back(call, down, "fail", hopeless, request=1)).json()["status"] == "dead"
    assert await _job(db, job_id) == ("dead", 2, 2, None)


async def test_it_may_be_given_back_and_kept_for_longer(dsn: str, db: Db, down: Downstream) -> None:
    async with calling(dsn, workers=True) as call, pushing(dsn):
        job_id = await insert(db, "q")
        kept = (await back(call, down, "extend", {"lease_s": 5000})).json()
        assert (4900 < kept["left_s"] <= 5000, kept["cancel"]) == (True, False)
        assert list((await cancel(db, job_id)).values()) == ["requested"]
        assert (await back(call, down, "extend", {"lease_s": 5000})).json()["cancel"] is True
        second = await insert(db, "q")
        assert (await back(call, down, "release", {"delay_s": 3600}, request=1)).json()["status"] == "pending"
    assert await _job(db, second) == ("pending", 1, 0, None)


@pytest.mark.fast
@pytest.mark.parametrize("answer", [202, 200, 500])
async def test_a_callback_may_come_before_the_answer(dsn: str, db: Db, answer: int) -> None:
    async with calling(dsn, workers=True) as call:

        async def complete_at_once(request: bytes) -> bytes:
            url = message_of(request)["callback"]["url"]
            assert (await call.client.post(f"{url}/complete", json={"result": 7})).status_code == 200
            return answer_of(answer, {"other": 1})

        async with serving(Downstream(complete_at_once)) as down, pushing(dsn) as (daemon, _):
            await put_endpoint(db, "e", down.url, "q", mode="callback")
            job_id = await insert(db, "q")
            await until(waits_for_status(db, job_id, "completed"))
            await until(lambda: not daemon.in_flight)
        assert await _job(db, job_id) == ("completed", 1, 0, "7")


@pytest.mark.parametrize(("answer", "status"), [(200, "completed"), (400, "dead"), (503, "failed"), (410, "failed")])
async def test_another_answer_than_202_ends_it_at_once(dsn: str, db: Db, answer: int, status: str) -> None:
    async with serving(Downstream(answer_of(answer, [1]))) as down, pushing(dsn):
        await put_endpoint(db, "e", down.url, "q", mode="callback")
        job_id = await insert(db, "q")
        await until(waits_for_status(db, job_id, status))
    assert (await _job(db, job_id))[1] == 1


async def test_what_was_not_delivered_waits_for_no_callback(dsn: str, db: Db) -> None:
    async with serving(Downstream()) as down:
        url = down.url
    async with pushing(dsn):
        await put_endpoint(db, "e", url, "q", mode="callback")
        once, often = await insert(db, "q", max_attempts=1), await insert(db, "q")
        await until(waits_for_status(db, often, "failed"))
        await until(waits_for_status(db, once, "pending"))
    assert (await _job(db, once))[2] == 0


@pytest.mark.parametrize("how", ["it breaks off", "the daemon stops", "the daemon is cut off from the database"])
async def test_a_callback_is_awaited_although_nobody_saw_an_answer(dsn: str, db: Db, how: str) -> None:
    arrived = asyncio.Event()

    async def act(_: Writer) -> None:
        arrived.set()
        if how != "it breaks off":
            await asyncio.sleep(3600)

    async with calling(dsn, workers=True) as call, serving(Downstream(act=act)) as down:
        await put_endpoint(db, "e", down.url, "q", mode="callback")
        async with pushing(dsn) as (daemon, seen):
            job_id = await insert(db, "q", max_attempts=1)
            await until(arrived.is_set)
            if how == "the daemon stops":
                daemon.request_stop(now=True)
                await seen.wait(events.DAEMON_STOPPED, exit_code=0)
            elif how != "it breaks off":
                daemon.in_flight.find(job_id, 1).stop(Reason.FENCE)  # type: ignore[union-attr]
            await seen.wait(events.JOB_HANDED_OVER)
        assert (await _job(db, job_id))[:2] == ("running", 1)
        assert (await back(call, down, "complete", {"result": 1})).status_code == 200
    assert await _job(db, job_id) == ("completed", 1, 0, "1")
    assert len(down.requests) == 1


async def test_a_cancelled_job_is_cancelled_though_its_request_is_under_way(dsn: str, db: Db) -> None:
    async def hang(_: Writer) -> None:
        await asyncio.sleep(3600)

    async with serving(Downstream(act=hang)) as down, pushing(dsn):
        await put_endpoint(db, "e", down.url, "q", mode="callback")
        job_id = await insert(db, "q")
        await until(lambda: down.requests)
        assert list((await cancel(db, job_id)).values()) == ["requested"]


async def test_the_assignment_alone_lets_in_and_only_to_its_attempt(dsn: str, db: Db, down: Downstream) -> None:
    async with calling(dsn, workers=True) as call:
        worker = await call.ok("POST", "/v1/workers", {"name": "w", "queues": {"remote": 1}, "lease_s": 30.0})
        secret = {"Pgworkd-Secret": worker["secret"]}
        await insert(db, "remote")
        claim = {"worker": worker["worker"], "queues": ["remote"], "max": 1, "wait_s": 1}
        (other,) = (await call.ok("POST", "/v1/claims", claim, headers=secret))["assignments"]
        own = await call.ok("POST", "/v1/jobs", {"queue": "remote", "payload": {}})
        assert own
        async with pushing(dsn):
            await insert(db, "q")
            await until(lambda: down.requests)
            url = message_of(down.requests[0])["callback"]["url"]
            pushed = url.rpartition("/")[2]

            async def status(path: str, body: Any) -> int:
                return (await call.client.post(path, json=body)).status_code

            assert await status(f"/v1/assignments/{other['assignment']}/complete", {}) == 401, "no token"
            for place in range(3, len(pushed), 5):
                changed = pushed[:place] + ("A" if pushed[place] != "A" else "B") + pushed[place + 1 :]
                assert await status(f"/v1/assignments/{changed}/complete", {}) == 401, place
            one = {"assignment": pushed, "outcome": "complete", "result": None}
            assert await status("/v1/settlements", {"settlements": [one]}) == 401
            assert await status(f"{url}/complete", {"enqueue": [{"queue": "q", "payload": {}}]}) == 403
            assert (await call.client.get("/v1/jobs")).status_code == 401
            wrong = await call.client.post(f"{url}/complete", json={}, headers={"Authorization": "Bearer pgw_no"})
            assert wrong.status_code == 401, "a wrong token is not made right by the assignment"
            async with calling(dsn, workers=True) as another:
                assert (await another.client.post(f"{url}/complete", json={})).json()["status"] == "completed"


async def test_without_an_address_of_gateways_nothing_is_sent(dsn: str, db: Db, down: Downstream) -> None:
    async with pushing(dsn, callback_url="") as (daemon, seen):
        refused = await seen.wait(events.ENDPOINT_REFUSED)
        assert "callback_url is not set" in refused["error"]
        await insert(db, "q")
        assert daemon.pools == {}
    assert down.requests == []
