"""The functions of schema.sql resolve every name the same way under any search_path."""

from __future__ import annotations

import uuid

import pytest

from tests.kits import verbs as v
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")

HOSTILE = """
CREATE SCHEMA evil;
CREATE FUNCTION evil.bang() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'evil code runs' USING ERRCODE = 'EVIL0';
END $$;
"""

HOSTILE_PATH = "SET search_path = evil, pg_catalog, pgworkd"


async def _insert(db: Db, count: int) -> list[uuid.UUID]:
    """The INSERT .. SELECT of the tests names types, and here types are shadowed too."""
    return [await db.fetchval("INSERT INTO pgworkd.jobs (queue) VALUES ('q') RETURNING id") for _ in range(count)]


async def every_verb(db: Db) -> tuple[uuid.UUID, uuid.UUID, uuid.UUID]:
    """Calls all verbs of daemons and operators, in statements that name no function, operator or type of others.

    The session's clock is at T0. Returns jobs that are completed, cancelled and failed.
    """
    worker_id = await v.worker(db)
    await v.set_pool(db, worker_id)
    completed, failed, released, ended, dead, asked, lost = await _insert(db, 7)
    assert len(await v.claim_ids(db, worker_id)) == 7
    assert await v.complete(db, [completed]) == {completed}
    assert await v.fail(db, [failed, dead], permanent=[False, True]) == {failed: "failed", dead: "dead"}
    assert await v.release(db, [released]) == {released}
    assert await v.end(db, [ended]) == {ended}
    assert await v.cancel(db, asked, released) == {asked: "requested", released: "cancelled"}
    assert await v.retry(db, dead) == {dead}
    assert await db.fetchval("SELECT pgworkd.discard($1)", [dead]) == 0
    assert await db.fetchval("SELECT pgworkd.edit($1, p_priority => 1)", dead) == '{"priority": 1}'
    assert await db.fetchval("SELECT ids FROM pgworkd.matching('cancel', 'q')") == sorted([asked, dead, failed, lost])
    assert await db.fetch("SELECT * FROM pgworkd.next_due('{q}')") == [("q", 0.0)]
    assert await db.fetchval("SELECT pgworkd.expire()") == 0
    assert await db.fetchval("SELECT pgworkd.ensure_partitions(1)") == 1, "today has rows elsewhere already"
    assert len(await db.fetch("SELECT * FROM pgworkd.prune(7, 7)")) == 1
    await db.execute("SELECT pgworkd.put_schedule('s', 'q', NULL, NULL, 60, 'UTC', 'skip', '{}')")
    assert await db.fetchval("SELECT pgworkd.add_occurrences('{s}', $1, '{1}')", [v.at(0)]) == ["s"]
    assert len(await db.fetch("SELECT * FROM pgworkd.ensure_schedules()")) == 1
    assert await db.fetchval("SELECT pgworkd.fail_schedule('s', 1, 'why')") is True
    await db.execute("UPDATE pgworkd.schedules SET every_s = 61")
    assert {
        row[0]
        for row in await db.fetch(
            "SELECT id FROM pgworkd.running_of($1, $2, -1)", worker_id, await v.token(db, worker_id)
        )
    } == {asked, lost}
    batch = await db.fetchval("SELECT id FROM pgworkd.create_batch('b', 'another')")
    assert len(await db.fetchval("SELECT pgworkd.add_jobs($1, ARRAY[$2::jsonb])", batch, "{}")) == 1
    assert await db.fetchval("SELECT pgworkd.seal_batch($1)", batch) is True
    assert await db.fetchrow("SELECT * FROM pgworkd.cancel_batch($1)", batch) == (1, 0, False)
    assert await db.fetchval("SELECT state FROM pgworkd.batch_progress") == "cancelled"
    assert await db.fetchval("SELECT pgworkd.delete_batch($1)", batch) == 1
    await db.execute(KEPT)
    assert await db.fetchval("SELECT pgworkd.free_key('q', 'kept')") is True
    assert await db.fetchval("SELECT pgworkd.free_batch_key('b', 'kept')") is False
    async with db.transaction():
        first, second = await _insert(db, 2)
        assert await db.fetchval("SELECT pgworkd.depend($1, $2)", second, [first]) == 1
    assert await db.fetch("SELECT * FROM pgworkd.await_results($1, 'c', 9)", [first]) == []
    assert len(await db.fetch("SELECT id FROM pgworkd.result_of($1)", [first])) == 1
    assert await db.fetchval("SELECT reason FROM pgworkd.blocked_jobs") == "waits for 1 job"
    assert await db.fetchval("SELECT pgworkd.report_progress($1, '{0}', '{1}', '{x}')", [first]) == []
    assert await db.fetchval("SELECT pgworkd.mend_dependencies()") == 0
    assert await db.fetchval("SELECT pgworkd.undepend($1)", [second]) == [second]
    assert (await v.cancel(db, first, second)) == {first: "cancelled", second: "cancelled"}
    rescuer = await v.worker(db)
    for seconds in (10, 20, 30, 40):
        await v.clock(seconds, db)
        assert await v.heartbeat(db, rescuer) is not None
    assert len(await v.rescue(db, rescuer)) == 2
    assert await v.sign_off(db, rescuer) is True
    return completed, asked, lost


KEPT = """
INSERT INTO pgworkd.jobs (queue, dedupe_key, dedupe_until, status) VALUES ('q', 'kept', '2150-01-01', 'completed')
"""


async def test_every_function_that_runs_a_statement_pins_its_search_path(db: Db) -> None:
    rows = await db.fetch(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'pgworkd'::regnamespace AND prosqlbody IS NULL "
        "AND NOT coalesce(proconfig, '{}') && "
        "ARRAY['search_path=pgworkd, pg_catalog, pg_temp', 'search_path=pg_catalog, pgworkd, pg_temp']"
    )
    # The excluded functions were parsed at creation. This one is inlined into others' statements; it touches no table.
    assert {row[0] for row in rows} <= {"add_error"}


@pytest.mark.parametrize(
    "shadow",
    [
        "CREATE DOMAIN evil.timestamptz AS text",
        "CREATE FUNCTION evil.lpad(text, int, text) RETURNS text LANGUAGE sql AS 'SELECT evil.bang(); SELECT $1'",
        "CREATE FUNCTION evil.uuidv7() RETURNS uuid LANGUAGE sql AS 'SELECT evil.bang(); SELECT gen_random_uuid()'",
    ],
    ids=["timestamptz", "lpad", "uuidv7"],
)
async def test_column_defaults_ignore_the_callers_search_path(db: Db, shadow: str) -> None:
    """A body that is a string is parsed at each call, in the caller's path: its functions, its casts."""
    await db.execute(HOSTILE)
    await db.execute(shadow)
    await db.execute(HOSTILE_PATH)
    await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('q')")
