"""What workers may state over HTTP: the max_attempts of their kinds, other queues, a reason, that they are stopping."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import asyncpg
import pytest

from pgworkd.gateway.workers import watch
from tests.kits.daemon import until
from tests.kits.gateway import calling
from tests.kits.workers import Worker, registered

pytestmark = pytest.mark.slow("leases of attempts, and workers that come back")

Db: TypeAlias = "asyncpg.Connection[Any]"


async def insert(db: Db, **columns: Any) -> Any:
    values = {"queue": "q"} | columns
    marks = ", ".join(f"${place}" for place in range(1, len(values) + 1))
    sql = f"INSERT INTO pgworkd.jobs ({', '.join(values)}) VALUES ({marks}) RETURNING id"  # noqa: S608
    return await db.fetchval(sql, *values.values())


async def live(db: Db, job_id: Any) -> dict[str, Any]:
    row = await db.fetchrow("SELECT status::text, error, failures, losses FROM pgworkd.jobs WHERE id = $1", job_id)
    assert row is not None
    return dict(row)


@pytest.mark.parametrize(("own", "stated", "fails"), [(None, 5, 5), (None, 1, 1), (2, 5, 2), (None, None, 3)])
async def test_a_job_without_max_attempts_has_those_that_the_worker_states_for_its_kind(
    dsn: str, db: Db, own: int | None, stated: int | None, fails: int
) -> None:
    job_id = await insert(db, kind="k", max_attempts=own)
    stating = {} if stated is None else {"max_attempts": {"k": stated, "other": 7}}
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        seen = []
        for _ in range(fails):
            (got,) = (await worker.claimed(wait_s=20, **stating))["assignments"]
            seen.append(got["job"]["max_attempts"])
            answer = await worker.settle(got, "fail", retry_in_s=0)
        assert answer["status"] == "dead"
        assert seen == [fails] * fails
    assert (await live(db, job_id))["failures"] == fails


async def test_workers_that_state_other_max_attempts_are_all_served(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        workers = [await registered(call, {"q": 1}) for _ in range(6)]
        got: dict[int, list[Any]] = {}

        async def wait(place: int, worker: Worker) -> None:
            claimed = await worker.claimed(wait_s=30, max_attempts={"k": place % 3 + 2})
            got[place] = [each["job"]["max_attempts"] for each in claimed["assignments"]]

        async with asyncio.TaskGroup() as tasks:
            for place, worker in enumerate(workers):
                tasks.create_task(wait(place, worker))
            for _ in workers:
                await insert(db, kind="k")
        assert got == {place: [place % 3 + 2] for place in range(6)}


async def test_a_suspect_goes_to_a_worker_that_states_others_when_the_first_runs_one_already(dsn: str, db: Db) -> None:
    """The first that waits may take no second suspect: those behind it must not wait for that."""
    async with calling(dsn, workers=True) as call:
        busy, idle = await registered(call, {"q": 5}), await registered(call, {"q": 5})
        await insert(db, losses=2)
        assert len(await busy.claim(wait_s=20)) == 1
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(busy.claimed(wait_s=15, max_attempts={"k": 9}))
            second = tasks.create_task(idle.claimed(wait_s=15))
            job_id = await insert(db, losses=2)
            found = (await second)["assignments"]
            assert [each["job"]["id"] for each in found] == [str(job_id)]
            await insert(db)
            assert len((await first)["assignments"]) == 1


async def test_a_worker_changes_its_queues_and_slots(dsn: str, db: Db) -> None:
    for queue in ("q", "r"):
        for _ in range(3):
            await insert(db, queue=queue)
    async with calling(dsn, workers=True) as call, calling(dsn, workers=True) as elsewhere:
        worker = await registered(call, {"q": 1})
        assert len(await worker.claim(most=10)) == 1
        twin = Worker(elsewhere, worker.id, worker.secret, ["q"])
        assert await twin.claim(most=10) == []
        path = f"/v1/workers/{worker.id}/queues"
        answer = await call.ok("PUT", path, {"queues": {"q": 2, "r": 3}}, headers=worker.headers)
        assert answer == {"queues": {"q": 2, "r": 3}}
        assert len(await worker.claim(most=10)) == 1
        worker.queues = twin.queues = ["r"]
        assert len(await twin.claim(most=2)) == 2, "another gateway learns it when it is asked"
        await call.ok("PUT", path, {"queues": {"r": 3}}, headers=worker.headers)
        rows = await db.fetch("SELECT queue::text, concurrency FROM pgworkd.pools WHERE worker_id = $1", worker.id)
        assert [tuple(row) for row in rows] == [("r", 3)]
        code, slug, said = await call.problem(
            "POST", "/v1/claims", {"worker": worker.id, "queues": ["q"]}, headers=worker.headers
        )
        assert (code, slug) == (422, "invalid")
        assert f"PUT /v1/workers/{worker.id}/queues" in said["errors"][0]["detail"]


async def test_another_gateway_learns_of_fewer_slots(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PERIOD_S", 0.1)
    for _ in range(5):
        await insert(db)
    async with calling(dsn, workers=True) as call, calling(dsn, workers=True) as elsewhere:
        worker = await registered(call, {"q": 4})
        twin = Worker(elsewhere, worker.id, worker.secret, ["q"])
        assert len(await twin.claim()) == 1
        path = f"/v1/workers/{worker.id}/queues"
        await call.ok("PUT", path, {"queues": {"q": 2}}, headers=worker.headers)
        known = elsewhere.client._transport.app.gateway.remote.workers.find(worker.id)  # type: ignore[attr-defined]
        await until(lambda: known.slots == {"q": 2})
        assert len(await twin.claim(most=4)) == 1


async def test_a_worker_that_is_stopping_is_answered_at_once_and_given_nothing(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        async with asyncio.TaskGroup() as tasks:
            held = tasks.create_task(worker.claim(wait_s=60))
            while not await db.fetchval("SELECT count(*) FROM pgworkd.pools WHERE queue = 'q' AND idle"):
                await asyncio.sleep(0.02)
            await worker.beat(state="stopping")
            assert await held == []
        job_id = await insert(db)
        assert await worker.claim() == []
        assert (await live(db, job_id))["status"] == "pending"
        await worker.beat()
        assert len(await worker.claim(wait_s=20)) == 1


async def test_what_a_worker_could_not_run_is_first_left_to_others_when_it_is_due_again(dsn: str, db: Db) -> None:
    job_id = await insert(db)
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        (got,) = await worker.claim(wait_s=20)
        await worker.settle(got, "release", delay_s=2, reason="no handler for kind 'q'")
        row = await live(db, job_id)
        assert (row["status"], row["error"], row["failures"]) == ("pending", "no handler for kind 'q'", 0)
        (again,) = await worker.claim(wait_s=20)
        assert again["job"]["id"] == str(job_id)
    late = "SELECT started_at - run_at >= interval '0.1 s' FROM pgworkd.jobs WHERE id = $1"
    assert await db.fetchval(late, job_id)


async def test_a_locked_job_holds_up_a_call_of_many_settles_only_for_a_moment(dsn: str, db: Db) -> None:
    ids = [await insert(db) for _ in range(20)]
    other = await asyncpg.connect(dsn)
    try:
        async with calling(dsn, workers=True) as call:
            worker = await registered(call, {"q": 20})
            got = await worker.claim(most=20, wait_s=20)
            await other.execute("BEGIN")
            await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", ids[7])
            settlements = [{"assignment": each["assignment"], "outcome": "complete"} for each in got]
            answers = (await call.ok("POST", "/v1/settlements", {"settlements": settlements}))["settlements"]
            slow = [each["problem"]["type"].rpartition("/")[2] for each in answers if each["problem"] is not None]
            assert slow == ["busy"]
            assert sum(each["status"] == "completed" for each in answers) == 19
    finally:
        other.terminate()


async def test_a_beat_tells_the_backoff_that_operators_have_set(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        worker = await registered(call)
        assert (await worker.beat())["backoffs"] == {}
        await worker.claim()
        await call.ok("PATCH", "/v1/queues/q", {"backoff_s": 7.5})
        for _ in range(200):
            if (found := (await worker.beat())["backoffs"])["q"]:
                break
        assert found == {"q": {"backoff_s": 7.5}}
