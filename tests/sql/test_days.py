"""Days of the history are added without reading what is in no day, and without a settle that waits."""

from __future__ import annotations

import pytest

from tests.kits.verbs import Db, clock, complete, insert, worker

pytestmark = pytest.mark.usefixtures("t0")

DAY = 86_400
LARGE = """
    INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, status, priority, attempts, failures, queue,
                                       payload, errors)
    SELECT pgworkd.new_id(), pgworkd.clock() - interval '1 day' - n * interval '1 s', pgworkd.clock(), pgworkd.clock(),
           'completed', 0, 1, 0, 'q', jsonb_build_object('x', repeat('x', 1500)), '[]'
    FROM generate_series(1, 6000) n"""
"""9 MB or more."""
READ = "SELECT seq_tup_read FROM pg_stat_xact_all_tables WHERE relname = 'finished_jobs_other'"
DAYS = """SELECT array_agg(right(c.relname, 8)::text ORDER BY c.relname) FROM pg_inherits i
    JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'pgworkd.finished_jobs'::regclass AND c.relname ~ '^finished_jobs_2100'"""
RULED_OUT = "SELECT conname::text FROM pg_constraint WHERE conname LIKE 'no_rows_of_%'"


async def ensure(db: Db, ahead: int) -> tuple[int, int]:
    """How many days were made, and rows of no day read for that."""
    async with db.transaction():
        before = await db.fetchval(READ)
        made = await db.fetchval("SELECT pgworkd.ensure_partitions($1)", ahead)
        return made, await db.fetchval(READ) - before


async def days(db: Db) -> list[str]:
    return list(await db.fetchval(DAYS) or [])


async def other_row(db: Db, days_on: float) -> None:
    """A row of no day, as a wrong clock makes it."""
    sql = LARGE.replace("6000", "1").replace("- interval '1 day'", f"+ {days_on} * interval '1 day'")
    await db.execute(sql)


async def finish(db: Db) -> None:
    ids = await insert(db, 1)
    await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 1)", await worker(db))
    assert await complete(db, ids)


async def test_a_large_table_of_no_day_is_read_once_and_locks_nobody_out(db: Db, other: Db) -> None:
    await db.execute(LARGE)
    assert await ensure(db, 7) == (0, 0)
    assert await db.fetchval("SELECT pgworkd.rule_out_days()") is True
    assert await db.fetchval(RULED_OUT) == "no_rows_of_21000617_21000717"
    assert await ensure(db, 7) == (0, 0), "nobody has checked it yet"
    await other.execute("BEGIN; SELECT pgworkd.validate_days()")
    await db.execute("SET lock_timeout = '100ms'")
    await finish(db)  # today's rows, and tomorrow's, still go where those of no day go
    await clock(DAY, db)
    await finish(db)
    await clock(0, db)
    await other.execute("COMMIT")
    await db.execute("RESET lock_timeout")  # autovacuum may hold it for longer
    assert await ensure(db, 7) == (6, 0)
    assert await ensure(db, 31) == (24, 0)
    assert (await days(db))[::29] == ["21000617", "21000716"]
    assert await db.fetchval("SELECT pgworkd.rule_out_days()") is False, "all are there"
    assert await db.fetchval(RULED_OUT) is None
    await clock(3 * DAY, db)
    await finish(db)
    rows = await db.fetch("SELECT tableoid::regclass::text FROM pgworkd.finished_jobs WHERE finished_at >= $1 ORDER BY"
                          " finished_at", await db.fetchval("SELECT pgworkd.clock() - interval '3 days'"))  # fmt: skip
    assert [row[0] for row in rows] == [*["pgworkd.finished_jobs_other"] * 2, "pgworkd.finished_jobs_21000618"]


async def test_days_are_ruled_out_up_to_the_first_row_of_one(db: Db) -> None:
    await db.execute(LARGE)
    await other_row(db, 5)
    assert await db.fetchval("SELECT pgworkd.rule_out_days()") is True
    assert await db.fetchval(RULED_OUT) == "no_rows_of_21000617_21000620"
    await db.execute("SELECT pgworkd.validate_days()")
    assert await ensure(db, 31) == (3, 0)
    assert await db.fetchval("SELECT pgworkd.rule_out_days()") is False, "the next has a row, which it may keep"
    assert await db.fetchval("SELECT pgworkd.rule_out_days()") is False


async def test_a_constraint_goes_before_its_days_come(db: Db) -> None:
    """Else, where it was checked and nobody has added the days, a settle would be refused."""
    await db.execute(LARGE)
    assert await db.fetchval("SELECT pgworkd.rule_out_days()") is True
    await clock(DAY, db)
    assert await db.fetchval("SELECT pgworkd.rule_out_days()") is True
    assert await db.fetchval(RULED_OUT) == "no_rows_of_21000618_21000718"
    await clock(2 * DAY, db)
    await finish(db)


@pytest.mark.parametrize("checked", [False, True])
async def test_days_that_nobody_has_added_in_time_refuse_no_rows(db: Db, checked: bool) -> None:
    """The daemons were away for days."""
    await db.execute(LARGE)
    assert await db.fetchval("SELECT pgworkd.rule_out_days()") is True
    if checked:
        await db.execute("SELECT pgworkd.validate_days()")
    await clock(5 * DAY, db)
    assert (await ensure(db, 0))[0] == checked
    await finish(db)


async def test_the_first_rows_of_a_day_may_stay_where_they_are(db: Db) -> None:
    await finish(db)
    assert await ensure(db, 2) == (2, 3)
    assert await days(db) == ["21000616", "21000617"]
    await finish(db)
    await clock(DAY, db)
    await finish(db)
    counts = await db.fetch("SELECT count(*) FROM pgworkd.finished_jobs GROUP BY tableoid ORDER BY 1")
    assert [row[0] for row in counts] == [1, 2]


async def test_a_day_that_is_added_has_all_that_the_history_has(db: Db) -> None:
    await db.execute("ALTER TABLE pgworkd.finished_jobs ADD CONSTRAINT theirs CHECK (queue <> 'nowhere')")
    assert (await ensure(db, 0))[0] == 1
    shapes = await db.fetch(
        "SELECT array_agg(a.attname || ' ' || a.atttypid::regtype || ' ' || a.attnotnull || coalesce(d.adbin::text, '')"
        " ORDER BY a.attnum), (SELECT count(*) FROM pg_index x WHERE x.indrelid = c.oid AND x.indisvalid),"
        " (SELECT array_agg(k.conname ORDER BY k.conname) FROM pg_constraint k WHERE k.conrelid = c.oid"
        "  AND k.contype = 'c')"
        " FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
        " LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum"
        " WHERE c.oid IN ('pgworkd.finished_jobs'::regclass, 'pgworkd.finished_jobs_21000615'::regclass) GROUP BY c.oid"
    )
    assert len(shapes) == 2
    assert shapes[0] == shapes[1]
