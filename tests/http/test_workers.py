"""Remote workers over HTTP: register, claim, beat, settle, sign off."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeAlias
from uuid import UUID

import anyio
import asyncpg
import pytest

from pgworkd.core.assignment import parsed, sealed
from pgworkd.gateway.api.request.gateway import Gateway
from tests.kits.gateway import Caller, also, calling, token
from tests.kits.workers import Worker, registered

pytestmark = pytest.mark.slow("claims that wait, leases that run out")

Db: TypeAlias = "asyncpg.Connection[Any]"


async def insert(db: Db, jobs: int = 1, payload: str = "{}", max_attempts: int | None = None) -> list[Any]:
    sql = "INSERT INTO pgworkd.jobs (queue, payload, max_attempts) VALUES ('q', $1, $2) RETURNING id"
    return [await db.fetchval(sql, payload, max_attempts) for _ in range(jobs)]


def waiting(call: Caller) -> int:
    """How many claims wait for jobs of q."""
    gateway: Gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
    pool = gateway.remote.queues.pools.get("q")
    return 0 if pool is None else pool.waiting


async def status(db: Db, job_id: Any) -> str:
    return str(await db.fetchval("SELECT status FROM pgworkd.all_jobs WHERE id = $1", job_id))


async def test_a_job_goes_through_a_remote_worker(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (job_id,) = await insert(db, payload='{"price": 1.10}')
        (got,) = await worker.claim(wait_s=20)
        assert got["job"]["id"] == str(job_id)
        assert got["job"]["attempt"] == 1
        assert await status(db, job_id) == "running"
        assert (await worker.beat(got))["gone"] == []
        assert await worker.settle(got, result={"total": 2}) == {"status": "completed", "repeated": False}
        assert await worker.settle(got, result={"total": 2}) == {"status": "completed", "repeated": True}
        row = await db.fetchrow("SELECT status, result FROM pgworkd.finished_jobs WHERE id = $1", job_id)
        assert row is not None
        assert (row["status"], json.loads(row["result"])) == ("completed", {"total": 2})
        assert await worker.sign_off() == 0


async def test_a_wait_is_answered_by_an_insert(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(worker.claim(wait_s=30))
            sql = "SELECT count(*) FROM pgworkd.pools WHERE queue = 'q' AND idle"
            while not await db.fetchval(sql):
                await asyncio.sleep(0.02)
            (job_id,) = await insert(db)
        assert [got["job"]["id"] for got in waiting.result()] == [str(job_id)]


async def test_those_that_wait_are_served_first_come_first_served(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        served: list[int] = []

        async def wait(worker: Worker) -> None:
            await worker.claim(wait_s=30)
            served.append(worker.id)

        workers = [await registered(call) for _ in range(5)]
        async with asyncio.TaskGroup() as tasks:
            for place, worker in enumerate(workers, 1):
                tasks.create_task(wait(worker))
                while waiting(call) < place:
                    await asyncio.sleep(0.01)
            for place in range(1, 6):
                await insert(db)
                while len(served) < place:
                    await asyncio.sleep(0.01)
        assert served == [worker.id for worker in workers]


async def test_a_worker_gets_no_more_than_its_free_slots(dsn: str, db: Db) -> None:
    await insert(db, 20)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call, {"q": 3})
        first = await worker.claim(most=100)
        assert len(first) == 3
        assert await worker.claim(most=100) == []
        await worker.settle(first[0])
        assert len(await worker.claim(most=100)) == 1


@pytest.mark.parametrize("how", ["complete", "fail", "release"])
async def test_a_stale_or_forged_settle_is_refused(dsn: str, db: Db, how: str) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        one, other = await registered(call), await registered(call)
        (got,) = await one.claim()
        found = parsed(got["assignment"])
        forged = sealed(found._replace(worker_id=other.id, token=UUID(other.secret)))
        for text in (forged, got["assignment"][:-1] + ("A" if got["assignment"][-1] != "A" else "E")):
            code, slug, _ = await call.problem("POST", f"/v1/assignments/{text}/{how}", {})
            assert (code, slug) in ((409, "stale-assignment"), (422, "invalid"))
        assert await status(db, job_id) == "running"
        await db.execute("UPDATE pgworkd.workers SET lost_at = now() WHERE id = $1", one.id)
        await db.execute("UPDATE pgworkd.jobs SET attempts = 2, worker_id = $1 WHERE id = $2", other.id, job_id)
        code, slug, _ = await call.problem("POST", f"/v1/assignments/{got['assignment']}/{how}", {})
        assert (code, slug) == (409, "stale-assignment")
        assert await status(db, job_id) == "running"


async def test_a_failure_is_retried_and_in_the_end_dead(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db, max_attempts=2)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        fault = {"type": "Oops", "message": "no\u0000de", "traceback": "at line 1"}
        assert (await worker.settle(got, "fail", retry_in_s=0, **fault))["status"] == "failed"
        (again,) = await worker.claim(wait_s=10)
        assert again["job"]["attempt"] == 2
        assert (await worker.settle(again, "fail", **fault))["status"] == "dead"
        errors = json.loads(await db.fetchval("SELECT errors FROM pgworkd.jobs WHERE id = $1", job_id))
        assert [each["type"] for each in errors] == ["Oops", "Oops"]
        assert errors[0]["worker"] == "w"


async def test_a_failure_without_a_delay_follows_the_queues_backoff(dsn: str, db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, backoff_s, backoff_factor) VALUES ('q', 500, 2)")
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        await worker.settle(got, "fail")
        sql = "SELECT extract(epoch FROM run_at - pgworkd.clock())::float8 FROM pgworkd.jobs WHERE id = $1"
        assert 440 < await db.fetchval(sql, job_id) < 560


async def test_a_cancel_is_told_in_a_held_claim_and_in_a_beat(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        async with asyncio.TaskGroup() as tasks:
            claim = tasks.create_task(worker.claimed(wait_s=30))
            while not waiting(call):
                await asyncio.sleep(0.01)
            await call.ok("DELETE", f"/v1/jobs/{job_id}")
        assert claim.result()["cancel"] == [got["assignment"]]
        assert (await worker.beat(got))["cancel"] == [got["assignment"]]
        assert (await worker.settle(got, "release"))["status"] in ("pending", "cancelled")
        assert await status(db, job_id) == "cancelled"
        assert (await worker.beat())["cancel"] == []


async def test_a_lost_worker_is_told_so(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        await db.execute("UPDATE pgworkd.workers SET lost_at = now() WHERE id = $1", worker.id)
        path = f"/v1/workers/{worker.id}/beat"
        code, slug, _ = await call.problem("POST", path, {}, headers=worker.headers)
        assert (code, slug) == (410, "worker-lost")
        body = {"worker": worker.id, "queues": ["q"]}
        code, slug, _ = await call.problem("POST", "/v1/claims", body, headers=worker.headers)
        assert (code, slug) == (410, "worker-lost")


async def test_another_holder_of_the_scope_cannot_act_for_a_worker(dsn: str) -> None:
    async with calling(dsn, workers=True) as call:
        worker, other = await registered(call), await registered(call)
        for method, path, body in (
            ("POST", "/v1/claims", {"worker": worker.id, "queues": ["q"]}),
            ("POST", f"/v1/workers/{worker.id}/beat", {}),
            ("DELETE", f"/v1/workers/{worker.id}", None),
        ):
            code, slug, _ = await call.problem(method, path, body, headers=other.headers)
            assert (code, slug) == (410, "worker-lost")
        narrow = also(call, await token(dsn, {"work": ["mail-*"]}))
        code, slug, _ = await narrow.problem("POST", "/v1/workers", {"name": "w", "queues": {"q": 1}})
        assert (code, slug) == (403, "forbidden")


async def test_signing_off_gives_back_what_it_has(dsn: str, db: Db) -> None:
    once, often = (await insert(db, max_attempts=1))[0], (await insert(db))[0]
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        assert len(await worker.claim(most=5)) == 2
        assert await worker.sign_off() == 2
        assert await status(db, once) == "dead"
        assert await status(db, often) == "pending"


async def test_what_became_of_a_job_is_not_told_once_its_worker_has_gone(dsn: str, db: Db) -> None:
    """Then no seal can be checked: whoever knows id, attempt and worker could ask."""
    await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        assert (await worker.settle(got))["status"] == "completed"
        assert (await worker.settle(got))["repeated"]
        await worker.sign_off()
        for text in (got["assignment"], got["assignment"][:-4] + "AAAA"):
            said = await call.problem("POST", f"/v1/assignments/{text}/complete", {})
            assert said[:2] == (409, "stale-assignment")


async def test_a_complete_creates_jobs_in_the_same_transaction(dsn: str, db: Db) -> None:
    await insert(db, 2)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        one, two = await worker.claim(most=2)
        following = [{"queue": "next", "payload": {"n": n}} for n in range(3)]
        assert (await worker.settle(one, enqueue=following))["repeated"] is False
        assert (await worker.settle(one, enqueue=following))["repeated"] is True
        assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE queue = 'next'") == 3
        narrow = also(call, await token(dsn, {"work": None}))
        path = f"/v1/assignments/{two['assignment']}/complete"
        code, slug, _ = await narrow.problem("POST", path, {"enqueue": following})
        assert (code, slug) == (403, "forbidden")
        assert await status(db, two["job"]["id"]) == "running"


async def test_many_settles_at_once_are_each_for_themselves(dsn: str, db: Db) -> None:
    await insert(db, 60)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call, {"q": 100})
        got = await worker.claim(most=100)
        assert len(got) == 60
        sent = [
            {"assignment": each["assignment"], "outcome": ("complete", "fail", "release")[place % 3]}
            for place, each in enumerate(got)
        ]
        sent.insert(7, {"assignment": "nonsense", "outcome": "complete"})
        answer = (await call.ok("POST", "/v1/settlements", {"settlements": sent}))["settlements"]
        assert [each["assignment"] for each in answer] == [each["assignment"] for each in sent]
        wrong = [place for place, each in enumerate(answer) if each["problem"] is not None]
        assert wrong == [7]
        assert sorted({each["status"] for each in answer if each["status"]}) == ["completed", "failed", "pending"]


async def test_an_attempt_with_a_lease_of_its_own_outlives_its_worker(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim(lease="job", lease_s=60)
        assert await worker.sign_off() == 0
        left = await call.ok("POST", f"/v1/assignments/{got['assignment']}/extend", {"lease_s": 120})
        assert 100 < left["left_s"] <= 120
        assert (await worker.settle(got))["status"] == "completed"
        assert await status(db, job_id) == "completed"
        gateway: Gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        assert gateway.remote.counters.of("q", "q").ended["completed"] == 1, "and is counted"
        assert (await call.ok("GET", f"/v1/jobs/{job_id}"))["started_at"] is not None


async def test_a_claim_whose_caller_hangs_up_is_given_back(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.claim, 1, 30)
            while not waiting(call):
                await asyncio.sleep(0.01)
            tasks.cancel_scope.cancel()
        (job_id,) = await insert(db)
        other = await registered(call)
        (got,) = await other.claim(wait_s=10)
        assert got["job"]["id"] == str(job_id)


async def test_an_operator_asks_a_worker_to_stop(dsn: str) -> None:
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        await call.ok("POST", f"/v1/workers/{worker.id}/ask", {"state": "stop"})
        assert (await worker.beat())["state"] == "stop"
        await call.ok("POST", f"/v1/workers/{worker.id}/ask", {"state": None})
        assert (await worker.beat())["state"] == "run"


async def test_a_worker_that_is_asked_while_it_waits_learns_it_at_once_and_is_given_nothing(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        worker, path = await registered(call), "/v1/workers/{}/ask"
        for state in ("quiet", "stop"):
            async with asyncio.TaskGroup() as tasks:
                claim = tasks.create_task(worker.claimed(wait_s=20))
                while not waiting(call):
                    await asyncio.sleep(0.01)
                await call.ok("POST", path.format(worker.id), {"state": state})
                assert await claim == (await claim) | {"assignments": [], "state": state}
            (job_id,) = await insert(db)
            assert (await worker.claimed(wait_s=0.3))["assignments"] == []
            assert await status(db, job_id) == "pending"
            async with asyncio.TaskGroup() as tasks:
                claim = tasks.create_task(worker.claimed(wait_s=20))
                while not waiting(call):
                    await asyncio.sleep(0.01)
                await call.ok("POST", path.format(worker.id), {"state": None})
                assert (await claim)["state"] == "run"
            (got,) = await worker.claim(wait_s=20)
            await worker.settle(got)


async def test_a_lone_surrogate_in_what_people_read_is_shown(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        worker, headers = await registered(call), {"Content-Type": "application/json"}
        for how, body in (
            ("fail", b'{"message": "a\\ud800b"}'),
            ("fail", b'{"traceback": "\\udfff", "type": "\\udc80"}'),
            ("fail", b'{"message": "' + "é\\ud83d".encode() * 9 + b'"}'),
            ("release", b'{"reason": "\\ud800"}'),
        ):
            await insert(db, max_attempts=2)
            (got,) = await worker.claim(wait_s=20)
            path = f"/v1/assignments/{got['assignment']}/{how}"
            answer = await call("POST", path, content=body, headers=headers)
            assert answer.status_code == 200, answer.text
        said = await db.fetch("SELECT errors->-1->>'message' FROM pgworkd.jobs ORDER BY id")
        assert said[0][0] == "a\\ud800b"


async def test_large_payloads_arrive_whole_and_answers_are_bounded(dsn: str, db: Db) -> None:
    text = "x" * 900_000
    await insert(db, 30, payload=json.dumps({"text": text}))
    async with calling(dsn, workers=True) as call:
        worker = await registered(call, {"q": 100})
        got = await worker.claim(most=100, wait_s=5)
        assert 1 <= len(got) < 30
        assert all(each["job"]["payload"] == {"text": text} for each in got)
        async with asyncio.timeout(20):
            sql = "SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'"
            while await db.fetchval(sql) > len(got):
                await asyncio.sleep(0.05)
