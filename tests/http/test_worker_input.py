"""What workers send, and must not: each refusal names its place, and the attempt goes on."""

from __future__ import annotations

import json
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest

from tests.http.test_workers import insert, status
from tests.kits.gateway import calling
from tests.kits.workers import registered

Db: TypeAlias = "asyncpg.Connection[Any]"
DEEP = "[" * 65 + "]" * 65
RESULTS = {
    '"\\u0000"': "/result",
    '{"a": ["x", "\\u0000"]}': "/result/a/1",
    '{"\\u0000": 1}': "/result",
    '"\\ud800"': "/result",
    '"\\udc00\\ud800"': "/result",
    "1e400": "/result",
    '{"a": -1e99999999}': "/result/a",
    "9" * 4301: "/result",
    DEEP: "/result",
    f'"{"x" * 2**20}"': "/result",
}
GOOD = ("null", "0", '"\\ud83d\\ude00"', '"\\\\u0000"', "1e300", "9" * 4300, '"NaN"', "[]", '{"a": 1.10}')


@pytest.mark.parametrize("result", RESULTS, ids=lambda text: text[:24])
@pytest.mark.parametrize("many", [False, True])
async def test_a_result_that_cannot_be_stored_is_refused_at_its_place(
    dsn: str, db: Db, result: str, many: bool
) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        path, body = f"/v1/assignments/{got['assignment']}/complete", f'{{"result": {result}}}'
        if many:
            path = "/v1/settlements"
            one = f'{{"assignment": "{got["assignment"]}", "outcome": "complete", "result": {result}}}'
            body = f'{{"settlements": [{one}]}}'
        answer = await call("POST", path, content=body, headers={"Content-Type": "application/json"})
        problem = answer.json()["settlements"][0]["problem"] if many else answer.json()
        assert problem["status"] == 422, problem
        assert problem["type"].endswith("/invalid")
        assert [each["pointer"].startswith(RESULTS[result]) for each in problem["errors"]] == [True], problem
        assert await status(db, job_id) == "running"
        assert (await worker.settle(got, "fail"))["status"] == "failed"


@pytest.mark.parametrize("result", GOOD, ids=lambda text: text[:24])
async def test_an_unusual_result_is_stored_as_it_is(dsn: str, db: Db, result: str) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        path, head = f"/v1/assignments/{got['assignment']}/complete", {"Content-Type": "application/json"}
        answer = await call("POST", path, content=f'{{"result": {result}}}', headers=head)
        assert answer.is_success, answer.text
        stored = await db.fetchval("SELECT result = $2::jsonb FROM pgworkd.finished_jobs WHERE id = $1", job_id, result)
        assert stored or result == "null"


ENQUEUED: dict[str, tuple[list[dict[str, Any]], int, str, str]] = {
    "unknown dependency": ([{"queue": "q"}, {"queue": "q", "after": [str(uuid4())]}], 422, "unknown-dependency", ""),
    "taken key": ([{"queue": "q", "dedupe_key": "taken"}], 409, "duplicate-key", ""),
    "NUL": ([{"queue": "q"}, {"queue": "q", "payload": {"a": "\0"}}], 422, "invalid", "/1/payload/a"),
    "both times": ([{"queue": "q", "run_at": "2030-01-01T00:00:00Z", "delay_s": 1}], 422, "invalid", ""),
    "queue": ([{"queue": "\0"}], 422, "invalid", ""),
    "type": ([{"queue": "q", "priority": "high"}], 422, "invalid", "/0/priority"),
}


@pytest.mark.parametrize("case", ENQUEUED)
async def test_jobs_of_a_result_that_are_refused_are_pointed_to(dsn: str, db: Db, case: str) -> None:
    jobs, code, slug, place = ENQUEUED[case]
    (job_id,) = await insert(db)
    await db.execute("INSERT INTO pgworkd.jobs (queue, dedupe_key, run_at) VALUES ('q', 'taken', '2100-01-01')")
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        path = f"/v1/assignments/{got['assignment']}/complete"
        found = await call.problem("POST", path, {"result": 1, "enqueue": jobs})
        assert found[:2] == (code, slug)
        assert [each["pointer"].startswith(f"/enqueue{place}") for each in found[2]["errors"]] == [True], found
        assert await status(db, job_id) == "running"
        assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 2
        assert (await worker.settle(got))["status"] == "completed"


async def test_progress_of_what_is_not_the_workers_is_answered_as_gone(dsn: str, db: Db) -> None:
    await insert(db, 3)
    async with calling(dsn, workers=True) as call:
        worker, other = await registered(call), await registered(call)
        (mine,), (foreign,) = await worker.claim(), await other.claim()
        (ended,) = await worker.claim()
        await worker.settle(ended)
        told = [mine["assignment"], foreign["assignment"], ended["assignment"], "nonsense"]
        progress = [{"assignment": each, "done": 0.5, "message": "half"} for each in told]
        answer = await worker.beat(mine, progress=progress)
        assert answer["gone"] == told[1:]
        for each, done in ((mine, 0.5), (foreign, None)):
            assert (await call.ok("GET", f"/v1/jobs/{each['job']['id']}"))["progress"] == done


@pytest.mark.parametrize("lease_s", [1, 9.9, 31_622_401])
async def test_a_lease_that_cannot_be_kept_is_refused(dsn: str, db: Db, lease_s: float) -> None:
    await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        body = {"worker": worker.id, "queues": ["q"], "lease": "job", "lease_s": lease_s}
        _, slug, found = await call.problem("POST", "/v1/claims", body, headers=worker.headers)
        assert (slug, found["errors"][0]["pointer"]) == ("invalid", "/lease_s")
        (got,) = await worker.claim(lease="job", lease_s=10)
        _, slug, found = await call.problem("POST", f"/v1/assignments/{got['assignment']}/extend", {"lease_s": lease_s})
        assert (slug, found["errors"][0]["pointer"]) == ("invalid", "/lease_s")


async def test_a_job_shows_when_its_worker_began(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        await worker.settle(got, result=json.loads("1"))
        shown = await call.ok("GET", f"/v1/jobs/{job_id}")
        assert shown["created_at"] <= shown["claimed_at"] <= shown["started_at"] <= shown["finished_at"]
