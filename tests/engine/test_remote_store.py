"""A gateway's calls on behalf of remote workers: claims for several, settles that match each worker, beats."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest

from pgworkd.core.claims import ClaimOrder
from pgworkd.core.fence import Fence, Settlement
from pgworkd.core.job import Ending, Outcome
from pgworkd.core.registration import Registration, token_of
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.remote_store import (
    LOCKED,
    LOST,
    RENEWED,
    Beat,
    ClaimsForWorkers,
    ClaimWaiter,
    RemoteStore,
    StoredWorker,
)
from tests.kits.settles import COMPLETED, complete, failed, released, settle
from tests.kits.verbs import Db, cancel, insert, live, one, over, statuses

CANCELLED = Outcome(Ending.CANCELLED)


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[RemoteStore]:
    """A gateway's connections."""
    opened = RemoteStore(ConnectionOptions(dsn), lambda: 2)
    yield opened
    await opened.close()


async def _claimed(store: RemoteStore, *waiters: ClaimWaiter) -> ClaimsForWorkers:
    return await store.claim_for(
        waiters, ClaimOrder(0, "q", 0, places="{}"), await store.standing_worker(), uuid.uuid4()
    )


def _held(claims: ClaimsForWorkers, workers: dict[int, Registration]) -> list[Fence]:
    return [
        Fence(claim.id, claim.attempt, worker, workers[worker].token)
        for claim, worker in zip(claims.claims, claims.workers, strict=True)
    ]


async def test_each_settle_ends_only_what_runs_under_its_worker(store: RemoteStore, db: Db) -> None:
    a, b = await store.register("a", "v", 30), await store.register("b", "v", 30)
    ids = await insert(db, 8, payload='{"n": 12345678901234567890}')
    claims = await _claimed(store, ClaimWaiter(a, 4), ClaimWaiter(b, 4))
    assert ([each.id for each in claims.claims], claims.workers, claims.lost) == (ids, [a] * 4 + [b] * 4, [])
    assert claims.claims[0].payload == '{"n": 12345678901234567890}', "no number goes through a float"
    held = _held(claims, {a: a, b: b})
    thieves = [each._replace(worker_id=b, token=b.token) for each in held[:4]]
    forged = [each._replace(token=uuid.uuid4()) for each in held[:4]]
    for wrong in (thieves, forged):
        assert await store.running(wrong) == set()
        for outcome in (COMPLETED, failed(), released(), CANCELLED):
            assert await settle(store, outcome, *wrong) == {}
        assert await store.extend(wrong, [None] * 4) == {}
    assert await statuses(db, ids) == ["running"] * 8
    assert await store.running(held) == set(ids)
    mixed = [held[0], thieves[1], held[4]]
    outcomes = [Outcome(Ending.COMPLETED, '{"ok": true}'), COMPLETED, COMPLETED]
    found = await store.settle(Ending.COMPLETED, list(map(Settlement, mixed, outcomes, [time.monotonic(), None, None])))
    assert found == {ids[0]: "completed", ids[4]: "completed"}
    assert json.loads((await over(db, ids[0]))["result"]) == {"ok": True}
    failures = [Settlement(held[n], failed(permanent=n == 5)) for n in (1, 5)]
    assert await store.settle(Ending.FAILED, failures) == {ids[1]: "failed", ids[5]: "dead"}
    back = [Settlement(held[2], released()), Settlement(held[6], released(60.0, "later"))]
    assert await store.settle(Ending.RELEASED, back) == {ids[2]: "pending", ids[6]: "pending"}
    assert await settle(store, CANCELLED, held[3], held[7]) == {ids[3]: "cancelled", ids[7]: "cancelled"}
    settled = await store.settled(held)
    assert settled == {
        ids[0]: "completed",
        ids[4]: "completed",
        ids[1]: "failed",
        ids[5]: "dead",
        ids[2]: "pending",
        ids[6]: "pending",
        ids[3]: "cancelled",
        ids[7]: "cancelled",
    }
    assert await store.settled([each._replace(attempt=2) for each in held]) == {}


@pytest.mark.parametrize("outcome", [COMPLETED, failed(), released(), CANCELLED], ids=lambda each: each.ending.value)
async def test_a_locked_job_holds_up_no_settle_of_others(
    store: RemoteStore, db: Db, dsn: str, outcome: Outcome
) -> None:
    a = await store.register("a", "v", 30)
    ids = await insert(db, 3)
    held = _held(await _claimed(store, ClaimWaiter(a, 3)), {a: a})
    other = await asyncpg.connect(dsn)
    try:
        await other.execute("BEGIN")
        await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", ids[1])
        assert (await settle(store, outcome, *held, skip_locked=True)).keys() == {ids[0], ids[2]}
        assert await store.running(held) == {ids[1]}
    finally:
        other.terminate()


async def test_a_lease_of_its_own_is_extended_and_settled_under_the_standing_worker(store: RemoteStore, db: Db) -> None:
    a, standing = await store.register("a", "v", 30), await store.standing_worker()
    ids = await insert(db, 2)
    nonce = uuid.uuid4()
    claims = await store.claim_for([ClaimWaiter(a, 1, 60.0), ClaimWaiter(a, 1)], ClaimOrder(0, "q", 0), standing, nonce)
    assert claims.workers == [a, a], "whoever asked; the attempt runs under another"
    own = Fence(ids[0], 1, standing, standing.token, nonce)
    mine = Fence(ids[1], 1, a, a.token)
    left = await store.extend([own, mine], [90.0, None])
    assert left.keys() == set(ids)
    assert left[ids[0]] == (pytest.approx(90, abs=1), False)
    assert left[ids[1]] == (None, False)
    await db.execute("SELECT pgworkd.cancel($1)", [ids[0]])
    assert (await store.extend([own], [90.0]))[ids[0]] == (pytest.approx(90, abs=1), True)
    assert await complete(store, own._replace(nonce=uuid.uuid4())) == set()
    assert await store.abandon(a) == [ids[1]]
    assert await complete(store, own) == {ids[0]}
    assert await store.abandon(a) is None


async def test_beats_of_many_are_one_call_and_say_what_became_of_each(store: RemoteStore, db: Db) -> None:
    fine, asked, gone = [await store.register(name, "v", 10) for name in "abc"]
    await db.execute("SELECT pgworkd.ask_worker($1, 'quiet')", asked)
    await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", gone)
    forged = Registration.of(fine, uuid.uuid4())
    beats = await store.heartbeats({fine: "running", asked: "stopping", gone: "running"})
    assert {each.worker_id: each for each in beats} == {
        fine: Beat(fine, RENEWED, 10, None),
        asked: Beat(asked, RENEWED, 10, "quiet"),
        gone: Beat(gone, LOST, None, None),
    }
    assert [each.outcome for each in await store.heartbeats({forged: "running"})] == [LOST]
    assert LOCKED not in {each.outcome for each in beats}
    await store.set_slots(fine, {"q": 3, "r": 1})
    found = await store.worker(fine)
    assert found == StoredWorker(fine, "a", 10, None, {"q": 3, "r": 1})
    assert token_of(found.registration) == fine.token
    assert await store.worker(gone) is None


async def test_cancels_of_several_workers_come_together(store: RemoteStore, db: Db) -> None:
    a, b = await store.register("a", "v", 30), await store.register("b", "v", 30)
    ids = await insert(db, 4)
    await _claimed(store, ClaimWaiter(a, 2), ClaimWaiter(b, 2))
    await cancel(db, ids[1], ids[2])
    news = await store.news([a, b])
    assert (sorted(news.cancels), news.gone) == ([(a, ids[1], 1), (b, ids[2], 1)], [])
    assert await store.news([]) == ([], [])
    mine = [Fence(job_id, 1, a, a.token) for job_id in ids]
    assert sorted((await store.news([a], mine)).gone) == sorted((a, job_id, 1) for job_id in ids[2:])


async def test_what_workers_run_is_counted_by_queue(store: RemoteStore, db: Db) -> None:
    a, b = await store.register("a", "v", 30), await store.register("b", "v", 30)
    ids = await insert(db, 3)
    await _claimed(store, ClaimWaiter(a, 2), ClaimWaiter(b, 1))
    found = await store.attempts_of([a, b])
    assert sorted(found) == sorted((w, i, 1, "q", None) for w, i in zip((a, a, b), ids, strict=True))
    for worker, slots in ((a, {"q": 2, "other": 1}), (b, {"q": 7})):
        await store.set_slots(worker, slots)
    slots_of, running = await store.work_of([a, b])
    assert (slots_of, sorted(running)) == ({a: {"q": 2, "other": 1}, b: {"q": 7}}, sorted(found))


async def test_a_failure_without_a_delay_has_that_of_the_queue(store: RemoteStore, db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, backoff_s, backoff_factor) VALUES ('q', 1000, 3)")
    a = await store.register("a", "v", 30)
    await insert(db, 2)
    held = _held(await _claimed(store, ClaimWaiter(a, 2)), {a: a})
    for each, delay_s, skip in zip(held, (None, 7.0), (False, True), strict=True):
        assert await settle(store, failed(delay_s), each, skip_locked=skip) == {each.job_id: "failed"}
    sql = "SELECT extract(epoch FROM run_at - pgworkd.clock())::float8 FROM pgworkd.jobs ORDER BY id"
    first, second = [row[0] for row in await db.fetch(sql)]
    assert 880 < first < 1120
    assert 0 < second <= 7


async def test_progress_is_stored_for_what_still_runs(store: RemoteStore, db: Db) -> None:
    a = await store.register("a", "v", 30)
    await insert(db, 2)
    one, two = _held(await _claimed(store, ClaimWaiter(a, 2)), {a: a})
    await store.report_progress([one, two._replace(attempt=9)], [0.5, 0.7], ["half", "no"])
    rows = await db.fetch("SELECT job_id, done, message FROM pgworkd.progress")
    assert [tuple(row) for row in rows] == [(one.job_id, 0.5, "half")]


async def test_who_was_presumed_dead_is_named(store: RemoteStore, db: Db) -> None:
    a, b = await store.register("a", "v", 30), await store.register("b", "v", 30)
    job_id = await one(db)
    await db.execute("UPDATE pgworkd.workers SET lost_at = now() WHERE id = $1", a)
    claims = await _claimed(store, ClaimWaiter(a, 1), ClaimWaiter(b, 1))
    assert (claims.lost, claims.workers, [each.id for each in claims.claims]) == ([a], [b], [job_id])
    assert (await live(db, job_id))["worker_id"] == b


async def test_the_places_of_keyed_claims_come_back(store: RemoteStore, db: Db) -> None:
    a = await store.register("a", "v", 30)
    await insert(db, 3, limit_key="k")
    claims = await _claimed(store, ClaimWaiter(a, 2))
    assert len(claims.claims) == 2
    assert claims.claims.places not in (None, "{}")
