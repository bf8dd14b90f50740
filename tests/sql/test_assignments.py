"""Assignments: claims on behalf of several workers, hand-overs, the fence of their settles, their leases."""

from __future__ import annotations

import itertools
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kits import verbs as v
from tests.kits.models import examples
from tests.kits.remote import Waiter, claim_for, claim_rows, registered, standing
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


# Claims on behalf of several


async def test_the_first_to_wait_is_served_first(db: Db) -> None:
    a, b, c = [await registered(db) for _ in range(3)]
    ids = await v.insert(db, 4)
    assert await claim_for(db, Waiter(a, 1), Waiter(b, 2), Waiter(c, 5)) == {a: ids[:1], b: ids[1:3], c: ids[3:]}
    rows = await db.fetch("SELECT id, worker_id, attempts, lease_until FROM pgworkd.jobs ORDER BY id")
    assert [row["worker_id"] for row in rows] == [a, b, b, c]
    assert {(row["attempts"], row["lease_until"]) for row in rows} == {(1, None)}


async def test_who_was_presumed_dead_gets_nothing_and_learns_it(db: Db, other: Db) -> None:
    lost, gone, expired, locked, fine = [await registered(db) for _ in range(5)]
    ids = await v.insert(db, 9)
    await db.execute("UPDATE pgworkd.workers SET lost_at = $2 WHERE id = $1", lost, v.at(0))
    await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", gone)
    await db.execute("UPDATE pgworkd.workers SET lease_until = $2 WHERE id = $1", expired, v.at(0))
    async with other.transaction():
        await other.execute("SELECT FROM pgworkd.workers WHERE id = $1 FOR UPDATE", locked)
        rows = await claim_rows(db, *(Waiter(each, 3) for each in (lost, gone, expired, locked, fine)))
    assert [(row["worker"], row["id"]) for row in rows] == [(fine, each) for each in ids[:3]] + [
        (lost, None),
        (gone, None),
    ]
    assert await claim_rows(db, Waiter(lost)) != [], "alone, too"


async def test_another_token_claims_nothing(db: Db) -> None:
    worker_id = await registered(db)
    await v.one(db)
    (row,) = await claim_rows(db, Waiter(worker_id), tokens=[uuid.uuid4()])
    assert (row["worker"], row["id"]) == (worker_id, None)


async def test_the_places_for_the_next_claim_are_returned_once(db: Db) -> None:
    a, b = await registered(db), await registered(db)
    ids = await v.insert(db, 3, serialize_key=None, limit_key="k")
    await v.one(db, losses=2)
    rows = await db.fetch(
        "SELECT * FROM pgworkd.claim_for($1, $2, '{2,2}', '{NULL,NULL}', NULL, NULL, 'q', p_places => '{}')",
        [a, b],
        [await v.token(db, a), await v.token(db, b)],
    )
    extras = [row for row in rows if row["id"] is None]
    assert len(rows) == 4 + len(extras)
    assert [row["worker"] for row in extras] == [None]
    assert extras[0]["payload"] is not None
    assert await v.statuses(db, ids) == ["running"] * 3


async def test_a_deadline_is_its_time_limit_and_five_seconds(db: Db) -> None:
    remote, daemon = await registered(db), await v.worker(db)
    ids = [await v.one(db, timeout_s=60), await v.one(db)]
    await claim_for(db, Waiter(remote, 2))
    assert [(await v.live(db, each))["lease_until"] for each in ids] == [v.at(65), None]
    native = await v.one(db, timeout_s=60)
    assert await v.claim_ids(db, daemon) == [native]
    assert (await v.live(db, native))["lease_until"] is None, "a daemon keeps its own deadlines"


async def test_an_attempt_with_a_lease_of_its_own_runs_under_the_standing_worker(db: Db) -> None:
    remote, stands, assignment = await registered(db), await standing(db), uuid.uuid4()
    long, short = await v.one(db), await v.one(db, timeout_s=20)
    rows = await claim_rows(db, Waiter(remote, 2, 60), assignment=assignment)
    assert [(row["worker"], row["id"]) for row in rows] == [(remote, long), (remote, short)]
    for job_id, until in ((long, v.at(60)), (short, v.at(25))):
        job = await v.live(db, job_id)
        assert (job["worker_id"], job["lease_s"], job["lease_until"]) == (stands, 60, until)
        assert job["assignment_id"] == assignment


WAITERS = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, 60.0]), st.booleans()), min_size=1, max_size=5)
"""(limit, lease_s, whether it runs a suspect already) of each."""


@pytest.mark.parametrize("suspects", [0, 1, 2, 4])
async def test_no_due_job_waits_beside_a_free_slot(db: Db, suspects: int) -> None:
    drawn: list[list[tuple[int, float | None, bool]]] = []

    @examples(25)
    @given(WAITERS)
    def collect(waiters: list[tuple[int, float | None, bool]]) -> None:
        drawn.append(waiters)

    collect()
    for number, (waiters, plain) in enumerate(zip(drawn, itertools.cycle([0, 1, 3, 7, 20]))):
        await _deal(db, waiters, plain, suspects, f"q{number}")


async def _deal(db: Db, waiters: list[tuple[int, float | None, bool]], plain: int, suspects: int, queue: str) -> None:
    asking = []
    for limit, lease_s, has_suspect in waiters:
        worker_id = await registered(db)
        if has_suspect:
            await v.one(db, "old", losses=2)
            assert len(await v.claim(db, worker_id, 1, "old")) == 1
        asking.append(Waiter(worker_id, limit, lease_s))
    ordinary = await v.insert(db, plain, queue)
    lost_twice = set(await v.insert(db, suspects, queue, losses=2))
    given_ = await claim_for(db, *asking, queue=queue)
    taken = [each for ids in given_.values() for each in ids]
    assert len(taken) == len(set(taken))
    for waiter, (_, _, has_suspect) in zip(asking, waiters, strict=True):
        mine = given_.get(waiter.worker, [])
        assert len(mine) <= waiter.limit
        assert len(lost_twice & set(mine)) <= (0 if has_suspect else 1), "suspects run one at a time"
    free = sum(waiter.limit for waiter in asking) - len(taken)
    left_plain = len(set(ordinary) - set(taken))
    assert free == 0 or left_plain == 0, f"{left_plain} jobs wait beside {free} free slots"
    untroubled = [
        waiter
        for waiter, (_, _, has_suspect) in zip(asking, waiters, strict=True)
        if not has_suspect
        and not lost_twice & set(given_.get(waiter.worker, []))
        and len(given_.get(waiter.worker, [])) < waiter.limit
    ]
    assert not (lost_twice - set(taken) and untroubled), "a suspect waits beside a worker that runs none"
    if not suspects:  # in the order in which they wait
        fill = iter(ordinary)
        assert [given_.get(each.worker, []) for each in asking] == [
            list(itertools.islice(fill, each.limit)) for each in asking
        ]


# Hand-overs


async def test_an_attempt_is_passed_on_to_a_worker_with_a_lease_only(db: Db) -> None:
    daemon, remote, lost = await v.worker(db), await registered(db), await registered(db)
    ids = await v.insert(db, 4)
    await v.claim(db, daemon)
    await db.execute("UPDATE pgworkd.workers SET lost_at = $2 WHERE id = $1", lost, v.at(0))
    sql = "SELECT pgworkd.hand_over($1, $2, $3, $4, $5, $6, $7)"
    mine, stands = await v.token(db, daemon), await standing(db)
    given_ = (ids, [1, 1, 1, 9], daemon, mine, [remote, lost, stands, remote], [None, None, 50.0, None], uuid.uuid4())
    assert await db.fetchval(sql, ids, [1] * 4, daemon, uuid.uuid4(), *given_[4:]) == [], "another token"
    assert sorted(await db.fetchval(sql, *given_)) == sorted([ids[0], ids[2]])
    assert [(await v.live(db, each))["worker_id"] for each in ids] == [remote, daemon, stands, daemon]
    assert (await v.live(db, ids[2]))["lease_until"] == v.at(50)
    # The standing worker takes attempts with a lease of their own, and no others do.
    assert await db.fetchval(sql, [ids[1]], [1], daemon, mine, [stands], [None], None) == []
    assert await db.fetchval(sql, [ids[1]], [1], daemon, mine, [remote], [5.0], uuid.uuid4()) == []


# The fence


async def _fenced(db: Db, *attempts: tuple[uuid.UUID, int, int, uuid.UUID | None, uuid.UUID | None]) -> list[int]:
    columns = [list(column) for column in zip(*attempts, strict=True)]
    found: list[int] = await db.fetchval("SELECT pgworkd.fenced($1, $2, $3, $4, $5)", *columns)
    return found


async def test_only_the_very_attempt_of_the_very_worker_is_settled(db: Db) -> None:
    a, b, stands = await registered(db), await registered(db), await standing(db)
    assignment, nothing = uuid.uuid4(), uuid.uuid4()
    mine, theirs, own = await v.insert(db, 3)
    await claim_for(db, Waiter(a), Waiter(b))
    await claim_rows(db, Waiter(a, 1, 60), assignment=assignment)
    ta, tb, ts = [await v.token(db, each) for each in (a, b, stands)]
    right = [(mine, 1, a, ta, None), (theirs, 1, b, tb, None), (own, 1, stands, ts, assignment)]
    assert await _fenced(db, *right) == [1, 1, 1]
    wrong = [
        (mine, 2, a, ta, None),
        (mine, 1, b, tb, None),
        (mine, 1, a, tb, None),
        (mine, 1, a, ta, assignment),
        (own, 1, stands, ts, None),
        (own, 1, stands, ts, nothing),
        (own, 1, a, ta, assignment),
        (nothing, 1, a, ta, None),
    ]
    assert await _fenced(db, *wrong, *right) == [-1] * len(wrong) + [1] * 3
    ids = [mine, mine, theirs, own]
    settled = await db.fetchval(
        "SELECT pgworkd.settle_completed($1, pgworkd.fenced($1, $2, $3, $4, $5), $6)",
        ids[1:],
        [1] * 3,
        [b, b, stands],
        [tb, tb, ts],
        [None, None, assignment],
        [None] * 3,
    )
    assert sorted(settled) == sorted([theirs, own]), "a settle by its id alone would have taken all three"
    assert await v.statuses(db, [mine]) == ["running"]


@pytest.mark.parametrize("settle", ["fail", "release", "retry"])
async def test_nothing_of_a_lease_outlives_its_attempt(db: Db, settle: str) -> None:
    remote = await registered(db)
    ids = [await v.one(db, timeout_s=60), await v.one(db, timeout_s=60)]
    await claim_for(db, Waiter(remote))
    await claim_for(db, Waiter(remote, 1, 30))
    if settle == "release":
        await v.release(db, ids)
    else:
        await v.fail(db, ids, permanent=settle == "retry")
    for job_id in ids:
        job = await v.live(db, job_id)
        assert (job["lease_until"], job["lease_s"], job["assignment_id"], job["worker_id"]) == (None,) * 4
