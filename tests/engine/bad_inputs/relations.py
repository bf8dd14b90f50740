"""Bad inputs 16 to 25: rows that conflict with others, and changes made to the table by hand."""

from __future__ import annotations

import unicodedata
import uuid
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from tests.engine.bad_inputs import Case, Check, among_good_ones, column, refused
from tests.kits.batches import batch, depend, seal
from tests.kits.daemon import insert, running, status, until, waits_for_status
from tests.kits.sessions import Notices
from tests.kits.verbs import Db, set_pool, worker

KEY = "key_must_have_1_to_512_characters"
NOBODY = "00000000-0000-7000-8000-000000000007"


async def cyclic_batches(_: str, db: Db) -> None:
    with pytest.raises(asyncpg.PostgresError, match="does not exist") as caught:
        await db.execute("INSERT INTO pgworkd.batches (id, name, parent_id) VALUES ($1, 'x', $1)", uuid.UUID(NOBODY))
    assert caught.value.sqlstate == "PW003"
    root = await batch(db, "root")
    child = await batch(db, "child", parent=root)
    for batch_id, parent in ((root, child), (child, child), (child, None)):
        with pytest.raises(asyncpg.PostgresError, match="cannot be moved") as caught:
            await db.execute("UPDATE pgworkd.batches SET parent_id = $2 WHERE id = $1", batch_id, parent)
        assert caught.value.sqlstate == "22023"
    assert await db.fetchval("SELECT array_agg(depth ORDER BY depth) FROM pgworkd.batches") == [0, 1]


async def deep_batches(_: str, db: Db) -> None:
    parent = await batch(db, "0")
    for depth in range(1, 33):
        parent = await batch(db, str(depth), parent=parent)
    with pytest.raises(asyncpg.PostgresError, match="would be at depth 33") as caught:
        await batch(db, "33", parent=parent)
    assert caught.value.sqlstate == "22023"


async def cyclic_dependencies(_: str, db: Db) -> None:
    async with db.transaction():
        one, two = await insert(db, "q"), await insert(db, "q")
        await depend(db, two, one)
        for job_id, after, says in ((one, two, "by way of others, for itself"), (one, one, "cannot wait for itself")):
            with pytest.raises(asyncpg.PostgresError, match=says) as caught:
                async with db.transaction():
                    await depend(db, job_id, after)
            assert caught.value.sqlstate == "PW004"
    assert [await status(db, job_id) for job_id in (one, two)] == ["pending", "blocked"]


async def child_of_a_finished_parent(_: str, db: Db) -> None:
    parent = await batch(db)
    await seal(db, parent)
    for adds in (batch(db, "child", parent=parent), insert(db, "q", batch_id=parent)):
        with pytest.raises(asyncpg.PostgresError, match="is finished: it takes no more") as caught:
            await adds
        assert caught.value.sqlstate == "PW003"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def unicode_forms(dsn: str, db: Db) -> None:
    app = App()
    app.handler("q", concurrency=10)(lambda: None)
    composed = "caf\u00e9"
    decomposed = unicodedata.normalize("NFD", composed)
    keys = [await insert(db, "q", dedupe_key=key, serialize_key=key) for key in (composed, decomposed)]
    with pytest.raises(asyncpg.UniqueViolationError):
        await insert(db, "q", dedupe_key=composed)
    async with running(app, dsn):
        for job_id in keys:
            await until(waits_for_status(db, job_id, "completed"))
    sql = "SELECT array_agg(dedupe_key::bytea ORDER BY id) FROM pgworkd.finished_jobs"
    assert await db.fetchval(sql) == [composed.encode(), decomposed.encode()]


def changed_by_hand(sql: str, becomes: str | None) -> Check:
    """Someone updates a running row: its outcome is rejected as stale, other jobs are not affected."""

    async def check(dsn: str, db: Db) -> None:
        app, go_on = App(), anyio.Event()

        @app.handler("odd", queue="q")
        async def handle() -> None:
            await go_on.wait()

        async with among_good_ones(dsn, db, app, kind="odd") as (odd, _, seen):
            await seen.wait(events.JOB_STARTED, job_id=str(odd))
            await db.execute(sql, odd)
            go_on.set()
            stale = await seen.wait(events.JOB_STALE, job_id=str(odd))
            assert (stale["attempt"], stale["outcome"]) == (1, "completed")
            assert await status(db, odd) == becomes

    return check


async def many_rows_one_notice(dsn: str, db: Db) -> None:
    """100,000 of them: a million would take ten times as long and prove no more."""
    await set_pool(db, await worker(db))
    session = await asyncpg.connect(dsn)
    try:
        notices = await Notices(session).listen()
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 100000)")
        (notice,) = await notices.heard()
    finally:
        session.terminate()
    assert notice["queue"] == "q"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 100_000


async def truncated(dsn: str, db: Db) -> None:
    app, go_on = App(), anyio.Event()

    @app.handler("q", concurrency=2)
    async def handle(payload: dict[str, Any]) -> None:
        if payload:
            await go_on.wait()

    async with running(app, dsn) as (daemon, seen):
        held = [await insert(db, "q", '{"wait": 1}') for _ in range(4)]
        await seen.wait(events.JOB_STARTED, count=2)
        await db.execute("TRUNCATE pgworkd.jobs")
        go_on.set()
        await until(waits_for_status(db, await insert(db, "q"), "completed"))
        stale = {facts["job_id"] for facts in seen.all(events.JOB_STALE)}
        assert stale <= {str(job_id) for job_id in held}
        assert len(stale) >= 2
        assert daemon.worker.may_claim


async def duplicate_keys(dsn: str, db: Db) -> None:
    app, got = App(), []

    @app.handler("odd", queue="q")
    async def handle(payload: dict[str, Any]) -> None:
        got.append(payload)

    async with among_good_ones(dsn, db, app, kind="odd", payload='{"a": 1, "b": 2, "a": 3}') as (odd, _, seen):
        await seen.wait(events.JOB_COMPLETED, job_id=str(odd))
    assert got == [{"a": 3, "b": 2}]


CASES = [
    Case(16, "a batch below itself", cyclic_batches),
    Case(16, "a batch 33 deep", deep_batches),
    Case(16, "jobs that wait for each other", cyclic_dependencies),
    *[
        Case(17, name, refused(sql, "PW003", message=f"batch {NOBODY} does not exist", args=[NOBODY]))
        for name, sql in (
            ("a job of no batch", "INSERT INTO pgworkd.jobs (queue, batch_id) VALUES ('q', $1)"),
            ("a child of no batch", "SELECT pgworkd.create_batch('b', 'q', p_parent => $1)"),
        )
    ],
    Case(18, "a child of a finished batch", child_of_a_finished_parent),
    *[
        Case(19, f"{name} of 12 KB", column(name, "repeat('x', 12000)", "23514", KEY))
        for name in ("dedupe_key", "serialize_key", "limit_key")
    ],
    Case(20, "keys in NFC and NFD", unicode_forms),
    Case(21, "a running row is deleted", changed_by_hand("DELETE FROM pgworkd.jobs WHERE id = $1", None)),
    Case(
        21,
        "a running row is updated",
        changed_by_hand(
            "UPDATE pgworkd.jobs SET status = 'failed', worker_id = NULL, run_at = now() + '1 h' WHERE id = $1",
            "failed",
        ),
    ),
    Case(22, "100,000 rows in one INSERT", many_rows_one_notice),
    Case(23, "TRUNCATE while jobs run", truncated),
    Case(24, "duplicate JSON keys", duplicate_keys),
    Case(
        25,
        "an assignment without running",
        column("assignment_id", f"'{NOBODY}'", "23514", "a_lease_of_its_own_needs_an_assignment"),
    ),
]
