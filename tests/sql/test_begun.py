"""payloads: a job that can expire begins where its payload is read, and cannot expire after that."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from tests.kits.verbs import T0, Db, at, claim, clock, fail, insert_running, one, release, rescue, statuses, worker

pytestmark = pytest.mark.usefixtures("t0")


async def read(
    db: Db, ids: list[uuid.UUID], attempt: int = 1, begin: int | None = None, bytes_max: int = 1000
) -> list[tuple[uuid.UUID, bool, bool]]:
    """(id, whether there is a payload, expired) of what is read."""
    sql = "SELECT * FROM pgworkd.payloads($1, $2, $3, p_begin => $4)"
    rows = await db.fetch(sql, ids, [attempt] * len(ids), bytes_max, begin)
    return [(row["id"], row["payload"] is not None, row["expired"]) for row in rows]


async def expired(db: Db) -> list[Any]:
    """How many expire now."""
    return [row["jobs"] for row in await db.fetch("SELECT jobs FROM pgworkd.expire_jobs() WHERE queue IS NOT NULL")]


async def test_a_claim_returns_no_payload_of_a_job_that_can_expire(db: Db) -> None:
    job_id, plain = await one(db, expires_at=at(60)), await one(db)
    rows = await claim(db, await worker(db))
    assert {row["id"]: row["payload"] for row in rows} == {job_id: None, plain: "{}"}
    assert await read(db, [job_id, plain]) == [(job_id, True, False), (plain, True, False)]


async def test_a_read_ends_with_the_payload_that_fills_it(db: Db) -> None:
    """Whatever a payload's size: a worker waits for no more than one beyond what it has asked for."""
    ids = await insert_running(db, 10, payload=json.dumps({"x": "y" * 300}))
    assert [job_id for job_id, _, _ in await read(db, ids, bytes_max=1000)] == ids[:4]
    assert [job_id for job_id, _, _ in await read(db, ids[4:], bytes_max=1)] == ids[4:5]


@pytest.mark.parametrize("then", ["released", "failed", "lost"])
@pytest.mark.parametrize("begins", [True, False])
async def test_a_job_that_has_begun_cannot_expire_and_another_can(db: Db, then: str, *, begins: bool) -> None:
    worker_id = await worker(db)
    job_id = await one(db, expires_at=at(60))
    await claim(db, worker_id)
    if begins:
        assert await read(db, [job_id]) == [(job_id, True, False)]
    if then == "released":
        await release(db, [job_id])
    elif then == "failed":
        await fail(db, [job_id], delay_s=1.0)
    else:
        await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
        await rescue(db, await worker(db))
    await clock(90, db)
    taken = [row["id"] for row in await claim(db, await worker(db))]
    assert taken == ([job_id] if begins else [])
    assert await expired(db) == ([] if begins else [1])
    assert await statuses(db, [job_id]) == ["running" if begins else "expired"]


async def test_a_job_that_expired_after_its_claim_is_not_given_out(db: Db) -> None:
    job_id, plain = await one(db, expires_at=at(60)), await one(db)
    await claim(db, await worker(db))
    await clock(61, db)
    assert await read(db, [job_id, plain]) == [(job_id, False, True), (plain, True, False)]
    assert await db.fetchval("SELECT begun FROM pgworkd.jobs WHERE id = $1", job_id) == 0


async def test_what_is_read_ahead_does_not_begin(db: Db) -> None:
    first, second = await one(db, expires_at=at(60)), await one(db)
    third, fourth = await one(db, expires_at=at(60)), await one(db)
    await claim(db, await worker(db))
    assert [row[0] for row in await read(db, [first, second, third, fourth], begin=1)] == [first, second]
    await clock(61, db)
    assert await read(db, [third, fourth], begin=1) == [(third, False, True), (fourth, True, False)]


async def test_an_answer_that_was_lost_is_given_again(db: Db) -> None:
    job_id = await one(db, expires_at=at(60))
    await claim(db, await worker(db))
    assert await read(db, [job_id]) == [(job_id, True, False)]
    await clock(61, db)
    assert await read(db, [job_id]) == [(job_id, True, False)], "it has begun"


async def test_a_locked_job_is_left_and_others_begin(db: Db, other: Db) -> None:
    locked, job_id = await one(db, expires_at=at(60)), await one(db, expires_at=at(60))
    await claim(db, await worker(db))
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", locked)
    await db.execute("SET statement_timeout = 2000")
    assert await read(db, [locked, job_id]) == [(locked, False, False), (job_id, True, False)]


@pytest.mark.parametrize("begun", [True, False, None])
async def test_an_attempt_that_was_handed_out_and_not_begun_is_given_back_as_such(db: Db, begun: bool | None) -> None:
    """A remote worker gets it with its payload; what it gives back at once, or never received, has not begun."""
    job_id = await one(db, expires_at=at(60))
    await claim(db, await worker(db))
    await read(db, [job_id])
    sql = "SELECT pgworkd.settle_released($1, '{1}', '{NULL}', '{NULL}', p_begun => $2)"
    await db.fetchval(sql, [job_id], None if begun is None else [begun])
    await clock(61, db)
    assert await expired(db) == ([1] if begun is False else [])


async def test_an_earlier_attempt_that_began_counts(db: Db) -> None:
    worker_id, job_id = await worker(db), await one(db, expires_at=at(60))
    await claim(db, worker_id)
    await read(db, [job_id])
    await fail(db, [job_id], delay_s=0.0)
    await claim(db, worker_id)
    await db.fetchval("SELECT pgworkd.settle_released($1, '{2}', '{NULL}', '{NULL}', p_begun => '{f}')", [job_id])
    await clock(61, db)
    assert await expired(db) == []


async def test_the_fence_holds_for_a_job_that_is_to_begin(db: Db) -> None:
    worker_id, job_id = await worker(db), await one(db, expires_at=at(60))
    await claim(db, worker_id)
    wrong = [(worker_id + 1, None), (worker_id, uuid.uuid4())]
    for who, token in wrong:
        rows = await db.fetch("SELECT * FROM pgworkd.payloads($1, '{1}', 1000, $2, $3)", [job_id], who, token)
        assert [(row["payload"], row["expired"]) for row in rows] == [(None, False)]
    assert await read(db, [job_id], attempt=2) == [(job_id, False, False)]
    assert await db.fetchval("SELECT begun FROM pgworkd.jobs WHERE run_at = $1", T0) == 0
