"""The functions of schema.sql resolve every name the same way under any search_path."""

from __future__ import annotations

import uuid

import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Notices
from tests.kits.verbs import Db

from .conftest import Connect

pytestmark = pytest.mark.usefixtures("t0")

HOSTILE = """
CREATE SCHEMA evil;
CREATE TABLE evil.audit (LIKE pgworkd.audit);
CREATE TABLE evil.batches (LIKE pgworkd.batches);
CREATE TABLE evil.batch_additions (LIKE pgworkd.batch_additions);
CREATE TABLE evil.jobs (LIKE pgworkd.jobs);
CREATE TABLE evil.finished_jobs (LIKE pgworkd.finished_jobs);
CREATE TABLE evil.finished_jobs_other (LIKE pgworkd.finished_jobs);
CREATE TABLE evil.job_dependencies (LIKE pgworkd.job_dependencies);
CREATE TABLE evil.progress (LIKE pgworkd.progress);
CREATE TABLE evil.refused_rows (LIKE pgworkd.refused_rows);
CREATE TABLE evil.result_waiters (LIKE pgworkd.result_waiters);
CREATE TABLE evil.workers (LIKE pgworkd.workers);
CREATE TABLE evil.pools (LIKE pgworkd.pools);
CREATE TABLE evil.queues (LIKE pgworkd.queues);
CREATE TABLE evil.schedules (LIKE pgworkd.schedules);
CREATE FUNCTION evil.bang() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'evil code runs' USING ERRCODE = 'EVIL0';
END $$;
CREATE FUNCTION evil.clock() RETURNS timestamptz LANGUAGE sql AS 'SELECT evil.bang(); SELECT now()';
CREATE FUNCTION evil.new_id() RETURNS uuid LANGUAGE sql AS 'SELECT evil.bang(); SELECT gen_random_uuid()';
CREATE FUNCTION evil.unnest(anyarray) RETURNS SETOF anyelement LANGUAGE sql AS 'SELECT evil.bang(); SELECT $1[1]';
CREATE FUNCTION evil.cardinality(anyarray) RETURNS int LANGUAGE sql AS 'SELECT evil.bang(); SELECT 0';
CREATE FUNCTION evil.array_position(text[], text) RETURNS int LANGUAGE sql AS 'SELECT evil.bang(); SELECT 0';
CREATE FUNCTION evil.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT evil.bang()';
CREATE FUNCTION evil.pg_try_advisory_xact_lock(int, int) RETURNS bool LANGUAGE sql AS 'SELECT evil.bang(); SELECT true';
CREATE FUNCTION evil.jsonb_build_array(anyelement) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
CREATE FUNCTION evil.jsonb_array_length(jsonb) RETURNS int LANGUAGE sql AS 'SELECT evil.bang(); SELECT 0';
CREATE FUNCTION evil.cancel(uuid[]) RETURNS void LANGUAGE sql AS 'SELECT evil.bang()';
CREATE FUNCTION evil.wake(text[]) RETURNS void LANGUAGE sql AS 'SELECT evil.bang()';
CREATE FUNCTION evil.archive(uuid[], text, text) RETURNS int LANGUAGE sql AS 'SELECT evil.bang(); SELECT 0';
CREATE FUNCTION evil.equal(uuid, uuid) RETURNS bool LANGUAGE sql AS 'SELECT evil.bang(); SELECT true';
CREATE OPERATOR evil.= (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = evil.equal);
CREATE TYPE evil.job_status AS ENUM ('evil');
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


async def test_a_hostile_search_path_changes_nothing(db: Db, connect: Connect) -> None:
    await db.execute(HOSTILE)
    await db.execute("CREATE TEMP TABLE jobs (LIKE pgworkd.jobs); CREATE TEMP TABLE workers (LIKE pgworkd.workers)")
    await db.execute(HOSTILE_PATH)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await db.fetch("SELECT clock()")
    assert caught.value.sqlstate == "EVIL0", "the path is hostile indeed"
    completed, asked, lost = await every_verb(db)
    for table in v.TABLES:
        assert await db.fetchval(f"SELECT count(*) FROM evil.{table}") == 0  # noqa: S608 - names are ours
    clean = await connect()
    assert await v.statuses(clean, [completed, asked, lost]) == ["completed", "cancelled", "failed"]


NAMES_OF_AN_INSERT = """
CREATE FUNCTION evil.equal(text, text) RETURNS bool LANGUAGE sql AS 'SELECT evil.bang(); SELECT true';
CREATE FUNCTION evil.equal(pgworkd.job_status, pgworkd.job_status) RETURNS bool LANGUAGE sql
    AS 'SELECT evil.bang(); SELECT true';
CREATE FUNCTION evil.before(timestamptz, timestamptz) RETURNS bool LANGUAGE sql AS 'SELECT evil.bang(); SELECT true';
CREATE FUNCTION evil.first(timestamptz, timestamptz) RETURNS timestamptz LANGUAGE sql
    AS 'SELECT evil.bang(); SELECT $1';
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.equal);
CREATE OPERATOR evil.= (LEFTARG = pgworkd.job_status, RIGHTARG = pgworkd.job_status, FUNCTION = evil.equal);
CREATE OPERATOR evil.<= (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = evil.before);
CREATE AGGREGATE evil.min(timestamptz) (SFUNC = evil.first, STYPE = timestamptz);
CREATE DOMAIN evil.text AS pg_catalog.text;
CREATE FUNCTION evil.notify_pools(text, timestamptz) RETURNS void LANGUAGE sql AS 'SELECT evil.bang()';
"""


async def test_the_insert_trigger_ignores_the_callers_search_path(db: Db, notices: Notices) -> None:
    await v.set_pool(db, await v.worker(db))
    await db.execute(HOSTILE + NAMES_OF_AN_INSERT)
    await db.execute(HOSTILE_PATH)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await db.fetch("SELECT 'a'::pg_catalog.text = 'b'::pg_catalog.text")
    assert caught.value.sqlstate == "EVIL0", "the path is hostile indeed"
    await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('q'), ('r')")
    assert await notices.queues() == ["q"]


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
