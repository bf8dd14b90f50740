"""Occurrences that no worker was there to run, and schedules that are no longer in code."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


async def _missed(db: Db, job_id: Any, attempt: int = 1) -> Any:
    return await db.fetchval("SELECT pgworkd.missed_since($1, $2)", job_id, attempt)


async def _waiting(db: Db, **rule: Any) -> None:
    """A waiting occurrence at T0, added earlier."""
    await v.put_schedule(db, **rule)
    await v.clock(-60, db)
    assert await v.add_occurrences(db, ("s", v.T0, 1)) == ["s"]


@pytest.mark.parametrize(
    ("came_s", "since_s"), [(60.0, None), (61.0, 61.0), (3600.0, 3600.0)], ids=["within its grace", "late", "very late"]
)
async def test_an_occurrence_is_missed_if_all_workers_arrived_after_its_grace_period(
    db: Db, came_s: float, since_s: float | None
) -> None:
    await _waiting(db)
    await v.clock(came_s, db)
    (job_id,) = await v.claim_ids(db, await v.worker(db))
    assert await _missed(db, job_id) == (None if since_s is None else v.at(since_s))


@pytest.mark.parametrize(("grace_s", "is_missed"), [(0.0, True), (299.0, True), (300.0, False)])
async def test_the_grace_period_is_set_per_schedule(db: Db, grace_s: float, is_missed: bool) -> None:
    await _waiting(db)
    await v.clock(0, db)
    await db.execute("UPDATE pgworkd.schedules SET missed_grace_s = $1", grace_s)
    await v.clock(300, db)
    (job_id,) = await v.claim_ids(db, await v.worker(db))
    assert (await _missed(db, job_id) is not None) is is_missed


async def test_a_backlog_a_pause_or_a_limit_does_not_make_an_occurrence_missed(db: Db) -> None:
    """Some worker of the queue was there when it was due; that another arrived later changes nothing."""
    early = await v.worker(db)
    await v.set_pool(db, early)
    await _waiting(db)
    await v.clock(3600, db)
    await db.execute("UPDATE pgworkd.workers SET lease_until = $1, seen_at = $2", v.at(3630), v.at(3600))
    late = await v.worker(db)
    (job_id,) = await v.claim_ids(db, late)
    assert await _missed(db, job_id) is None
    # Once the early one is lost, only the late one counts.
    await db.execute("UPDATE pgworkd.workers SET lost_at = $2 WHERE id = $1", early, v.at(3600))
    assert await _missed(db, job_id) == v.at(3600)


async def test_workers_of_other_queues_do_not_count(db: Db) -> None:
    await v.set_pool(db, await v.worker(db), "other")
    await _waiting(db)
    await v.clock(3600, db)
    await db.execute("UPDATE pgworkd.workers SET lease_until = $1", v.at(3630))
    (job_id,) = await v.claim_ids(db, await v.worker(db))
    assert await _missed(db, job_id) == v.at(3600)


async def test_an_occurrence_that_was_claimed_before_is_not_missed(db: Db) -> None:
    await _waiting(db)
    await v.clock(3600, db)
    worker_id = await v.worker(db)
    (job_id,) = await v.claim_ids(db, worker_id)
    assert await _missed(db, job_id) is not None
    await v.release(db, [job_id])
    assert await v.claim_ids(db, worker_id) == [job_id]
    assert await _missed(db, job_id, 2) is None


@pytest.mark.parametrize("missed", ["once", "all"])
async def test_an_occurrence_to_be_made_up_for_is_not_skipped(db: Db, missed: str) -> None:
    await _waiting(db, missed=missed)
    await v.clock(3600, db)
    (job_id,) = await v.claim_ids(db, await v.worker(db))
    assert await _missed(db, job_id) is None


# A failing occurrence


async def test_a_failing_occurrence_does_not_delay_the_next(db: Db) -> None:
    await v.put_schedule(db)
    worker_id = await v.worker(db)
    job_id = await v.due_occurrence(db, worker_id)
    assert await v.fail(db, [job_id], following=("s", v.at(60), 1)) == {job_id: "failed"}
    assert await v.occurrences(db) == [(v.T0, "failed"), (v.at(60), "pending")]
    # Whatever becomes of its retries, the chain has exactly one next occurrence.
    await db.execute("UPDATE pgworkd.jobs SET run_at = $1 WHERE status = 'failed'", v.T0)
    assert await v.claim_ids(db, worker_id) == [job_id]
    settle = "SELECT pgworkd.settle_completed($1, '{2}', '{null}', '{s}', $2, '{1}')"
    assert await db.fetchval(settle, [job_id], [v.at(120)]) == [job_id]
    assert await v.occurrences(db) == [(v.at(60), "pending")]


async def test_with_waits_for_retries_the_next_occurrence_waits_for_the_failing_one(db: Db) -> None:
    await v.put_schedule(db)
    worker_id = await v.worker(db)
    job_id = await v.due_occurrence(db, worker_id)
    await db.execute("UPDATE pgworkd.schedules SET waits_for_retries = true")
    assert await v.fail(db, [job_id], delay_s=0, following=("s", v.at(60), 2)) == {job_id: "failed"}
    assert await v.add_occurrences(db, ("s", v.at(60), 2)) == []
    assert not await db.fetchval("SELECT broken FROM pgworkd.ensure_schedules()")
    assert await v.claim_ids(db, worker_id) == [job_id]
    assert await v.fail(db, [job_id], 2, permanent=True, following=("s", v.at(60), 2)) == {job_id: "dead"}
    assert await v.occurrences(db) == [(v.T0, "dead"), (v.at(60), "pending")]


# Schedules removed from code


async def _declare(db: Db, worker_id: int, *names: str) -> dict[str, bool]:
    rows = await db.fetch("SELECT * FROM pgworkd.declare_schedules($1, $2)", worker_id, list(names))
    return {row["name"]: row["retired"] for row in rows}


async def _retire(db: Db, *names: str) -> list[str]:
    return list(await db.fetchval("SELECT pgworkd.retire_schedules($1)", list(names)))


async def test_a_schedule_removed_from_code_is_disabled_and_enabled_when_it_returns(db: Db) -> None:
    for name in ("gone", "kept"):
        await v.put_schedule(db, name)
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('by hand', 'q', 5)")
    old, new = await v.worker(db), await v.worker(db)
    assert await _declare(db, old, "gone", "kept") == {}
    assert await _retire(db, "gone") == [], "one worker has not said what it has"
    assert await _declare(db, new, "kept") == {}
    assert await _retire(db, "gone") == [], "the old one has it"
    assert await v.sign_off(db, old) is True
    assert await _declare(db, new, "kept") == {"gone": False}
    assert await _retire(db, "gone", "kept", "by hand") == ["gone"]
    (note,) = await db.fetch("SELECT what, queue, before::jsonb, after::jsonb FROM pgworkd.audit")
    assert (note["what"], note["queue"]) == ("schedule", "q")
    assert '"enabled": true' in note["before"]
    assert '"enabled": false' in note["after"]
    assert '"schedule": "gone"' in note["after"]
    back = await v.worker(db)
    assert await _declare(db, back, "gone", "kept") == {"gone": True}
    await v.put_schedule(db, "gone")
    assert (await v.schedule(db, "gone"))["enabled"]
    assert await _declare(db, back, "gone", "kept") == {}


async def test_a_schedule_disabled_by_an_operator_stays_disabled(db: Db) -> None:
    await v.put_schedule(db)
    await db.execute("SELECT pgworkd.enable_schedule('s', false)")
    worker_id = await v.worker(db)
    assert await _declare(db, worker_id, "s") == {}
    assert await _declare(db, worker_id) == {}
    await v.put_schedule(db, every_s=61)
    assert not (await v.schedule(db))["enabled"]


async def test_an_operator_enables_disables_and_removes(db: Db) -> None:
    await v.put_schedule(db)
    assert await db.fetchval("SELECT pgworkd.enable_schedule('s', true)") is False
    assert await db.fetchval("SELECT pgworkd.enable_schedule('s', false)") is True
    assert await db.fetchval("SELECT pgworkd.enable_schedule('s', true)") is True
    worker_id = await v.worker(db)
    await _declare(db, worker_id, "s")
    with pytest.raises(asyncpg.PostgresError, match="is declared in the code of worker"):
        await db.execute("SELECT pgworkd.remove_schedule('s')")
    await _declare(db, worker_id)
    await db.execute("SELECT pgworkd.remove_schedule('s')")
    for verb in ("remove_schedule('s')", "enable_schedule('s', true)", "run_schedule('s')"):
        with pytest.raises(asyncpg.PostgresError, match='schedule "s" does not exist'):
            await db.execute(f"SELECT pgworkd.{verb}")
    assert await db.fetchval("SELECT array_agg(what ORDER BY id) FROM pgworkd.audit") == ["schedule"] * 3


async def test_run_now_inserts_a_job_besides_the_occurrences(db: Db) -> None:
    await v.put_schedule(db, payload='{"n": 1}', kind="k")
    await v.add_occurrences(db, ("s", v.at(60), 1))
    job_id = await db.fetchval("SELECT pgworkd.run_schedule('s', 'ann')")
    job = await db.fetchrow("SELECT * FROM pgworkd.jobs WHERE id = $1", job_id)
    assert job is not None
    assert (job["queue"], job["kind"], job["payload"], job["schedule"], job["run_at"]) == (
        "q",
        "k",
        '{"n": 1}',
        None,
        v.T0,
    )
    assert await v.occurrences(db) == [(v.at(60), "pending")]
    assert await db.fetchval("SELECT (who, job_id) = ('ann', $1) FROM pgworkd.audit", job_id)
