"""settle_completed, settle_failed, settle_released, settle_ended: every attempt ends once, in its own name."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import asyncpg
import pytest

from .verbs import (
    NO_STATISTICS,
    T0,
    Db,
    Later,
    Notices,
    at,
    blocks,
    cancel,
    claim,
    claim_ids,
    clock,
    complete,
    end,
    fail,
    insert,
    is_locked,
    live,
    one,
    over,
    release,
    rows_read,
    set_pool,
    statuses,
    waits_for_lock,
    worker,
)

pytestmark = pytest.mark.usefixtures("t0")

MIB = 1024 * 1024
Settle = Callable[..., Awaitable[Any]]
VERBS = pytest.mark.parametrize("settle", [complete, fail, release, end])


async def _running(db: Db, count: int = 1, **columns: Any) -> list[uuid.UUID]:
    ids = await insert(db, count, **columns)
    assert await claim_ids(db, await worker(db), count) == ids
    return ids


async def _everything(db: Db) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await db.fetch("SELECT * FROM pgworkd.all_jobs ORDER BY id")]


# The fence, the same for all four


@VERBS
@pytest.mark.parametrize("attempt", [0, 1, 3, -1, 2**31 - 1])
async def test_another_attempt_than_the_running_one_changes_nothing(db: Db, settle: Settle, attempt: int) -> None:
    (job_id,) = await _running(db)
    await release(db, [job_id])
    await claim(db, await worker(db))
    assert (await live(db, job_id))["attempts"] == 2
    before = await _everything(db)
    assert not await settle(db, [job_id], attempt)
    assert await _everything(db) == before
    assert list(await settle(db, [job_id], 2)) == [job_id]


@VERBS
@pytest.mark.parametrize("late", [complete, fail, release, end])
async def test_the_second_settle_of_an_attempt_is_told_that_it_is_late(db: Db, settle: Settle, late: Settle) -> None:
    (job_id,) = await _running(db)
    assert list(await settle(db, [job_id])) == [job_id]
    before = await _everything(db)
    assert not await late(db, [job_id])
    assert await _everything(db) == before


@VERBS
async def test_a_job_that_does_not_run_is_not_settled(db: Db, settle: Settle) -> None:
    waiting, dead = await one(db), await one(db, status="dead")
    unknown = uuid.uuid4()
    assert not await settle(db, [waiting, dead, unknown], 0)
    assert await statuses(db, [waiting, dead]) == ["pending", "dead"]


@VERBS
async def test_good_and_stale_settles_share_a_batch(db: Db, settle: Settle) -> None:
    ids = await _running(db, 6)
    await release(db, ids[2:4])
    await claim(db, await worker(db))  # two of them run again, under attempt 2
    await db.execute("DELETE FROM pgworkd.jobs WHERE id = $1", ids[5])
    assert set(await settle(db, [*ids, uuid.uuid4()])) == {ids[0], ids[1], ids[4]}
    assert (await statuses(db, ids))[2:4] == ["running"] * 2


@VERBS
async def test_an_id_that_is_twice_in_a_batch_is_settled_once(db: Db, settle: Settle) -> None:
    (job_id,) = await _running(db)
    assert list(await settle(db, [job_id, job_id], [1, 7])) == [job_id]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 1


@VERBS
async def test_an_empty_batch_is_fine(db: Db, settle: Settle) -> None:
    assert not await settle(db, [])


@VERBS
@pytest.mark.parametrize("late", [complete, fail, release, end])
async def test_of_two_settles_at_once_one_wins(db: Db, other: Db, third: Db, settle: Settle, late: Settle) -> None:
    """solid_queue#589, oban#532: finished and failed at once."""
    (job_id,) = await _running(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert list(await settle(db, [job_id])) == [job_id]
        waiting = Later(tasks, late(other, [job_id]))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert not await waiting.answer()
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 1


@VERBS
async def test_if_the_first_of_two_settles_rolls_back_the_second_wins(
    db: Db, other: Db, third: Db, settle: Settle
) -> None:
    (job_id,) = await _running(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await complete(db, [job_id])
        waiting = Later(tasks, settle(other, [job_id]))
        await waits_for_lock(third, other)
        await db.execute("ROLLBACK")
        assert list(await waiting.answer()) == [job_id]


@pytest.mark.parametrize(
    ("settle", "outcome"), [(complete, "completed"), (fail, "cancelled"), (release, "cancelled"), (end, "cancelled")]
)
async def test_a_cancel_that_commits_while_a_settle_waits_for_it_counts(
    db: Db, other: Db, third: Db, settle: Settle, outcome: str
) -> None:
    (job_id,) = await _running(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert await cancel(db, job_id) == {job_id: "requested"}
        waiting = Later(tasks, settle(other, [job_id]))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert list(await waiting.answer()) == [job_id]
    assert await statuses(db, [job_id]) == [outcome]


# Completed


async def test_completed_leaves_a_complete_row_in_the_history(db: Db) -> None:
    worker_id = await worker(db)
    job_id = await one(
        db, kind="k", payload='{"n": 1}', meta='{"t": 1}', priority=-4, dedupe_key="d", max_attempts=4, run_at=at(-9)
    )
    await claim(db, worker_id)
    await fail(db, [job_id], delay_s=2)
    await clock(3, db)
    await claim(db, worker_id)
    await clock(5, db)
    before = await live(db, job_id)
    assert await complete(db, [job_id], 2, ['{"r": [1, 2]}']) == {job_id}
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0
    row = dict(await over(db, job_id))
    assert row == {name: before[name] for name in row if name in before} | {
        "status": "completed",
        "finished_at": at(5),
        "result": '{"r": [1, 2]}',
    }
    assert (row["attempts"], row["failures"], row["started_at"], row["worker_id"]) == (2, 1, at(3), worker_id)
    assert len(json.loads(row["errors"])) == 1


async def test_a_result_may_be_any_json_or_missing(db: Db) -> None:
    results = [None, "null", "7", '"text"', "[1]", "{}"]
    ids = await _running(db, len(results))
    await complete(db, ids, 1, results)
    assert [(await over(db, i))["result"] for i in ids] == results


@pytest.mark.parametrize(
    ("result", "sqlstate", "name"),
    [
        (json.dumps("a" * 2 * MIB), "23514", "result_must_not_exceed_1_mib"),
        (json.dumps("a" * 20 * MIB), "23514", "result_must_not_exceed_1_mib"),
        ('{"x": "\\u0000"}', "22P05", None),
        ("NaN", "22P02", None),
    ],
)
async def test_a_bad_result_is_refused_by_class_and_nothing_is_settled(
    db: Db, result: str, sqlstate: str, name: str | None
) -> None:
    ids = await _running(db, 2)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await complete(db, ids, 1, ["{}", result])
    assert (caught.value.sqlstate, caught.value.constraint_name) == (sqlstate, name)
    assert await statuses(db, ids) == ["running"] * 2


async def test_a_payload_and_a_result_of_1_mib_go_through(db: Db) -> None:
    text = json.dumps({"x": "a" * (MIB - 100)})
    (job_id,) = await _running(db, payload=text)
    assert await complete(db, [job_id], 1, [text]) == {job_id}
    row = await over(db, job_id)
    assert row["payload"] == row["result"] == text


async def test_a_queue_that_keeps_nothing_leaves_no_history_of_completed_jobs(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0), ('other', 1), ('null', NULL)")
    gone = await _running(db, 3)
    assert await complete(db, gone, 1, ["1"] * 3) == set(gone)
    kept = []
    for queue in ("other", "null", "without a row"):
        ids = await insert(db, 1, queue)
        await claim(db, await worker(db), queue=queue)
        assert await complete(db, ids) == set(ids)
        kept += ids
    assert await statuses(db, [*gone, *kept]) == [None] * 3 + ["completed"] * 3


async def test_a_days_history_is_in_its_partition_and_a_stray_days_in_the_other(db: Db) -> None:
    here, far = await _running(db, 2)
    await complete(db, [far])
    await db.execute("RESET pgworkd.clock")
    await complete(db, [here])
    rows = await db.fetch("SELECT id, finished_at, tableoid::regclass::text FROM pgworkd.finished_jobs")
    today = next(row["finished_at"] for row in rows if row["id"] == here)
    assert {row["id"]: row["tableoid"] for row in rows} == {
        here: f"pgworkd.finished_jobs_{today:%Y%m%d}",
        far: "pgworkd.finished_jobs_other",
    }


# Failed


async def test_failed_waits_for_its_retry_and_remembers_why(db: Db) -> None:
    (job_id,) = await _running(db)
    await clock(5, db)
    assert await fail(db, [job_id], delay_s=30, message="downstream said no") == {job_id: "failed"}
    row = await live(db, job_id)
    assert (row["status"], row["failures"], row["losses"], row["worker_id"]) == ("failed", 1, 0, None)
    assert (row["run_at"], row["failed_at"], row["error"]) == (at(35), at(5), "downstream said no")
    (entry,) = json.loads(row["errors"])
    when = entry.pop("at")
    assert await db.fetchval("SELECT $1::text::timestamptz", when) == at(5)
    assert entry == {"attempt": 1, "type": "E", "message": "downstream said no", "traceback": "...", "worker": "w"}


async def test_an_absurd_row_does_not_harm_its_batch(db: Db) -> None:
    absurd = await one(db, failures=2**31 - 1, attempts=2**31 - 2, max_attempts=1000, errors='[7, null, "x"]')
    plain = await one(db)
    assert await claim_ids(db, await worker(db)) == [absurd, plain]
    assert await fail(db, [absurd, plain], [2**31 - 1, 1]) == {absurd: "dead", plain: "failed"}
    assert len(json.loads((await live(db, absurd))["errors"])) == 4


async def test_each_job_of_a_batch_has_its_own_delay_and_verdict(db: Db) -> None:
    ids = await _running(db, 4)
    answer = await fail(db, ids, delay_s=[0, 0.5, 1800, 0], permanent=[False, False, False, True])
    assert answer == {**dict.fromkeys(ids[:3], "failed"), ids[3]: "dead"}
    assert [(await live(db, i))["run_at"] for i in ids] == [T0, at(0.5), at(1800), T0]


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
async def test_a_spent_budget_is_dead(db: Db, max_attempts: int) -> None:
    job_id = await one(db, max_attempts=max_attempts)
    worker_id = await worker(db)
    outcomes = []
    for attempt in range(1, max_attempts + 1):
        assert await claim_ids(db, worker_id) == [job_id]
        outcomes += (await fail(db, [job_id], attempt, delay_s=0)).values()
    assert outcomes == ["failed"] * (max_attempts - 1) + ["dead"]
    row = await live(db, job_id)
    assert (row["failures"], row["failed_at"], row["worker_id"]) == (max_attempts, T0, None)
    assert await claim(db, worker_id) == []


async def test_permanent_is_dead_at_once(db: Db) -> None:
    (job_id,) = await _running(db, max_attempts=1000)
    assert await fail(db, [job_id], permanent=True) == {job_id: "dead"}
    assert (await live(db, job_id))["failures"] == 1


async def test_a_dead_job_keeps_its_due_time_and_frees_its_dedupe_key(db: Db) -> None:
    (job_id,) = await _running(db, dedupe_key="k", run_at=at(-7))
    await fail(db, [job_id], permanent=True)
    assert (await live(db, job_id))["run_at"] == at(-7)
    await one(db, dedupe_key="k")


async def test_a_job_whose_cancellation_was_asked_for_is_not_tried_again(db: Db) -> None:
    retried, dead, plain = await _running(db, 3)
    await cancel(db, retried, dead)
    answer = await fail(db, [retried, dead, plain], permanent=[False, True, False])
    assert answer == {retried: "cancelled", dead: "dead", plain: "failed"}
    row = await over(db, retried)
    assert (row["status"], row["error"], row["failures"]) == ("cancelled", "it broke", 1)
    assert len(json.loads(row["errors"])) == 1


async def test_the_history_of_errors_keeps_the_newest_20(db: Db) -> None:
    job_id = await one(db, max_attempts=1000)
    worker_id = await worker(db)
    for attempt in range(1, 25):
        await claim(db, worker_id)
        await fail(db, [job_id], attempt, delay_s=0, message=f"e{attempt}")
        errors = json.loads((await live(db, job_id))["errors"])
        assert len(errors) == min(attempt, 20)
    assert [entry["attempt"] for entry in errors] == list(range(5, 25))
    assert (errors[-1]["message"], (await live(db, job_id))["error"]) == ("e24", "e24")


# Released


async def test_released_keeps_its_place_its_budget_and_wakes_others(db: Db, notices: Notices) -> None:
    first, second = await one(db, run_at=at(-9)), await one(db, run_at=at(-8))
    worker_id = await worker(db)
    assert await claim_ids(db, worker_id, 1) == [first]
    await set_pool(db, await worker(db))
    await clock(5, db)
    assert await release(db, [first]) == {first}
    row = await live(db, first)
    assert (row["status"], row["run_at"], row["failures"], row["attempts"]) == ("pending", at(-9), 0, 1)
    assert (row["error"], row["errors"], row["worker_id"]) == (None, "[]", None)
    assert await notices.heard() == [{"queue": "q"}]
    assert await claim_ids(db, worker_id) == [first, second]


async def test_one_release_notifies_each_queue_once_and_only_sleepers(db: Db, notices: Notices) -> None:
    worker_id, ids = await worker(db), []
    for queue in ("q", "r", "awake"):
        await insert(db, 5, queue)
        ids += await claim_ids(db, worker_id, queue=queue)
        await set_pool(db, worker_id, queue, asleep=queue != "awake")
    await notices.heard()
    assert await release(db, ids) == set(ids)
    assert sorted(notice["queue"] for notice in await notices.heard()) == ["q", "r"]


async def test_a_stale_release_notifies_nobody(db: Db, notices: Notices) -> None:
    (job_id,) = await _running(db)
    await set_pool(db, await worker(db))
    assert await release(db, [job_id], 2) == set()
    assert await notices.heard() == []


async def test_snoozed_waits_for_its_delay_and_notifies_nobody(db: Db, notices: Notices) -> None:
    (job_id,) = await _running(db)
    await set_pool(db, await worker(db))
    await release(db, [job_id], delay_s=90.5, message="no handler for kind 'q'")
    row = await live(db, job_id)
    assert (row["status"], row["run_at"], row["failures"]) == ("pending", at(90.5), 0)
    assert (row["error"], row["errors"]) == ("no handler for kind 'q'", "[]")
    assert await notices.heard() == []


async def test_a_release_without_a_message_leaves_the_last_error(db: Db) -> None:
    (job_id,) = await _running(db)
    await fail(db, [job_id], delay_s=0, message="first")
    await claim(db, await worker(db))
    await release(db, [job_id], 2)
    row = await live(db, job_id)
    assert (row["error"], row["status"], row["failures"]) == ("first", "pending", 1)


async def test_a_released_job_whose_cancellation_was_asked_for_is_cancelled(db: Db) -> None:
    first, second, plain = await _running(db, 3)
    await cancel(db, first, second)
    assert await release(db, [first, plain]) == {first, plain}
    assert await release(db, [second], delay_s=60) == {second}
    assert await statuses(db, [first, second, plain]) == ["cancelled", "cancelled", "pending"]


# Ended


async def test_ended_moves_to_the_history_as_cancelled_or_expired(db: Db) -> None:
    ids = await _running(db, 4, payload='{"n": 1}')
    await clock(5, db)
    outcomes = ["cancelled", "expired", "cancelled", "expired"]
    assert await end(db, ids, status=outcomes, message="because") == set(ids)
    assert await statuses(db, ids) == outcomes
    row = await over(db, ids[0])
    assert (row["finished_at"], row["error"], row["payload"], row["result"]) == (at(5), "because", '{"n": 1}', None)
    assert (row["attempts"], row["started_at"]) == (1, T0)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_ended_without_a_message_keeps_the_last_error(db: Db) -> None:
    (job_id,) = await _running(db)
    await fail(db, [job_id], delay_s=0, message="first")
    await claim(db, await worker(db))
    await end(db, [job_id], 2)
    assert (await over(db, job_id))["error"] == "first"


@pytest.mark.parametrize("status", ["running", "pending", "nonsense"])
async def test_ended_knows_no_other_status(db: Db, status: str) -> None:
    (job_id,) = await _running(db)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await end(db, [job_id], status=status)
    assert caught.value.sqlstate in {"23514", "22P02"}
    assert await statuses(db, [job_id]) == ["running"]


# The plans


async def _pinned_plan(db: Db, verb: str) -> list[dict[str, Any]]:
    """The nodes of the plan of the statement that finds the rows, taken from the function, under its settings."""
    row = await db.fetchrow(
        "SELECT prosrc, proargnames[:pronargs] AS names, oidvectortypes(proargtypes) AS types, proconfig "
        "FROM pg_proc WHERE oid = ('pgworkd.' || $1)::regproc",
        verb,
    )
    assert row is not None
    found = re.search(
        r"(DELETE FROM jobs|UPDATE jobs|SELECT j\.id).*?(RETURNING j\.(id|\*)|FOR UPDATE OF j)", row["prosrc"], re.S
    )
    assert found is not None
    statement = re.sub(r"\bp_\w+", lambda match: f"${row['names'].index(match[0]) + 1}", found[0])
    async with db.transaction():
        for setting in row["proconfig"]:
            await db.execute("SELECT set_config($1, $2, true)", *setting.split("=", 1))
        await db.execute(f"PREPARE pinned ({row['types']}) AS {statement}")
        nulls = ", ".join(["NULL"] * len(row["names"]))
        (plan,) = json.loads(await db.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE pinned ({nulls})"))
        await db.execute("DEALLOCATE pinned")
    nodes = [plan["Plan"]]
    for node in nodes:
        nodes += node.get("Plans", [])
    return nodes


@pytest.mark.parametrize("verb", ["settle_completed", "settle_failed", "settle_released", "settle_ended"])
async def test_the_plan_is_the_primary_key_hashed_against_the_batch(db: Db, verb: str) -> None:
    """Whatever the statistics: a nested loop looks at batch x batch rows, another index at all that run."""
    await db.execute(NO_STATISTICS)
    running = {"status": "running", "worker_id": await worker(db), "attempts": 1}
    steps: list[Callable[[], Awaitable[Any]]] = [
        lambda: db.execute("SELECT 'never analysed'"),
        lambda: db.execute("ANALYZE pgworkd.jobs"),  # while it is empty
        lambda: insert(db, 2000, "r"),
        lambda: db.execute("ANALYZE pgworkd.jobs"),  # while nothing runs
        lambda: insert(db, 5000, **running),
        lambda: db.execute("ANALYZE pgworkd.jobs"),
    ]
    for number, step in enumerate(steps):
        await step()
        nodes = await _pinned_plan(db, verb)
        scans = [
            (n["Node Type"], n.get("Index Name")) for n in nodes if n.get("Alias") == "j" and "Scan" in n["Node Type"]
        ]
        assert scans == [("Index Scan", "jobs_pkey")], f"step {number}"
        (condition,) = [n["Index Cond"] for n in nodes if "Index Cond" in n]
        assert "ANY ($1)" in condition, f"step {number}: not a generic plan, or not by the ids"
        joins = {n["Node Type"] for n in nodes} & {"Nested Loop", "Merge Join", "Hash Join"}
        assert joins == {"Hash Join"}, f"step {number}"


@pytest.mark.parametrize("before", [0, 2000])
async def test_settles_read_the_rows_they_settle_and_no_others(db: Db, other: Db, before: int) -> None:
    """As long as it believes that few jobs run, the planner likes to read all that do."""
    worker_id = await worker(db)
    await db.execute(NO_STATISTICS)
    await insert(db, before, "r")
    await db.execute("ANALYZE pgworkd.jobs")
    for settle in (complete, fail, release, end):  # plans of a time when nothing ran
        await settle(db, [uuid.uuid4()])
    ids = (await insert(db, 50_000, status="running", worker_id=worker_id, attempts=1))[::5]
    for session, size in ((db, 10), (other, 10), (db, 1000), (other, 1000)):
        for settle in (complete, fail, release, end):
            batch, ids = ids[:size], ids[size:]
            async with session.transaction():
                seq, idx = await rows_read(session)
                assert set(await settle(session, batch)) == set(batch)
                seq_after, idx_after = await rows_read(session)
                assert seq_after == seq, f"{settle.__name__} scanned the table"
                assert idx_after - idx <= 3 * len(batch), f"{settle.__name__} read rows it did not settle"


async def test_a_settle_costs_pages_by_the_batch_and_not_by_the_table(db: Db) -> None:
    worker_id = await worker(db)
    await db.execute(NO_STATISTICS)
    small = await insert(db, 10, status="running", worker_id=worker_id, attempts=1)
    await db.execute("ANALYZE pgworkd.jobs")
    ones, texts = "array_fill(1, '{10}')", "array_fill('expired'::text, '{10}')"
    delays, falses = "array_fill(1::float8, '{10}')", "array_fill(false, '{10}')"
    calls = {
        f"settle_completed($1, {ones}, array_fill('1'::text, '{{10}}'))": 0,
        f"settle_failed($1, {ones}, {delays}, {falses}, {texts}, array_fill('{{}}'::text, '{{10}}'))": 0,
        f"settle_released($1, {ones}, {delays}, {texts})": 0,
        f"settle_ended($1, {ones}, {texts}, {texts})": 0,
    }
    for call in calls:
        calls[call] = await blocks(db, f"SELECT pgworkd.{call}", small)
    ids = (await insert(db, 20_000, status="running", worker_id=worker_id, attempts=1))[::2000]
    for call, few in calls.items():
        # Ten pages of rows instead of one, and one more level of each of a dozen indexes per row.
        assert await blocks(db, f"SELECT pgworkd.{call}", ids) <= few + 10 * 20, call


# Once wrong


@VERBS
@pytest.mark.parametrize("order", ["by id", "against"])
async def test_rows_are_locked_in_the_order_of_their_key(
    db: Db, other: Db, third: Db, settle: Settle, order: str
) -> None:
    """A bitmap scan locks in the table's order; with cancel and retry, which lock by id, that deadlocks (40P01)."""
    high, low = uuid.UUID(int=2), uuid.UUID(int=1)
    for job_id in (high, low):
        await one(db, id=job_id, priority=job_id.int)
    await claim(db, await worker(db))
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", low)
        waiting = Later(tasks, settle(other, [low, high] if order == "by id" else [high, low]))
        await waits_for_lock(third, other)
        held = await is_locked(third, "jobs", "id", high)
        await db.execute("COMMIT")
        assert set(await waiting.answer()) == {low, high}
    assert not held, "it holds the second row while it waits for the first"


@pytest.mark.parametrize("settle", [fail, end])
async def test_a_queue_that_keeps_nothing_keeps_no_ended_job(db: Db, settle: Settle) -> None:
    """keep_s = 0 means no history, whatever the outcome."""
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    (job_id,) = await _running(db)
    await cancel(db, job_id)
    await settle(db, [job_id])
    assert await statuses(db, [job_id]) == [None]


async def test_defect_the_order_holds_for_a_batch_with_long_messages(db: Db, other: Db, third: Db) -> None:
    """Beyond work_mem a hash join goes in parts, each in order, but not the whole: by default, 8 MB of errors."""
    ids = sorted(await _running(db, 200))
    await other.execute("SET work_mem = '64kB'")
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", ids[100])
        waiting = Later(tasks, fail(other, ids, message="x" * 4096))
        await waits_for_lock(third, other)
        free = await third.fetch("SELECT id FROM pgworkd.jobs ORDER BY id FOR UPDATE SKIP LOCKED")
        await db.execute("COMMIT")
        assert len(await waiting.answer()) == 200
    assert [row["id"] for row in free] == ids[101:]
