"""Waiting for results: a registered waiter is notified, asks again, and misses nothing; results by job and by batch."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.batches import add, batch, run, seal
from tests.kits.daemon import until
from tests.kits.flow import unblock
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")

CHANNEL = "pgworkd_results_x"


async def await_results(db: Db, *ids: uuid.UUID, channel: str = CHANNEL, for_s: float = 60) -> dict[uuid.UUID, str]:
    """await_results; the statuses of finished jobs."""
    rows = await db.fetch("SELECT * FROM pgworkd.await_results($1, $2, $3)", ids, channel, for_s)
    return {row["id"]: row["status"] for row in rows}


class Ear:
    """A session that listens on some channels."""

    def __init__(self, session: Db) -> None:
        self._session, self._heard = session, []  # type: ignore[var-annotated]

    async def listen(self, *channels: str) -> Ear:
        """Starts to listen."""
        for channel in (*channels, "mark"):
            await self._session.add_listener(channel, lambda *args: self._heard.append(args[2:]))
        return self

    async def heard(self) -> list[tuple[str, list[uuid.UUID]]]:
        """(channel, ids) of everything committed since the last call."""
        mark = uuid.uuid4().hex

        async def marked() -> bool:
            return ("mark", mark) in self._heard

        await self._session.execute("SELECT pg_notify('mark', $1)", mark)
        await until(marked, 10)
        heard, self._heard = self._heard[:-1], []
        assert all(len(text.encode()) < 8000 for _, text in heard)
        return [(channel, [uuid.UUID(job_id) for job_id in json.loads(text)]) for channel, text in heard]


@pytest.fixture
async def ear(other: Db) -> Ear:
    """Listens on the channel of these tests from the start."""
    return await Ear(other).listen(CHANNEL, "second")


async def _dies(db: Db, ids: list[uuid.UUID]) -> Any:
    return await v.fail(db, ids, permanent=True)


async def _is_lost(db: Db, ids: list[uuid.UUID]) -> None:
    await db.execute("UPDATE pgworkd.jobs SET losses = 2")
    rescuer = await v.worker(db)
    await v.steady(db, rescuer, until=40)
    assert await v.rescue(db, rescuer) == dict.fromkeys(ids, "dead")


async def _cancelled(db: Db, ids: list[uuid.UUID]) -> Any:
    await v.cancel(db, *ids)
    return await v.release(db, ids)


@pytest.mark.parametrize("settle", [v.complete, _dies, v.end, _is_lost, _cancelled])
async def test_every_outcome_notifies_the_waiters(
    db: Db, ear: Ear, settle: Callable[[Db, list[uuid.UUID]], Awaitable[Any]]
) -> None:
    ids = await v.insert_running(db, 3)
    assert await await_results(db, *ids) == {}
    await await_results(db, ids[1], channel="second")
    assert await ear.heard() == []
    await settle(db, ids)
    heard = await ear.heard()
    assert sorted(heard) == sorted([(CHANNEL, sorted(ids)), ("second", [ids[1]])]), "one notice for each channel"


async def test_a_job_that_finished_earlier_is_returned_at_once(db: Db, ear: Ear) -> None:
    done, dead, gone, late, runs = await v.insert_running(db, 5)
    (waits,) = await v.insert(db)
    await v.complete(db, [done])
    await _dies(db, [dead])
    await v.end(db, [gone])
    await v.end(db, [late], status="expired")
    missing = uuid.uuid4()
    over = {done: "completed", dead: "dead", gone: "cancelled", late: "expired", missing: "gone"}
    assert await await_results(db, *over, waits, runs, runs) == over
    left = await db.fetch("SELECT job_id FROM pgworkd.result_waiters")
    assert sorted(row[0] for row in left) == sorted([waits, runs]), "of the others nobody needs to hear"
    assert await ear.heard() == []


async def test_a_dead_job_is_a_result_and_can_be_awaited_again(db: Db, ear: Ear) -> None:
    (job_id,) = await v.insert_running(db)
    await await_results(db, job_id)
    await _dies(db, [job_id])
    assert await ear.heard() == [(CHANNEL, [job_id])]
    await v.retry(db, job_id)
    assert await await_results(db, job_id) == {}
    (row,) = await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 1)", await v.worker(db))
    await v.complete(db, [job_id], row["attempt"])
    assert await ear.heard() == [(CHANNEL, [job_id])]


async def test_a_retried_or_released_job_is_not_notified(db: Db, ear: Ear) -> None:
    ids = await v.insert_running(db, 2)
    await await_results(db, *ids)
    await v.fail(db, ids[:1])
    await v.release(db, ids[1:])
    assert await ear.heard() == []


async def test_a_waiting_job_that_is_cancelled_or_expires_is_notified(db: Db, ear: Ear) -> None:
    first, second = await v.one(db), await v.one(db, expires_at=v.at(5))
    await await_results(db, first, second)
    await v.cancel(db, first)
    await v.clock(6, db)
    await db.execute("SELECT pgworkd.expire()")
    assert await ear.heard() == [(CHANNEL, [first]), (CHANNEL, [second])]


async def test_many_results_are_sent_in_few_notifications_within_the_size_limit(db: Db, ear: Ear) -> None:
    ids = sorted(await v.insert_running(db, 400))
    await await_results(db, *ids)
    await v.complete(db, ids)
    heard = await ear.heard()
    assert [len(part) for _, part in heard] == [190, 190, 20]
    assert sorted(job_id for _, part in heard for job_id in part) == ids


async def test_a_waiter_that_does_not_renew_is_removed(db: Db, ear: Ear) -> None:
    (job_id, other_id) = await v.insert_running(db, 2)
    await await_results(db, job_id, other_id, for_s=10)
    await v.clock(8, db)
    await await_results(db, other_id, for_s=10)
    await v.clock(11, db)
    await v.complete(db, [job_id, other_id])
    assert await ear.heard() == [(CHANNEL, [other_id])]
    await unblock(db)
    assert await db.fetchval("SELECT array_agg(job_id) FROM pgworkd.result_waiters") == [other_id]


# Races


async def test_an_outcome_committed_without_notification_is_seen_by_the_next_call(db: Db, other: Db, third: Db) -> None:
    """The settle checked before anyone waited, and commits after the first call."""
    ids = await v.insert_running(db, 2)
    await other.execute("BEGIN")
    await v.complete(other, ids[:1])
    with anyio.fail_after(5):
        assert await await_results(db, *ids) == {}
    await other.execute("COMMIT")
    assert await await_results(db, *ids) == {ids[0]: "completed"}
    ear = await Ear(third).listen(CHANNEL)
    await v.complete(other, ids[1:])
    assert await ear.heard() == [(CHANNEL, [ids[1]])]


async def test_waiting_for_results_blocks_nobody(db: Db, other: Db) -> None:
    """Not even in a long transaction: neither a settle nor a claim, nor another that waits elsewhere."""
    running = await v.insert_running(db, 3)
    (waits,) = await v.insert(db)
    async with other.transaction():
        assert await await_results(other, *running, waits) == {}
        with anyio.fail_after(5):
            await v.complete(db, running[:1])
            await v.fail(db, running[1:2])
            await v.cancel(db, running[2])
            assert await run(db, await v.worker(db)) == [waits]
            assert await await_results(db, *running, channel="second") == {running[0]: "completed"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("NULL, 'c', 1", "p_jobs must not be"),
        ("'{NULL}', 'c', 1", "p_jobs must not be"),
        ("array_fill(pgworkd.new_id(), '{10001}'), 'c', 1", "p_jobs has more than 10000"),
        ("'{}', '', 1", "p_channel must have 1 to 63 bytes"),
        ("'{}', repeat('x', 64), 1", "p_channel must have 1 to 63 bytes"),
        ("'{}', 'c', 0.5", "p_for_s must be 1 to 86400"),
        ("'{}', 'c', 'nan'", "p_for_s must be 1 to 86400"),
        ("'{}', 'c', NULL", "p_for_s must be 1 to 86400"),
    ],
)
async def test_arguments_that_await_results_refuses(db: Db, arguments: str, message: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match=message):
        await db.execute(f"SELECT * FROM pgworkd.await_results({arguments})")  # noqa: S608 - literals of this test


# Results


async def test_result_of_finds_live_and_finished_jobs(db: Db) -> None:
    done, dead, runs = await v.insert_running(db, 3)
    await v.complete(db, [done], results=['{"n": 1}'])
    await v.fail(db, [dead], permanent=True, message="why")
    keeps = await v.one(db, queue="keeps", dedupe_key="d", dedupe_until=v.at(100))
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('keeps', 0)")
    assert await run(db, await v.worker(db), queue="keeps") == [keeps]
    rows = await db.fetch("SELECT * FROM pgworkd.result_of($1)", [done, dead, runs, keeps, uuid.uuid4()])
    assert {row["id"]: tuple(row)[1:] for row in rows} == {
        done: ("completed", '{"n": 1}', None, v.at(0)),
        dead: ("dead", None, "why", None),
        runs: ("running", None, None, None),
    }


async def _pages(db: Db, batch_id: uuid.UUID, limit: int, **options: Any) -> list[tuple[str, int, Any]]:
    """All pages of batch_results: (batch, n of the payload, result)."""
    found: list[asyncpg.Record] = []
    sql = "SELECT * FROM pgworkd.batch_results($1, $2, $3, $4, $5)"
    while True:
        last = (found[-1]["batch_id"], found[-1]["id"]) if found else (None, None)
        page = await db.fetch(sql, batch_id, options.get("all", False), *last, limit)
        assert len(page) <= limit
        if not page:
            break
        found += page
    assert len({row["id"] for row in found}) == len(found), "twice"
    assert [(r["batch_id"], r["id"]) for r in found] == sorted((r["batch_id"], r["id"]) for r in found)
    return [(row["batch"], json.loads(row["payload"]).get("n"), json.loads(row["result"])) for row in found]


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
async def test_the_results_of_a_tree_are_those_of_its_final_batches(db: Db, limit: int) -> None:
    root = await batch(db, "root")
    final = await batch(db, "final", parent=root, final=True)
    leaf = await batch(db, "leaf", parent=root)
    for batch_id in (root, final, leaf):
        await add(db, batch_id, 3)
    (dead,) = await add(db, final)
    worker_id = await v.worker(db)
    await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 9)", worker_id)
    rows = await db.fetch("SELECT id FROM pgworkd.jobs WHERE status = 'running' ORDER BY id")
    await v.complete(db, [row["id"] for row in rows], results=["7"] * 9)
    await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 1)", worker_id)
    await v.fail(db, [dead], permanent=True)
    await seal(db, root, final, leaf)
    three = [(n, 7) for n in range(3)]
    assert await _pages(db, root, limit) == [("final", *pair) for pair in three]
    assert await _pages(db, leaf, limit) == [("leaf", *pair) for pair in three]
    everything = await _pages(db, root, limit, all=True)
    assert sorted(everything) == sorted((name, *pair) for name in ("root", "final", "leaf") for pair in three)
    await db.execute("UPDATE pgworkd.batches SET final = false")
    assert [name for name, *_ in await _pages(db, root, limit)] == ["final"] * 3 + ["leaf"] * 3, "else of the leaves"


async def test_jobs_of_a_stream_kind_are_not_results(db: Db) -> None:
    worker_id = await v.worker(db)
    root = await batch(db, "root")
    child = await batch(db, "child", parent=root, stream=True, stream_kind="maker")
    await add(db, root, 2)
    await seal(db, root)
    await run(db, worker_id, result='"r"')
    (first, second) = [
        row["id"] for row in await db.fetch("SELECT id FROM pgworkd.claim($1, 'q', 9) ORDER BY id", worker_id)
    ]
    await add(db, child, 1, {"n": 9})
    await v.complete(db, [first, second])
    await run(db, worker_id, result='"made"')
    assert await _pages(db, root, 10) == [("child", 9, "made")]


async def test_results_that_were_not_kept_and_batches_that_do_not_exist(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    root = await batch(db)
    await add(db, root, 2)
    await run(db, await v.worker(db), result="1")
    assert await _pages(db, root, 10) == []
    with pytest.raises(asyncpg.PostgresError, match="does not exist") as caught:
        await _pages(db, uuid.uuid4(), 10)
    assert caught.value.sqlstate == v.BATCH_CLOSED
    with pytest.raises(asyncpg.InvalidParameterValueError, match="go together"):
        await db.fetch("SELECT * FROM pgworkd.batch_results($1, p_after => $1)", root)
