"""What operators do over HTTP: lists, operations on many jobs, queues, schedules, tokens, audit."""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest

from pgworkd.admin import listing
from tests.kits.gateway import also, calling, token

Db: TypeAlias = "asyncpg.Connection[Any]"
DEAD = """INSERT INTO pgworkd.jobs (queue, status, attempts, failures, failed_at, error)
    SELECT 'q', 'dead', 3, 3, now(), 'E: no ' || i FROM generate_series(1, $1::int) i"""
COUNTED = """SELECT pgworkd.note_deaths(array_agg(id)) FROM pgworkd.jobs WHERE status = 'dead';
    SELECT pgworkd.count_deaths(1000)"""


@pytest.mark.parametrize("walk", [3, 7, 1000])
async def test_pages_have_each_job_that_matches_once_wherever_it_is(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch, walk: int
) -> None:
    """However few rows a page looks at, and whether they are live or finished."""
    for name in ("WALK_ROWS", "WALK_ALL_ROWS"):
        monkeypatch.setattr(listing, name, walk)
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' || i % 3 FROM generate_series(1, 40) i")
    await db.execute(
        "SELECT pgworkd.cancel(array_agg(id)) FROM (SELECT id FROM pgworkd.jobs ORDER BY random() LIMIT 20) j"
    )
    every = {str(row[0]): (row[1], row[2]) for row in await db.fetch("SELECT id, queue, status FROM pgworkd.all_jobs")}
    async with calling(dsn) as call:
        for query in ({}, {"queue": "q1"}, {"status": "cancelled"}, {"queue": "q2", "status": "pending"}):
            found, cursor = [], None
            for _ in range(100):
                params = query | {"limit": 4} | ({} if cursor is None else {"cursor": cursor})
                page = await call.ok("GET", "/v1/jobs", params=params)
                found += [row["id"] for row in page["jobs"]]
                if (cursor := page["next"]) is None:
                    break
            wanted = [
                job
                for job, (queue, status) in every.items()
                if query.get("queue", queue) == queue and query.get("status", status) == status
            ]
            assert found == sorted(wanted, reverse=True), query


async def test_jobs_are_found_by_key_batch_and_group_of_errors(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        keyed = (await call.ok("POST", "/v1/jobs", {"queue": "q", "limit_key": "tenant"}))["id"]
        batch = (await call.ok("POST", "/v1/batches", {"name": "b", "payloads": [{}]}))["id"]
        await db.execute(DEAD, 1)
        await db.execute(COUNTED)
        (group,) = (await call.ok("GET", "/v1/dead"))["groups"]
        group_id = group["group"]
        wanted = {"key=tenant": 1, "key=x": 0, f"batch={batch}": 1, f"error_group={group_id}": 1}
        for query, count in wanted.items():
            found = (await call.ok("GET", f"/v1/jobs?{query}"))["jobs"]
            assert len(found) == count, query
        assert (await call.ok("GET", "/v1/jobs?key=tenant"))["jobs"][0]["id"] == keyed


async def test_jobs_are_found_by_when_they_were_created(dsn: str, db: Db) -> None:
    """Live and finished; from an instant on, and before one."""
    instants, ids = [], []
    for number in range(4):
        instants.append((await db.fetchval("SELECT clock_timestamp()")).isoformat())
        ids.append(str(await db.fetchval("INSERT INTO pgworkd.jobs (queue) VALUES ('q') RETURNING id")))
        if number % 2:
            await db.execute("SELECT pgworkd.cancel($1)", [ids[-1]])
    async with calling(dsn) as call:

        async def found(**params: Any) -> list[str]:
            rows = (await call.ok("GET", "/v1/jobs", params=params))["jobs"]
            return [row["id"] for row in reversed(rows)]

        for since in range(4):
            for until in range(since, 4):
                assert await found(since=instants[since], until=instants[until]) == ids[since:until]
            assert await found(since=instants[since]) == ids[since:]
            assert await found(until=instants[since]) == ids[:since]
        code, slug, _ = await call.problem("GET", "/v1/jobs?since=2026-01-01T00:00:00")
        assert (code, slug) == (422, "invalid"), "without a time zone it is no instant"


async def test_all_that_match_are_retried_in_steps(dsn: str, db: Db) -> None:
    await db.execute(DEAD, 25)
    async with calling(dsn) as call:
        would = await call.ok("POST", "/v1/jobs/retry?dry_run=true", {"queue": "q"})
        assert (would["matches"], would["exact"], len(would["sample"])) == (25, True, 10)
        steps = []
        while True:
            step = await call.ok("POST", "/v1/jobs/retry", {"queue": "q", "limit": 10})
            steps.append(step["done"])
            if not step["more"]:
                break
        assert sum(steps) == 25
        assert max(steps) == 10
        everything = await call.problem("POST", "/v1/jobs/cancel", {})
        assert everything[:2] == (422, "invalid")
        done = await call.ok("POST", "/v1/jobs/cancel", {"all_queues": True})
        assert done["outcomes"] == {"cancelled": 25, "requested": 0}
    who = await db.fetch("SELECT DISTINCT who FROM pgworkd.audit WHERE what <> 'token'")
    assert len(who) == 1
    assert who[0][0].startswith("tester (token ")


async def test_jobs_to_which_an_operation_does_not_apply_are_named_with_the_reason(dsn: str, db: Db) -> None:
    await db.execute(DEAD, 1)
    dead = str(await db.fetchval("SELECT id FROM pgworkd.jobs"))
    async with calling(dsn) as call:
        waits = (await call.ok("POST", "/v1/jobs", {"queue": "q"}))["id"]
        unknown = str(uuid4())
        done = await call.ok("POST", "/v1/jobs/discard", {"ids": [dead, waits, unknown]})
        assert done["outcomes"] == {"discarded": 1}
        assert {each["id"]: each["status"] for each in done["refused"]} == {waits: "pending", unknown: "unknown"}
        done = await call.ok("POST", "/v1/jobs/undepend", {"ids": [waits]})
        assert (done["done"], len(done["refused"])) == (0, 1)
        assert (await call.problem("POST", "/v1/jobs/undepend", {"queue": "q"}))[:2] == (422, "invalid")
        assert (await call.problem("POST", "/v1/jobs/explode", {"ids": [waits]}))[:2] == (422, "invalid")


async def test_ids_and_a_filter_are_not_given_together(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        one = (await call.ok("POST", "/v1/jobs", {"queue": "q"}))["id"]
        for more in ({"queue": "r"}, {"status": "failed"}, {"kind": "k"}, {"all_queues": True}, {"limit": 1}):
            for path in ("cancel", "retry", "discard", "undepend", "cancel?dry_run=true"):
                code, _, found = await call.problem("POST", f"/v1/jobs/{path}", {"ids": [one]} | more)
                assert (code, found["errors"][0]["pointer"]) == (422, f"/{next(iter(more))}")
        assert await db.fetchval("SELECT status::text FROM pgworkd.jobs") == "pending"
        assert (await call.ok("POST", "/v1/jobs/cancel", {"ids": [one], "all_queues": False}))["done"] == 1


async def test_what_is_misspelt_is_named(dsn: str) -> None:
    async with calling(dsn) as call:
        await call.ok("POST", "/v1/jobs", {"queue": "email"})
        code, _, found = await call.problem("GET", "/v1/jobs?status=done")
        assert (code, "give one of pending, running" in found["detail"]) == (422, True)
        code, _, found = await call.problem("POST", "/v1/queues/emial/pause")
        assert (code, found["detail"].endswith("did you mean 'email'?")) == (404, True)
        code, _, found = await call.problem("POST", "/v1/queues/new/pause")
        assert (code, "?create=true" in found["detail"]) == (404, True)
        assert [each["queue"] for each in (await call.ok("GET", "/v1/queues"))["queues"]] == ["email"]
        assert (await call.ok("POST", "/v1/queues/new/pause?create=true"))["paused"]
        assert (await call.problem("GET", "/v1/jbos"))[2]["detail"].startswith("there is no such path")
        code, _, found = await call.problem("PUT", "/v1/schedules/s", {"queue": "email"})
        assert (code, found["detail"]) == (422, "the schedule has no rule: give cron or every_s")
        narrow = also(call, await token(dsn, {"read": ("email", "a*")}))
        said = (await narrow.problem("GET", "/v1/jobs"))[2]["detail"]
        assert said.endswith("for all queues; you have it for 'email', 'a*': name one, where the call takes a queue")


async def test_an_operator_of_one_queue_touches_no_other(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        mine = (await call.ok("POST", "/v1/jobs", {"queue": "mail"}))["id"]
        theirs = (await call.ok("POST", "/v1/jobs", {"queue": "bank"}))["id"]
        batch = (await call.ok("POST", "/v1/batches", {"name": "bank", "payloads": [{}]}))["id"]
        narrow = also(call, await token(dsn, {"operate": ["mail"]}))
        assert (await narrow.problem("POST", "/v1/jobs/cancel", {"ids": [mine, theirs]}))[:2] == (404, "not-found")
        for which in ({"queue": "bank"}, {"all_queues": True}, {"batch": batch}, {"kind": "bank"}, {"key": "k"}):
            assert (await narrow.problem("POST", "/v1/jobs/cancel", which))[:2] == (403, "forbidden"), which
        for method, path in (("POST", "pause"), ("POST", "resume"), ("PATCH", "")):
            body = {"concurrency": 1} if method == "PATCH" else None
            refused = await narrow.problem(method, f"/v1/queues/bank/{path}".rstrip("/"), body)
            assert refused[:2] == (403, "forbidden")
        assert (await narrow.ok("POST", "/v1/jobs/cancel", {"ids": [mine]}))["done"] == 1
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE queue = 'bank'") == 2


async def test_settings_and_pauses_of_queues_whose_names_are_anything(dsn: str) -> None:
    async with calling(dsn) as call:
        for name in ("plain", "a/b", "ü.%2F", "..", "\u202eabc", "50%", "a b", "?x=1#y"):
            path = "/v1/queues/" + "".join(f"%{byte:02X}" for byte in name.encode())
            found = await call.ok("PATCH", path, {"concurrency": 3, "rate": 10, "rate_period_s": 1.0})
            assert found["queue"] == name
            assert found["settings"]["concurrency"] == {"value": 3, "from": "row"}
            assert (await call.ok("POST", f"{path}/pause", {"for_s": 60.0}))["paused"]
            assert not (await call.ok("POST", f"{path}/resume"))["paused"]
            assert (await call.ok("POST", f"{path}/pause"))["paused_until"] is None
            assert (await call.ok("GET", path))["paused"]
            assert (await call.ok("GET", f"{path}/depth"))["depth"] == 0
        for body in ({"concurrency": 0}, {"rate": 5}, {"concurrency": 1.5}, {"nope": 1}, {}):
            assert (await call.problem("PATCH", "/v1/queues/fresh", body))[:2] == (422, "invalid"), body
        assert (await call.problem("POST", "/v1/queues/q/pause?create=true", {"until": "2001-01-01T00:00:00Z"}))[
            0
        ] == 422
        assert (await call.problem("GET", "/v1/queues/nothing"))[:2] == (404, "not-found")


async def test_schedules_are_made_changed_run_and_removed(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        path = "/v1/schedules/night%2Fly"
        rule = {"queue": "q", "cron": "0 3 * * *", "timezone": "Europe/Vienna", "payload": {"n": 1}}
        assert (await call("PUT", path, rule)).status_code == 201
        assert (await call("PUT", path, rule | {"missed": "once"})).status_code == 200
        more = {"missed_grace_s": 7.0, "wait_for_retries": True}
        assert (await call("PUT", path, rule | more)).status_code == 200
        stored = await db.fetchrow("SELECT missed_grace_s, waits_for_retries FROM pgworkd.schedules")
        assert tuple(stored) == (7.0, True)
        times = (await call.ok("GET", f"{path}/next?n=3"))["next"]
        assert [datetime.fromisoformat(each) for each in times] == sorted(map(datetime.fromisoformat, set(times)))
        assert not (await call.ok("PATCH", path, {"enabled": False}))["enabled"]
        job = (await call.ok("POST", f"{path}/run"))["id"]
        assert (await call.ok("GET", f"/v1/jobs/{job}"))["payload"] == {"n": 1}
        for bad in (
            {"cron": "61 * * * *"},
            {"cron": None},
            {"every_s": 5},
            {"timezone": "Mars/Base"},
            {"missed_grace_s": -1.0},
        ):
            assert (await call.problem("PUT", path, rule | bad))[:2] == (422, "invalid"), bad
        assert (await call.ok("DELETE", path))["removed"]
        for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/run"), ("GET", "/next")):
            assert (await call.problem(method, path + tail))[:2] == (404, "not-found")
        await db.execute("SELECT pgworkd.put_schedule('ours', 'q', 'k', NULL, 60, 'UTC', 'skip', '{}')")
        refused = await call.problem("PUT", "/v1/schedules/ours", rule)
        assert refused[:2] == (409, "conflict")
        narrow = also(call, await token(dsn, {"operate": ["z"], "read": ["z"]}))
        assert (await narrow.problem("PUT", "/v1/schedules/mine", rule))[:2] == (403, "forbidden")
        assert (await narrow.problem("DELETE", "/v1/schedules/ours"))[:2] == (404, "not-found")
        assert (await narrow.ok("GET", "/v1/schedules"))["schedules"] == []


async def test_tokens_are_added_listed_and_revoked_and_never_shown_again(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        body = {"name": "app", "scopes": {"enqueue": ["mail", "report-*"], "read": None}}
        made = await call.ok("POST", "/v1/tokens", body)
        other = also(call, made["token"])
        await other.ok("POST", "/v1/jobs", {"queue": "report-7"})
        assert (await other.problem("POST", "/v1/jobs", {"queue": "bank"}))[:2] == (403, "forbidden")
        assert (await other.problem("GET", "/v1/tokens"))[:2] == (403, "forbidden")
        listed = await call("GET", "/v1/tokens")
        assert made["token"].rpartition("_")[2] not in listed.text
        assert next(row for row in listed.json()["tokens"] if row["id"] == made["id"])["scopes"] == body["scopes"]
        for bad in ({"scopes": {}}, {"scopes": {"fly": None}}, {"expires_at": "2001-01-01T00:00:00Z"}, {"name": ""}):
            assert (await call.problem("POST", "/v1/tokens", body | bad))[:2] == (422, "invalid"), bad
        await call.ok("DELETE", f"/v1/tokens/{made['id']}")
        assert (await call.problem("DELETE", f"/v1/tokens/{made['id']}"))[:2] == (404, "not-found")
    stored = await db.fetch(
        "SELECT to_jsonb(t)::text FROM pgworkd.tokens t UNION ALL SELECT to_jsonb(a)::text FROM pgworkd.audit a"
    )
    assert not [row for row in stored if made["token"].rpartition("_")[2] in row[0]]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.audit WHERE what = 'token'") == 3


async def test_the_audit_shows_payloads_to_those_only_who_may_see_them(dsn: str) -> None:
    async with calling(dsn) as call:
        job = (await call.ok("POST", "/v1/jobs", {"queue": "q", "payload": {"card": "4111"}}))["id"]
        await call.ok("PATCH", f"/v1/jobs/{job}", {"payload": {"card": "4222"}})
        reader = also(call, await token(dsn, {"read": None}))
        assert "4222" not in (await reader("GET", f"/v1/audit?job_id={job}")).text
        assert "4222" in (await call("GET", f"/v1/audit?job_id={job}")).text


async def test_a_group_of_errors_is_muted(dsn: str, db: Db) -> None:
    await db.execute(DEAD, 3)
    await db.execute(COUNTED)
    async with calling(dsn) as call:
        (group,) = (await call.ok("GET", "/v1/dead"))["groups"]
        await call.ok("POST", "/v1/dead/mute", {"group": group["group"], "for_s": 60.0})
        assert (await call.ok("GET", "/v1/dead"))["groups"][0]["muted"]
        await call.ok("POST", "/v1/dead/mute", {"group": group["group"], "for_s": 0})
        assert not (await call.ok("GET", "/v1/dead"))["groups"][0]["muted"]
        assert (await call.problem("POST", "/v1/dead/mute", {"group": 999_999, "for_s": 5}))[:2] == (404, "not-found")


async def test_the_dead_of_one_group_of_errors_are_retried_or_discarded(dsn: str, db: Db) -> None:
    await db.execute(DEAD, 3)
    await db.execute(DEAD.replace("E: no ", "E: broke "), 2)
    await db.execute(COUNTED)
    async with calling(dsn) as call:
        groups = {each["dead"]: each for each in (await call.ok("GET", "/v1/dead"))["groups"]}
        assert groups[3]["place"] == "", "no traceback tells it"
        one, other = ({"group": groups[dead]["group"]} for dead in (3, 2))
        assert (await call.ok("POST", "/v1/jobs/retry?dry_run=true", one))["matches"] == 3
        assert (await call.ok("POST", "/v1/jobs/retry", one | {"limit": 2}))["more"] is True
        assert (await call.ok("POST", "/v1/jobs/retry", one))["done"] == 1
        assert (await call.ok("POST", "/v1/jobs/discard", other))["done"] == 2
        counts = dict(await db.fetch("SELECT status::text, count(*) FROM pgworkd.all_jobs GROUP BY 1"))
        assert counts == {"pending": 3, "discarded": 2}
        for body in (one, one | {"queue": "q"}):
            code, slug, found = await call.problem("POST", "/v1/jobs/cancel", body)
            assert (code, slug, found["errors"][0]["pointer"]) == (422, "invalid", "/group")
        for wrong in (0, -1, 2**63, "1", 1.5):
            assert (await call.problem("POST", "/v1/jobs/retry", {"group": wrong}))[:2] == (422, "invalid")
        narrow = also(call, await token(dsn, {"operate": ["q"]}))
        assert (await narrow.problem("POST", "/v1/jobs/retry", one))[:2] == (403, "forbidden")
        assert (await narrow.ok("POST", "/v1/jobs/retry", one | {"queue": "q"}))["done"] == 0
