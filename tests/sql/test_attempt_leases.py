"""Leases of single attempts, and deadlines: extended, passed, and left alone where no gateway was there."""

from __future__ import annotations

import json
import math
import time

import asyncpg
import pytest

from pgworkd.core.backoff import Backoff
from tests.kits.remote import Waiter, claim_for, extend, overdue, registered
from tests.kits.verbs import Db, at, cancel, clock, insert, live, one, rescue, statuses, steady, token, worker

pytestmark = pytest.mark.usefixtures("t0")


async def test_a_lease_is_extended_until_the_deadline(db: Db) -> None:
    remote = await registered(db)
    free, limited, plain, timed = [await one(db, timeout_s=t) for t in (None, 100, None, 100)]
    await claim_for(db, Waiter(remote, 2, 60))
    await claim_for(db, Waiter(remote, 2))
    await clock(50, db)
    assert await extend(db, free) == 60
    assert await extend(db, free, lease_s=200) == 200
    assert await extend(db, free) == 200, "the length that it has now"
    assert await extend(db, limited) == 55, "not beyond its deadline"
    assert await extend(db, plain) is None
    assert await extend(db, timed, lease_s=999) == 55
    with pytest.raises(KeyError):
        await extend(db, free, attempt=2)
    assert (await live(db, timed))["lease_s"] is None


async def test_a_locked_attempt_holds_up_no_other_extension(db: Db, other: Db) -> None:
    remote = await registered(db)
    ids = await insert(db, 2)
    await claim_for(db, Waiter(remote, 2, 60))
    async with other.transaction():
        await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", ids[0])
        assert await extend(db, ids[1]) == 60
        with pytest.raises(KeyError):
            await extend(db, ids[0])
    assert await extend(db, ids[0]) == 60


async def _with_gateway(db: Db, since: float, until: float) -> None:
    gateway = await db.fetchval("SELECT min(id) FROM pgworkd.workers WHERE kind = 'gateway'")
    await steady(db, gateway or await registered(db, "gateway"), since=since, until=until)


async def test_what_passed_its_lease_or_its_deadline_is_a_failure(db: Db) -> None:
    remote = await registered(db, lease_s=30)
    leased, timed, once = await one(db), await one(db, timeout_s=10), await one(db, max_attempts=1)
    await claim_for(db, Waiter(remote, 1, 20))
    await claim_for(db, Waiter(remote, 1))
    await claim_for(db, Waiter(remote, 1, 20))
    await _with_gateway(db, 0, 15)
    assert await overdue(db) == {}
    await _with_gateway(db, 15, 60)
    assert await overdue(db) == {leased: "failed", timed: "failed", once: "dead"}
    job = await live(db, leased)
    assert (job["failures"], job["losses"], job["error"]) == (1, 0, "its lease of 20 s was not renewed")
    assert at(60 + 27) <= job["run_at"] <= at(60 + 33), "30 s, give or take 10 %"
    assert (await live(db, timed))["error"] == "no result within 10 s"
    assert await overdue(db) == {}


@pytest.mark.parametrize(
    ("later", "said"), [(10, "no result within 10 s"), ("null", "its lease of 30 s was not renewed")]
)
async def test_what_passed_the_time_limit_of_its_queue_says_so(db: Db, later: int | str, said: str) -> None:
    remote = await registered(db, lease_s=30)
    await db.execute("""SELECT pgworkd.set_queue('q', '{"timeout_s": 10}')""")
    job_id = await one(db)
    await claim_for(db, Waiter(remote, 1))
    await db.execute("SELECT pgworkd.set_queue('q', $1)", f'{{"timeout_s": {later}}}')
    await _with_gateway(db, 0, 60)
    assert await overdue(db) == {job_id: "failed"}
    assert (await live(db, job_id))["error"] == said, "there is always a reason"


async def test_an_outage_of_all_gateways_gives_each_lease_its_own_time(db: Db) -> None:
    remote = await registered(db, lease_s=600)
    short, long = await insert(db, 2)
    await claim_for(db, Waiter(remote, 1, 40))
    await claim_for(db, Waiter(remote, 1, 300))
    await clock(5000, db)
    assert await overdue(db) == {}, "there has been no gateway"
    await _with_gateway(db, 5000, 5030)
    assert await overdue(db) == {}
    await _with_gateway(db, 5030, 5040)
    assert await overdue(db) == {short: "failed"}
    await _with_gateway(db, 5040, 5310)
    assert await overdue(db) == {long: "failed"}


async def test_an_extension_and_the_failure_exclude_each_other(db: Db, other: Db) -> None:
    remote, job_id = await registered(db), await one(db)
    await claim_for(db, Waiter(remote, 1, 20))
    await _with_gateway(db, 0, 60)
    await clock(60, other)
    async with other.transaction():
        assert await extend(other, job_id) == 20
        assert await overdue(db) == {}
    assert await overdue(db) == {}
    assert await statuses(db, [job_id]) == ["running"]


async def test_a_row_that_refuses_to_fail_holds_up_no_other(db: Db) -> None:
    remote = await registered(db)
    ids = await insert(db, 5)
    await claim_for(db, Waiter(remote, 5, 20))
    await db.execute(f"ALTER TABLE pgworkd.jobs ADD CONSTRAINT no CHECK (id <> '{ids[2]}' OR status <> 'failed')")
    await _with_gateway(db, 0, 60)
    assert set(await overdue(db)) == {*ids} - {ids[2]}
    assert await overdue(db) == {}


async def test_a_cancelled_job_whose_lease_passes_is_cancelled(db: Db) -> None:
    remote, job_id = await registered(db), await one(db)
    await claim_for(db, Waiter(remote, 1, 20))
    assert await cancel(db, job_id) == {job_id: "requested"}
    await _with_gateway(db, 0, 60)
    assert await overdue(db) == {job_id: "cancelled"}


async def test_rescue_leaves_attempts_with_a_lease_of_their_own(db: Db) -> None:
    daemon, remote = await worker(db), await registered(db, lease_s=10)
    mine, own = await insert(db, 2)
    await claim_for(db, Waiter(remote, 1))
    await claim_for(db, Waiter(remote, 1, 3000))
    gateway = await registered(db, "gateway")
    await steady(db, daemon, gateway, until=100)
    assert await rescue(db, daemon) == {mine: "failed"}
    assert await statuses(db, [own]) == ["running"]


async def test_a_lease_belongs_to_a_running_job(db: Db) -> None:
    for column, value in (("lease_until", "'2100-01-01'"), ("lease_s", "5"), ("assignment_id", "gen_random_uuid()")):
        with pytest.raises(asyncpg.CheckViolationError, match="lease"):
            await db.execute(f"INSERT INTO pgworkd.jobs (queue, {column}) VALUES ('q', {value})")  # noqa: S608


async def test_only_what_passed_lately_is_looked_at_if_so_asked(db: Db) -> None:
    remote = await registered(db)
    early, late = await insert(db, 2)
    await claim_for(db, Waiter(remote, 1, 20))
    await claim_for(db, Waiter(remote, 1, 60))
    await _with_gateway(db, 0, 150)
    sql = "SELECT id FROM pgworkd.fail_overdue(1000, $1)"
    assert [row[0] for row in await db.fetch(sql, 100.0)] == [late]
    assert [row[0] for row in await db.fetch(sql, None)] == [early]


@pytest.mark.slow("thousands of rows for each case: what they cost has to show")
async def test_leases_and_fences_of_many_cost_no_more_each_than_of_few(db: Db) -> None:
    """On tables that were never analyzed, whose plans may be anything; quadratic ones would cost ten times as much."""
    remote = await registered(db, lease_s=3600)
    ids = await insert(db, 2000)
    for _ in range(4):
        await claim_for(db, Waiter(remote, 500))
    mine = await token(db, remote)
    workers = [await registered(db, lease_s=3600) for _ in range(2000)]
    rows = await db.fetch("SELECT id, token FROM pgworkd.workers WHERE id = ANY ($1)", workers)

    async def took_s(count: int) -> dict[str, float]:
        some, them = ids[:count], rows[:count]
        fence = (some, [1] * count, [remote] * count, [mine] * count)
        calls = {
            "fenced": ("SELECT pgworkd.fenced($1, $2, $3, $4, NULL)", fence),
            "extend": ("SELECT pgworkd.extend($1, $2)", (some, [1] * count)),
            "heartbeats": (
                "SELECT pgworkd.heartbeats($1, $2, $3)",
                ([row[0] for row in them], [row[1] for row in them], ["running"] * count),
            ),
        }
        best = dict.fromkeys(calls, math.inf)
        for _ in range(5):
            for name, (sql, args) in calls.items():
                began = time.perf_counter()
                await db.fetch(sql, *args)
                best[name] = min(best[name], time.perf_counter() - began)
        return best

    few, many = await took_s(200), await took_s(2000)
    assert {name for name in few if many[name] > 40 * few[name]} == set()


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"backoff_s": 5},
        {"backoff_s": 0},
        {"backoff_factor": 1},
        {"backoff_factor": 1000, "backoff_cap_s": 31_622_400, "backoff_s": 31_622_400},
        {"backoff_cap_s": 45.5},
    ],
)
async def test_its_retry_waits_as_long_as_that_of_a_handler_without_a_policy(db: Db, row: dict[str, float]) -> None:
    if row:
        await db.execute("SELECT pgworkd.set_queue('q', $1)", json.dumps(row))
    policy = Backoff(jitter=0).overridden_by(row)
    for failures in (1, 2, 3, 10, 80, 81, 1000, 2_147_483_647):
        found = await db.fetchval("SELECT pgworkd.retry_delay_s('q', $1)", failures)
        assert found == pytest.approx(policy.delay_s(failures), rel=0.101), failures
