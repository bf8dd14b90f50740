"""Waiting for the results of jobs, from a process that does not run them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.client import batch, enqueue
from pgworkd.errors import BatchClosed, JobFailed, JobUnknown, PermanentError, SchemaError, UsageError
from pgworkd.results import Found, Results
from tests.kits.daemon import insert, running, until

pytestmark = pytest.mark.slow("sessions that wait for results")

NOBODY = UUID(int=7)


def doubles() -> App:
    app = App()

    @app.handler("double", concurrency=100, max_attempts=1)
    async def double(payload: dict[str, Any]) -> int | None:
        if payload.get("n") is None:
            raise PermanentError("there is no number")
        return 2 * int(payload["n"])

    @app.handler("nothing")
    async def nothing() -> None:
        return None

    return app


@pytest.mark.fast
@pytest.mark.parametrize("poll_s", [60.0, 0.1], ids=["by-notice", "by-polling"])
async def test_a_result_arrives_when_the_job_ends(dsn: str, db: asyncpg.Connection[Any], poll_s: float) -> None:
    async with running(doubles(), dsn), Results(dsn, poll_s=poll_s) as results:
        assert await results.result(await enqueue(db, "double", {"n": 21}), timeout_s=5) == 42
        assert await results.result(await enqueue(db, "nothing"), timeout_s=5) is None


async def test_a_finished_job_returns_its_result_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with running(doubles(), dsn):
        job_id = await enqueue(db, "double", {"n": 1})
        await until(lambda: db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.finished_jobs)"))
    async with Results(dsn, poll_s=60) as results:
        assert await results.result(job_id, timeout_s=5) == 2
        assert await results.result(job_id, timeout_s=5) == 2


async def test_many_waiters_share_two_connections(dsn: str, db: asyncpg.Connection[Any]) -> None:
    answers: dict[int, int] = {}

    async def wait(results: Results, n: int, job_id: UUID) -> None:
        answers[n] = await results.result(job_id, timeout_s=10)

    async with Results(dsn, poll_s=60) as results, anyio.create_task_group() as tasks:
        for n in range(300):
            tasks.start_soon(wait, results, n, await enqueue(db, "double", {"n": n}))
        await until(lambda: db.fetchval("SELECT count(*) = 300 FROM pgworkd.result_waiters"))
        sessions = await db.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        )
        assert sessions == 2
        async with running(doubles(), dsn):
            await until(lambda: len(answers) == 300)
    assert answers == {n: 2 * n for n in range(300)}


async def test_two_may_wait_for_one_job_and_one_may_be_cancelled(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with Results(dsn, poll_s=60) as results:
        job_id = await enqueue(db, "double", {"n": 4})
        with pytest.raises(TimeoutError):
            await results.result(job_id, timeout_s=0.01)
        async with anyio.create_task_group() as tasks:
            answers: list[int] = []

            async def wait() -> None:
                answers.append(await results.result(job_id, timeout_s=5))

            tasks.start_soon(wait)
            tasks.start_soon(wait)
            await until(lambda: db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.result_waiters)"))
            async with running(doubles(), dsn):
                await until(lambda: len(answers) == 2)
        assert answers == [8, 8]


@pytest.mark.fast
async def test_a_job_without_a_result_raises_the_reason(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with running(doubles(), dsn), Results(dsn, poll_s=60) as results:
        with pytest.raises(JobFailed, match=r"is dead: .*PermanentError: there is no number") as dead:
            await results.result(await enqueue(db, "double", {}), timeout_s=5)
        assert dead.value.status == "dead"
        cancelled = await insert(db, "unserved")
        await db.execute("SELECT pgworkd.cancel(ARRAY[$1::uuid])", cancelled)
        with pytest.raises(JobFailed, match="is cancelled"):
            await results.result(cancelled, timeout_s=5)
        with pytest.raises(JobUnknown, match="is unknown"):
            await results.result(NOBODY, timeout_s=5)


async def test_a_disconnected_listener_listens_again(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with Results(dsn, poll_s=0.2) as results:
        for n in (1, 2):
            job_id = await enqueue(db, "double", {"n": n})
            async with running(doubles(), dsn):
                assert await results.result(job_id, timeout_s=5) == 2 * n
            await db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )


async def test_exceptions_inside_the_context_are_not_wrapped(dsn: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Results(dsn):
            raise ZeroDivisionError
    with pytest.raises(TimeoutError):
        async with Results(dsn) as results:
            await results.result(await _new_job(dsn), timeout_s=0.01)


async def _new_job(dsn: str) -> UUID:
    connection = await asyncpg.connect(dsn)
    try:
        return await enqueue(connection, "q")
    finally:
        connection.terminate()


async def test_a_database_without_the_schema_is_reported(empty_dsn: str) -> None:
    with pytest.raises(SchemaError, match="pgworkd migrate"):
        async with Results(empty_dsn) as results:
            await results.result(NOBODY)


async def test_the_number_of_waiters_is_bounded(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.client.results.WAITERS_MAX", 0)
    async with Results(dsn) as results:
        with pytest.raises(UsageError, match="0 jobs already have waiters"):
            await results.result(NOBODY)


@pytest.mark.fast
async def test_results_of_a_tree_are_paged_from_its_final_stage(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.client.results._PAGE_ROWS", 3)
    app, told = doubles(), anyio.Event()

    @app.handler("again", concurrency=10)
    async def again(payload: dict[str, Any]) -> int:
        return 2 * int(payload["result"])

    @app.handler("told")
    async def tell() -> None:
        told.set()

    async with app.batch(db, "first", kind="double", on_complete={"queue": "told"}) as root:
        await root.child("second", kind="again", stream=True)
        ids = await root.add({"n": n} for n in range(10))
    async with running(app, dsn), Results(dsn) as results:
        with anyio.fail_after(5):
            await told.wait()
        found = [each async for each in results.of_batch(root.id)]
        everything = [each async for each in results.of_batch(root.id, every=True)]
        with pytest.raises(BatchClosed, match="does not exist"):
            [each async for each in results.of_batch(NOBODY)]
    assert sorted(each.result for each in found) == [4 * n for n in range(10)]
    assert {each.batch for each in found} == {"second"}
    assert len({each.id for each in found}) == 10
    first = [each for each in everything if each.batch == "first"]
    assert first == [Found("first", job_id, {"n": n}, 2 * n) for n, job_id in enumerate(ids)]
    assert len(everything) == 20


async def test_an_unfinished_tree_returns_the_results_so_far(dsn: str, db: asyncpg.Connection[Any]) -> None:
    root = await batch(db, "open", queue="double")
    await root.add([{"n": 1}])
    async with Results(dsn) as results, running(doubles(), dsn):
        await until(lambda: db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.finished_jobs)"))
        assert [each.result async for each in results.of_batch(root.id)] == [2]
