"""audit: who did what to which job or queue, recorded once by the operation itself."""

from __future__ import annotations

import json
import uuid
from typing import Any

import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.verbs import Db

from .conftest import Connect

pytestmark = pytest.mark.usefixtures("t0")

NOW = "2100-06-15T12:00:00+00:00"


async def notes(db: Db) -> list[tuple[Any, ...]]:
    """(what, queue, job_id, before, after) of every row, in order."""
    rows = await db.fetch("SELECT what, queue, job_id, before, after FROM pgworkd.audit ORDER BY id")
    return [(*row[:3], json.loads(row[3]), json.loads(row[4])) for row in rows]


async def dead(db: Db, count: int = 1, **columns: object) -> list[uuid.UUID]:
    """Jobs that were claimed and are dead."""
    ids = await v.insert(db, count, **columns)
    await v.claim(db, await v.worker(db), count)
    await v.fail(db, ids, permanent=True)
    return ids


async def test_cancel_records_what_was_cancelled_and_what_was_requested(db: Db) -> None:
    await db.execute("SET timezone = 'UTC'")
    (died,) = await dead(db)
    running, waiting = await v.insert(db, 2)
    await v.claim(db, await v.worker(db), 1)
    await v.cancel(db, waiting, running, died, uuid.uuid4())
    assert sorted(await notes(db), key=lambda note: str(note[2])) == sorted(
        [
            ("cancel", "q", running, {"cancel_requested_at": None}, {"cancel_requested_at": NOW}),
            ("cancel", "q", waiting, {"status": "pending"}, {"status": "cancelled"}),
        ],
        key=lambda note: str(note[2]),
    )
    await v.cancel(db, waiting, running, died)
    assert len(await notes(db)) == 2, "what changes nothing is not noted"


@pytest.mark.parametrize("way", ["failed", "released", "ended", "rescued"])
async def test_a_cancellation_applied_by_the_engine_is_recorded_once(db: Db, way: str) -> None:
    job_id = await v.one(db, max_attempts=9)
    worker_id = await v.worker(db)
    await v.claim(db, worker_id)
    await v.cancel(db, job_id)
    if way == "failed":
        await v.fail(db, [job_id])
    elif way == "released":
        await v.release(db, [job_id])
    elif way == "ended":
        await v.end(db, [job_id])
    else:
        rescuer = await v.worker(db)
        await v.steady(db, rescuer)
        assert await v.rescue(db, rescuer) == {job_id: "cancelled"}
    assert await v.statuses(db, [job_id]) == ["cancelled"]
    assert [note[0] for note in await notes(db)] == ["cancel"]


async def test_cancelling_a_job_that_died_after_a_request_records_nothing_more(db: Db) -> None:
    job_id = await v.one(db)
    await v.claim(db, await v.worker(db))
    await v.cancel(db, job_id)
    await v.fail(db, [job_id], permanent=True)
    assert await v.cancel(db, job_id) == {}
    assert len(await notes(db)) == 1, "what was asked for when it ran"


async def test_retry_records_what_it_changed(db: Db) -> None:
    await db.execute("SET timezone = 'UTC'")
    (died,) = await dead(db, run_at=v.at(-60))
    waiting = await v.one(db)
    await v.claim(db, await v.worker(db))
    await v.fail(db, [waiting], delay_s=90)
    await v.retry(db, died, waiting)
    assert await notes(db) == [
        (
            "retry",
            "q",
            died,
            {"status": "dead", "failures": 1, "run_at": "2100-06-15T11:59:00+00:00"},
            {"status": "pending", "failures": 0, "run_at": NOW},
        ),
        (
            "retry",
            "q",
            waiting,
            {"status": "failed", "run_at": "2100-06-15T12:01:30+00:00"},
            {"status": "pending", "run_at": NOW},
        ),
    ]


async def test_a_refused_retry_is_not_recorded(db: Db) -> None:
    died = await dead(db, dedupe_key="k")
    await v.one(db, dedupe_key="k")
    with pytest.raises(asyncpg.UniqueViolationError):
        await v.retry(db, *died)
    assert await notes(db) == []


async def test_discard_records_the_jobs_it_removed(db: Db) -> None:
    await db.execute("SET timezone = 'UTC'")
    died, waiting = await dead(db, 2), await v.one(db)
    await db.execute("SELECT pgworkd.discard($1)", [*died, waiting])
    assert await notes(db) == [("discard", "q", job_id, {"finished_at": None}, {"finished_at": NOW}) for job_id in died]


async def test_the_engine_records_nothing_of_its_own(db: Db) -> None:
    ids = await v.insert(db, 5)
    worker_id = await v.worker(db)
    await v.claim(db, worker_id)
    await v.complete(db, ids[:1])
    await v.fail(db, ids[1:3], permanent=[True, False])
    await v.release(db, ids[3:4])
    await v.end(db, ids[4:], status="expired")
    await db.execute("SELECT * FROM pgworkd.prune(1, 0)")
    assert await notes(db) == []


# The actor


async def test_the_actor_is_the_argument_then_the_session_setting_then_user_and_program(
    db: Db, connect: Connect
) -> None:
    ids = await v.insert(db, 4)
    user = await db.fetchval("SELECT session_user")
    await db.execute("SELECT pgworkd.cancel($1, 'ann@desk')", ids[:1])
    await db.execute("SET application_name = ''")
    await v.cancel(db, ids[1])
    session = await connect()
    await session.execute("SET application_name = 'dashboard'")
    await v.cancel(session, ids[2])
    await session.execute(f"SET pgworkd.by = '{'b' * 300}'")
    await v.cancel(session, ids[3])
    rows = await db.fetch("SELECT job_id, who, at FROM pgworkd.audit ORDER BY id")
    assert [row["job_id"] for row in rows] == ids
    assert [row["who"] for row in rows] == ["ann@desk", user, f"{user} (dashboard)", "b" * 200]
    assert rows[0]["at"] == v.T0


async def test_every_operator_verb_accepts_the_name_of_the_actor(db: Db) -> None:
    died, other, waiting = await dead(db), await dead(db), await v.one(db)
    await db.execute("SELECT pgworkd.retry($1, 'me')", died)
    await db.execute("SELECT pgworkd.discard($1, p_by => 'me')", other)
    await db.execute("SELECT pgworkd.edit($1, p_priority => 3, p_by => 'me')", waiting)
    rows = await db.fetch("SELECT what, who FROM pgworkd.audit ORDER BY id")
    assert [tuple(row) for row in rows] == [("retry", "me"), ("discard", "me"), ("edit", "me")]


# Queues


async def test_queue_settings_are_recorded_whatever_changes_them(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, max_running) VALUES ('mail', 5)")
    await db.execute("UPDATE pgworkd.queues SET paused_until = 'infinity', max_running = NULL, updated_at = now()")
    await db.execute("UPDATE pgworkd.queues SET updated_at = now() + interval '1 s', fair = false")
    await db.execute("UPDATE pgworkd.queues SET name = 'post'")
    await db.execute("DELETE FROM pgworkd.queues")
    assert await notes(db) == [
        ("queue", "mail", None, {"max_running": None}, {"max_running": 5}),
        (
            "queue",
            "mail",
            None,
            {"max_running": 5, "paused_until": None},
            {"max_running": None, "paused_until": "infinity"},
        ),
        ("queue", "post", None, {"name": "mail"}, {"name": "post"}),
        ("queue", "post", None, {"paused_until": "infinity"}, {"paused_until": None}),
    ]


async def test_a_queue_row_without_settings_is_not_recorded(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name) VALUES ('q')")
    await db.execute("DELETE FROM pgworkd.queues")
    assert await notes(db) == []


# Kept as long as the history, and for at least 7 days


async def test_prune_deletes_old_audit_rows_in_batches(db: Db) -> None:
    for day in (0, 1, 2, 9):
        await v.clock(day * 86_400, db)
        await v.cancel(db, await v.one(db))
    await v.clock(9.5 * 86_400, db)
    for keep_days, left in ((9, 3), (9, 3), (1, 2), (1, 1), (1, 1)):
        await db.execute("SELECT * FROM pgworkd.prune($1, 30, 1)", keep_days)
        assert len(await notes(db)) == left


async def test_a_thousand_jobs_are_recorded_in_one_statement(db: Db) -> None:
    """One INSERT .. SELECT per operation: the cost does not grow by a statement per job."""
    ids = await v.insert(db, 1000)
    await db.execute("CREATE TABLE statements (n int)")
    await db.execute(
        "CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO public.statements VALUES (1); RETURN NULL; END'"
    )
    await db.execute("CREATE TRIGGER noted AFTER INSERT ON pgworkd.audit EXECUTE FUNCTION noted()")
    await v.cancel(db, *ids)
    assert await db.fetchval("SELECT count(*) FROM statements") == 1
    assert await db.fetchval("SELECT count(*) FROM pgworkd.audit") == 1000


async def test_settings_of_scratch_queues_of_bench_are_left_out_and_only_those(db: Db) -> None:
    scratch, other = "pgworkd-bench-0123456789ab", "pgworkd-bench-mine"
    for queue in (scratch, other):
        await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ($1, 0)", queue)
        await db.execute("DELETE FROM pgworkd.queues WHERE name = $1", queue)
    assert [row[0] for row in await db.fetch("SELECT queue FROM pgworkd.audit")] == [other, other]
