"""enqueue(): inserting where a dedupe key may be taken."""

from __future__ import annotations

import uuid
from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Notices
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")

WAITING = ["pending", "scheduled", "blocked", "failed", "failed, holding"]


async def holder(db: Db, state: str) -> uuid.UUID:
    """A job with the key in this state; the same worker has claimed others before."""
    worker_id, line = await v.worker(db), None
    if state == "blocked":
        await v.one(db, serialize_key="s")
        assert len(await v.claim_ids(db, worker_id, 1)) == 1
    if state in ("blocked", "failed, holding"):
        line = "s"
    later = {"run_at": v.at(100)} if state == "scheduled" else {}
    job_id, created, changed = await v.enqueue(db, payload='{"n": 1}', priority=5, serialize_key=line, **later)
    assert (created, changed) == (True, False)
    if state == "blocked":
        assert await v.claim_ids(db, worker_id) == []
    elif state not in ("pending", "scheduled"):
        assert await v.claim_ids(db, worker_id) == [job_id]
    if state.startswith("failed"):
        await v.fail(db, [job_id], delay_s=300)
    elif state == "dead":
        await v.fail(db, [job_id], permanent=True)
    elif state == "over":
        await db.execute("UPDATE pgworkd.jobs SET dedupe_until = $2 WHERE id = $1", job_id, v.at(3600))
        await v.complete(db, [job_id])
    status = {"scheduled": "pending", "failed, holding": "failed", "over": "completed"}.get(state, state)
    assert (await v.live(db, job_id))["status"] == status
    return job_id


NEW: dict[str, Any] = {
    "payload": '{"n": 2}',
    "kind": "x",
    "priority": -3,
    "run_at": v.at(50),
    "expires_at": v.at(500),
    "max_attempts": 9,
    "timeout_s": 1.5,
    "meta": '{"m": 2}',
}


# Each mode for each state


@pytest.mark.parametrize("word", v.WORDS)
@pytest.mark.parametrize("state", [None, "dead"])
async def test_a_free_key_is_given_to_the_new_job(db: Db, word: str, state: str | None) -> None:
    old = await holder(db, state) if state else None
    job_id, created, changed = await v.enqueue(db, word, **NEW, serialize_key="s", limit_key="l", on_retry="yield")
    assert (created, changed, job_id == old) == (True, False, False)
    row = await v.live(db, job_id)
    assert {name: row[name] for name in NEW} == NEW
    assert (row["serialize_key"], row["limit_key"], row["yields"], row["status"]) == ("s", "l", True, "pending")


@pytest.mark.parametrize("word", v.WORDS)
@pytest.mark.parametrize("state", [*WAITING, "running", "over"])
async def test_raise_and_skip_change_nothing_and_no_mode_changes_a_job_not_waiting(
    db: Db, word: str, state: str
) -> None:
    if state in WAITING and word in ("replace", "reschedule"):
        return
    job_id = await holder(db, state)
    before = await v.live(db, job_id)
    if word == "raise":
        with pytest.raises(asyncpg.UniqueViolationError) as caught:
            await v.enqueue(db, word, **NEW)
        assert caught.value.constraint_name == "jobs_dedupe"
        assert "(queue, dedupe_key)=(q, k)" in caught.value.detail
    else:
        assert await v.enqueue(db, word, **NEW) == (job_id, False, False)
    assert await v.live(db, job_id) == before
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE dedupe_key = 'k'") == 1


CHANGED = {
    "replace": NEW,
    "reschedule": {"run_at": v.at(50), "priority": -3},
}


@pytest.mark.parametrize("word", CHANGED)
@pytest.mark.parametrize("state", WAITING)
async def test_a_waiting_job_is_changed(db: Db, word: str, state: str) -> None:
    job_id = await holder(db, state)
    before = dict(await v.live(db, job_id))
    assert await v.enqueue(db, word, **NEW, serialize_key="other", dedupe_for_s=60.0) == (job_id, False, True)
    wanted = before | CHANGED[word] | {"status": "failed" if state.startswith("failed") else "pending"}
    wanted["dedupe_until"] = v.at(60) if word == "replace" else None
    assert dict(await v.live(db, job_id)) == wanted


async def test_values_that_are_not_given_are_defaults_or_stay(db: Db) -> None:
    job_id = await holder(db, "scheduled")
    await v.clock(10, db)
    assert await v.enqueue(db, "reschedule") == (job_id, False, True)
    row = await v.live(db, job_id)
    assert (row["run_at"], row["priority"], row["payload"]) == (v.at(10), 5, '{"n": 1}')
    assert await v.enqueue(db, "reschedule", delay_s=7.0) == (job_id, False, True)
    assert (await v.live(db, job_id))["run_at"] == v.at(17)
    assert await v.enqueue(db, "replace") == (job_id, False, True)
    row = await v.live(db, job_id)
    assert (row["run_at"], row["priority"], row["payload"]) == (v.at(10), 0, "{}")


async def test_dedupe_for_counts_from_now_and_replace_without_it_keeps_the_old_value(db: Db) -> None:
    job_id, _, _ = await v.enqueue(db, dedupe_for_s=60.0)
    await v.clock(10, db)
    await v.enqueue(db, "replace", dedupe_for_s=60.0)
    await v.enqueue(db, "replace")
    assert (await v.live(db, job_id))["dedupe_until"] == v.at(70)
    assert await v.enqueue(db, "skip", queue="another") != (job_id, False, False)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"on_duplicate": "ignore"}, "p_on_duplicate must be raise, skip, replace or reschedule"),
        ({"on_duplicate": "skip", "dedupe_key": None}, "p_on_duplicate needs a p_dedupe_key"),
        ({"run_at": v.T0, "delay_s": 1.0}, "p_run_at and p_delay_s are both given"),
        ({"delay_s": -1.0}, "p_delay_s must not be negative"),
        ({"dedupe_until": v.T0, "dedupe_for_s": 1.0}, "p_dedupe_until and p_dedupe_for_s are both given"),
        ({"dedupe_for_s": 0.0}, "p_dedupe_for_s must be above 0"),
        ({"dedupe_for_s": -1.0}, "p_dedupe_for_s must be above 0"),
        ({"dedupe_for_s": float("nan")}, "interval out of range"),
        ({"dedupe_for_s": 1e10}, "instant_must_lie_between_1970_and_2200"),
        ({"dedupe_for_s": 1.0, "dedupe_key": None}, "dedupe_until_needs_a_dedupe_key"),
        ({"dedupe_key": ""}, "key_must_have_1_to_512_characters"),
        ({"dedupe_key": "d" * 513, "on_duplicate": "skip"}, "key_must_have_1_to_512_characters"),
        ({"serialize_key": ""}, "key_must_have_1_to_512_characters"),
        ({"limit_key": "l" * 513}, "key_must_have_1_to_512_characters"),
        ({"on_retry": "later"}, "p_on_retry must be hold or yield"),
        ({"on_retry": "yield"}, "'yield' needs a p_serialize_key"),
        ({"payload": "[1]"}, "value_must_be_a_json_object"),
        ({"queue": ""}, "name_must_have_1_to_200_characters"),
    ],
)
async def test_bad_arguments_are_refused(db: Db, options: dict[str, Any], told: str) -> None:
    with pytest.raises((asyncpg.DataError, asyncpg.IntegrityConstraintViolationError), match=told):
        await v.enqueue(db, **options)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


@pytest.mark.parametrize("word", ["replace"])
@pytest.mark.parametrize("bad", [{"payload": "[1]"}, {"kind": ""}, {"max_attempts": 0}, {"timeout_s": 0.0}])
async def test_a_waiting_job_is_not_changed_to_invalid_values(db: Db, word: str, bad: dict[str, Any]) -> None:
    job_id = await holder(db, "pending")
    before = await v.live(db, job_id)
    with pytest.raises(asyncpg.CheckViolationError):
        await v.enqueue(db, word, **bad)
    assert await v.live(db, job_id) == before


# Notifications


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(
    ("state", "options", "heard"),
    [
        ("scheduled", {"run_at": v.at(-50)}, v.at(-50)),  # earlier: claims are past it
        ("scheduled", {"delay_s": 8.0, "priority": 5}, v.T0),
        ("scheduled", {"delay_s": 30.0, "priority": 5}, None),  # idle pools poll before then
        ("pending", {"delay_s": 5.0, "priority": 5}, None),  # later: claims have not reached it
        ("pending", {"run_at": v.T0, "priority": 5}, None),
        ("pending", {"run_at": v.at(1), "priority": 6}, v.T0),  # another priority, another cursor
    ],
)
@pytest.mark.parametrize("word", ["replace", "reschedule"])
async def test_pools_are_notified_of_a_job_that_moves_before_their_cursor(
    db: Db, notices: Notices, word: str, state: str, options: dict[str, Any], heard: Any, idle: bool
) -> None:
    await holder(db, state)
    await v.set_pool(db, await v.worker(db), idle=idle)
    await notices.heard()
    await v.enqueue(db, word, **options)
    wanted = [] if heard is None else [{"queue": "q", "run_at": pytest.approx(heard.timestamp(), abs=0.2)}]
    assert await notices.heard() == wanted


async def test_a_notification_carries_the_start_of_its_transaction(db: Db, notices: Notices) -> None:
    await holder(db, "scheduled")
    await v.set_pool(db, await v.worker(db), idle=False)
    await db.execute("RESET pgworkd.clock")
    async with db.transaction():
        began_at = await db.fetchval("SELECT date_part('epoch', transaction_timestamp())")
        await db.execute("SELECT pg_sleep(0.01)")
        await v.enqueue(db, "reschedule")
    assert await notices.heard() == [{"queue": "q", "run_at": pytest.approx(began_at, abs=3e-6)}]


# Waiters of a serialize key


async def test_the_next_job_of_a_key_is_promoted_when_the_first_is_postponed(db: Db, notices: Notices) -> None:
    worker_id = await v.worker(db)
    head, _, _ = await v.enqueue(db, serialize_key="s", run_at=v.at(-2))
    behind = [await v.one(db, serialize_key="s", run_at=v.at(-1 + n / 10)) for n in range(2)]
    await db.execute("UPDATE pgworkd.jobs SET status = 'blocked' WHERE id = ANY ($1)", behind)
    await v.set_pool(db, worker_id)
    await v.enqueue(db, "reschedule", delay_s=60.0)
    assert await v.statuses(db, [head, *behind]) == ["pending", "pending", "blocked"]
    assert await notices.queues() == ["q"]
    assert await v.claim_ids(db, worker_id) == behind[:1]


@pytest.mark.parametrize("holding", ["running", "failed"])
async def test_no_job_is_promoted_while_the_key_is_held(db: Db, holding: str) -> None:
    worker_id = await v.worker(db)
    runs = await v.one(db, serialize_key="s", run_at=v.at(-9))
    assert await v.claim_ids(db, worker_id) == [runs]
    ids = [
        (await v.enqueue(db, serialize_key="s", run_at=v.at(-2)))[0],
        await v.one(db, serialize_key="s", run_at=v.at(-1)),
    ]
    assert await v.claim_ids(db, worker_id) == []
    assert await v.statuses(db, ids) == ["blocked", "blocked"]
    if holding == "failed":
        await v.fail(db, [runs])
    await v.enqueue(db, "reschedule", delay_s=60.0)
    assert await v.statuses(db, ids) == ["pending", "blocked"]
    if holding == "running":
        await v.complete(db, [runs])
        assert await v.claim_ids(db, worker_id) == ids[1:]
    else:
        assert await v.claim_ids(db, worker_id) == []


async def test_a_retry_that_holds_its_key_keeps_it(db: Db) -> None:
    job_id = await holder(db, "failed, holding")
    other = await v.one(db, serialize_key="s")
    await v.enqueue(db, "replace", payload='{"n": 2}', delay_s=60.0)
    assert await v.claim_ids(db, await v.worker(db)) == []
    await v.clock(60, db)
    worker_id = await v.worker(db)
    assert await v.claim_ids(db, worker_id) == [job_id]
    await v.complete(db, [job_id], 2)
    assert await v.claim_ids(db, worker_id) == [other]


async def test_an_open_transaction_that_moves_a_job_does_not_block_claims(db: Db, other: Db) -> None:
    """It locks the rows that it has moved, and not the queue."""
    await v.enqueue(db, serialize_key="s")
    worker_id = await v.worker(db)
    free = [await v.one(db, serialize_key="t"), await v.one(db)]
    await db.execute("BEGIN")
    await v.enqueue(db, "reschedule", delay_s=60.0)
    with anyio.fail_after(10):
        assert set(await v.claim_ids(other, worker_id)) == set(free)
    await db.execute("COMMIT")
