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

pytestmark = pytest.mark.slow("each bad value in each call of a worker")

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
JSON = {"Content-Type": "application/json"}
GOOD = ("null", "0", '"\\ud83d\\ude00"', '"\\\\u0000"', "1e300", "9" * 4300, '"NaN"', "[]", '{"a": 1.10}')


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
async def test_a_result_that_cannot_be_stored_is_refused_at_its_place(dsn: str, db: Db, many: bool) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        path = "/v1/settlements" if many else f"/v1/assignments/{got['assignment']}/complete"
        settled = f'"assignment": "{got["assignment"]}", "outcome": "complete", ' if many else ""
        for result, place in RESULTS.items():
            body = f'{{{settled}"result": {result}}}'
            answer = await call("POST", path, content=f'{{"settlements": [{body}]}}' if many else body, headers=JSON)
            problem = answer.json()["settlements"][0]["problem"] if many else answer.json()
            assert problem["type"].endswith("/invalid"), (result, problem)
            assert [each["pointer"].startswith(place) for each in problem["errors"]] == [True], (result, problem)
        assert await status(db, job_id) == "running"
        assert (await worker.settle(got, "fail"))["status"] == "failed"


async def test_an_unusual_result_is_stored_as_it_is(dsn: str, db: Db) -> None:
    await insert(db, len(GOOD))
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        for result, got in zip(GOOD, await worker.claim(most=len(GOOD)), strict=True):
            path = f"/v1/assignments/{got['assignment']}/complete"
            answer = await call("POST", path, content=f'{{"result": {result}}}', headers=JSON)
            assert answer.is_success, (result, answer.text)
            sql = "SELECT coalesce(result = $2::jsonb, $2 = 'null') FROM pgworkd.finished_jobs WHERE id::text = $1"
            assert await db.fetchval(sql, got["job"]["id"], result), result


ENQUEUED: dict[str, tuple[list[dict[str, Any]], int, str, str]] = {
    "unknown dependency": ([{"queue": "q"}, {"queue": "q", "after": [str(uuid4())]}], 422, "unknown-dependency", ""),
    "taken key": ([{"queue": "q", "dedupe_key": "taken"}], 409, "duplicate-key", ""),
    "NUL": ([{"queue": "q"}, {"queue": "q", "payload": {"a": "\0"}}], 422, "invalid", "/1/payload/a"),
    "both times": ([{"queue": "q", "run_at": "2030-01-01T00:00:00Z", "delay_s": 1}], 422, "invalid", ""),
    "queue": ([{"queue": "\0"}], 422, "invalid", ""),
    "type": ([{"queue": "q", "priority": "high"}], 422, "invalid", "/0/priority"),
}


async def test_jobs_of_a_result_that_are_refused_are_pointed_to(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    await db.execute("INSERT INTO pgworkd.jobs (queue, dedupe_key, run_at) VALUES ('q', 'taken', '2100-01-01')")
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        path = f"/v1/assignments/{got['assignment']}/complete"
        for case, (jobs, code, slug, place) in ENQUEUED.items():
            found = await call.problem("POST", path, {"result": 1, "enqueue": jobs})
            assert found[:2] == (code, slug), case
            at = [each["pointer"] for each in found[2]["errors"]]
            assert [each.startswith(f"/enqueue{place}") for each in at] == [True], (case, at)
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


async def test_a_lease_that_cannot_be_kept_is_refused(dsn: str, db: Db) -> None:
    await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim(lease="job", lease_s=10)
        body = {"worker": worker.id, "queues": ["q"], "lease": "job"}
        for lease_s in (1, 9.9, 31_622_401):
            for path, sent in (("/v1/claims", body), (f"/v1/assignments/{got['assignment']}/extend", {})):
                _, slug, found = await call.problem("POST", path, sent | {"lease_s": lease_s}, headers=worker.headers)
                assert (slug, found["errors"][0]["pointer"]) == ("invalid", "/lease_s"), (lease_s, path)


async def test_a_job_shows_when_its_worker_began(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim()
        await worker.settle(got, result=json.loads("1"))
        shown = await call.ok("GET", f"/v1/jobs/{job_id}")
        assert shown["created_at"] <= shown["claimed_at"] <= shown["started_at"] <= shown["finished_at"]


MISFITS: tuple[tuple[Any, str], ...] = (
    ({"outcome": "complete"}, "/assignment"),
    ({"assignment": "a", "outcome": "perhaps"}, "/outcome"),
    ({"assignment": "a", "outcome": "fail", "retry_in_s": -1}, "/retry_in_s"),
    ({"assignment": "a", "outcome": "complete", "surplus": 1}, "/surplus"),
    ({"assignment": "x" * 201, "outcome": "complete"}, "/assignment"),
    ({"assignment": "a", "outcome": "complete", "enqueue": [{"queue": ""}]}, "/enqueue/0/queue"),
    ("nothing", ""),
)


async def test_a_settlement_of_a_wrong_form_harms_no_other(dsn: str, db: Db) -> None:
    jobs = await insert(db, 2)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        good = [
            {"assignment": got["assignment"], "outcome": "fail", "message": "m" * 200_000, "traceback": None}
            for got in await worker.claim(most=2)
        ]
        sent = [good[0], *(misfit for misfit, _ in MISFITS), good[1]]
        first, *wrong, last = (await call.ok("POST", "/v1/settlements", {"settlements": sent}))["settlements"]
        assert [each["status"] for each in (first, last)] == ["failed", "failed"]
        for (misfit, pointer), answer in zip(MISFITS, wrong, strict=True):
            assert (answer["status"], answer["problem"]["status"]) == (None, 422)
            assert answer["problem"]["errors"][0]["pointer"] == pointer, misfit
            assert answer["assignment"] == (misfit.get("assignment", "") if isinstance(misfit, dict) else "")
        assert {await status(db, job) for job in jobs} == {"failed"}
