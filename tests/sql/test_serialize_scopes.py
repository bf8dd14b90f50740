"""serialize_scope: keys of several queues are one name space, in one order; see also test_flow_model.py."""

from __future__ import annotations

import json
import uuid
from typing import Any

import anyio
import asyncpg
import pytest
from anyio.to_thread import run_sync

from tests.kits import verbs as v
from tests.kits.cli import invoke
from tests.kits.flow import expire, line, settings, take_ids, unblock
from tests.kits.gateway import also, calling, token
from tests.kits.sessions import Later, Notices, waits_for_lock
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


async def scoped(db: Db, scope: str | None = "stage", *queues: str) -> None:
    for queue in queues or ("q", "r"):
        await db.execute("SELECT pgworkd.set_queue($1, $2)", queue, json.dumps({"serialize_scope": scope}))


@pytest.fixture(params=["stage", "q"])
async def scope(request: pytest.FixtureRequest, db: Db) -> str:
    """Two queues of one scope, which may be the name of one of them."""
    if request.param == "q":
        await scoped(db, "q", "r")
    else:
        await scoped(db, "stage")
    return str(request.param)


async def ended(db: Db, how: str, job_id: uuid.UUID) -> None:
    """Ends a running job, or gives its key free."""
    if how == "completed":
        await v.complete(db, [job_id])
    elif how == "dead":
        await v.fail(db, [job_id], permanent=True)
    elif how == "snoozed":
        await v.release(db, [job_id], delay_s=600.0)
    elif how == "cancelled":
        await v.end(db, [job_id])
    elif how == "expired":
        await v.end(db, [job_id], status="expired")
    else:
        await v.cancel(db, job_id)
        await v.release(db, [job_id])


HOWS = ["completed", "dead", "snoozed", "cancelled", "expired", "released and cancelled"]


@pytest.mark.parametrize("how", HOWS)
async def test_jobs_of_two_queues_run_one_at_a_time_in_order_and_the_other_queue_is_told(
    db: Db, other: Db, scope: str, how: str
) -> None:
    worker_id = await v.worker(db)
    for queue in ("q", "r"):
        await db.execute("INSERT INTO pgworkd.pools VALUES ($1, $2, 5, true)", worker_id, queue)
    ids = [(await line(db, "k", queue=queue))[0] for queue in ("q", "r", "r", "q")]
    assert await take_ids(db, worker_id, queue="r") == []
    assert await take_ids(db, worker_id, queue="q") == [ids[0]]
    assert await v.statuses(db, ids) == ["running", "blocked", "blocked", "blocked"]
    notices = await Notices(other).listen()
    await ended(db, how, ids[0])
    await db.execute("SELECT pgworkd.apply_effects()")
    assert await v.statuses(db, ids[1:2]) == ["pending"]
    assert "r" in [notice.get("queue") for notice in await notices.heard()]
    for job_id, queue, another in ((ids[1], "r", "q"), (ids[2], "r", "q"), (ids[3], "q", "r")):
        assert await take_ids(db, worker_id, queue=another) == []
        assert await take_ids(db, worker_id, queue=queue) == [job_id]
        await v.complete(db, [job_id])


async def test_other_keys_and_queues_are_not_delayed_and_each_queue_has_its_own_limits(db: Db, scope: str) -> None:
    worker_id = await v.worker(db)
    await settings(db, "q", max_running=1)
    await settings(db, "r", max_running=3)
    (held,) = await line(db, "k", queue="q")
    (same,), (elsewhere,) = await line(db, "k", queue="r"), await line(db, "k", queue="other")
    others = await line(db, "a", "b", "c", "d", queue="r")
    assert await take_ids(db, worker_id, queue="q") == [held]
    assert await take_ids(db, worker_id, queue="r") == others[:3]
    assert await take_ids(db, worker_id, queue="other") == [elsewhere]
    await v.complete(db, others[:3])
    await v.complete(db, [held])
    assert sorted(await take_ids(db, worker_id, queue="r")) == sorted([same, others[3]])


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_claims_of_two_queues_never_take_one_key(db: Db, other: Db, third: Db, scope: str, end_with: str) -> None:
    one_worker, another = await v.worker(db), await v.worker(db)
    (first,), (second,) = await line(db, "k", queue="q"), await line(db, "k", queue="r")
    (free,) = await line(db, "free", queue="r")
    await db.execute("BEGIN")
    assert await take_ids(db, one_worker, queue="q") == [first]
    async with anyio.create_task_group() as tasks:
        claimed = Later(tasks, take_ids(other, another, queue="r"))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        assert await claimed.answer() == [free]
    if end_with == "ROLLBACK":
        assert await take_ids(db, one_worker, queue="q") == [first]
    await v.complete(db, [first])
    assert await take_ids(db, another, queue="r") == [second]


async def test_a_retry_holds_its_key_in_all_queues_and_what_was_left_is_repaired(db: Db, scope: str) -> None:
    worker_id = await v.worker(db, lease_s=3600)
    (first,), (second,), (third,) = [await line(db, "k", queue=queue) for queue in ("r", "q", "r")]
    assert await take_ids(db, worker_id, queue="r") == [first]
    await v.fail(db, [first], delay_s=60.0)
    assert await take_ids(db, worker_id, queue="q") == []
    await v.clock(60, db)
    assert await take_ids(db, worker_id, queue="q") == []
    assert await take_ids(db, worker_id, queue="r") == [first]
    await db.execute("DELETE FROM pgworkd.jobs WHERE id = $1", first)  # by hand: nobody is told
    assert await take_ids(db, worker_id, queue="q") == []
    assert await unblock(db) > 0
    assert await take_ids(db, worker_id, queue="q") == [second]
    await db.execute("UPDATE pgworkd.jobs SET expires_at = pgworkd.clock() WHERE id = $1", third)
    await expire(db)
    assert await v.statuses(db, [third]) == ["expired"]


@pytest.mark.parametrize("status", ["pending", "blocked", "running", "failed", "dead"])
async def test_a_scope_stays_while_the_queue_has_jobs_with_keys(dsn: str, db: Db, status: str) -> None:
    await scoped(db, "stage", "q")
    worker_id = await v.worker(db)
    first, second = await line(db, "k", "k", queue="q")
    if status != "pending":
        assert await take_ids(db, worker_id) == [first]
    if status in ("dead", "failed"):
        await v.cancel(db, second)
        await v.fail(db, [first], permanent=status == "dead", delay_s=60.0)
    if status == "blocked":
        await db.execute("DELETE FROM pgworkd.jobs WHERE id = $1", first)
    statements = (
        "UPDATE pgworkd.queues SET serialize_scope = 'other'",
        "DELETE FROM pgworkd.queues",
        "SELECT pgworkd.set_queue('q', '{\"serialize_scope\": null}')",
    )
    for statement in statements:
        with pytest.raises(asyncpg.CheckViolationError, match="queue q has jobs with a serialize_key"):
            await db.execute(statement)
    await db.execute("UPDATE pgworkd.queues SET concurrency = 3, serialize_scope = 'stage'")
    said = await run_sync(lambda: invoke(["queues", "set", "q", "--serialize-scope", "x"], env={"PGWORKD_DSN": dsn}))
    assert (said.exit_code, "serialize_scope must stay while" in said.stderr) == (2, True), said.stderr
    async with calling(dsn) as call:
        assert (await call.problem("PATCH", "/v1/queues/q", {"serialize_scope": "x"}))[:2] == (422, "invalid")
        narrow = also(call, await token(dsn, {"operate": ["q"]}))
        assert (await narrow.problem("PATCH", "/v1/queues/q", {"serialize_scope": "x"}))[:2] == (403, "forbidden")
    await db.execute("DELETE FROM pgworkd.jobs")
    for statement in statements[::-1]:
        await db.execute(statement)


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
@pytest.mark.parametrize("losses", [0, 2])
async def test_a_job_that_is_committed_after_its_queue_got_a_scope_joins_the_line_of_that(
    db: Db, other: Db, isolation: str, losses: int
) -> None:
    """Its own transaction has not seen the change."""
    worker_id, another = await v.worker(db), await v.worker(db)
    await other.execute(f"BEGIN ISOLATION LEVEL {isolation}")
    await other.execute("SELECT FROM pgworkd.queues")
    (late,) = await line(other, "k", queue="q")
    await scoped(db, "stage")
    (before,) = await line(db, "k", queue="r")
    await db.execute("UPDATE pgworkd.jobs SET run_at = $2 WHERE id = $1", before, v.at(-60))
    await other.execute("COMMIT")
    await db.execute("UPDATE pgworkd.jobs SET losses = $2 WHERE id = $1", late, losses)
    assert await take_ids(db, worker_id, queue="q") == []
    assert await take_ids(db, worker_id, queue="r") == [before]
    assert await take_ids(db, another, queue="q") == []
    row = await db.fetchrow("SELECT why, waits_for FROM pgworkd.claim_one($1, NULL, 'q', $2)", another, late)
    assert row in [("key", [before]), ("blocked", [before])]
    await v.complete(db, [before])
    assert await take_ids(db, another, queue="q") == [late]


async def test_a_scope_waits_for_the_claims_under_way(db: Db, other: Db, third: Db) -> None:
    worker_id = await v.worker(db)
    (job,) = await line(db, "k", queue="q")
    await db.execute("BEGIN")
    assert await take_ids(db, worker_id, queue="q") == [job]
    async with anyio.create_task_group() as tasks:
        changed = Later(tasks, scoped(other, "stage", "q"))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        with pytest.raises(asyncpg.CheckViolationError, match="queue q has jobs with a serialize_key"):
            await changed.answer()


async def test_a_queue_with_a_scope_is_not_renamed_while_it_has_jobs_with_keys(db: Db) -> None:
    await scoped(db, "stage", "q")
    await line(db, "k", queue="q")
    with pytest.raises(asyncpg.CheckViolationError, match="queue q has jobs with a serialize_key"):
        await db.execute("UPDATE pgworkd.queues SET name = 'p' WHERE name = 'q'")


async def test_a_scope_is_set_and_shown_by_each_door(dsn: str, db: Db) -> None:
    async def shown() -> Any:
        return await db.fetchval("SELECT serialize_scope FROM pgworkd.queues WHERE name = 'q'")

    args = ["queues", "set", "q", "--create", "--serialize-scope", "stage"]
    assert (await run_sync(lambda: invoke(args, env={"PGWORKD_DSN": dsn}))).exit_code == 0
    assert await shown() == "stage"
    async with calling(dsn) as call:
        found = await call.ok("PATCH", "/v1/queues/q", {"serialize_scope": "floor"})
        assert found["settings"]["serialize_scope"] == {"value": "floor", "from": "row"}
        assert await shown() == "floor"
        for wrong in ("", "x" * 201, 7):
            assert (await call.problem("PATCH", "/v1/queues/q", {"serialize_scope": wrong}))[:2] == (422, "invalid")
        await call.ok("PATCH", "/v1/queues/q", {"serialize_scope": None})
    assert await shown() is None


async def test_each_row_of_a_transaction_gets_the_scope_that_its_queue_has_then(db: Db) -> None:
    await scoped(db, "stage", "r")
    async with db.transaction():
        made = [await v.one(db, queue, serialize_key=f"{number}") for number, queue in enumerate("qrqr")]
        await db.execute("DELETE FROM pgworkd.jobs WHERE queue = 'q'")
        await scoped(db, "sound", "q")
        made += [await v.one(db, queue, serialize_key="k") for queue in "qr"]
        found = dict(await db.fetch("SELECT id, serialize_scope::text FROM pgworkd.jobs"))
    assert [found.get(job_id) for job_id in made] == [None, "stage", None, "stage", "sound", "stage"]
