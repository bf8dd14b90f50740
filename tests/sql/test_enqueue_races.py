"""enqueue() in many sessions at once, and while the holder of the key is being changed."""

from __future__ import annotations

import anyio
import asyncpg
import pytest

from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import WORDS, Answer, Db, cancel, claim_ids, clock, complete, enqueue, live, release, worker

from .conftest import Connect

pytestmark = [pytest.mark.usefixtures("t0"), pytest.mark.slow("several sessions in each order")]


@pytest.mark.parametrize("word", WORDS)
async def test_one_of_twenty_sessions_inserts_and_all_get_its_id(db: Db, connect: Connect, word: str) -> None:
    sessions = [await connect() for _ in range(20)]
    answers: list[Answer] = []
    refused = 0

    async def ask(session: Db, number: int) -> None:
        nonlocal refused
        await clock(0, session)
        try:
            answers.append(await enqueue(session, word, payload=f'{{"n": {number}}}'))
        except asyncpg.UniqueViolationError:
            refused += 1

    async with anyio.create_task_group() as tasks:
        for number, session in enumerate(sessions):
            tasks.start_soon(ask, session, number)
    assert sum(created for _, created, _ in answers) == 1
    assert len({job_id for job_id, _, _ in answers}) == 1
    assert len(answers) + refused == 20
    assert refused == (19 if word == "raise" else 0)
    assert sum(changed for _, _, changed in answers) == (19 if word in ("replace", "reschedule") else 0)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 1


MET = [  # what the other session has done to the holder before the call, and how its transaction ends
    *[("changed", then) for then in ("claimed", "completed", "cancelled", "rolled back")],
    *[("locked", then) for then in ("claimed", "completed", "cancelled")],
]


@pytest.mark.parametrize(
    ("met", "then", "word"),
    [(*met, word) for met in MET for word in ("skip", "replace", "reschedule") if (met[0], word) != ("locked", "skip")],
)
async def test_the_job_that_holds_the_key_changes_while_enqueue_waits_for_it(
    db: Db, other: Db, third: Db, met: str, word: str, then: str
) -> None:
    """Whatever the other session does, the answer is the job that holds the key afterwards."""
    worker_id = await worker(db)
    old = None if then == "rolled back" else (await enqueue(db))[0]
    if then == "completed":
        await claim_ids(db, worker_id)
        if met == "locked":
            await release(db, [old])
    acts = {
        "claimed": lambda: claim_ids(db, worker_id),
        "completed": lambda: complete(db, [old]) if met == "changed" else claim_and_complete(db, worker_id),
        "cancelled": lambda: cancel(db, old),
        "rolled back": lambda: enqueue(db),
    }
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await (acts[then]() if met == "changed" else db.execute("SELECT FROM pgworkd.jobs FOR UPDATE"))
        asking = Later(tasks, enqueue(other, word))
        await waits_for_lock(third, other)
        if met == "locked":
            await acts[then]()
        await db.execute("ROLLBACK" if then == "rolled back" else "COMMIT")
        job_id, created, changed = await asking.answer()
    assert (created, changed) == (then != "claimed", False)
    assert (job_id == old) == (then == "claimed")
    assert (await live(db, job_id))["status"] == ("running" if then == "claimed" else "pending")


async def claim_and_complete(db: Db, worker_id: int) -> None:
    ids = await claim_ids(db, worker_id)
    assert await complete(db, ids, 2) == set(ids)
