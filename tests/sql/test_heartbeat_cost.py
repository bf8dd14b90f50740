"""The queries of a heartbeat cost the same whatever has run before, and however many queues have settings."""

from __future__ import annotations

import json

import pytest

from tests.kits.sessions import NO_STATISTICS, blocks
from tests.kits.verbs import Db, at, cancel, claim_ids, clock, complete, insert, one, worker

from .conftest import Connect

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]

WANTED = "SELECT * FROM pgworkd.wanted($1)"


async def test_finished_jobs_do_not_slow_a_heartbeat_while_vacuum_is_held_back(db: Db, connect: Connect) -> None:
    """The index entries of jobs the worker has run remain; a heartbeat must not read them."""
    worker_id = await worker(db, 3600)
    await db.execute(NO_STATISTICS)
    running = await insert(db, 2)
    assert await claim_ids(db, worker_id) == running
    alone = await blocks(db, WANTED, worker_id)
    holder = await connect()
    await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await holder.fetchval("SELECT count(*) FROM pgworkd.jobs")
    for _ in range(5):
        await insert(db, 1000)
        await complete(db, await claim_ids(db, worker_id, 1000))
    for session in (db, await connect()):
        assert await blocks(session, WANTED, worker_id) <= 1.5 * alone
    await cancel(db, running[1])
    row = await db.fetchrow(WANTED, worker_id)
    assert row is not None
    assert (row["cancel_ids"], row["cancel_attempts"]) == (running[1:], [1])


async def test_polling_for_due_jobs_by_idle_pools_costs_the_same(db: Db, connect: Connect) -> None:
    """They poll every second or two; the index entries of finished jobs remain in front of the waiting ones."""
    worker_id = await worker(db, 3600)
    await db.execute(NO_STATISTICS)
    next_due = "SELECT * FROM pgworkd.next_due($1, $2, $3)"
    known = (["q", "r"], [12.0, 12.0], ["{5,0}", "{5,0}"])
    await clock(600, db)
    await one(db, run_at=at(650), priority=5)
    await one(db, run_at=at(595))
    alone = await blocks(db, next_due, *known)
    await clock(0, db)
    holder = await connect()
    await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await holder.fetchval("SELECT count(*) FROM pgworkd.jobs")
    for columns in ({}, {"priority": 5}, {"limit_key": "l"}, {"limit_key": "l", "priority": 5}):
        for queue in "qr":
            await insert(db, 1000, queue, run_at=at(0), **columns)
            await complete(db, await claim_ids(db, worker_id, 1000, queue))
    fresh = await connect()
    await clock(600, db, fresh)
    for session in (db, fresh):
        assert await blocks(session, next_due, *known) <= 1.5 * alone
    assert await db.fetch(next_due, *known) == [("q", -5.0)]
    await one(db, "r", run_at=at(604), priority=3)
    await one(db, "r", run_at=at(603), limit_key="l", priority=9)
    await one(db, "r", run_at=at(602), limit_key="l", priority=-9)
    assert await db.fetch(next_due, *known) == [("q", -5.0), ("r", 2.0)]


async def test_settings_of_other_queues_do_not_slow_a_heartbeat(db: Db, other: Db) -> None:
    """5,000 of them; those of its own queues are still returned. A call that names no queues gets all."""
    worker_id = await worker(db)
    sql, queues = "SELECT * FROM pgworkd.wanted($1, $2, $3)", ["q", "r"]
    settings = "INSERT INTO pgworkd.queues (name, concurrency) SELECT $1 || n, 5 FROM generate_series($2::int, $3) n"
    for name in queues:
        await db.execute("INSERT INTO pgworkd.queues (name, concurrency) VALUES ($1, 7)", name)
    row = await db.fetchrow(sql, worker_id, None, queues)
    assert row is not None
    version, settings_then = row["settings_version"], row["settings"]

    async def cost(session: Db, known: str | None) -> int:
        """The minimum of several: a call that is planned anew also reads catalogs."""
        return min([await blocks(session, sql, worker_id, known, queues) for _ in range(4)])

    alone = [await cost(db, known) for known in (version, None)]
    await db.execute(settings, "other", 1, 5000)
    for session in (db, other):
        found = [await cost(session, known) for known in (version, None)]
        assert all(beside <= 1.5 * before + 2 for beside, before in zip(found, alone, strict=True))
    row = await db.fetchrow(sql, worker_id, version, queues)
    assert row is not None
    assert (row["settings"], row["settings_version"]) == (None, version), "what others have is no news"
    row = await db.fetchrow(sql, worker_id, None, queues)
    assert row is not None
    assert row["settings"] == settings_then
    await db.execute("UPDATE pgworkd.queues SET concurrency = 8 WHERE name = 'r'")
    row = await db.fetchrow(sql, worker_id, version, queues)
    assert row is not None
    assert json.loads(row["settings"])["r"]["concurrency"] == 8
    row = await db.fetchrow("SELECT * FROM pgworkd.wanted($1)", worker_id)
    assert row is not None
    assert len(json.loads(row["settings"])) == 5002


async def test_settings_are_returned_again_only_when_they_have_changed(db: Db, other: Db) -> None:
    """Whatever changed them, also when a transaction that began earlier commits later, at one instant."""
    worker_id = await worker(db)
    await db.execute("INSERT INTO pgworkd.queues (name, concurrency) SELECT 'q' || n, 5 FROM generate_series(1, 50) n")

    async def asked(known: str | None) -> tuple[dict[str, object] | None, str]:
        row = await db.fetchrow("SELECT * FROM pgworkd.wanted($1, $2)", worker_id, known)
        assert row is not None
        return row["settings"] and json.loads(row["settings"]), row["settings_version"]

    settings, version = await asked(None)
    assert settings is not None
    assert len(settings) == 50
    assert await asked(version) == (None, version)
    await other.execute("BEGIN")
    await other.execute("UPDATE pgworkd.queues SET concurrency = 6 WHERE name = 'q1'")
    changes = [
        (db, "UPDATE pgworkd.queues SET concurrency = 7 WHERE name = 'q2'"),
        (other, "COMMIT"),
        (db, "DELETE FROM pgworkd.queues WHERE name = 'q3'"),
        (db, "INSERT INTO pgworkd.queues (name, concurrency) VALUES ('q3', 5)"),
        (db, "UPDATE pgworkd.queues SET paused_until = 'infinity' WHERE name = 'q2'"),
        (db, "UPDATE pgworkd.queues SET paused_until = pgworkd.clock() + interval '9 s' WHERE name = 'q2'"),
    ]
    for session, change in changes:
        await session.execute(change)
        settings, version = await asked(version)
        assert settings is not None, change
    assert (await asked(version))[0] is not None, "while a pause counts down, each answer says how long it lasts"


async def test_the_version_of_the_settings_is_stable_while_transaction_ids_advance(db: Db, other: Db) -> None:
    """It is derived from age() of the rows, which grows with each transaction of the server."""
    worker_id = await worker(db)
    await db.execute("INSERT INTO pgworkd.queues (name, concurrency) SELECT 'q' || n, 5 FROM generate_series(1, 3) n")
    await db.execute("VACUUM (FREEZE) pgworkd.queues")
    await db.execute("UPDATE pgworkd.queues SET concurrency = 6 WHERE name = 'q1'")
    version = "SELECT settings_version FROM pgworkd.wanted($1)"
    before = await db.fetchval(version, worker_id)
    for _ in range(20):
        await other.execute("SELECT pg_current_xact_id()")
    assert await db.fetchval(version, worker_id) == before


async def test_a_search_for_orphaned_attempts_does_not_reread_earlier_rows(db: Db, connect: Connect) -> None:
    """Each worker searches every half minute; the index entries of jobs it has run remain, in each of its queues."""
    worker_id = await worker(db, 3600)
    await db.execute(NO_STATISTICS)
    running_of = "SELECT id FROM pgworkd.running_of($1, (SELECT token FROM pgworkd.workers WHERE id = $1), 60, $2, $3)"
    window = (worker_id, 100.0, ["q", "r"])
    old = await insert(db, 1)
    assert await claim_ids(db, worker_id, 1) == old
    await clock(500, db)
    stray = await insert(db, 1)
    assert await claim_ids(db, worker_id, 1) == stray
    await clock(580, db)
    alone = await blocks(db, running_of, *window)
    await clock(10, db)
    holder = await connect()
    await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await holder.fetchval("SELECT count(*) FROM pgworkd.jobs")
    for queue in "qrqrs":
        await insert(db, 1000, queue)
        await complete(db, await claim_ids(db, worker_id, 1000, queue))
    fresh = await connect()
    await clock(580, db, fresh)
    for session in (db, fresh):
        assert await blocks(session, running_of, *window) <= 1.5 * alone
    assert [row["id"] for row in await db.fetch(running_of, *window)] == stray
    assert {row["id"] for row in await db.fetch(running_of, worker_id, None, None)} == {*old, *stray}
