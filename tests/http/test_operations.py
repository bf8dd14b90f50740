"""Operations in the background over HTTP: started, followed and stopped by those who may."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.kits import verbs as v
from tests.kits.gateway import also, calling, token
from tests.kits.verbs import Db


async def dead(db: Db, count: int, queue: str = "q") -> None:
    """Dead jobs."""
    await v.insert(db, count, queue, status="dead", attempts=1, failures=1, failed_at=datetime.now(UTC))


async def test_one_is_started_followed_and_finished(dsn: str, db: Db) -> None:
    await dead(db, 7)
    async with calling(dsn) as call:
        made = await call.ok("POST", "/v1/jobs/retry?background=true", {"queue": "q"})
        facts = {"what": "retry", "queue": "q", "expected": 7, "done": 0, "state": "running", "finished_at": None}
        assert {name: made[name] for name in facts} == facts
        place = f"/v1/operations/{made['id']}"
        assert await call.ok("POST", "/v1/jobs/retry?background=true", {"queue": "q"}) == made, "it is the same"
        await db.execute("SELECT pgworkd.advance_operations(5)")
        assert (await call.ok("GET", place))["done"] == 5
        await db.execute("SELECT pgworkd.advance_operations(5)")
        found = await call.ok("GET", place)
        assert (found["done"], found["state"]) == (7, "finished")
        assert await call.ok("GET", "/v1/operations") == {"operations": [found]}
        assert await call.ok("POST", f"{place}/stop") == found, "it is over"
        assert found["who"] == f"tester (token {call.token.split('_')[1]})"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'pending'") == 7


async def test_one_is_stopped(dsn: str, db: Db) -> None:
    await dead(db, 7)
    async with calling(dsn) as call:
        made = await call.ok("POST", "/v1/jobs/discard?background=true", {"queue": "q"})
        await db.execute("SELECT pgworkd.advance_operations(5)")
        stopped = await call.ok("POST", f"/v1/operations/{made['id']}/stop")
        assert (stopped["state"], stopped["done"], stopped["stopped_by"]) == ("stopped", 5, made["who"])
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'dead'") == 2


@pytest.mark.parametrize(
    ("operation", "body", "said"),
    [
        ("retry", {"ids": ["00000000-0000-0000-0000-000000000007"]}, "ids"),
        ("retry", {"queue": "q", "limit": 7}, "limit"),
        ("retry", {}, "nothing says which jobs to retry"),
        ("cancel", {"queue": "q", "status": "dead"}, "cannot cancel a job whose status is dead"),
        ("cancel", {"queue": "q", "group": 7}, "group"),
        ("undepend", {"queue": "q"}, "undepend takes ids"),
    ],
)
async def test_what_makes_no_sense_is_named(dsn: str, db: Db, operation: str, body: dict[str, Any], said: str) -> None:
    async with calling(dsn) as call:
        status, _, found = await call.problem("POST", f"/v1/jobs/{operation}?background=true", body)
        assert (status, said in str(found)) == (422, True), found
    assert await db.fetchval("SELECT count(*) FROM pgworkd.operations") == 0


async def test_with_a_dry_run_none_is_started(dsn: str, db: Db) -> None:
    await dead(db, 2)
    async with calling(dsn) as call:
        found = await call.ok("POST", "/v1/jobs/retry?background=true&dry_run=true", {"queue": "q"})
        assert found["matches"] == 2
    assert await db.fetchval("SELECT count(*) FROM pgworkd.operations") == 0


async def test_a_token_for_some_queues_knows_only_theirs(dsn: str, db: Db) -> None:
    await dead(db, 1, "a")
    await dead(db, 1, "b")
    async with calling(dsn) as call:
        mine = await call.ok("POST", "/v1/jobs/retry?background=true", {"queue": "a"})
        other = await call.ok("POST", "/v1/jobs/retry?background=true", {"queue": "b"})
        of_all = await call.ok("POST", "/v1/jobs/retry?background=true", {"all_queues": True})
        narrow = also(call, await token(dsn, {"read": ["a"], "operate": ["a"]}))
        assert [each["id"] for each in (await narrow.ok("GET", "/v1/operations"))["operations"]] == [mine["id"]]
        for hidden in (other["id"], of_all["id"], 7000):
            assert (await narrow.problem("GET", f"/v1/operations/{hidden}"))[0] == 404
            assert (await narrow.problem("POST", f"/v1/operations/{hidden}/stop"))[0] == 404
        for body in ({"queue": "b"}, {"all_queues": True}):
            assert (await narrow.problem("POST", "/v1/jobs/retry?background=true", body))[0] == 403
        assert (await narrow.ok("POST", f"/v1/operations/{mine['id']}/stop"))["state"] == "stopped"
