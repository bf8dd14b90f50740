"""claim_one(): the job of that id, if a claim could take it; else why not, and nothing has changed."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kits import verbs as v
from tests.kits.models import examples
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")
COLUMNS = "why, again_s, waits_for, id, attempt, max_attempts, payload"


async def one(db: Db, worker_id: int, job_id: uuid.UUID, queue: str = "q", more: str = "", *args: Any) -> Any:
    """What claim_one() answers; `more`: further arguments."""
    sql = f"SELECT {COLUMNS} FROM pgworkd.claim_one($1, NULL, $2, $3{more})"  # noqa: S608 - names of ours
    return await db.fetchrow(sql, worker_id, queue, job_id, *args)


async def why(db: Db, worker_id: int, job_id: uuid.UUID, queue: str = "q") -> str | None:
    """Why it was not claimed; None: it was. Of a job that was not, nothing may have changed."""
    sql = "SELECT j::text FROM pgworkd.jobs j WHERE j.id = $1"
    before = await db.fetchval(sql, job_id)
    row = await one(db, worker_id, job_id, queue)
    if row["why"] is None:
        assert row["id"] == job_id
        assert await db.fetchval("SELECT worker_id FROM pgworkd.jobs WHERE id = $1", job_id) == worker_id
    else:
        assert (row["id"], row["attempt"]) == (None, None)
        assert await db.fetchval(sql, job_id) == before
    found: str | None = row["why"]
    return found


async def test_a_job_is_claimed_before_those_that_are_due_before_it(db: Db) -> None:
    worker_id = await v.worker(db)
    await v.insert(db, 3, priority=9)
    job_id = await v.one(db, payload='{"n": 1}')
    async with db.transaction():
        row = await one(db, worker_id, job_id, "q", ", '{q}', '{7}', 5")
        assert len(await v.claim(db, worker_id)) == 3, "what follows in the transaction is an ordinary claim"
    assert (row["why"], row["id"], row["attempt"], row["payload"], row["max_attempts"]) == (
        None,
        job_id,
        1,
        '{"n": 1}',
        7,
    )
    job = await v.live(db, job_id)
    assert (job["status"], job["worker_id"], job["claim_id"], job["attempts"]) == ("running", worker_id, 5, 1)
    assert await v.complete(db, [job_id]) == {job_id}


class Case(NamedTuple):
    """A reason: what the job has, what its queue has, and what makes it so."""

    why: str
    columns: dict[str, Any] = {}  # noqa: RUF012 - never changed
    sql: str = ""
    again_s: float | None = None


CASES = (
    Case("running", sql="UPDATE pgworkd.jobs SET status = 'running', worker_id = $1, attempts = 1"),
    Case("dead", sql="UPDATE pgworkd.jobs SET status = 'dead', attempts = 1, failed_at = run_at"),
    Case("expired", {"expires_at": v.at(-1)}),
    Case("not_due", {"run_at": v.at(60)}, again_s=60.0),
    Case("paused", sql="INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', 'infinity')"),
    Case(
        "paused", sql="INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', pgworkd.clock() + '9 s')", again_s=9
    ),
    Case("limit", sql="INSERT INTO pgworkd.queues (name, max_running) VALUES ('q', 1)"),
    Case("limit", {"limit_key": "a"}, "INSERT INTO pgworkd.queues (name, limit_per_key) VALUES ('q', 1)"),
    Case("key", {"serialize_key": "a"}),
    Case("suspect", {"losses": 2}),
)
OTHER = {"limit": {"limit_key": "a"}, "key": {"serialize_key": "a"}, "suspect": {"losses": 2}}
"""The job that runs already."""


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.why)
async def test_a_job_that_no_claim_would_take_is_not_claimed(db: Db, case: Case) -> None:
    worker_id = await v.worker(db)
    first = None
    if (other := OTHER.get(case.why)) is not None:
        first = await v.one(db, run_at=v.at(-5), **other)
        assert await v.claim_ids(db, worker_id) == [first]
    job_id = await v.one(db, **case.columns)
    if case.sql:
        await db.execute(case.sql, *([worker_id] if "$1" in case.sql else []))
    assert await why(db, worker_id, job_id) == case.why
    row = await one(db, worker_id, job_id)
    assert row["again_s"] == case.again_s
    assert row["waits_for"] == ([first] if case.why == "key" else None)
    if first is not None:  # it was that, and nothing else
        await v.complete(db, [first])
        assert await why(db, worker_id, job_id) is None


async def test_a_rate_says_when_to_ask_again_and_is_charged(db: Db) -> None:
    worker_id = await v.worker(db, 300)
    await db.execute("INSERT INTO pgworkd.queues (name, rate, rate_period_s) VALUES ('q', 1, 60)")
    first, second = await v.insert(db, 2)
    assert await why(db, worker_id, first) is None
    row = await one(db, worker_id, second)
    assert (row["why"], row["again_s"]) == ("limit", 60.0)
    await v.clock(60, db)
    assert await why(db, worker_id, second) is None


async def test_a_job_that_waits_for_others_says_for_which(db: Db) -> None:
    worker_id = await v.worker(db)
    first, second = await v.insert(db, 2)
    async with db.transaction():
        job_id = await v.one(db)
        await db.execute("SELECT pgworkd.depend($1, $2)", job_id, [first, second])
    assert await why(db, worker_id, job_id) == "blocked"
    assert (await one(db, worker_id, job_id))["waits_for"] == sorted([first, second])


@pytest.mark.parametrize("paused", [False, True])
async def test_a_blocked_job_waits_for_nothing_once_its_key_is_free(db: Db, *, paused: bool) -> None:
    worker_id = await v.worker(db)
    first, second = [await v.one(db, serialize_key="a") for _ in range(2)]
    await v.claim_ids(db, worker_id)
    if paused:
        await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', 'infinity')")
    row = await one(db, worker_id, second)
    assert (row["why"], row["again_s"], row["waits_for"]) == ("blocked", None, [first])
    await db.execute("DELETE FROM pgworkd.jobs WHERE id = $1", first)  # nobody promotes the second
    row = await one(db, worker_id, second)
    assert (row["why"], row["again_s"], row["waits_for"]) == ("blocked", None, None)


async def test_a_key_of_a_scope_is_held_by_another_queue(db: Db) -> None:
    worker_id = await v.worker(db)
    await db.execute("INSERT INTO pgworkd.queues (name, serialize_scope) VALUES ('q', 'stage'), ('sound', 'stage')")
    await v.one(db, "sound", serialize_key="a", run_at=v.at(-9))
    second = await v.one(db, "sound", serialize_key="a", run_at=v.at(-5))
    third = await v.one(db, serialize_key="a", run_at=v.at(-1))
    await v.fail(db, await v.claim_ids(db, worker_id, 1, "sound"), permanent=True)
    assert (await one(db, worker_id, third))["waits_for"] == [second], "and not the dead one"
    assert await why(db, worker_id, second, "sound") is None
    row = await one(db, worker_id, third)
    assert (row["why"], row["waits_for"]) == ("key", [second])
    await v.complete(db, [second])
    assert await why(db, worker_id, third) is None


async def test_a_job_that_is_nowhere_or_elsewhere_is_unknown(db: Db) -> None:
    worker_id = await v.worker(db)
    assert await why(db, worker_id, uuid.uuid4()) == "unknown"
    job_id = await v.one(db, "other")
    assert await why(db, worker_id, job_id) == "unknown"
    (ended,) = await v.insert(db)
    await v.claim(db, worker_id)
    await v.complete(db, [ended])
    assert await why(db, worker_id, ended) == "unknown"


async def test_a_locked_job_is_not_waited_for(db: Db, other: Db) -> None:
    worker_id, job_id = await v.worker(db), await v.one(db)
    async with other.transaction():
        await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", job_id)
        assert await why(db, worker_id, job_id) == "locked"
    assert await why(db, worker_id, job_id) is None


async def test_a_worker_without_a_lease_claims_nothing(db: Db) -> None:
    worker_id, job_id = await v.worker(db, 30), await v.one(db)
    await v.clock(31, db)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await one(db, worker_id, job_id)
    assert refused.value.sqlstate == v.LEASE_GONE
    assert (await v.live(db, job_id))["status"] == "pending"


async def test_an_attempt_with_a_lease_of_its_own_runs_under_the_standing_worker(db: Db) -> None:
    worker_id, job_id = await v.worker(db), await v.one(db)
    standing = await db.fetchval("SELECT id FROM pgworkd.standing_worker()")
    nonce = uuid.uuid4()
    row = await one(db, worker_id, job_id, "q", ", '{}', '{}', 5, 60, $4, $5", standing, nonce)
    assert (row["why"], row["attempt"]) == (None, 1)
    job = await v.live(db, job_id)
    assert (job["worker_id"], job["assignment_id"], job["lease_s"], job["claim_id"]) == (standing, nonce, 60.0, None)
    assert job["lease_until"] == v.at(60)


JOB = st.fixed_dictionaries(
    {
        "run_at": st.sampled_from([-9, -5, 0, 10]).map(v.at),
        "serialize_key": st.sampled_from([None, "a", "b"]),
        "limit_key": st.sampled_from([None, None, "x"]),
        "yields": st.booleans(),
        "losses": st.sampled_from([0, 0, 0, 1]),
    }
)
STEP = st.tuples(st.integers(1, 3), st.sampled_from(["stay", "complete", "retry", "retry later", "release", "die"]))


async def test_it_takes_what_a_claim_of_all_would_take_and_no_other(db: Db) -> None:
    drawn: list[Any] = []

    @examples(60)
    @given(st.lists(JOB, min_size=1, max_size=7), st.lists(STEP, max_size=3))
    def collect(jobs: list[Any], steps: list[Any]) -> None:
        drawn.append((jobs, steps))

    collect()
    worker_id = await v.worker(db, 3600)
    for number, (jobs, steps) in enumerate(drawn):
        queue = f"q{number}"
        ids = [await v.one(db, queue, **each) for each in jobs]
        for limit, end in steps:
            await _settle(db, await v.claim(db, worker_id, limit, queue), end)
        taken = set(await _undone(db, v.claim_ids(db, worker_id, 1000, queue)))
        assert taken == {each for each in ids if await _undone(db, why(db, worker_id, each, queue)) is None}


async def _settle(db: Db, rows: list[Any], end: str) -> None:
    ids, attempts = [row["id"] for row in rows if row["id"]], [row["attempt"] for row in rows if row["id"]]
    if not ids:
        return
    match end:
        case "complete":
            await v.complete(db, ids, attempts)
        case "retry" | "retry later" | "die":
            await v.fail(db, ids, attempts, delay_s=60.0 if end == "retry later" else 0.0, permanent=end == "die")
        case "release":
            await v.release(db, ids, attempts)


async def _undone(db: Db, call: Any) -> Any:
    """The answer to a call that is rolled back."""
    transaction = db.transaction()
    await transaction.start()
    try:
        return await call
    finally:
        await transaction.rollback()
