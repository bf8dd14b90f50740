"""A daemon that pushes: each line of the table of answers, from the row of a job to the row of its end."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, NamedTuple

import anyio
import pytest

from pgworkd.core import events
from pgworkd.push.daemon import delivery
from tests.kits.daemon import cancel, insert, until, waits_for_status
from tests.kits.downstream import Downstream, Writer, answer_of, headers_of, message_of, serving
from tests.kits.push import pushing, put_endpoint
from tests.kits.verbs import Db

pytestmark = pytest.mark.slow("a daemon for each, and services that hang")

_JOB = """SELECT queue, status, attempts, failures, result::text, error,
    extract(epoch FROM run_at - clock_timestamp())::float8 AS due_s FROM pgworkd.all_jobs WHERE id = $1"""


async def _job(db: Db, job_id: Any) -> dict[str, Any]:
    row = await db.fetchrow(_JOB, job_id)
    assert row is not None
    return dict(row)


@pytest.mark.fast
async def test_a_job_goes_out_and_its_answer_is_its_result(dsn: str, db: Db) -> None:
    async with serving(Downstream(answer_of(200, {"total": 1.5}))) as down, pushing(dsn):
        await put_endpoint(db, "billing", down.url, "invoices", headers={"X-Team": "billing"})
        payload = '{"amount": 12.340, "big": 123456789012345678901}'
        job_id = await insert(db, "invoices", payload, kind="paid", meta='{"traceparent": "00-ab-cd-01"}')
        await until(waits_for_status(db, job_id, "completed"))
    assert json.loads((await _job(db, job_id))["result"]) == {"total": 1.5}
    (request,) = down.requests
    assert request.startswith(b"POST /jobs HTTP/1.1\r\n")
    assert b'"amount": 12.340' in request
    sent, headers = message_of(request), headers_of(request)
    assert sent["type"] == "job.run"
    assert {name: sent["data"][name] for name in ("id", "queue", "kind", "attempt", "max_attempts", "deadline_s")} == {
        "id": str(job_id),
        "queue": "invoices",
        "kind": "paid",
        "attempt": 1,
        "max_attempts": 3,
        "deadline_s": 30,
    }
    assert sent["data"]["payload"]["big"] == 123456789012345678901
    given = {"webhook-id": str(job_id), "x-team": "billing", "pgworkd-attempt": "1", "traceparent": "00-ab-cd-01"}
    assert given.items() <= headers.items()
    assert "webhook-signature" not in headers, "it is not signed"


class Line(NamedTuple):
    """What an answer makes of a job, after its first attempt."""

    answer: bytes
    status: str
    said: str = ""
    """In the job's error."""
    result: str | None = None
    due_s: tuple[float, float] | None = None
    max_attempts: int = 3


def _in(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


LINES = {
    "200 with JSON": Line(answer_of(200, [1]), "completed", result="[1]"),
    "201 with JSON": Line(answer_of(201, "made"), "completed", result='"made"'),
    "200 with text": Line(answer_of(200, b"ok", content_type="text/plain"), "completed"),
    "200 with nothing": Line(answer_of(200), "completed"),
    "202, which is not agreed": Line(answer_of(202, {"n": 1}), "completed", result='{"n": 1}'),
    "204": Line(answer_of(204), "completed"),
    "206": Line(answer_of(206, b"x"), "completed"),
    "301": Line(
        answer_of(301, location="http://127.0.0.1:9/"), "failed", "HTTP 301: redirects to 'http://127.0.0.1:9/'"
    ),
    "307": Line(answer_of(307, location="/elsewhere"), "failed", "which is not followed"),
    **{
        f"{status}": Line(answer_of(status, {"no": "never"}), "dead", f'HTTP {status}: {{"no": "never"}}')
        for status in (400, 413, 415, 422, 501)
    },
    **{f"{status}": Line(answer_of(status), "failed", f"HTTP {status}") for status in (401, 403, 404, 405, 409, 418)},
    **{f"{status}": Line(answer_of(status), "failed", f"HTTP {status}") for status in (408, 425, 429, 500, 502, 504)},
    "503, later": Line(answer_of(503, retry_after="120"), "failed", "HTTP 503", due_s=(110, 121)),
    "503, at once": Line(answer_of(503, retry_after="0"), "dead", "HTTP 503", max_attempts=2),
    "429, at a date": Line(answer_of(429, retry_after=_in(80_000)), "failed", "HTTP 429", due_s=(60_000, 80_001)),
    "500, in ten years": Line(answer_of(500, retry_after="315360000"), "failed", due_s=(86_300, 86_401)),
    "500, before now": Line(answer_of(500, retry_after="-5"), "failed", due_s=(0, 60)),
    "500, the last time": Line(answer_of(500), "dead", "HTTP 500", max_attempts=1),
    "410": Line(answer_of(410, {"moved": "away"}), "failed", "HTTP 410"),
    "500, but complete": Line(answer_of(500, {"n": 1}, pgworkd_outcome="complete"), "completed", result='{"n": 1}'),
    "200, but fail": Line(answer_of(200, {"n": 1}, pgworkd_outcome="fail"), "failed", 'HTTP 200: {"n": 1}'),
    "200, but dead": Line(answer_of(200, b"no", pgworkd_outcome="dead"), "dead", "HTTP 200: no"),
    "200, but release": Line(
        answer_of(200, b"busy", pgworkd_outcome="Release", retry_after="60"), "pending", "busy", due_s=(50, 61)
    ),
    "200, but whatever": Line(answer_of(200, pgworkd_outcome="whatever"), "dead", "complete, fail, dead, release"),
    "not JSON": Line(answer_of(200, b"{", content_type="application/json"), "completed"),
    "not JSON, strictly": Line(answer_of(200, b"{", content_type="application/json"), "dead", "the work is done"),
    "a result of NUL": Line(answer_of(200, b'"\\u0000"', content_type="application/json"), "completed"),
    "2 MiB": Line(answer_of(200, b'"' + b"x" * 2**21 + b'"', content_type="application/json"), "completed"),
    "not HTTP": Line(b"SSH-2.0-OpenSSH_9.9\r\n\r\n", "failed", "it may have been done"),
}


async def test_each_line_of_the_table(dsn: str, db: Db) -> None:
    def answer(request: bytes) -> bytes:
        return LINES[message_of(request)["data"]["payload"]["line"]].answer

    jobs = {}
    async with serving(Downstream(answer)) as down, pushing(dsn) as (_, seen):
        for number, (name, line) in enumerate(LINES.items()):
            await put_endpoint(db, name, down.url, f"q{number}", strict_results=name.endswith("strictly"))
            payload = json.dumps({"line": name})
            jobs[name] = await insert(db, f"q{number}", payload, max_attempts=line.max_attempts)
        for name, line in LINES.items():
            await until(lambda name=name, line=line: _has_come_to(db, jobs[name], line.status))
        found = {name: await _job(db, job_id) for name, job_id in jobs.items()}
        disabled = await seen.wait(events.ENDPOINT_DISABLED)
    for name, line in LINES.items():
        job = found[name]
        assert (job["status"], job["result"]) == (line.status, line.result), (name, job)
        assert line.said in (job["error"] or ""), (name, job)
        assert job["attempts"] >= job["failures"] + (line.status in ("completed", "pending")), (name, job)
        assert job["failures"] == (line.status in ("failed", "dead")) * (2 if name == "503, at once" else 1), (
            name,
            job,
        )
        if line.due_s is not None:
            assert line.due_s[0] <= job["due_s"] <= line.due_s[1], (name, job)
    assert disabled == {"endpoint": "410", "reason": 'HTTP 410: {"moved": "away"}'}
    rows = await db.fetch("SELECT name::text, disabled_at IS NOT NULL AS off, paused_until FROM pgworkd.endpoints")
    assert [row["name"] for row in rows if row["off"]] == ["410"]
    assert {row["name"] for row in rows if row["paused_until"]} == {"429", "429, at a date"}
    paused = await db.fetch("SELECT endpoint::text FROM pgworkd.queues WHERE paused_until > clock_timestamp()")
    assert {row[0] for row in paused} == {"410", "429", "429, at a date"}


async def test_a_result_that_is_dropped_is_told_once_a_minute(dsn: str, db: Db) -> None:
    answer = answer_of(200, b"OK", content_type="application/json")
    async with serving(Downstream(answer)) as down, pushing(dsn) as (_, seen):
        await put_endpoint(db, "e", down.url, "q")
        first = await insert(db, "q")
        await until(waits_for_status(db, first, "completed"))
        noted = await db.fetchrow("SELECT warned_at, warned_why FROM pgworkd.endpoints")
        for job_id in [await insert(db, "q") for _ in range(20)]:
            await until(waits_for_status(db, job_id, "completed"))
        (told,) = seen.all(events.RESULT_DROPPED)
    assert (told["job_id"], told["endpoint"]) == (str(first), "e")
    assert "result cannot be read" in told["reason"]
    assert noted is not None
    assert noted["warned_why"] == told["reason"]
    assert await db.fetchrow("SELECT warned_at, warned_why FROM pgworkd.endpoints") == noted


async def _has_come_to(db: Db, job_id: Any, status: str) -> bool:
    job = await _job(db, job_id)
    return job["status"] == status and job["attempts"] > 0


async def test_what_was_not_delivered_is_no_failure_of_a_job_that_may_run_once(dsn: str, db: Db) -> None:
    async with serving(Downstream()) as down:
        url = down.url  # and nobody listens there any more
    async with pushing(dsn):
        await put_endpoint(db, "away", url, "q")
        once, often = await insert(db, "q", max_attempts=1), await insert(db, "q", max_attempts=2)
        await until(lambda: _has_come_to(db, often, "failed"))
        await until(lambda: _has_come_to(db, once, "pending"))
        job = await _job(db, once)
    assert (job["failures"], job["due_s"] > 0) == (0, True)
    assert "NotDelivered: the connection failed" in job["error"]
    assert (await _job(db, often))["failures"] == 1


@pytest.mark.fast
async def test_a_receiver_that_breaks_off_may_have_done_it(dsn: str, db: Db) -> None:
    async def hang_up(_: Writer) -> None:
        pass

    async with serving(Downstream(act=hang_up)) as down, pushing(dsn):
        await put_endpoint(db, "e", down.url, "q")
        once = await insert(db, "q", max_attempts=1)
        await until(waits_for_status(db, once, "dead"))
    assert "it may have been done" in (await _job(db, once))["error"]
    assert len(down.requests) == 1


@pytest.mark.fast
async def test_five_failures_in_a_row_pause_the_endpoint_with_all_its_queues(dsn: str, db: Db) -> None:
    statuses = iter([500, 500, 500, 500, 200] + [500] * 5)
    async with serving(Downstream(lambda _: answer_of(next(statuses)))) as down, pushing(dsn) as (_, seen):
        await put_endpoint(db, "e", down.url, "q", "other")
        for number in range(1, 11):
            job_id = await insert(db, "q", max_attempts=1)
            await until(waits_for_status(db, job_id, "completed" if number == 5 else "dead"))
            assert len(seen.all(events.ENDPOINT_PAUSED)) == (number == 10), number
        assert seen.all(events.ENDPOINT_PAUSED) == [{"endpoint": "e", "for_s": 10.0, "reason": "HTTP 500"}]
        waiting = await insert(db, "other")
        await seen.wait(events.QUEUE_SETTINGS, queue="other", paused=True)
        assert (await _job(db, waiting))["status"] == "pending"
        down.answer = answer_of(200)
        assert await db.fetchval("SELECT pgworkd.enable_endpoint('e')")
        await until(waits_for_status(db, waiting, "completed"))


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_daemon_that_was_frozen_blames_no_endpoint(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch, *, frozen: bool
) -> None:
    monkeypatch.setattr(delivery, "FROZEN_S", 0.5)

    async def hang(_: Writer) -> None:
        if frozen and len(down.requests) == 5:
            time.sleep(1.5)  # noqa: ASYNC251 - the daemon is in this process
        await anyio.sleep_forever()

    async with serving(Downstream(act=hang)) as down, pushing(dsn) as (_, seen):
        await put_endpoint(db, "e", down.url, "q", timeout_s=0.5)
        for job_id in [await insert(db, "q", max_attempts=1) for _ in range(5)]:
            await until(waits_for_status(db, job_id, "dead"))
        assert len(seen.all(events.ENDPOINT_PAUSED)) == (not frozen)


async def test_the_largest_payload_is_sent_whole(dsn: str, db: Db) -> None:
    text = "ö" * (2**19 - 16)
    async with serving(Downstream()) as down, pushing(dsn):
        await put_endpoint(db, "e", down.url, "q")
        jobs = [await insert(db, "q", json.dumps({"text": text}, ensure_ascii=False)) for _ in range(3)]
        for job_id in jobs:
            await until(waits_for_status(db, job_id, "completed"))
    assert [message_of(request)["data"]["payload"] for request in down.requests] == [{"text": text}] * 3


async def test_a_burst_of_failures_makes_one_pause_and_the_next_is_longer(dsn: str, db: Db) -> None:
    async with serving(Downstream(answer_of(500))) as down, pushing(dsn) as (daemon, seen):
        await put_endpoint(db, "e", down.url, "q")
        await db.execute("""SELECT pgworkd.set_queue('q', '{"concurrency": 50}')""")
        for wanted in (10.0, 20.0):
            await db.execute("INSERT INTO pgworkd.jobs (queue, max_attempts) SELECT 'q', 1 FROM generate_series(1, 50)")
            await seen.wait(events.ENDPOINT_PAUSED, for_s=wanted)
            await until(lambda: db.fetchval("SELECT count(*) = 0 FROM pgworkd.jobs WHERE status = 'running'"))
            assert len(seen.all(events.ENDPOINT_PAUSED)) == wanted / 10
            await db.execute("DELETE FROM pgworkd.jobs")
            for target in daemon._routes.targets.values():  # as if the time had passed
                target._paused_until = 0.0
            await db.execute("SELECT pgworkd.enable_endpoint('e')")


async def test_answers_of_one_burst_that_ask_for_patience_make_one_pause(dsn: str, db: Db) -> None:
    async with serving(Downstream(answer_of(429, retry_after="30"))) as down, pushing(dsn) as (_, seen):
        await put_endpoint(db, "e", down.url, "q")
        await db.execute("INSERT INTO pgworkd.jobs (queue, max_attempts) SELECT 'q', 1 FROM generate_series(1, 10)")
        await until(lambda: db.fetchval("SELECT count(*) = 10 FROM pgworkd.jobs WHERE status = 'dead'"))
    assert [each["for_s"] for each in seen.all(events.ENDPOINT_PAUSED)] == [30.0]


async def test_an_endpoint_that_is_gone_is_enabled_by_an_operator(dsn: str, db: Db) -> None:
    async with serving(Downstream(answer_of(410))) as down, pushing(dsn) as (_, seen):
        await put_endpoint(db, "e", down.url, "q", "quiet")
        await db.execute("SELECT pgworkd.set_queue('quiet', '{\"paused_until\": \"infinity\"}')")
        job_id = await insert(db, "q")
        await seen.wait(events.ENDPOINT_DISABLED)
        await until(waits_for_status(db, job_id, "failed"))
        down.answer = answer_of(204)
        assert await db.fetchval("SELECT pgworkd.enable_endpoint('e', 'ann')")
        await db.execute("UPDATE pgworkd.jobs SET run_at = now() WHERE id = $1", job_id)
        await until(waits_for_status(db, job_id, "completed"))
    assert await db.fetchval("SELECT paused_until = 'infinity' FROM pgworkd.queues WHERE name = 'quiet'")
    said = await db.fetch("SELECT who, after::text FROM pgworkd.audit WHERE what = 'endpoint' ORDER BY id")
    assert [(row["who"], json.loads(row["after"]).get("disabled")) for row in said][1:] == [
        ("push", True),
        ("ann", False),
    ]


async def test_nothing_is_sent_to_a_disabled_endpoint_whatever_its_queues_say(dsn: str, db: Db) -> None:
    async with serving(Downstream()) as down, pushing(dsn) as (daemon, seen):
        await put_endpoint(db, "e", down.url, "a", "b")
        await until(lambda: len(daemon.pools) == 2)
        assert await db.fetchval("SELECT pgworkd.disable_endpoint('e', 'moved')")
        await db.execute("SELECT pgworkd.set_queue('a', '{\"paused_until\": null}')")  # resumed all the same
        await put_endpoint(db, "e", down.url, "c")
        await seen.wait(events.QUEUE_REMOVED, queue="a")
        await seen.wait(events.QUEUE_REMOVED, queue="b")
        jobs = [await insert(db, queue) for queue in ("a", "b", "c")]
        assert (daemon.pools, down.requests) == ({}, [])
        assert await db.fetchval("SELECT pgworkd.enable_endpoint('e')")
        for job_id in jobs:
            await until(waits_for_status(db, job_id, "completed"))


async def test_queues_come_and_go_while_it_runs(dsn: str, db: Db) -> None:
    async with serving(Downstream()) as one, serving(Downstream()) as other, pushing(dsn) as (daemon, seen):
        assert daemon.pools == {}
        await put_endpoint(db, "e", one.url, "a", "b")
        await until(waits_for_status(db, await insert(db, "a"), "completed"))
        await db.execute("SELECT pgworkd.set_queue('a', '{\"endpoint\": null}')")
        await seen.wait(events.QUEUE_REMOVED, queue="a")
        assert set(daemon.pools) == {"b"}
        await put_endpoint(db, "e", other.url)
        await until(lambda: other.requests or insert(db, "b"))
        assert not await db.fetchval("SELECT pgworkd.remove_endpoint('unknown')")


@pytest.mark.parametrize("queues", [{"a": 3, "none": None}, None])
async def test_it_serves_the_queues_that_it_is_told(dsn: str, db: Db, queues: dict[str, int | None] | None) -> None:
    async with serving(Downstream()) as down:
        await put_endpoint(db, "e", down.url, "a", "b")
        async with pushing(dsn, queues=queues) as (daemon, _):
            await until(lambda: daemon.pools)
            assert {name: pool.concurrency for name, pool in daemon.pools.items()} == (
                {"a": 10, "b": 10} if queues is None else {"a": 3}
            )


@pytest.mark.parametrize(("stop", "max_attempts", "status"), [
    ("cancel", 3, "cancelled"), ("stop", 3, "pending"), ("stop", 1, "dead"), ("time out", 3, "failed"),
])  # fmt: skip
async def test_a_request_under_way_ends_with_its_attempt(
    dsn: str, db: Db, stop: str, max_attempts: int, status: str
) -> None:
    hangs = anyio.Event()

    async def hang(_: Writer) -> None:
        hangs.set()
        await anyio.sleep_forever()

    async with serving(Downstream(act=hang)) as down:
        await put_endpoint(db, "e", down.url, "q", timeout_s=0.2 if stop == "time out" else 30)
        async with pushing(dsn) as (daemon, seen):
            job_id = await insert(db, "q", max_attempts=max_attempts)
            with anyio.fail_after(10):
                await hangs.wait()
            if stop == "cancel":
                await cancel(db, job_id)
            elif stop == "stop":
                daemon.request_stop(now=True)
            await until(waits_for_status(db, job_id, status))
        assert seen.all(events.SHUTDOWN_INCOMPLETE) == []
    assert len(down.requests) == 1
