"""One job over HTTP: created, seen, waited for, edited, ended, played again."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest

from pgworkd import App
from pgworkd.client.new_job import new_ids
from tests.kits.daemon import running
from tests.kits.gateway import also, calling, token

Db: TypeAlias = "asyncpg.Connection[Any]"
BIG = '{"id": 123456789012345678901234567890, "price": 1.10, "tiny": 1e-30, "text": "\\u00fc \U0001f600"}'


async def test_a_job_has_all_fields_that_it_was_given(dsn: str, db: Db) -> None:
    fields = {
        "queue": "mail",
        "kind": "welcome",
        "payload": {"to": 7},
        "meta": {"tag": "x"},
        "priority": -3,
        "run_at": "2031-01-31T07:00:00+01:00",
        "expires_at": "2032-01-31T07:00:00Z",
        "max_attempts": 7,
        "timeout_s": 12.5,
        "dedupe_key": "d",
        "dedupe_for_s": 60,
        "serialize_key": "s",
        "limit_key": "l",
        "on_retry": "yield",
    }
    async with calling(dsn) as call:
        made = await call("POST", "/v1/jobs", fields)
        assert made.status_code == 201
        assert made.headers["location"] == f"/v1/jobs/{made.json()['id']}"
        found = await call.ok("GET", made.headers["location"])
    row = await db.fetchrow("SELECT * FROM pgworkd.jobs")
    assert row is not None
    assert (row["yields"], row["timeout_s"]) == (True, 12.5)
    assert row["dedupe_until"] is not None
    for name in ("queue", "kind", "payload", "meta", "priority", "max_attempts", "dedupe_key", "serialize_key"):
        assert found[name] == fields[name]
    assert found["run_at"] == "2031-01-31T06:00:00+00:00"
    assert (found["status"], found["attempts"]) == ("pending", 0)


async def test_a_payload_keeps_its_digits_on_the_way_in_and_out(dsn: str, db: Db) -> None:
    """No float ever holds them: 1.10 stays 1.10, an id of 30 digits stays what it is."""
    async with calling(dsn) as call:
        body = '{"queue": "q", "payload": ' + BIG + "}"
        made = await call("POST", "/v1/jobs", content=body, headers={"Content-Type": "application/json"})
        job_id = made.json()["id"]
        await db.execute(
            "WITH one AS (DELETE FROM pgworkd.jobs RETURNING *) INSERT INTO pgworkd.finished_jobs (id, finished_at, "
            "run_at, created_at, status, priority, attempts, failures, queue, payload, result, errors) SELECT id, "
            "now(), run_at, created_at, 'completed', 0, 1, 0, queue, payload, payload::jsonb -> 'price', '[]' FROM one"
        )
        found = (await call("GET", f"/v1/jobs/{job_id}")).text
        result = (await call("GET", f"/v1/jobs/{job_id}/result")).text
    assert "123456789012345678901234567890" in found
    assert '"price": 1.10' in found
    assert result.endswith('"result":1.10}')


async def test_the_same_dedupe_key_is_refused_or_answered_with_its_holder(dsn: str) -> None:
    async with calling(dsn) as call:
        job = {"queue": "q", "dedupe_key": "k"}
        first = await call.ok("POST", "/v1/jobs", job)
        status, slug, found = await call.problem("POST", "/v1/jobs", job)
        assert (status, slug, found["detail"]) == (409, "duplicate-key", "a job of queue 'q' has the dedupe key 'k'")
        again = await call("POST", "/v1/jobs", job | {"on_duplicate": "skip"})
        assert (again.status_code, again.json()) == (200, {"id": first["id"], "created": False, "changed": False})
        changed = await call.ok("POST", "/v1/jobs", job | {"on_duplicate": "replace", "payload": {"n": 2}})
        assert changed["changed"]


async def test_a_put_repeated_creates_one_job_whatever_became_of_it(dsn: str, db: Db) -> None:
    job_id = f"{new_ids(1)[0]:032x}"
    job = {"queue": "q", "payload": {"n": 1.50}}
    async with calling(dsn) as call:
        first = await call("PUT", f"/v1/jobs/{job_id}", job)
        assert (first.status_code, first.json()["created"], first.json()["keep_s"]) == (201, True, None)
        again = await call("PUT", f"/v1/jobs/{job_id}", job)
        assert (again.status_code, again.json()["created"]) == (200, False)
        await call.ok("DELETE", f"/v1/jobs/{job_id}")
        ended = await call("PUT", f"/v1/jobs/{job_id}", job)
        assert (ended.status_code, ended.json()["status"]) == (200, "cancelled")
        other = await call.problem("PUT", f"/v1/jobs/{job_id}", job | {"payload": {"n": 2}})
        assert other[:2] == (409, "id-taken")
        await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('short', 0)")
        kept = await call.problem("PUT", f"/v1/jobs/{uuid4()}", {"queue": "short"})
        assert kept[:2] == (422, "invalid")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_the_id_of_a_job_in_a_path_may_have_the_prefix_of_others(dsn: str, db: Db) -> None:
    """Each route that has one answers as to the bare id."""
    asked = "INSERT INTO pgworkd.stack_requests (job_id, attempt, worker_id, asked_by) VALUES ($1, 1, 1, 'x')"
    async with calling(dsn) as call:
        routes = [
            (method.upper(), path)
            for path, methods in (await call.ok("GET", "/v1/openapi.json"))["paths"].items()
            for method in methods
            if "{job_id}" in path
        ]
        assert len(routes) > 5
        bodies = {"PUT": {"queue": "q"}, "PATCH": {"priority": 3}}
        for method, path in routes:
            codes = []
            for job_id in (str(uuid4()), f"job_{uuid4()}"):
                await call.ok("PUT", f"/v1/jobs/{job_id}", {"queue": "q"})
                await db.execute(asked, job_id.removeprefix("job_"))
                codes += [(await call(method, path.replace("{job_id}", job_id), bodies.get(method))).status_code]
            assert codes[0] == codes[1], (method, path)
            assert codes[0] not in (404, 422), (method, path)
        for wrong in ("job_", f"JOB_{uuid4()}", f"job_job_{uuid4()}", f"task_{uuid4()}"):
            assert (await call.problem("GET", f"/v1/jobs/{wrong}"))[:2] == (422, "invalid")


async def test_many_puts_of_one_id_at_once_create_one_job(dsn: str, db: Db) -> None:
    job_id = f"{new_ids(1)[0]:032x}"
    async with calling(dsn) as call:
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(call("PUT", f"/v1/jobs/{job_id}", {"queue": "q"})) for _ in range(12)]
        codes = sorted(each.result().status_code for each in calls)
    assert codes == [200] * 11 + [201]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 1


async def test_the_end_of_a_job_answers_those_who_wait(dsn: str) -> None:
    app = App()
    go = asyncio.Event()

    @app.handler("slow")
    async def slow(payload: dict[str, Any]) -> dict[str, Any]:
        await go.wait()
        return {"got": payload}

    async with calling(dsn) as call, running(app, dsn):
        job_id = (await call.ok("POST", "/v1/jobs", {"queue": "slow", "payload": {"n": 1}}))["id"]
        early = await call("GET", f"/v1/jobs/{job_id}/result")
        assert early.status_code == 202
        async with asyncio.TaskGroup() as tasks:
            waiting = [
                tasks.create_task(call("GET", f"/v1/jobs/{job_id}{path}?wait_s=30")) for path in ("", "/result") * 4
            ]
            await asyncio.sleep(0.1)
            go.set()
        assert {each.result().json().get("status", "result") for each in waiting} == {"completed", "result"}
        assert waiting[1].result().json()["result"] == {"got": {"n": 1}}


async def test_a_wait_that_is_too_short_tells_the_status(dsn: str) -> None:
    async with calling(dsn) as call:
        job_id = (await call.ok("POST", "/v1/jobs", {"queue": "q"}))["id"]
        assert (await call.ok("GET", f"/v1/jobs/{job_id}?wait_s=0.05"))["status"] == "pending"
        assert (await call("GET", f"/v1/jobs/{job_id}/result?wait_s=0.05")).status_code == 202


async def test_a_failed_job_has_a_problem_in_place_of_a_result(dsn: str) -> None:
    app = App()

    @app.handler("bad", max_attempts=1)
    async def bad(_: dict[str, Any]) -> None:
        raise ValueError("no such account")

    async with calling(dsn) as call, running(app, dsn):
        job_id = (await call.ok("POST", "/v1/jobs", {"queue": "bad"}))["id"]
        code, slug, found = await call.problem("GET", f"/v1/jobs/{job_id}/result?wait_s=30")
        assert (code, slug, found["job_status"]) == (409, "job-failed", "dead")
        assert "no such account" in found["detail"]
        shown = await call.ok("GET", f"/v1/jobs/{job_id}")
        assert shown["errors"][0]["message"] == "no such account"


async def test_a_waiting_job_is_edited_if_it_is_as_it_was_read(dsn: str) -> None:
    async with calling(dsn) as call:
        job_id = (await call.ok("POST", "/v1/jobs", {"queue": "q"}))["id"]
        path = f"/v1/jobs/{job_id}"
        tag = (await call("GET", path)).headers["etag"]
        edited = await call("PATCH", path, {"priority": 5}, headers={"If-Match": tag})
        assert edited.json() == {"id": job_id, "changed": ["priority"]}
        late = await call.problem("PATCH", path, {"priority": 6}, headers={"If-Match": tag})
        assert late[:2] == (412, "changed")
        weak = f'"other", W/{edited.headers["etag"]}'  # as nginx makes it where it compresses the answer
        fresh = await call("PATCH", path, {"payload": {"n": 1}}, headers={"If-Match": weak})
        assert fresh.json()["changed"] == ["payload"]
        await call.ok("DELETE", path)
        assert (await call.problem("PATCH", path, {"priority": 7}))[:2] == (409, "not-waiting")


async def test_a_tag_tells_nothing_of_a_payload_that_its_reader_may_not_see(dsn: str) -> None:
    async with calling(dsn) as call:
        path = f"/v1/jobs/{(await call.ok('POST', '/v1/jobs', {'queue': 'q', 'payload': {'pin': 1}}))['id']}"
        reader = also(call, await token(dsn, {"read": None}))
        seen, known = set(), set()
        for pin in (1, 2):
            await call.ok("PATCH", path, {"payload": {"pin": pin}}, headers={"If-Match": "*"})
            seen.add((await reader("GET", path)).headers["etag"])
            known.add((await call("GET", path)).headers["etag"])
        assert (len(seen), len(known)) == (1, 2)


async def test_a_cancelled_job_is_played_again_with_its_payload(dsn: str) -> None:
    async with calling(dsn) as call:
        job = {"queue": "q", "kind": "k", "payload": {"n": 1}, "priority": 3, "meta": {"a": 1}}
        job_id = (await call.ok("POST", "/v1/jobs", job))["id"]
        early = await call.problem("POST", f"/v1/jobs/{job_id}/replay")
        assert early[:2] == (409, "conflict")
        assert (await call.ok("DELETE", f"/v1/jobs/{job_id}"))["outcome"] == "cancelled"
        assert (await call.ok("DELETE", f"/v1/jobs/{job_id}"))["outcome"] == "cancelled"
        made = await call.ok("POST", f"/v1/jobs/{job_id}/replay")
        found = await call.ok("GET", f"/v1/jobs/{made['id']}")
        assert {name: found[name] for name in job} == job


async def test_a_job_that_expired_runs_when_it_is_played_again_unless_its_time_is_kept(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        body = {"queue": "q", "payload": {"n": 1.50}, "expires_at": "2026-01-01T00:00:00Z"}
        first = (await call.ok("POST", "/v1/jobs", body))["id"]
        assert await db.fetchval("SELECT pgworkd.expire()") == 1
        again = {
            query: (await call.ok("POST", f"/v1/jobs/{first}/replay{query}"))["id"]
            for query in ("", "?keep_expires_at=false", "?keep_expires_at=true")
        }
        assert await db.fetchval("SELECT pgworkd.expire()") == 1
        found = {query: await call.ok("GET", f"/v1/jobs/{made}") for query, made in again.items()}
        assert [each["status"] for each in found.values()] == ["pending", "pending", "expired"]
        assert [each["expires_at"] for each in found.values()] == [None, None, "2026-01-01T00:00:00+00:00"]
        assert {json.dumps(each["payload"]) for each in found.values()} == {'{"n": 1.5}'}
        assert (await call.problem("POST", f"/v1/jobs/{first}/replay?keep_expires=true"))[:2] == (422, "invalid")


async def test_a_job_of_another_queue_is_as_unknown_as_one_that_is_not_there(dsn: str) -> None:
    async with calling(dsn) as call:
        job_id = (await call.ok("POST", "/v1/jobs", {"queue": "secret"}))["id"]
        narrow = also(
            call, await token(dsn, {scope: ["mail-*"] for scope in ("read", "payload", "operate", "enqueue")})
        )
        for method, path, body in (
            ("GET", "", None),
            ("GET", "/result", None),
            ("PATCH", "", {"priority": 1}),
            ("DELETE", "", None),
            ("POST", "/replay", None),
        ):
            there = await narrow.problem(method, f"/v1/jobs/{job_id}{path}", body)
            nowhere = await narrow.problem(method, f"/v1/jobs/{uuid4()}{path}", body)
            assert there[:2] == nowhere[:2] == (404, "not-found"), (method, path)


async def test_payloads_are_shown_to_those_only_who_may_see_them(dsn: str) -> None:
    async with calling(dsn) as call:
        job_id = (await call.ok("POST", "/v1/jobs", {"queue": "q", "payload": {"card": "4111"}, "meta": {"x": 1}}))[
            "id"
        ]
        reader = also(call, await token(dsn, {"read": None}))
        found = await reader("GET", f"/v1/jobs/{job_id}")
        assert "4111" not in found.text
        assert not {"payload", "meta", "result", "errors"} & found.json().keys()
        assert (await reader.problem("GET", f"/v1/jobs/{job_id}/result"))[:2] == (403, "forbidden")
        mixed = also(call, await token(dsn, {"read": None, "payload": ["other"]}))
        assert "4111" not in (await mixed("GET", f"/v1/jobs/{job_id}")).text
        assert json.loads((await call("GET", f"/v1/jobs/{job_id}")).text)["payload"] == {"card": "4111"}


@pytest.mark.parametrize("after", ["unknown", "cycle"])
async def test_a_dependency_that_can_never_be_met_is_refused(dsn: str, after: str) -> None:
    async with calling(dsn) as call:
        known = (await call.ok("POST", "/v1/jobs", {"queue": "q"}))["id"]
        waits = await call.ok("POST", "/v1/jobs", {"queue": "q", "after": [known]})
        assert (await call.ok("GET", f"/v1/jobs/{waits['id']}"))["status"] == "blocked"
        if after == "cycle":
            await call.ok("DELETE", f"/v1/jobs/{known}")
        job = {"queue": "q", "after": [known if after == "cycle" else str(uuid4())]}
        assert (await call.problem("POST", "/v1/jobs", job))[:2] == (422, "unknown-dependency")
