"""The table `queues`: its bounds, notifications of a change, and what a heartbeat returns to a worker."""

from __future__ import annotations

import json
from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits.sessions import Later, Notices, waits_for_lock
from tests.kits.verbs import Db, at, clock, heartbeat, worker

NOTICE = {"queues": True}


async def set_queue(db: Db, queue: str = "q", **changes: Any) -> None:
    """Changes settings as operators do."""
    await db.execute("SELECT pgworkd.set_queue($1, $2)", queue, json.dumps(changes))


async def row(db: Db, queue: str = "q") -> dict[str, Any]:
    """The settings in the row."""
    found = await db.fetchval("SELECT to_jsonb(q) FROM pgworkd.queues q WHERE name = $1", queue)
    shown = {} if found is None else json.loads(found)
    return {
        k: v
        for k, v in shown.items()
        if v is not None and v is not False and k not in ("name", "updated_at", "limited")
    }


async def set_pool(db: Db, worker_id: int, code: int | None, queue: str = "q") -> None:
    """Announces a pool with this concurrency as its default from code."""
    await db.execute("SELECT pgworkd.set_pool($1, $2, 1, true, $3, 'code')", worker_id, queue, code)


# Bounds


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("concurrency = 0", "concurrency_must_be_1_to_10000"),
        ("concurrency = -1", "concurrency_must_be_1_to_10000"),
        ("concurrency = 10001", "concurrency_must_be_1_to_10000"),
        ("concurrency = 1000000000", "concurrency_must_be_1_to_10000"),
        ("max_running = 0", "limit_must_be_1_to_a_million"),
        ("max_running = 1000000000", "limit_must_be_1_to_a_million"),
        ("limit_per_key = -1", "limit_must_be_1_to_a_million"),
        ("rate = 0, rate_period_s = 1", "limit_must_be_1_to_a_million"),
        ("rate = 10", "rate_needs_a_period"),
        ("rate_period_s = 10", "rate_needs_a_period"),
        ("rate = 10, rate_period_s = 0", "period_must_be_above_0_and_at_most_366_days"),
        ("rate = 10, rate_period_s = 'NaN'", "period_must_be_above_0_and_at_most_366_days"),
        ("rate = 10, rate_period_s = 'infinity'", "period_must_be_above_0_and_at_most_366_days"),
        ("rate_burst = 5", "rate_burst_needs_a_rate"),
        ("rate_per_key = 5", "rate_per_key_needs_a_period"),
        ("rate_per_key_burst = 5", "rate_per_key_burst_needs_a_rate"),
        ("keep_s = -1", "keep_must_not_be_negative"),
        ("backoff_s = -1", "backoff_must_be_0_to_366_days"),
        ("backoff_s = 'NaN'", "backoff_must_be_0_to_366_days"),
        ("backoff_s = 1e9", "backoff_must_be_0_to_366_days"),
        ("backoff_factor = 0.5", "backoff_factor_must_be_1_to_1000"),
        ("backoff_factor = 'NaN'", "backoff_factor_must_be_1_to_1000"),
        ("backoff_cap_s = 1e9", "backoff_cap_must_be_0_to_366_days"),
    ],
)
async def test_a_plain_update_out_of_bounds_is_refused(db: Db, change: str, constraint: str) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name) VALUES ('q')")
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await db.execute(f"UPDATE pgworkd.queues SET {change}")  # noqa: S608 - ours
    assert refused.value.constraint_name == constraint
    assert await row(db) == {}


# Notifications


async def test_every_change_of_the_table_is_notified_once_per_transaction(db: Db, notices: Notices) -> None:
    for sql in (
        "INSERT INTO pgworkd.queues (name, concurrency) VALUES ('q', 1), ('r', 2)",
        "UPDATE pgworkd.queues SET concurrency = 3",
        "DELETE FROM pgworkd.queues WHERE name = 'q'",
        "TRUNCATE pgworkd.queues",
    ):
        await db.execute(sql)
        assert await notices.heard() == [NOTICE], sql
    async with db.transaction():
        for concurrency in range(1, 5):
            await set_queue(db, concurrency=concurrency)
    assert await notices.heard() == [NOTICE]


async def test_a_rolled_back_change_is_not_notified(db: Db, notices: Notices) -> None:
    transaction = db.transaction()
    await transaction.start()
    await set_queue(db, concurrency=3)
    await transaction.rollback()
    assert await notices.heard() == []


@pytest.mark.usefixtures("t0")
async def test_a_plain_update_sets_updated_at(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name) VALUES ('q'), ('r')")
    await clock(5, db)
    await db.execute("UPDATE pgworkd.queues SET concurrency = 3 WHERE name = 'q'")
    assert await db.fetch("SELECT updated_at FROM pgworkd.queues ORDER BY name") == [(at(5),), (at(0),)]


# Changing some of the settings


async def test_a_change_leaves_the_other_settings_as_they_are(db: Db) -> None:
    await set_queue(db, concurrency=4, rate=10, rate_period_s=0.5)
    await set_queue(db, max_running=7, fair=True)
    assert await row(db) == {"concurrency": 4, "rate": 10, "rate_period_s": 0.5, "max_running": 7, "fair": True}
    await set_queue(db, rate=None, rate_period_s=None, fair=None)
    assert await row(db) == {"concurrency": 4, "max_running": 7}


async def test_a_row_without_settings_is_deleted(db: Db, notices: Notices) -> None:
    await set_queue(db, concurrency=4)
    await set_queue(db, concurrency=None)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.queues") == 0
    assert len(await notices.heard()) == 2
    await set_queue(db, fair=False, max_running=None)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.queues") == 0


async def test_name_date_and_computed_columns_cannot_be_changed(db: Db) -> None:
    await set_queue(db, concurrency=4, name="other", limited=True, updated_at="infinity")
    (found,) = await db.fetch("SELECT name, limited, isfinite(updated_at) FROM pgworkd.queues")
    assert tuple(found) == ("q", False, True)


async def test_a_refused_change_changes_nothing(db: Db) -> None:
    await set_queue(db, concurrency=4)
    with pytest.raises(asyncpg.CheckViolationError):
        await set_queue(db, concurrency=5, max_running=0)
    with pytest.raises(asyncpg.CheckViolationError):
        await set_queue(db, concurrency=5, rate_burst=3)
    assert await row(db) == {"concurrency": 4}


@pytest.mark.parametrize("first", [{"max_running": 5}, {"concurrency": None}])
@pytest.mark.parametrize("there", [True, False])
async def test_concurrent_changes_are_both_kept(
    db: Db, other: Db, third: Db, first: dict[str, Any], there: bool
) -> None:
    """The second waits for the first, whether that inserts, updates or deletes the row."""
    if there:
        await set_queue(db, concurrency=4)
    async with anyio.create_task_group() as tasks:
        transaction = db.transaction()
        await transaction.start()
        await set_queue(db, **first)
        if not there and first == {"concurrency": None}:
            await db.execute("INSERT INTO pgworkd.queues (name, concurrency) VALUES ('q', 1)")
        second = Later(tasks, set_queue(other, keep_s=60))
        await waits_for_lock(third, other)
        await transaction.commit()
        await second.answer()
    concurrency = {"concurrency": 4} if there and "concurrency" not in first else {}
    if not there and "concurrency" in first:
        concurrency = {"concurrency": 1}
    wanted = concurrency | {k: v for k, v in first.items() if v is not None} | {"keep_s": 60}
    assert await row(db) == wanted


# What a heartbeat returns


@pytest.mark.usefixtures("t0")
async def test_a_heartbeat_returns_every_setting_and_the_end_of_the_pause(db: Db) -> None:
    worker_id = await worker(db)
    settings = {"concurrency": 3, "max_running": 9, "rate": 5, "rate_period_s": 0.1, "rate_burst": 2, "fair": True}
    settings |= {"backoff_s": 0.5, "backoff_factor": 2, "backoff_cap_s": 60, "keep_s": 0}
    await set_queue(db, **settings, paused_until=at(90).isoformat())

    async def told() -> Any:
        answer = await heartbeat(db, worker_id)
        assert answer is not None
        return json.loads(answer["settings"])["q"]

    paused = {"paused": True, "paused_until": at(90).isoformat()}
    assert await told() == settings | paused | {"pause_s": 90, "limited": True}
    await clock(89.5, db)
    assert (await told())["pause_s"] == 0.5
    await clock(90, db)
    assert await told() == settings | {"paused": False, "limited": True}


async def test_a_heartbeat_reports_workers_with_different_defaults_from_code(db: Db) -> None:
    mine, same, others, lost = [await worker(db, name=name) for name in ("mine", "same", "other", "lost")]
    unknown = await worker(db, name="unknown")
    for worker_id, code in ((mine, 4), (same, 4), (others, 7), (lost, 9), (unknown, None)):
        await set_pool(db, worker_id, code)
    await set_pool(db, others, 8, "elsewhere")
    await db.execute("UPDATE pgworkd.workers SET lost_at = now() WHERE id = $1", lost)

    async def told(worker_id: int) -> Any:
        answer = await heartbeat(db, worker_id)
        assert answer is not None
        return json.loads(answer["differing"])

    assert await told(mine) == {"q": [["other", 7]]}
    assert await told(others) == {"q": [["mine", 4], ["same", 4]]}
    await set_pool(db, mine, 7)
    assert await told(mine) == {"q": [["same", 4]]}
    await db.execute("SELECT pgworkd.drop_pool($1, 'q')", same)
    assert await told(mine) == {}


async def test_dropping_a_pool_affects_only_that_worker(db: Db) -> None:
    one, two = await worker(db), await worker(db)
    for worker_id in (one, two):
        for queue in ("q", "r"):
            await set_pool(db, worker_id, 1, queue)
    await db.execute("SELECT pgworkd.drop_pool($1, 'q')", one)
    found = await db.fetch("SELECT worker_id, queue::text FROM pgworkd.pools ORDER BY 1, 2")
    assert [tuple(pool) for pool in found] == [(one, "r"), (two, "q"), (two, "r")]
