"""Many jobs in one call: all of them, or none."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any, TypeAlias

import asyncpg
import pytest

from pgworkd.gateway.api.routes import bulk
from tests.kits.gateway import also, calling, token

pytestmark = pytest.mark.slow("bodies of megabytes")

Db: TypeAlias = "asyncpg.Connection[Any]"
LINES = {"Content-Type": "application/x-ndjson"}
COUNT = "SELECT count(*) FROM pgworkd.jobs"


async def test_ten_thousand_jobs_in_one_call(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        found = await call(
            "POST", "/v1/jobs/bulk", {"jobs": [{"queue": "q", "payload": {"n": n}} for n in range(10_000)]}
        )
        assert found.status_code == 201
        assert len(set(found.json()["ids"])) == await db.fetchval(COUNT) == 10_000
        code, slug, _ = await call.problem("POST", "/v1/jobs/bulk", {"jobs": [{"queue": "q"}] * 10_001})
        assert (code, slug) == (422, "invalid")


async def test_each_bad_job_is_named_by_pointer_and_none_is_created(dsn: str, db: Db) -> None:
    jobs: list[Any] = [{"queue": "q"} for _ in range(20)]
    jobs[3] = {"queue": "q", "payload": {"deep": {"er": "a\0b"}}}
    jobs[7] = {"queue": "q", "run_at": "2031-01-01T00:00:00Z", "delay_s": 1}
    jobs[11] = {"queue": "q", "payload": {"list": [1, "\0"]}}
    async with calling(dsn) as call:
        code, _, found = await call.problem("POST", "/v1/jobs/bulk", {"jobs": jobs})
        assert code == 422
        assert [each["pointer"] for each in found["errors"]] == [
            "/jobs/3/payload/deep/er",
            "/jobs/7",
            "/jobs/11/payload/list/1",
        ]
        jobs[3], jobs[7], jobs[11] = {"queue": ""}, {"queue": "q", "priority": 1.5}, {"queue": "q", "typo": 1}
        code, _, found = await call.problem("POST", "/v1/jobs/bulk", {"jobs": jobs})
        assert code == 422
        assert [each["pointer"] for each in found["errors"]] == ["/jobs/3/queue", "/jobs/7/priority", "/jobs/11/typo"]
    assert await db.fetchval(COUNT) == 0


async def test_a_taken_key_among_many_creates_none(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        jobs = [{"queue": "q", "dedupe_key": str(n % 9)} for n in range(10)]
        assert (await call.problem("POST", "/v1/jobs/bulk", {"jobs": jobs}))[:2] == (409, "duplicate-key")
    assert await db.fetchval(COUNT) == 0


async def test_one_queue_that_is_not_allowed_refuses_all(dsn: str, db: Db) -> None:
    async with calling(dsn, {"enqueue": ["mail"]}) as call:
        jobs = [{"queue": "mail"}, {"queue": "bank"}]
        assert (await call.problem("POST", "/v1/jobs/bulk", {"jobs": jobs}))[:2] == (403, "forbidden")
        lines = "\n".join(map(json.dumps, jobs))
        assert (await call.problem("POST", "/v1/jobs/stream", content=lines, headers=LINES))[:2] == (403, "forbidden")
        steps = [{"name": str(n), **job} for n, job in enumerate(jobs)]
        assert (await call.problem("POST", "/v1/workflows", {"jobs": steps}))[:2] == (403, "forbidden")
    assert await db.fetchval(COUNT) == 0


async def test_a_stream_of_lines_is_one_transaction(dsn: str, db: Db) -> None:
    async def lines() -> AsyncIterator[bytes]:
        for n in range(5_000):
            yield b'{"queue": "q", "payload": {"n": %d, "x": 1.10}}\n' % n
        yield b'\n{"queue": "q"}'  # an empty line, and a last one without an end

    async with calling(dsn) as call:
        found = await call("POST", "/v1/jobs/stream", content=lines(), headers=LINES)
        assert (found.status_code, found.json()) == (201, {"created": 5_001})
    assert await db.fetchval(COUNT) == 5_001
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE payload::text LIKE '%1.10}'") == 5_000


@pytest.mark.parametrize(
    "bad", ["{", '{"queue": "q", "payload": {"a": 1, "a": 2}}', '{"queue": 7}', '{"queue": "q", "x": 1}', "[]"]
)
async def test_a_bad_line_after_many_good_ones_is_named_and_none_is_created(dsn: str, db: Db, bad: str) -> None:
    lines = '{"queue": "q"}\n' * 4_321 + bad
    async with calling(dsn) as call:
        code, _, found = await call.problem("POST", "/v1/jobs/stream", content=lines, headers=LINES)
        assert code in (400, 422)
        assert found["detail"].startswith("line 4,322")
    assert await db.fetchval(COUNT) == 0


async def test_a_stream_that_stops_coming_creates_nothing(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    import anyio

    async def lines() -> AsyncIterator[bytes]:
        yield b'{"queue": "q"}\n' * 3_000
        await anyio.sleep(3600)

    monkeypatch.setattr(bulk, "BODY_S", 0.2)
    async with calling(dsn) as call:
        found = await call.problem("POST", "/v1/jobs/stream", content=lines(), headers=LINES)
        assert found[:2] == (408, "body-too-slow")
    assert await db.fetchval(COUNT) == 0


async def test_a_line_without_end_is_refused_early(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LINE_BYTES_MAX", 10_000)
    async with calling(dsn) as call:
        found = await call.problem("POST", "/v1/jobs/stream", content="x" * 100_000, headers=LINES)
        assert found[:2] == (413, "body-too-large")
        plain = await call.problem("POST", "/v1/jobs/stream", content="{}", headers={"Content-Type": "text/plain"})
        assert plain[:2] == (415, "not-json-type")


async def test_a_workflow_by_names(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        first = (await call.ok("POST", "/v1/jobs", {"queue": "etl"}))["id"]
        steps = [
            {"name": "load", "queue": "etl", "after": ["extract", first]},
            {"name": "extract", "queue": "etl", "payload": {"day": 7}},
            {"name": "report", "queue": "mail", "after": ["load"], "on_failed_dependency": "run"},
        ]
        ids = (await call.ok("POST", "/v1/workflows", {"jobs": steps}))["ids"]
        assert set(ids) == {"load", "extract", "report"}
        blocked = await db.fetch("SELECT id::text FROM pgworkd.jobs WHERE status = 'blocked'")
        assert {row[0] for row in blocked} == {ids["load"], ids["report"]}
        cycle = [{"name": "a", "queue": "q", "after": ["b"]}, {"name": "b", "queue": "q", "after": ["a"]}]
        assert (await call.problem("POST", "/v1/workflows", {"jobs": cycle}))[:2] == (422, "invalid")
        unknown = [{"name": "a", "queue": "q", "after": ["nope"]}]
        code, _, found = await call.problem("POST", "/v1/workflows", {"jobs": unknown})
        assert (code, "nope" in found["detail"]) == (422, True)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/jobs/bulk", b'{"jobs": [' + b",".join([b"{}"] * 2_000_000) + b"]}", 422),
        ("/v1/jobs", b'{"queue": "q", "payload": {"a": [' + b",".join([b"{}"] * 250_000) + b"]}}", 201),
        ("/v1/batches", b'{"name": "b", "payloads": [' + b",".join([b'{"a": {}}'] * 10_000) + b"]}", 201),
    ],
    ids=["bulk", "job", "batch"],
)
async def test_others_are_answered_while_a_large_body_is_read(dsn: str, path: str, body: bytes, status: int) -> None:
    async with calling(dsn) as call:
        answered_at = [time.monotonic()]
        async with asyncio.TaskGroup() as tasks:
            headers = {"Content-Type": "application/json"}
            reading = tasks.create_task(call("POST", path, content=body, headers=headers))
            while not reading.done():
                assert (await call("GET", "/healthz")).status_code == 200
                answered_at.append(time.monotonic())
                await asyncio.sleep(0.001)  # nothing of this call waits: the loop would see no other
        answered_at.append(time.monotonic())
        assert reading.result().status_code == status
        longest_s = max(after - before for before, after in pairwise(answered_at))
        assert longest_s < (answered_at[-1] - answered_at[0]) / 2, "not one wait for all of it"


async def test_others_have_their_turns_while_the_lines_of_a_stream_are_read(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one whose lines are all there: else a caller who sends without a pause is the only one who is served."""
    turns, lines, read = 0, b'{"queue": "q"}\n' * 2_000, Counter[int]()
    read_line = bulk._job

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def reading(*line: Any) -> Any:
        read[turns] += 1
        return read_line(*line)

    monkeypatch.setattr(bulk, "_job", reading)
    async with calling(dsn) as call, asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(count())
        headers = {"Content-Type": "application/x-ndjson"}
        assert (await call("POST", "/v1/jobs/stream", content=lines, headers=headers)).json() == {"created": 2_000}
        counting.cancel()
    assert read.total() == 2_000
    assert max(read.values()) <= bulk.LINES_SLICE


async def test_a_workflow_has_a_bound_of_its_dependencies(dsn: str) -> None:
    steps: list[dict[str, Any]] = [{"name": f"s{n}", "queue": "q"} for n in range(1_000)]
    names = [step["name"] for step in steps]
    late = [{"name": f"late {n}", "queue": "q", "after": names} for n in range(101)]
    async with calling(dsn) as call:
        found = await call.problem("POST", "/v1/workflows", {"jobs": [*steps, *late]})
        assert (*found[:2], found[2]["errors"][0]["pointer"]) == (422, "invalid", "/jobs")
        assert "101,000 others in all, 100,000 are allowed" in found[2]["errors"][0]["detail"]


async def test_large_bodies_of_one_caller_do_not_hold_up_those_of_another(dsn: str) -> None:
    """And members that are unknown are told up to a bound."""
    members = b'{"jobs": [{"queue": "q", ' + b",".join(b'"m%d": 1' % n for n in range(900_000)) + b"}]}"
    arrays = b'{"jobs": [' + b",".join([b"[1]"] * 2_000_000)
    fine = json.dumps({"jobs": [{"queue": "q", "payload": {"text": "x" * 200}}] * 1_000}).encode()
    headers = {"Content-Type": "application/json"}
    async with calling(dsn) as call:
        other = also(call, await token(dsn, name="other"))
        async with asyncio.TaskGroup() as tasks:
            bad = [members, arrays, arrays, arrays]
            hogs = [tasks.create_task(call("POST", "/v1/jobs/bulk", content=body, headers=headers)) for body in bad]
            await asyncio.sleep(0)
            assert (await other("POST", "/v1/jobs/bulk", content=fine, headers=headers)).status_code == 201
            assert not all(hog.done() for hog in hogs), "it did not wait for all of them"
        assert [hog.result().status_code for hog in hogs] == [400] * 4
        assert "an object has more than 10,000 members" in hogs[0].result().json()["detail"]
