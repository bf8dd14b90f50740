"""Each line of the table "From other services" in docs/http.md is played."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeAlias
from uuid import uuid4

import anyio
import asyncpg
import httpx
import pytest

from pgworkd import App, Job
from pgworkd.core.access import Access
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.http import asgi
from tests.http.test_server import bearer, stack
from tests.kits.daemon import running, until
from tests.kits.docs import table
from tests.kits.gateway import LIMIT_S, Caller, calling, served, token
from tests.kits.workers import registered

pytestmark = pytest.mark.slow("every route of two other services")

Db: TypeAlias = "asyncpg.Connection[Any]"
Play: TypeAlias = "Callable[[Caller, Db, str], Awaitable[None]]"
PLAYS: dict[str, Play] = {}


def plays(line: str) -> Callable[[Play], Play]:
    """This function plays that line."""

    def note(play: Play) -> Play:
        PLAYS[line] = play
        return play

    return note


async def job(call: Caller, **more: Any) -> str:
    return str((await call.ok("POST", "/v1/jobs", {"queue": "q"} | more))["id"])


async def status(call: Caller, job_id: str) -> str:
    return str((await call.ok("GET", f"/v1/jobs/{job_id}"))["status"])


async def finished(call: Caller, **more: Any) -> str:
    """A job that a remote worker has completed."""
    worker = await registered(call)
    job_id = await job(call, **more)
    (got,) = await worker.claim(wait_s=20)
    await worker.settle(got, result={"total": 2})
    return job_id


@plays("create a job that has items, with metadata, and how often each item may fail")
async def create(call: Caller, db: Db, dsn: str) -> None:
    job = {"name": "job", "queue": "q", "payloads": [{"n": 1}, {"n": 2}], "meta": {"by": "ann"}, "max_attempts": 5}
    made = await call.ok("POST", "/v1/batches", job)
    shown = await call.ok("GET", f"/v1/batches/{made['id']}")
    assert (shown["total"], shown["meta"]) == (2, {"by": "ann"})
    assert await db.fetchval("SELECT array_agg(max_attempts::int) FROM pgworkd.jobs") == [5, 5]


@plays("assign a job to a worker")
async def assign(call: Caller, db: Db, dsn: str) -> None:
    job_id = await job(call)
    (got,) = await (await registered(call)).claim(wait_s=20)
    assert got["job"]["id"] == job_id


@plays("heartbeat")
async def heartbeat(call: Caller, db: Db, dsn: str) -> None:
    worker = await registered(call)
    answer = await worker.beat()
    assert (answer["state"], answer["gone"]) == ("run", [])


@plays("result")
async def result(call: Caller, db: Db, dsn: str) -> None:
    job_id = await finished(call)
    assert (await call.ok("GET", f"/v1/jobs/{job_id}/result"))["result"] == {"total": 2}


@plays("failure")
async def failure(call: Caller, db: Db, dsn: str) -> None:
    worker, job_id = await registered(call), await job(call, max_attempts=2)
    for after in ("failed", "dead"):
        (got,) = await worker.claim(wait_s=20)
        assert got["job"]["attempt"] == (1 if after == "failed" else 2)
        await worker.settle(got, "fail", type="E", message="no", retry_in_s=0.0)
        assert await status(call, job_id) == after


@plays("add items")
async def add(call: Caller, db: Db, dsn: str) -> None:
    root = (await call.ok("POST", "/v1/batches", {"name": "job", "queue": "q"}))["id"]
    await call.ok("POST", f"/v1/batches/{root}/jobs", {"payloads": [{"n": 1}] * 3})
    assert (await call.ok("GET", f"/v1/batches/{root}"))["total"] == 3


@plays("a key of an item that is unique in its job (and queue), and items that run one at a time")
async def keys(call: Caller, db: Db, dsn: str) -> None:
    jobs = [(await call.ok("POST", "/v1/batches", {"name": name, "queue": "q"}))["id"] for name in "ab"]
    items = {"payloads": [{"n": 1}, {"n": 2}], "dedupe_key": ["one", "two"], "serialize_key": "s"}
    ids = [(await call.ok("POST", f"/v1/batches/{job_id}/jobs", items))["ids"] for job_id in jobs]
    assert (await call.problem("POST", f"/v1/batches/{jobs[0]}/jobs", items))[:2] == (409, "duplicate-key")
    again = await call.ok("POST", f"/v1/batches/{jobs[0]}/jobs", {**items, "on_duplicate": "skip"})
    assert again == {"ids": ids[0], "created": [False, False], "changed": [False, False]}
    worker, ran = await registered(call), []
    for _ in range(4):
        (got,) = await worker.claim(most=10, wait_s=20)
        ran.append(got["job"]["id"])
        await worker.settle(got)
    assert ran == [*ids[0], *ids[1]]


@plays("seal")
async def seal(call: Caller, db: Db, dsn: str) -> None:
    root = (await call.ok("POST", "/v1/batches", {"name": "job", "queue": "q"}))["id"]
    assert (await call.ok("POST", f"/v1/batches/{root}/seal"))["sealed"]
    assert (await call.problem("POST", f"/v1/batches/{root}/jobs", {"payloads": [{}]}))[:2] == (409, "batch-closed")


@plays("query jobs")
async def query(call: Caller, db: Db, dsn: str) -> None:
    trees = [await call.ok("POST", "/v1/batches", {"name": name, "queue": "q", "payloads": [{}]}) for name in "ab"]
    found = await call.ok("GET", "/v1/batches?name=b")
    assert [each["id"] for each in found["batches"]] == [trees[1]["id"]]
    items = await call.ok("GET", f"/v1/jobs?batch={trees[1]['id']}")
    assert len(items["jobs"]) == 1


@plays("status of a job")
async def state(call: Caller, db: Db, dsn: str) -> None:
    assert await status(call, await job(call)) == "pending"
    root = (await call.ok("POST", "/v1/batches", {"name": "job", "queue": "q"}))["id"]
    assert (await call.ok("GET", f"/v1/batches/{root}"))["state"] == "open"


@plays("delete, with the items, also of what is not finished")
async def delete(call: Caller, db: Db, dsn: str) -> None:
    job_id = await job(call)
    assert (await call.ok("DELETE", f"/v1/jobs/{job_id}"))["outcome"] == "cancelled"
    root = (await call.ok("POST", "/v1/batches", {"name": "job", "queue": "q"}))["id"]
    gone = await call.ok("DELETE", f"/v1/batches/{root}?cancel=true&items=true")
    assert gone == {"deleted": 1, "items": 0, "more": False}


@plays("job types with attempts, time limits and concurrency")
async def types(call: Caller, db: Db, dsn: str) -> None:
    await job(call)
    await call.ok("PATCH", "/v1/queues/q", {"max_running": 1, "max_losses": 2, "max_attempts": 1, "timeout_s": 9})
    job_id = await job(call, max_attempts=7)
    (one,) = await (await registered(call)).claim(most=10, wait_s=20)
    assert one["job"]["id"] != job_id
    assert (one["job"]["max_attempts"], round(one["deadline_s"])) == (1, 9)
    assert await (await registered(call)).claim(most=10) == []
    assert (await call.ok("GET", f"/v1/jobs/{job_id}"))["max_attempts"] == 7


@plays("PUT with the client's UUID, or `job_` and a UUID")
async def put(call: Caller, db: Db, dsn: str) -> None:
    path, body = f"/v1/jobs/{uuid4()}", {"queue": "q", "payload": {"n": 1}}
    assert [(await call("PUT", path, body)).status_code for _ in range(3)] == [201, 200, 200]
    assert (await call("PUT", path.replace("jobs/", "jobs/job_"), body)).status_code == 200
    assert (await call.problem("PUT", path, body | {"payload": {"n": 2}}))[:2] == (409, "id-taken")


@plays("run_after, expires_at")
async def times(call: Caller, db: Db, dsn: str) -> None:
    worker = await registered(call)
    later = await job(call, delay_s=3600.0)
    assert await worker.claim() == []
    await call.ok("PATCH", f"/v1/jobs/{later}", {"delay_s": 0.0})
    assert [got["job"]["id"] for got in await worker.claim(wait_s=20)] == [later]
    soon = await db.fetchval("SELECT now() + interval '0.2 s'")
    job_id = await job(call, expires_at=soon.isoformat(), delay_s=3600.0)
    await until(lambda: db.fetchval("SELECT now() > $1", soon))
    assert await db.fetchval("SELECT pgworkd.expire()") == 1
    assert await status(call, job_id) == "expired"


@plays("GET from hot or archived jobs")
async def archived(call: Caller, db: Db, dsn: str) -> None:
    job_id = await job(call)
    assert await status(call, job_id) == "pending"
    worker = await registered(call)
    (got,) = await worker.claim(wait_s=20)
    await worker.settle(got)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0
    assert await status(call, job_id) == "completed"


@plays("replay, with the time at which it expires")
async def replay(call: Caller, db: Db, dsn: str) -> None:
    job_id = await finished(call, payload={"n": 1})
    assert (await call.ok("POST", f"/v1/jobs/{job_id}/replay?keep_expires_at=true"))["created"]
    again = (await call.ok("POST", f"/v1/jobs/{job_id}/replay"))["id"]
    assert again != job_id
    assert (await call.ok("GET", f"/v1/jobs/{again}"))["payload"] == {"n": 1}


@plays("archived lists")
async def lists(call: Caller, db: Db, dsn: str) -> None:
    done = await finished(call)
    await job(call)
    found = await call.ok("GET", "/v1/jobs?status=completed&queue=q")
    assert [each["id"] for each in found["jobs"]] == [done]


@plays("pluggable authentication")
async def authentication(call: Caller, db: Db, dsn: str) -> None:
    def authorize(request: Any) -> Access:
        if request.headers.get("x-key") != "sesame":
            raise Problem("unauthenticated")
        return Access("a partner", {"enqueue": ["q"]})

    app = asgi(dsn, authorize=authorize)
    app.gateway.options = replace(app.gateway.options, workers=False)
    transport = httpx.ASGITransport(app=app)
    async with app.running(), httpx.AsyncClient(transport=transport, base_url="http://partner") as client:
        assert (await client.post("/v1/jobs", json={"queue": "q"})).status_code == 401
        client.headers["x-key"] = "sesame"
        assert (await client.post("/v1/jobs", json={"queue": "q"})).status_code == 201
        assert (await client.post("/v1/jobs", json={"queue": "other"})).status_code == 403


@plays("HTTP debugging")
async def debugging(call: Caller, db: Db, dsn: str) -> None:
    headers = bearer(await token(dsn))
    with await anyio.to_thread.run_sync(lambda: stack(served(dsn, "--debug-http"))) as (process, address):
        async with httpx.AsyncClient(base_url=address, headers=headers, timeout=LIMIT_S) as client:
            answer = await client.post("/v1/jobs", json={"queue": "q"})
        process.send_signal(signal.SIGTERM)
        log, _ = await anyio.to_thread.run_sync(process.communicate)
    (line,) = [line for line in log.splitlines() if "http.request" in line]
    assert answer.headers["x-request-id"] in line


def test_each_line_of_the_table_has_its_play() -> None:
    assert [there for there, _ in table("docs/http.md", "From other services")] == list(PLAYS)


@pytest.mark.parametrize("line", PLAYS)
async def test_what_other_services_offered_is_here(dsn: str, db: Db, line: str) -> None:
    async with calling(dsn, workers=True) as call:
        await PLAYS[line](call, db, dsn)


async def test_a_program_of_theirs_and_a_daemon_of_ours_share_a_queue(dsn: str) -> None:
    app = App()

    @app.handler("q")
    async def handle(job: Job) -> int:
        return len(job.payload)

    async with calling(dsn) as call, running(app, dsn):
        job_id = await job(call, payload={"a": 1, "b": 2})
        found = await call.ok("GET", f"/v1/jobs/{job_id}?wait_s=30")
        assert found["status"] == "completed"
        assert (await call.ok("GET", f"/v1/jobs/{job_id}/result"))["result"] == 2
