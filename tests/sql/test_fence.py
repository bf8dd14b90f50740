"""The fence is (id, attempt, worker): a worker that lost its registration, or its commits, changes nothing."""

from __future__ import annotations

import json
import uuid
from typing import Any

import asyncpg
import pytest

from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from tests.kits.verbs import LEASE_GONE, Db, claim, claim_ids, clock, one, over, statuses, token, worker

pytestmark = pytest.mark.usefixtures("t0")

SETTLES = {
    "completed": "SELECT cardinality(pgworkd.settle_completed($1, $2, '{NULL}', p_worker => $4, p_token => $3))",
    "failed": "SELECT count(*) FROM pgworkd.settle_failed($1, $2, '{0}', '{t}', '{m}', ARRAY['{}'], "
    "p_worker => $4, p_token => $3)",
    "released": "SELECT cardinality(pgworkd.settle_released($1, $2, '{NULL}', '{NULL}', $4, $3))",
    "ended": "SELECT cardinality(pgworkd.settle_ended($1, $2, '{cancelled}', '{NULL}', $4, $3))",
}


async def settle(
    db: Db, how: str, job_id: uuid.UUID, worker_id: int, its_token: uuid.UUID | None = None, attempt: int = 1
) -> int:
    """Settles it as that worker (None: with the token that it has); the number of jobs settled."""
    its_token = its_token or await token(db, worker_id)
    return int(await db.fetchval(SETTLES[how], [job_id], [attempt], its_token, worker_id))


@pytest.mark.parametrize("how", SETTLES)
async def test_a_settle_is_valid_only_under_the_registration_that_claimed(db: Db, how: str) -> None:
    mine, others = await worker(db), await worker(db)
    job_id = await one(db)
    await claim(db, mine)
    for worker_id, its_token in ((others, None), (mine, await token(db, others)), (mine, uuid.uuid4())):
        assert await settle(db, how, job_id, worker_id, its_token) == 0
    assert await statuses(db, [job_id]) == ["running"]
    assert await settle(db, how, job_id, mine, attempt=2) == 0
    assert await settle(db, how, job_id, mine) == 1


@pytest.mark.parametrize("how", SETTLES)
async def test_a_settle_does_not_wait_for_a_lock_on_the_worker_row(db: Db, other: Db, how: str) -> None:
    mine = await worker(db)
    job_id = await one(db)
    await claim(db, mine)
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.workers FOR UPDATE")
    await db.execute("SET statement_timeout = '2s'")
    assert await settle(db, how, job_id, mine) == 1
    await other.execute("COMMIT")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT cardinality(pgworkd.report_progress($1, '{1}', '{0.5}', '{m}', $2, $3)) = 1",
        "SELECT bool_and(payload IS NOT NULL) FROM pgworkd.payloads($1, '{1}', 1000, $2, $3)",
    ],
    ids=["progress", "payloads"],
)
async def test_a_running_job_is_checked_only_under_the_registration_that_claimed(db: Db, sql: str) -> None:
    mine, others = await worker(db), await worker(db)
    job_id = await one(db)
    await claim(db, mine)
    for worker_id, its_token in ((others, await token(db, others)), (mine, await token(db, others))):
        assert await db.fetchval(sql, [job_id], worker_id, its_token) is False
    for worker_id, known in ((mine, await token(db, mine)), (None, None)):
        assert await db.fetchval(sql, [job_id], worker_id, known) is True


async def test_a_pool_is_announced_and_dropped_only_under_the_registration(db: Db) -> None:
    mine = await worker(db)
    sets = "SELECT pgworkd.set_pool($1, 'q', $3, true, p_token => $2)"
    pools = "SELECT coalesce(array_agg(concurrency), '{}') FROM pgworkd.pools"
    stranger, its = uuid.uuid4(), await token(db, mine)
    await db.execute(sets, mine, stranger, 1)
    assert await db.fetchval(pools) == []
    await db.execute(sets, mine, its, 2)
    await db.execute(sets, mine, stranger, 3)
    await db.execute("SELECT pgworkd.drop_pool($1, 'q', $2)", mine, stranger)
    assert await db.fetchval(pools) == [2]
    await db.execute("SELECT pgworkd.drop_pool($1, 'q', $2)", mine, its)
    assert await db.fetchval(pools) == []


@pytest.mark.parametrize(
    ("status", "change", "name"),
    [
        (status, change, name)
        for status in ("pending", "blocked", "running", "failed", "dead")
        for change, name in (
            ("status = 'pending', attempts = 0", "attempts_never_fall_to_run_a_job_again_call_retry"),
            ("attempts = 0, failures = 0", "attempts_never_fall_to_run_a_job_again_call_retry"),
            ("status = 'cancelled'", "a_job_is_ended_by_cancel_status_must_be_of_a_live_one"),
            ("status = 'expired', worker_id = NULL", "a_job_is_ended_by_cancel_status_must_be_of_a_live_one"),
        )
        if status == "dead" or "pending" not in change
    ],
)
async def test_a_plain_update_that_would_break_the_fence_or_end_a_job_is_told_what_to_call(
    db: Db, status: str, change: str, name: str
) -> None:
    """Statements that articles show: two runs of one number would be one and the same to the fence, and to `deaths`."""
    worker_id, job_id = await worker(db), await one(db, serialize_key="k" if status == "blocked" else None)
    await claim(db, worker_id)
    if status != "running":
        states = "status = $2::text::pgworkd.job_status, worker_id = NULL, failures = 1, failed_at = now()"
        await db.execute(f"UPDATE pgworkd.jobs SET {states} WHERE id = $1", job_id, status)  # noqa: S608 - from above
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await db.execute(f"UPDATE pgworkd.jobs SET {change} WHERE id = $1", job_id)  # noqa: S608 - from above
    assert caught.value.constraint_name == name
    before = await db.fetchval("SELECT attempts FROM pgworkd.jobs")
    assert before == 1


async def test_after_a_failover_that_lost_a_claim_only_the_current_attempt_settles(db: Db) -> None:
    stale, good = await worker(db), await worker(db)
    job_id = await one(db)
    await claim(db, stale)
    # The promoted standby had not received that claim.
    await db.execute("UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL, started_at = NULL, attempts = 0")
    assert [row["attempt"] for row in await claim(db, good)] == [1]
    assert await settle(db, "failed", job_id, stale) == 0
    assert await settle(db, "completed", job_id, good) == 1
    assert (await over(db, job_id))["worker_id"] == good


async def test_two_daemons_with_one_id_do_not_touch_each_others_jobs(db: Db) -> None:
    """A dump was restored beside live daemons: a new one has got the id of another that is still live."""
    worker_id = await worker(db)
    old = await token(db, worker_id)
    await db.execute("DELETE FROM pgworkd.workers")
    await db.execute("SELECT setval('pgworkd.workers_id_seq', $1, false)", worker_id)
    assert await worker(db) == worker_id
    new = await token(db, worker_id)
    job_id = await one(db)
    claimed = "SELECT id FROM pgworkd.claim($1, 'q', 1, p_token => $2)"
    with pytest.raises(asyncpg.PostgresError) as refused:
        await db.fetch(claimed, worker_id, old)
    assert refused.value.sqlstate == LEASE_GONE
    assert await db.fetchval(claimed, worker_id, new) == job_id
    await clock(5, db)
    running = "SELECT id FROM pgworkd.running_of($1, $2, 1)"
    assert await db.fetch(running, worker_id, old) == []
    assert await db.fetchval(running, worker_id, new) == job_id
    before = await db.fetch("SELECT * FROM pgworkd.workers")
    assert await db.fetchval("SELECT pgworkd.heartbeat($1, $2, 'stopping')", worker_id, old) is False
    assert await db.fetchval("SELECT pgworkd.sign_off($1, $2)", worker_id, old) is True, "nothing of ours is left"
    assert await db.fetch("SELECT * FROM pgworkd.workers") == before
    for how in SETTLES:
        assert await settle(db, how, job_id, worker_id, old) == 0
    assert await db.fetchval("SELECT pgworkd.heartbeat($1, $2, 'running')", worker_id, new) is True


async def test_a_sequence_that_lags_behind_never_yields_an_id_twice(db: Db) -> None:
    """Logical replication carries rows, not sequences."""
    first, second = await worker(db), await worker(db)
    await db.execute("SELECT setval('pgworkd.workers_id_seq', $1, false)", first)
    assert await worker(db) == second + 1


async def test_migrate_advances_sequences_past_the_existing_ids(dsn: str, db: Db) -> None:
    ids = [await worker(db) for _ in range(3)]
    for number in range(3):
        await db.execute("SELECT pgworkd.set_queue('q', $1)", json.dumps({"concurrency": number + 1}))
    for _ in range(2):
        await db.execute("SELECT pgworkd.put_off(NULL, ARRAY[pgworkd.new_id()], true)")
    for sequence in ("workers_id_seq", "audit_id_seq", "pending_effects_id_seq"):
        await db.execute(f"SELECT setval('pgworkd.{sequence}', 1, false)")
    with pytest.raises(asyncpg.UniqueViolationError):
        await db.execute("SELECT pgworkd.set_queue('q', '{\"concurrency\": 9}')")
    await schema.migrate(ConnectionOptions(dsn))
    last: list[Any] = [await db.fetchval(f"SELECT last_value FROM pgworkd.{s}_id_seq") for s in ("workers", "audit")]  # noqa: S608
    assert last == [ids[-1], await db.fetchval("SELECT max(id) FROM pgworkd.audit")]
    await db.execute("SELECT pgworkd.set_queue('q', '{\"concurrency\": 9}')")
    await db.execute("SELECT pgworkd.put_off(NULL, ARRAY[pgworkd.new_id()], true)")
    assert await claim_ids(db, await worker(db)) == []
