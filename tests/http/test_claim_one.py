"""A claim of one job, by its id: the assignment, or why the job cannot be had."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest

from pgworkd.gateway.api.routes.workers import NOT_CLAIMED
from tests.http.test_workers import insert, status
from tests.kits.gateway import also, calling, token
from tests.kits.workers import Worker, registered

pytestmark = pytest.mark.slow("claims in each state of a job")

Db: TypeAlias = "asyncpg.Connection[Any]"


async def refused(worker: Worker, job_id: Any, **more: Any) -> tuple[int, str, dict[str, Any]]:
    """The problem that answers a claim of the job."""
    body = {"worker": worker.id, "job": str(job_id)} | more
    return await worker.call.problem("POST", "/v1/claims", body, headers=worker.headers)


async def test_a_job_is_claimed_by_its_id_before_others_and_settled_as_any(dsn: str, db: Db) -> None:
    first, second = await insert(db, 2, payload='{"n": 1}')
    async with calling(dsn, workers=True) as call:
        worker = await registered(call, {"q": 1})
        (got,) = await worker.claim(queues=None, job=f"job_{second}")
        assert (got["job"]["id"], got["job"]["payload"]) == (str(second), {"n": 1})
        assert (await worker.beat(got))["gone"] == []
        assert await worker.claim() == [], "its slot is taken"
        code, slug, _ = await refused(worker, first)
        assert (code, slug) == (409, "no-free-slot")
        assert await worker.settle(got) == {"status": "completed", "repeated": False}
        (got,) = await worker.claim(queues=None, job=str(first), max_attempts={"q": 7})
        assert got["job"]["max_attempts"] == 7


async def test_a_payload_of_any_size_arrives(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db, payload=json.dumps({"pad": "x" * 900_000}))
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim(queues=None, job=str(job_id))
        assert len(got["job"]["payload"]["pad"]) == 900_000


async def test_an_attempt_with_a_lease_of_its_own_outlives_its_worker(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim(queues=None, job=str(job_id), lease="job", lease_s=60)
        assert await worker.sign_off() == 0
        assert 50 < (await call.ok("POST", f"/v1/assignments/{got['assignment']}/extend", {}))["left_s"] <= 60
        assert (await worker.settle(got))["status"] == "completed"


STATES = {
    "not-due": "UPDATE pgworkd.jobs SET run_at = pgworkd.clock() + '1 h' WHERE id = $1",
    "job-running": "SELECT pgworkd.claim_one(id, NULL, 'q', $1) FROM pgworkd.workers WHERE name = 'other'",
    "job-blocked": "SELECT pgworkd.depend($1, ARRAY[(pgworkd.enqueue('q', '{}', p_delay_s => 9)).id])",
    "job-ended": "SELECT pgworkd.cancel(ARRAY[$1::uuid])",
    "queue-paused": "INSERT INTO pgworkd.queues (name, paused_until) SELECT 'q', 'infinity' WHERE $1 IS NOT NULL",
    "limit-reached": "INSERT INTO pgworkd.queues (name, max_running) SELECT 'q', 1 WHERE $1 IS NOT NULL",
    "busy": "SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE",
    "no-free-slot": "UPDATE pgworkd.jobs SET losses = 2 WHERE id = $1",
}
MEMBERS = {
    "not-due": {"job_status", "again_s", "run_at"},
    "job-running": {"job_status", "worker"},
    "job-blocked": {"job_status", "waits_for"},
}


@pytest.mark.parametrize("state", STATES)
async def test_a_job_that_cannot_be_claimed_is_answered_with_the_reason(dsn: str, db: Db, state: str) -> None:
    assert set(STATES) == set(NOT_CLAIMED.values())
    async with calling(dsn, workers=True) as call:
        worker, other = await registered(call), await registered(call, name="other")
        if state in ("limit-reached", "no-free-slot"):
            (first,) = await insert(db)
            await db.execute("UPDATE pgworkd.jobs SET losses = 2 WHERE id = $1", first)
            await worker.claim(queues=None, job=str(first))
        async with db.transaction():  # in which a job may be said to wait for another
            (job_id,) = await insert(db)
            await db.execute(STATES[state].replace("$1", f"'{job_id}'::uuid"))
        async with db.transaction():
            if state == "busy":
                await db.execute(STATES[state], job_id)
            code, slug, found = await refused(worker, job_id)
        assert (code, slug) == (503 if state == "busy" else 409, state), found
        assert str(job_id) in found["detail"]
        assert MEMBERS.get(state, {"job_status"}) <= set(found)
        if state == "job-running":
            assert found["worker"] == "other"
            assert other.id
        before = "running" if state == "job-running" else found["job_status"]
        assert await status(db, job_id) == before


async def test_a_job_of_a_queue_that_is_not_the_tokens_is_unknown(dsn: str, db: Db) -> None:
    other = await db.fetchval("INSERT INTO pgworkd.jobs (queue) VALUES ('other') RETURNING id")
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        code, slug, found = await refused(worker, other)
        assert (code, slug, found["errors"][0]["pointer"]) == (422, "invalid", "/job")
        assert f"PUT /v1/workers/{worker.id}/queues" in found["errors"][0]["detail"]
        worker.call = also(call, await token(dsn, {"work": ["q"]}))
        answers = [await refused(worker, each) for each in (other, uuid4())]
        assert [(code, slug) for code, slug, _ in answers] == [(404, "not-found")] * 2
        assert await status(db, other) == "pending"


async def test_a_claim_is_of_queues_or_of_one_job(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        for more in ({"queues": ["q"]}, {"job": None}, {"wait_s": 1}, {"max": 2}, {"job": "x"}, {"job": "job_7"}):
            assert (await refused(worker, job_id, **more))[:2] == (422, "invalid"), more
        assert await status(db, job_id) == "pending"


async def test_a_worker_that_is_lost_or_to_be_quiet_gets_nothing(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        await call.ok("POST", f"/v1/workers/{worker.id}/ask", {"state": "quiet"})
        async with asyncio.timeout(20):
            while (await worker.beat())["state"] != "quiet":
                await asyncio.sleep(0.05)
        found = await worker.claimed(queues=None, job=str(job_id))
        assert (found["assignments"], found["state"]) == ([], "quiet")
        gone = await registered(call)
        await db.execute("UPDATE pgworkd.workers SET lost_at = now() WHERE id = $1", gone.id)
        assert (await refused(gone, job_id))[:2] == (410, "worker-lost")
        assert await status(db, job_id) == "pending"


async def test_of_many_that_claim_one_job_at_once_one_gets_it(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        workers = [await registered(call) for _ in range(6)]
        body = {"job": str(job_id)}

        async def tried(worker: Worker) -> int:
            headers = worker.headers
            return (await call("POST", "/v1/claims", body | {"worker": worker.id}, headers=headers)).status_code

        codes = await asyncio.gather(*map(tried, workers))
        assert sorted(codes)[0] == 200
        assert set(sorted(codes)[1:]) <= {409, 503}
        assert await db.fetchval("SELECT attempts FROM pgworkd.jobs WHERE id = $1", job_id) == 1
