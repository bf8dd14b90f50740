"""settle_failed and settle_released: the job waits again, or is dead, and stores the error."""

from __future__ import annotations

import json

import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Notices
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


# Failed


async def test_failed_waits_for_its_retry_and_stores_the_error(db: Db) -> None:
    (job_id,) = await v.insert_running(db)
    await v.clock(5, db)
    assert await v.fail(db, [job_id], delay_s=30, message="downstream said no") == {job_id: "failed"}
    row = await v.live(db, job_id)
    assert (row["status"], row["failures"], row["losses"], row["worker_id"]) == ("failed", 1, 0, None)
    assert (row["run_at"], row["failed_at"], row["error"]) == (v.at(35), v.at(5), "downstream said no")
    (entry,) = json.loads(row["errors"])
    when = entry.pop("at")
    assert await db.fetchval("SELECT $1::text::timestamptz", when) == v.at(5)
    assert entry == {"attempt": 1, "type": "E", "message": "downstream said no", "traceback": "...", "worker": "w"}


async def test_a_row_with_extreme_counters_does_not_affect_its_batch(db: Db) -> None:
    absurd = await v.one(db, failures=2**31 - 1, attempts=2**31 - 2, max_attempts=1000, errors='[7, null, "x"]')
    plain = await v.one(db)
    assert await v.claim_ids(db, await v.worker(db)) == [absurd, plain]
    assert await v.fail(db, [absurd, plain], [2**31 - 1, 1]) == {absurd: "dead", plain: "failed"}
    assert len(json.loads((await v.live(db, absurd))["errors"])) == 4


async def test_each_job_of_a_batch_has_its_own_delay_and_outcome(db: Db) -> None:
    ids = await v.insert_running(db, 4)
    answer = await v.fail(db, ids, delay_s=[0, 0.5, 1800, 0], permanent=[False, False, False, True])
    assert answer == {**dict.fromkeys(ids[:3], "failed"), ids[3]: "dead"}
    assert [(await v.live(db, i))["run_at"] for i in ids] == [v.T0, v.at(0.5), v.at(1800), v.T0]


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
async def test_a_job_is_dead_after_max_attempts_failures(db: Db, max_attempts: int) -> None:
    job_id = await v.one(db, max_attempts=max_attempts)
    worker_id = await v.worker(db)
    outcomes = []
    for attempt in range(1, max_attempts + 1):
        assert await v.claim_ids(db, worker_id) == [job_id]
        outcomes += (await v.fail(db, [job_id], attempt, delay_s=0)).values()
    assert outcomes == ["failed"] * (max_attempts - 1) + ["dead"]
    row = await v.live(db, job_id)
    assert (row["failures"], row["failed_at"], row["worker_id"]) == (max_attempts, v.T0, None)
    assert await v.claim(db, worker_id) == []


async def test_a_permanent_failure_is_dead_at_once(db: Db) -> None:
    (job_id,) = await v.insert_running(db, max_attempts=1000)
    assert await v.fail(db, [job_id], permanent=True) == {job_id: "dead"}
    assert (await v.live(db, job_id))["failures"] == 1


async def test_a_dead_job_keeps_its_due_time_and_frees_its_dedupe_key(db: Db) -> None:
    (job_id,) = await v.insert_running(db, dedupe_key="k", run_at=v.at(-7))
    await v.fail(db, [job_id], permanent=True)
    assert (await v.live(db, job_id))["run_at"] == v.at(-7)
    await v.one(db, dedupe_key="k")


async def test_a_failed_job_whose_cancellation_was_requested_is_not_retried(db: Db) -> None:
    retried, dead, plain = await v.insert_running(db, 3)
    await v.cancel(db, retried, dead)
    answer = await v.fail(db, [retried, dead, plain], permanent=[False, True, False])
    assert answer == {retried: "cancelled", dead: "dead", plain: "failed"}
    row = await v.over(db, retried)
    assert (row["status"], row["error"], row["failures"]) == ("cancelled", "it broke", 1)
    assert len(json.loads(row["errors"])) == 1


async def test_the_newest_20_errors_are_kept(db: Db) -> None:
    job_id = await v.one(db, max_attempts=1000)
    worker_id = await v.worker(db)
    for attempt in range(1, 25):
        await v.claim(db, worker_id)
        await v.fail(db, [job_id], attempt, delay_s=0, message=f"e{attempt}")
        errors = json.loads((await v.live(db, job_id))["errors"])
        assert len(errors) == min(attempt, 20)
    assert [entry["attempt"] for entry in errors] == list(range(5, 25))
    assert (errors[-1]["message"], (await v.live(db, job_id))["error"]) == ("e24", "e24")


# Released


async def test_a_released_job_keeps_its_place_counts_no_failure_and_notifies_pools(db: Db, notices: Notices) -> None:
    first, second = await v.one(db, run_at=v.at(-9)), await v.one(db, run_at=v.at(-8))
    worker_id = await v.worker(db)
    assert await v.claim_ids(db, worker_id, 1) == [first]
    await v.set_pool(db, await v.worker(db))
    await v.clock(5, db)
    assert await v.release(db, [first]) == {first}
    row = await v.live(db, first)
    assert (row["status"], row["run_at"], row["failures"], row["attempts"]) == ("pending", v.at(-9), 0, 1)
    assert (row["error"], row["errors"], row["worker_id"]) == (None, "[]", None)
    assert await notices.heard() == [{"queue": "q", "run_at": v.at(-9).timestamp()}]
    assert await v.claim_ids(db, worker_id) == [first, second]


async def test_one_release_notifies_each_queue_once_including_polling_pools(db: Db, notices: Notices) -> None:
    worker_id, ids = await v.worker(db), []
    for queue in ("q", "r", "awake"):
        await v.insert(db, 5, queue)
        ids += await v.claim_ids(db, worker_id, queue=queue)
        await v.set_pool(db, worker_id, queue, idle=queue != "awake")
    await notices.heard()
    assert await v.release(db, ids) == set(ids)
    assert sorted(notice["queue"] for notice in await notices.heard()) == ["awake", "q", "r"]


async def test_a_stale_release_notifies_nobody(db: Db, notices: Notices) -> None:
    (job_id,) = await v.insert_running(db)
    await v.set_pool(db, await v.worker(db))
    assert await v.release(db, [job_id], 2) == set()
    assert await notices.heard() == []


async def test_a_snoozed_job_waits_for_its_delay_and_notifies_nobody(db: Db, notices: Notices) -> None:
    (job_id,) = await v.insert_running(db)
    await v.set_pool(db, await v.worker(db))
    await v.release(db, [job_id], delay_s=90.5, message="no handler for kind 'q'")
    row = await v.live(db, job_id)
    assert (row["status"], row["run_at"], row["failures"]) == ("pending", v.at(90.5), 0)
    assert (row["error"], row["errors"]) == ("no handler for kind 'q'", "[]")
    assert await notices.heard() == []


async def test_a_release_without_a_message_keeps_the_last_error(db: Db) -> None:
    (job_id,) = await v.insert_running(db)
    await v.fail(db, [job_id], delay_s=0, message="first")
    await v.claim(db, await v.worker(db))
    await v.release(db, [job_id], 2)
    row = await v.live(db, job_id)
    assert (row["error"], row["status"], row["failures"]) == ("first", "pending", 1)


async def test_a_released_job_whose_cancellation_was_requested_is_cancelled(db: Db) -> None:
    first, second, plain = await v.insert_running(db, 3)
    await v.cancel(db, first, second)
    assert await v.release(db, [first, plain]) == {first, plain}
    assert await v.release(db, [second], delay_s=60) == {second}
    assert await v.statuses(db, [first, second, plain]) == ["cancelled", "cancelled", "pending"]
