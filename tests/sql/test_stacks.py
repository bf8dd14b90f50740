"""Requests for the stacks of running attempts: who is asked, whose answer counts, and how long both are kept."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.verbs import Db

ROW = "SELECT attempt, worker_id, asked_by, answered_at IS NOT NULL, stack FROM pgworkd.stack_requests"


async def answer(
    db: Db, job_id: UUID, worker_id: int, attempt: int = 1, stack: str = "here", token: Any = None
) -> bool:
    token = await v.token(db, worker_id) if token is None else token
    sql = "SELECT pgworkd.answer_stack($1, $2, $3, $4, $5)"
    return bool(await db.fetchval(sql, job_id, attempt, worker_id, token, stack))


async def running(db: Db) -> tuple[UUID, int]:
    """A job that runs, and its worker."""
    job_id, worker_id = await v.one(db), await v.worker(db, 3600)
    assert await v.claim_ids(db, worker_id) == [job_id]
    return job_id, worker_id


async def test_the_worker_of_the_attempt_is_notified_and_told_by_its_heartbeat(dsn: str, db: Db) -> None:
    job_id, worker_id = await running(db)
    other = await v.worker(db, 3600)
    heard: list[str] = []
    listening = await asyncpg.connect(dsn)
    await listening.add_listener("pgworkd", lambda *told: heard.append(told[-1]))
    await db.execute("SELECT pgworkd.ask_stack($1, 'ada')", job_id)
    await listening.execute("SELECT 1")
    await listening.close()
    assert [json.loads(each) for each in heard] == [{"worker": worker_id}]
    for worker, asked in ((worker_id, [job_id]), (other, [])):
        told = await v.heartbeat(db, worker)
        assert told is not None
        assert (told["stack_ids"], told["stack_attempts"]) == (asked, [1] * len(asked))
    assert await answer(db, job_id, worker_id)
    told = await v.heartbeat(db, worker_id)
    assert told is not None
    assert told["stack_ids"] == []
    assert tuple(await db.fetchrow(ROW)) == (1, worker_id, "ada", True, "here")
    await db.execute("SELECT pgworkd.ask_stack($1, 'bob')", job_id)
    assert tuple(await db.fetchrow(ROW)) == (1, worker_id, "bob", False, None)


async def test_only_the_answer_of_who_is_asked_counts_and_the_first(db: Db) -> None:
    job_id, worker_id = await running(db)
    other = await v.worker(db, 3600)
    assert not await answer(db, job_id, worker_id), "nobody has asked"
    await db.execute("SELECT pgworkd.ask_stack($1)", job_id)
    assert not await answer(db, job_id, other)
    assert not await answer(db, job_id, worker_id, attempt=2)
    assert not await answer(db, job_id, worker_id, token=UUID(int=7))
    assert not await answer(db, UUID(int=7), worker_id)
    assert await answer(db, job_id, worker_id, stack="x" * 65536)
    assert not await answer(db, job_id, worker_id, stack="late")
    await db.execute("SELECT pgworkd.ask_stack($1)", job_id)
    with pytest.raises(asyncpg.CheckViolationError, match="stack_must_not_exceed_64_kib"):
        await answer(db, job_id, worker_id, stack="x" * 65537)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("SELECT pgworkd.settle_released(ARRAY[$1::uuid], '{1}', '{60}', '{x}')", "pending: only a running job"),
        ("SELECT pgworkd.settle_completed(ARRAY[$1::uuid], '{1}', '{null}')", "completed: only a running job"),
        ("UPDATE pgworkd.workers SET kind = 'remote' WHERE $1::uuid IS NOT NULL", "run by the remote worker w, which"),
        ("UPDATE pgworkd.workers SET kind = 'standing' WHERE $1::uuid IS NOT NULL", "sent by HTTP to what runs it"),
        ("UPDATE pgworkd.workers SET lost_at = now() WHERE $1::uuid IS NOT NULL", "run by a worker whose lease has"),
    ],
)
async def test_what_cannot_be_asked_is_refused(db: Db, change: str, said: str) -> None:
    job_id, _ = await running(db)
    await db.execute(change, job_id)
    with pytest.raises(asyncpg.PostgresError, match=f"job {job_id} is {said}") as caught:
        await db.execute("SELECT pgworkd.ask_stack($1)", job_id)
    assert caught.value.sqlstate == "PW005"
    assert await db.fetch(ROW) == []


async def test_they_are_forgotten_after_an_hour(db: Db) -> None:
    sql = """INSERT INTO pgworkd.stack_requests (job_id, attempt, worker_id, asked_by, asked_at)
        SELECT gen_random_uuid(), 1, 1, $1, clock_timestamp() - $2::text::interval"""
    await db.execute(sql, "old", "61 minutes")
    await db.execute(sql, "young", "59 minutes")
    await db.execute("SELECT pgworkd.prune(7, 30)")
    assert await db.fetch("SELECT asked_by FROM pgworkd.stack_requests") == [("young",)]


async def test_a_worker_is_told_of_twenty_at_most(db: Db) -> None:
    await db.execute(
        """INSERT INTO pgworkd.stack_requests (job_id, attempt, worker_id, asked_by)
        SELECT gen_random_uuid(), 1, $1, 'x' FROM generate_series(1, 30)""",
        worker_id := await v.worker(db, 3600),
    )
    told = await v.heartbeat(db, worker_id)
    assert told is not None
    assert len(set(told["stack_ids"])) == len(told["stack_attempts"]) == 20
