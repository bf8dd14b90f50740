"""Jobs that many callers create one by one: they share statements, and each is answered for itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, TypeAlias

import anyio
import asyncpg
import pytest

from pgworkd.client import NewJob
from pgworkd.errors import DatabaseUnavailable, OutcomeUnknown, PgworkdError, UsageError
from pgworkd.gateway.api.request import enqueues
from pgworkd.gateway.api.request.enqueues import Enqueues
from tests.kits.daemon import until
from tests.kits.gateway import Caller, calling

Db: TypeAlias = "asyncpg.Connection[Any]"
CALLS = 60
LOCKED = "SELECT count(*) FROM pg_locks WHERE NOT granted"


async def created(call: Caller, number: int, **more: Any) -> Any:
    """The answer to a call that creates a job."""
    return await call("POST", "/v1/jobs", {"queue": "q", "payload": {"n": number}, **more})


async def test_those_that_come_together_share_statements_and_each_gets_its_own_id(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, enqueue_many = list[int](), enqueues.enqueue_many

    def counted(connection: Any, jobs: Any) -> Any:
        sizes.append(len(jobs))
        return enqueue_many(connection, jobs)

    monkeypatch.setattr(enqueues, "enqueue_many", counted)
    async with calling(dsn) as call:
        answers = await asyncio.gather(*(created(call, number) for number in range(CALLS)))
    assert {answer.status_code for answer in answers} == {201}
    stored = dict(await db.fetch("SELECT id::text, (payload ->> 'n')::int FROM pgworkd.jobs"))
    assert [stored[answer.json()["id"]] for answer in answers] == list(range(CALLS))
    assert sum(sizes) == CALLS
    assert len(sizes) < CALLS / 2


async def test_one_that_is_refused_harms_no_other(dsn: str, db: Db) -> None:
    await db.execute("ALTER TABLE pgworkd.jobs ADD CONSTRAINT no_sevens CHECK (payload ->> 'n' <> '7')")
    async with calling(dsn) as call:
        answers = await asyncio.gather(*(created(call, number) for number in range(CALLS)))
    wrong = [number for number, answer in enumerate(answers) if answer.status_code != 201]
    assert wrong == [7]
    assert "no_sevens" in answers[7].text
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == CALLS - 1


@pytest.mark.parametrize("key", ["dedupe_key", "serialize_key"])
async def test_what_waits_for_a_key_holds_up_no_other(dsn: str, db: Db, key: str) -> None:
    async with calling(dsn) as call:
        async with db.transaction():
            await db.execute(f"INSERT INTO pgworkd.jobs (queue, {key}) VALUES ('q', 'k')")  # noqa: S608 - names are ours
            async with asyncio.TaskGroup() as tasks:
                waits = tasks.create_task(created(call, 0, **{key: "k"}))
                for number in range(1, 6):
                    with anyio.fail_after(5):
                        assert (await created(call, number)).status_code == 201
                if key == "dedupe_key":
                    await until(lambda: db.fetchval(LOCKED))
                    waits.cancel()
        assert (await created(call, 7)).status_code == 201


async def test_a_lost_connection_is_told_to_all_of_its_callers_and_to_no_other(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        assert (await created(call, 0)).status_code == 201
        async with db.transaction():
            await db.execute("LOCK TABLE pgworkd.jobs IN EXCLUSIVE MODE")
            async with asyncio.TaskGroup() as tasks:
                waiting = [tasks.create_task(created(call, number)) for number in range(CALLS)]
                await until(lambda: db.fetchval(LOCKED))
                while not all(each.done() for each in waiting):
                    await db.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE NOT granted")
                    await anyio.sleep(0.01)
        told = [(each.result().status_code, each.result().json()["type"].rpartition("/")[2]) for each in waiting]
        assert {status for status, _ in told} == {503}
        assert {slug for _, slug in told} <= {"outcome-unknown", "unavailable"}
        assert "outcome-unknown" in {slug for _, slug in told}
        assert (await created(call, 1)).status_code == 201


async def test_a_stop_answers_what_is_sent_and_what_waits() -> None:
    class Stuck:
        async def call(self, _: Any) -> None:
            await anyio.sleep_forever()

    ours, answers = Enqueues(Stuck()), list[PgworkdError]()  # type: ignore[arg-type]

    async def add(readers: Any) -> None:
        with pytest.raises(PgworkdError) as caught:
            await ours.add(NewJob("q"), readers)
        answers.append(caught.value)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as callers, anyio.create_task_group() as readers:
            for _ in range(enqueues.STATEMENTS_MAX * 3):
                callers.start_soon(add, readers)
                await anyio.wait_all_tasks_blocked()
            readers.cancel_scope.cancel()
    kinds = [type(answer) for answer in answers]
    assert sorted(kinds, key=str) == sorted(
        [OutcomeUnknown] * enqueues.STATEMENTS_MAX + [DatabaseUnavailable] * 2 * enqueues.STATEMENTS_MAX, key=str
    )


async def test_who_has_gone_meanwhile_creates_nothing_and_large_jobs_go_apart() -> None:
    sent, go_on = list[list[str]](), anyio.Event()

    class Slow:
        async def call(self, use: Any) -> list[None]:
            jobs: list[NewJob] = []

            def note(_: Any, found: Any) -> None:
                jobs.extend(found)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(enqueues, "enqueue_many", note)
                use(SimpleNamespace())
            sent.append([job.queue for job in jobs])
            await go_on.wait()
            return [None] * len(jobs)

    ours, large = Enqueues(Slow()), {"text": "x" * 600_000}  # type: ignore[arg-type]
    async with anyio.create_task_group() as readers, asyncio.TaskGroup() as callers:
        made = []
        for _ in range(enqueues.STATEMENTS_MAX):
            made.append(callers.create_task(ours.add(NewJob("q"), readers)))
            await anyio.wait_all_tasks_blocked()
        gone = callers.create_task(ours.add(NewJob("gone"), readers))
        made += [callers.create_task(ours.add(NewJob(f"large{n}", large), readers)) for n in range(2)]
        made += [callers.create_task(ours.add(NewJob("small"), readers)) for _ in range(3)]
        with pytest.raises(UsageError, match="payload"):
            await ours.add(NewJob("q", {"n": object()}), readers)
        await anyio.wait_all_tasks_blocked()
        gone.cancel()
        await anyio.wait_all_tasks_blocked()
        go_on.set()
    assert all(each.done() for each in made)
    assert sent[enqueues.STATEMENTS_MAX :] == [["large0"], ["large1", "small", "small", "small"]]
