"""expire, ensure_partitions, prune, running_of: the periodic maintenance of any daemon, and how it blocks nobody."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")

DAY = 86400
LOCK_TIMEOUT_S = 0.2


async def expire(db: Db, limit: int = 1000) -> int:
    """expire(); the number of jobs it finished."""
    return int(await db.fetchval("SELECT pgworkd.expire($1)", limit))


async def ensure(db: Db, days: int = 7) -> int:
    """ensure_partitions(); the number of partitions it created."""
    return int(await db.fetchval("SELECT pgworkd.ensure_partitions($1)", days))


async def prune(db: Db, keep_days: int = 7, keep_dead_days: int = 30, limit: int = 5000) -> tuple[int, int]:
    """prune(); rows deleted, dead moved."""
    return tuple(await db.fetchrow("SELECT * FROM pgworkd.prune($1, $2, $3)", keep_days, keep_dead_days, limit))  # type: ignore[return-value]


async def drop_all(db: Db, keep_days: int = 7) -> int:
    """drop_partition() until there is none left; the number dropped."""
    dropped = 0
    while await db.fetchval("SELECT pgworkd.drop_partition($1)", keep_days) is not None:
        dropped += 1
    return dropped


async def partitions(db: Db) -> list[str]:
    """The day partitions of the history, in order."""
    sql = """SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
             WHERE i.inhparent = 'pgworkd.finished_jobs'::regclass AND c.relname <> 'finished_jobs_other' ORDER BY 1"""
    return [row[0].removeprefix("finished_jobs_") for row in await db.fetch(sql)]


def day(days: float) -> str:
    """The name of the partition this many days after T0."""
    return v.at(days * DAY).strftime("%Y%m%d")


async def finished(db: Db, days: float, count: int = 1, queue: str = "q") -> None:
    """Completes this many jobs a number of days after T0; the clock is at T0 again when it returns."""
    await v.clock(days * DAY, db)
    worker_id = await v.worker(db)
    ids = await v.insert(db, count, queue)
    assert await v.claim_ids(db, worker_id, count, queue) == ids
    await v.complete(db, ids)
    await v.clock(0, db)


# expire


async def test_expire_finishes_waiting_jobs_past_their_expiry(db: Db) -> None:
    gone = [await v.one(db, expires_at=v.at(-1)), await v.one(db, expires_at=v.T0, run_at=v.at(60))]
    kept = [await v.one(db, expires_at=v.T0 + timedelta(microseconds=1)), await v.one(db)]
    assert await expire(db) == 2
    assert await v.statuses(db, [*gone, *kept]) == ["expired"] * 2 + ["pending"] * 2
    row = await v.over(db, gone[0])
    assert (row["finished_at"], row["error"], row["attempts"]) == (v.T0, "expired before it could start", 0)
    assert await expire(db) == 0


async def test_expire_leaves_running_and_dead_jobs(db: Db) -> None:
    ids = await v.insert(db, 2, expires_at=v.at(1))
    await v.claim(db, await v.worker(db))
    await v.fail(db, ids[1:], permanent=True)
    await v.clock(60, db)
    assert await expire(db) == 0
    assert await v.complete(db, ids[:1]) == set(ids[:1])


async def test_expire_takes_the_oldest_first_up_to_its_limit(db: Db) -> None:
    ids = [await v.one(db, expires_at=v.at(-seconds)) for seconds in (1, 3, 2)]
    assert await expire(db, 2) == 2
    assert await v.statuses(db, ids) == ["pending", "expired", "expired"]
    assert await expire(db, 2) == 1


async def test_expire_skips_locked_rows_and_a_concurrent_expire(db: Db, other: Db) -> None:
    ids = await v.insert(db, 3, expires_at=v.at(-1))
    await db.execute("SET statement_timeout = '2s'")
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", ids[0])
    assert await expire(db, 1) == 1
    await db.execute("BEGIN")
    assert await expire(db) == 1
    await other.execute("ROLLBACK")
    assert await expire(other) == 0, "one at a time"
    await db.execute("COMMIT")
    assert await expire(other) == 1


# ensure_partitions


async def test_partitions_are_created_for_today_and_the_days_ahead(db: Db) -> None:
    made = await partitions(db)
    today = await db.fetchval("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    first = datetime.strptime(made[0], "%Y%m%d").replace(tzinfo=UTC)
    assert made == [(first + timedelta(days=n)).strftime("%Y%m%d") for n in range(8)], "schema.sql makes a week"
    assert made[0] <= today <= made[-1]
    assert await ensure(db, 3) == 4
    assert (await partitions(db))[8:] == [day(n) for n in range(4)]
    assert await ensure(db, 3) == 0
    await v.clock(2 * DAY, db)
    assert await ensure(db, 3) == 2


@pytest.mark.parametrize("seconds", [0.0, -0.000001, 43199.999999, 43200.0])
async def test_a_partition_covers_its_utc_day_whatever_the_session_time_zone(db: Db, seconds: float) -> None:
    await db.execute("SET timezone = 'Pacific/Kiritimati'; SET datestyle = 'German'")
    await ensure(db, 1)
    await v.clock(-DAY, db)
    await ensure(db, 0)
    instant = v.T0.replace(hour=0) + timedelta(seconds=seconds)
    await db.execute("SELECT set_config('pgworkd.clock', $1, false)", str(instant))
    worker_id, job_id = await v.worker(db), await v.one(db)
    await v.claim(db, worker_id)
    await v.complete(db, [job_id])
    name = await db.fetchval("SELECT tableoid::regclass::text FROM pgworkd.finished_jobs")
    assert name == f"pgworkd.finished_jobs_{instant:%Y%m%d}"


async def test_a_day_with_rows_in_the_default_partition_stays_there_and_others_are_made(db: Db) -> None:
    await finished(db, 0, 3)
    await finished(db, 2, 1)
    assert await ensure(db, 3) == 2
    assert (await partitions(db))[8:] == [day(1), day(3)]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs_other") == 4
    await finished(db, 0)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs") == 5


async def test_creating_partitions_does_not_wait_for_a_long_reader_and_loses_nothing(db: Db, other: Db) -> None:
    await other.execute("BEGIN")
    await other.fetch("SELECT count(*) FROM pgworkd.all_jobs")
    assert await ensure(db, 0) == 0
    await finished(db, 0)
    await other.execute("COMMIT")
    assert await ensure(db, 1) == 1
    assert (await partitions(db))[8:] == [day(1)]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs") == 1


async def test_settles_proceed_while_a_partition_is_created_later(db: Db, other: Db) -> None:
    """ensure_partitions in an open transaction locks the table; a second caller returns at once."""
    await db.execute("BEGIN")
    await ensure(db)
    await other.execute("SET statement_timeout = '2s'")
    assert await ensure(other) == 0
    await db.execute("ROLLBACK")
    assert await ensure(other) == 8


# prune


async def test_prune_drops_partitions_past_the_retention(db: Db) -> None:
    await ensure(db, 3)
    await finished(db, 0, 3)
    await finished(db, 1, 2)
    await drop_all(db, 100)  # those that schema.sql made, for the days of the real clock
    assert await partitions(db) == [day(n) for n in range(4)]
    await v.clock(7 * DAY, db)
    assert await drop_all(db) == 0, "the day is over, but a row of its last minute is not 7 days old"
    await v.clock(8 * DAY, db)
    assert await drop_all(db) == 1
    assert await prune(db) == (0, 0)
    assert await partitions(db) == [day(n) for n in range(1, 4)]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs") == 2


async def test_prune_deletes_old_rows_without_a_partition_in_batches(db: Db) -> None:
    await finished(db, -20, 5)
    await finished(db, -6.99, 2)
    assert [(await prune(db, 7, 30, 3))[0] for _ in range(3)] == [3, 2, 0]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs") == 2


async def test_a_queue_may_keep_history_for_less_but_not_for_more_than_the_default(db: Db) -> None:
    queues = "('less', 60), ('more', 100000000), ('default', NULL)"
    await db.execute(f"INSERT INTO pgworkd.queues (name, keep_s) VALUES {queues}")  # noqa: S608
    await ensure(db, 0)
    for queue in ("less", "more", "default", "q"):
        await finished(db, -61 / DAY, 2, queue)
    await finished(db, -60 / DAY, 2, "less")
    assert await prune(db, 7, 30, 1) == (1, 0)
    assert await prune(db) == (1, 0)
    assert await prune(db) == (0, 0)
    rows = await db.fetch("SELECT queue, count(*) FROM pgworkd.finished_jobs GROUP BY 1 ORDER BY 1")
    assert [tuple(row) for row in rows] == [("default", 2), ("less", 2), ("more", 2), ("q", 2)]


async def test_prune_archives_jobs_that_have_been_dead_for_long(db: Db) -> None:
    await v.clock(-31 * DAY, db)
    old, alive, recent = await v.insert(db, 3)
    await v.claim(db, await v.worker(db), 3)
    await v.fail(db, [old], permanent=True, message="why")
    await v.fail(db, [alive], delay_s=100 * DAY)
    await v.clock(-29 * DAY, db)
    await v.fail(db, [recent], permanent=True)
    await v.clock(0, db)
    assert (await prune(db))[1] == 1
    row = await v.over(db, old)
    assert (row["status"], row["error"], row["finished_at"], row["failures"]) == ("dead", "why", v.T0, 1)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 2
    await v.clock(3 * DAY, db)
    assert (await prune(db, 7, 30, 0))[1] == 0
    assert (await prune(db))[1] == 1


async def test_dropping_a_partition_gives_up_at_its_first_reader_and_rows_are_deleted(db: Db, other: Db) -> None:
    await drop_all(db, 1)
    await ensure(db, 1)
    await finished(db, -20)
    await v.clock(10 * DAY, db)
    await other.execute("BEGIN")
    await other.fetch(f"SELECT FROM pgworkd.finished_jobs_{day(0)}")
    assert await drop_all(db) == 0
    assert (await prune(db))[0] == 1
    assert day(0) in await partitions(db)
    await other.execute("COMMIT")
    assert await drop_all(db) == 2
    assert await partitions(db) == []


@pytest.mark.parametrize("days", [0, -10, None])
async def test_the_history_of_today_cannot_be_pruned(db: Db, days: int | None) -> None:
    for verb in ("drop_partition($1)", "forget_rows($1, 10)", "prune($1, 30)"):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="keep_days must be 1 or more"):
            await db.execute(f"SELECT pgworkd.{verb}", days)


async def test_concurrent_prunes_do_not_wait_for_each_other(db: Db, other: Db) -> None:
    await finished(db, -20)
    await db.execute("BEGIN")
    assert (await prune(db))[0] == 1
    await other.execute("SET statement_timeout = '2s'")
    assert await prune(other) == (0, 0)
    await db.execute("COMMIT")


async def test_a_locked_dead_job_is_left_for_the_next_prune(db: Db, other: Db) -> None:
    job_id = await v.one(db, status="dead", failed_at=v.at(-31 * DAY))
    await db.execute("SET statement_timeout = '2s'")
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs FOR UPDATE")
    assert (await prune(db))[1] == 0
    await other.execute("COMMIT")
    assert (await prune(db))[1] == 1
    assert await v.statuses(db, [job_id]) == ["discarded"]


# running_of


async def test_running_of_lists_the_attempts_of_a_worker_older_than_an_age(db: Db) -> None:
    mine, others = await v.worker(db, 3600), await v.worker(db, 3600)
    old, fresh, theirs, ended = await v.insert(db, 4)
    for worker_id, job_id in ((mine, old), (mine, fresh), (others, theirs), (mine, ended)):
        await v.clock(10 if job_id == fresh else 0, db)
        assert await v.claim_ids(db, worker_id, 1) == [job_id]
    await v.cancel(db, old)  # it keeps running until its worker is notified
    await v.release(db, [ended])
    await v.clock(20, db)
    sql = "SELECT id, attempt FROM pgworkd.running_of($1, (SELECT token FROM pgworkd.workers WHERE id = $1), $2)"
    assert [tuple(row) for row in await db.fetch(sql, mine, 10.0)] == [(old, 1)]
    assert sorted(tuple(row) for row in await db.fetch(sql, mine, 0.0)) == sorted([(old, 1), (fresh, 1)])
    assert await db.fetch(sql, 4711, 0.0) == []


# Regressions


async def test_a_long_reader_delays_ensure_partitions_once_and_not_for_each_day(db: Db, other: Db) -> None:
    """Eight days would be eight waits of 200 ms, with every settle queued behind each: the first is the last."""
    await other.execute("BEGIN")
    await other.fetch("SELECT count(*) FROM pgworkd.all_jobs")
    took_s = []
    for _ in range(3):  # a stalled machine delays one, eight waits are in each
        started = time.monotonic()
        assert await ensure(db, 7) == 0
        took_s.append(time.monotonic() - started)
    assert min(took_s) < 4 * LOCK_TIMEOUT_S
    await other.execute("COMMIT")


async def test_a_locked_row_of_the_history_is_skipped_by_prune(db: Db, other: Db) -> None:
    """A DELETE that waited for it would meet lock_timeout (55P03), which rolls back the whole call, partitions too."""
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 60)")
    await finished(db, -1, 3)
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.finished_jobs LIMIT 1 FOR UPDATE")
    assert (await prune(db))[0] == 2
    await other.execute("COMMIT")
    assert (await prune(db))[0] == 1


async def test_expire_counts_the_jobs_of_a_queue_without_history(db: Db) -> None:
    """archive() returns what it wrote to the history: expire() would return 0, as if nothing were left."""
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    await v.insert(db, 3, expires_at=v.at(-1))
    assert await expire(db, 2) == 2
    assert await expire(db, 2) == 1


async def test_a_job_that_has_started_does_not_expire(db: Db) -> None:
    """expires_at means `not started by then`; one that waits for its retry has started. And its error would be lost."""
    job_id = await v.one(db, expires_at=v.at(5))
    await v.claim(db, await v.worker(db))
    await db.execute("SELECT pgworkd.payloads($1, '{1}', 1000)", [job_id])  # it begins
    await v.fail(db, [job_id], delay_s=10, message="downstream said no")
    await v.clock(20, db)
    await expire(db)
    assert await v.statuses(db, [job_id]) == ["failed"]
    assert await v.claim_ids(db, await v.worker(db)) == [job_id]
