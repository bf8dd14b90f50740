"""matching: finds jobs chunk by chunk, each once, by index where one fits, and never waits."""

from __future__ import annotations

import uuid
from typing import Any

import asyncpg
import pytest

from tests.kits.sessions import blocks
from tests.kits.verbs import Db, at, cancel, claim, claim_ids, fail, insert, one, retry, worker

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]

CHUNK = "SELECT * FROM pgworkd.matching({})"


async def chunk(db: Db, what: str = "cancel", **wanted: Any) -> tuple[list[uuid.UUID], uuid.UUID | None]:
    """One answer: ids, last."""
    named = ", ".join(f"p_{name} => ${number}" for number, name in enumerate(wanted, 2))
    row = await db.fetchrow(CHUNK.format(f"$1{', ' if named else ''}{named}"), what, *wanted.values())
    assert row is not None
    return row["ids"], row["last"]


async def found(db: Db, what: str = "cancel", **wanted: Any) -> list[uuid.UUID]:
    """All that match, in chunks."""
    ids, last = await chunk(db, what, **wanted)
    while last is not None:
        more, last = await chunk(db, what, **(wanted | {"after": last}))
        ids += more
    return ids


async def dead(db: Db, count: int = 1, queue: str = "q", **columns: object) -> list[uuid.UUID]:
    """Dead jobs."""
    return await insert(db, count, queue, status="dead", failed_at=at(0), **columns)


async def every_kind_of_job(db: Db) -> dict[str, list[uuid.UUID]]:
    """One of each kind in queue q, by name; and one in another queue."""
    worker_id = await worker(db)
    running = await insert(db, 2)
    keyed_running = await one(db, serialize_key="k", priority=1)
    assert len(await claim(db, worker_id)) == 3
    failed = await one(db, kind="special", priority=9)
    await claim(db, worker_id, 1)
    await fail(db, [failed], delay_s=60)
    suspect = await one(db, losses=2, limit_key="t")
    pending, future, limited = await one(db), await one(db, run_at=at(60)), await one(db, limit_key="t")
    parked = await one(db, serialize_key="k", limit_key="t", status="blocked")
    named = await one(db, dedupe_key="d")
    died = [*await dead(db), *await dead(db, kind="special", dedupe_key="d", serialize_key="k", limit_key="t")]
    await one(db, "elsewhere")
    return {
        "running": [*running, keyed_running],
        "failed": [failed],
        "pending": [suspect, pending, future, limited, named],
        "blocked": [parked],
        "dead": died,
        "k": [keyed_running, parked],
        "t": [suspect, limited, parked],
        "d": [named],
        "special": [failed],
    }


async def test_every_filter_finds_exactly_the_matching_jobs(db: Db) -> None:
    jobs = await every_kind_of_job(db)
    alive = sorted(jobs["running"] + jobs["failed"] + jobs["pending"] + jobs["blocked"])
    assert await found(db, queue="q") == alive, "to cancel: what waits or runs"
    assert len(await found(db, all=True)) == len(alive) + 1
    for status in ("running", "failed", "pending", "blocked"):
        assert await found(db, queue="q", status=status) == sorted(jobs[status]), status
    for key in ("k", "t", "d"):
        assert await found(db, queue="q", key=key) == sorted(jobs[key]), key
        assert await found(db, key=key) == sorted(jobs[key]), "in all queues"
        assert await found(db, "discard", queue="q", key=key) == jobs["dead"][1:]
    assert await found(db, queue="q", kind="special") == jobs["special"]
    assert await found(db, kind="q") == [job_id for job_id in alive if job_id not in jobs["special"]]
    assert await found(db, queue="q", key="k", kind="special") == []
    assert await found(db, queue="nowhere") == await found(db, key="nowhere") == []
    assert await found(db, queue="q", batch=uuid.uuid4()) == []


async def test_retry_and_discard_match_dead_jobs(db: Db) -> None:
    jobs = await every_kind_of_job(db)
    for what in ("retry", "discard"):
        assert await found(db, what, queue="q") == await found(db, what, all=True) == sorted(jobs["dead"])
        assert await found(db, what, queue="q", kind="special") == jobs["dead"][1:]
        assert await found(db, what, queue="q", key="t") == jobs["dead"][1:]
    assert await found(db, "retry", queue="q", status="failed") == jobs["failed"]


@pytest.mark.parametrize(
    ("what", "wanted", "hint"),
    [
        ("cancel", {}, "p_all => true"),
        ("cancel", {"status": "pending"}, "p_all => true"),
        ("cancel", {"queue": "q", "status": "completed"}, "blocked, pending, failed, running, or NULL."),
        ("cancel", {"queue": "q", "status": "dead"}, "Dead jobs have ended: discard() them."),
        ("retry", {"queue": "q", "status": "running"}, "dead, failed"),
        ("discard", {"queue": "q", "status": "failed"}, "dead"),
        ("edit", {"queue": "q"}, "cancel, retry or discard"),
        (None, {"queue": "q"}, "cancel, retry or discard"),
    ],
)
async def test_invalid_filters_are_refused(db: Db, what: Any, wanted: dict[str, Any], hint: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
        await chunk(db, what, **wanted)
    assert hint in str(caught.value)


async def test_chunks_are_in_the_order_of_ids_and_contain_each_job_once(db: Db) -> None:
    ids = sorted(
        await insert(db, 25) + [await one(db, id=uuid.UUID(int=0)), await one(db, id=uuid.UUID(int=2**128 - 1))]
    )
    sizes, seen, last = [], [], None
    while True:
        some, last = await chunk(db, queue="q", limit=10, after=last)
        sizes.append(len(some))
        seen += some
        if last is None:
            break
    assert (sizes, seen) == ([10, 10, 7], ids)
    assert await chunk(db, queue="q", limit=27) == (ids, ids[-1])
    assert await chunk(db, queue="q", after=ids[-1]) == ([], None)
    for limit, length in ((0, 1), (-5, 1), (2**31 - 1, 27)):
        assert len((await chunk(db, queue="q", limit=limit))[0]) == length


async def test_changing_the_jobs_of_a_chunk_does_not_affect_the_next(db: Db) -> None:
    """Cancelled jobs are gone, refused ones remain: neither is returned again, none is missed."""
    ids, last, seen = await dead(db, 30, dedupe_key=None), None, []
    while True:
        some, last = await chunk(db, "retry", queue="q", limit=7, after=last)
        seen += some
        await (retry if len(seen) % 2 else cancel)(db, *some[::2])
        if last is None:
            break
    assert seen == sorted(ids)


async def test_many_candidates_are_scanned_in_the_order_of_ids(db: Db) -> None:
    """More than 10,000 of a queue: no longer sorted for each chunk."""
    ids = await insert(db, 10_050, serialize_key=None)
    rare = [await one(db, kind="rare") for _ in range(3)]
    died = await dead(db)
    assert await found(db, queue="q", limit=4000) == sorted(ids + rare)
    assert await found(db, queue="q", kind="rare", limit=2) == rare
    assert await found(db, "discard", queue="q", status="dead") == died


async def test_one_call_scans_a_bounded_number_of_rows_and_returns_where_to_continue(db: Db) -> None:
    await db.execute("ALTER TABLE pgworkd.jobs DISABLE TRIGGER USER")
    await insert(db, 100_500, "crowd")
    (job_id,) = await insert(db, 1, "crowd", kind="rare")
    ids, last = await chunk(db, kind="rare")
    assert (ids, last is None) == ([], False)
    assert await chunk(db, kind="rare", after=last) == ([job_id], None)
    before = await blocks(db, "SELECT pgworkd.matching('cancel', p_kind => 'rare')")
    await insert(db, 60_000, "crowd")
    assert await blocks(db, "SELECT pgworkd.matching('cancel', p_kind => 'rare')") < before * 1.1


async def test_matching_neither_waits_for_locks_nor_holds_any(db: Db, other: Db) -> None:
    ids = await insert(db, 3)
    await other.execute("BEGIN; LOCK TABLE pgworkd.jobs IN ROW EXCLUSIVE MODE")
    await other.execute("SELECT FROM pgworkd.jobs FOR UPDATE")
    assert await found(db, queue="q") == ids
    await other.execute("ROLLBACK")
    await db.execute("BEGIN")
    await found(db, queue="q")
    assert await claim_ids(other, await worker(other)) == ids
    await db.execute("ROLLBACK")
