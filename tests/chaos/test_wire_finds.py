"""Regressions found by cutting at every message, each reproduced with a whole daemon."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, DeadJob, Job
from pgworkd.admin import Admin
from pgworkd.cli.common import hinted
from pgworkd.core import events
from pgworkd.database import settles
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.maintenance import Periods
from pgworkd.errors import DatabaseUnavailable, OutcomeUnknown, PermanentError
from pgworkd.settings.config import Settings
from tests.kits.daemon import insert, running, until
from tests.kits.proxy import Message, Proxy

pytestmark = pytest.mark.slow("daemons under faults")

NEVER_S = 3600.0
ALONE = {
    "heartbeat_s": 20.0,
    "lease_s": 60.0,
    "poll_s": 60.0,
    "periods": Periods(*[NEVER_S] * 6),
}
"""A daemon without background traffic: every message after a job's start is caused by that job."""


class Scissors:
    """Cuts the first connection on which this sequence of messages is seen after `ready`, before the last one."""

    def __init__(self, *steps: str) -> None:
        self.ready = False
        self.cut = 0
        self._steps = steps
        self._reached = Counter[int]()

    def __call__(self, message: Message) -> bool:
        if not self.ready or message.side + message.kind != self._steps[self._reached[message.connection]]:
            return True
        self._reached[message.connection] += 1
        if self._reached[message.connection] < len(self._steps):
            return True
        self.ready, self.cut = False, self.cut + 1
        return False


async def test_on_dead_hooks_run_for_a_settle_whose_reply_was_lost(dsn: str, db: asyncpg.Connection[Any]) -> None:
    scissors, app, heard = Scissors("clientE", "serverD"), App(), list[DeadJob]()

    @app.handler("q")
    async def handle() -> None:
        scissors.ready = bool(heard)  # the first job prepares all statements
        raise PermanentError("no")

    @app.on_dead
    async def note(dead: DeadJob) -> None:
        heard.append(dead)

    async with Proxy(dsn) as proxy:
        proxy.on_message = scissors
        async with running(app, proxy.dsn, **ALONE) as (_, seen):
            ids = [await insert(db, "q")]
            await until(lambda: len(heard) == 1)
            ids.append(await insert(db, "q"))
            await until(lambda: len(heard) == 2)
            assert len(seen.all(events.JOB_DEAD)) == 2
            assert seen.all(events.JOB_STALE) == []
    assert scissors.cut == 1
    assert [(dead.id, dead.attempt) for dead in heard] == [(str(job_id), 1) for job_id in ids]
    assert heard[1].error.endswith("PermanentError: no")
    assert await db.fetchval("SELECT max(jsonb_array_length(errors)) FROM pgworkd.jobs") == 1


async def test_an_unanswered_settle_is_repeated_or_reported_stale_after_a_rescue(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """A job rescued meanwhile is not mistaken for our own settle, although the attempt is the same."""
    scissors, app, go_on = Scissors("clientE"), App(), anyio.Event()

    @app.handler("q")
    async def handle() -> None:
        await go_on.wait()
        scissors.ready = True
        raise ValueError("no")

    async with Proxy(dsn) as proxy:
        proxy.on_message = scissors
        async with running(app, proxy.dsn, **ALONE) as (_, seen):
            mine, taken = await insert(db, "q"), await insert(db, "q")
            await seen.wait(events.JOB_STARTED, count=2)
            await db.execute(
                """UPDATE pgworkd.jobs SET status = 'dead', failures = 1, worker_id = NULL,
                errors = pgworkd.add_error(errors, '{"type": "lost", "attempt": 1}') WHERE id = $1""",
                taken,
            )
            go_on.set()
            await seen.wait(events.JOB_FAILED, job_id=str(mine))
            await seen.wait(events.JOB_STALE, job_id=str(taken))
            assert seen.all(events.JOB_DEAD) == []
    assert scissors.cut == 1


HISTORY = """INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, started_at, status, priority,
        attempts, failures, worker_id, queue, payload, errors)
    SELECT gen_random_uuid(), now() - interval '5 days', now(), now(), now(), 'completed', 0, 1, 0, 1, 'q', '{}', '[]'
    FROM generate_series(1, 20000)"""


async def test_looking_up_an_unanswered_settle_does_not_scan_the_history(db: asyncpg.Connection[Any]) -> None:
    """A scan would time out as well with a long history, and be repeated again and again."""
    await db.execute(f"{HISTORY}; ANALYZE pgworkd.finished_jobs")
    ids = [row[0] for row in await db.fetch("SELECT id FROM pgworkd.finished_jobs LIMIT 20")]
    async with db.transaction():
        assert {row[1] for row in await db.fetch(settles.SETTLED, ids, [1] * 20, [0] * 20)} == {"completed"}
        read = "SELECT sum(seq_tup_read)::int FROM pg_stat_xact_user_tables WHERE relname ~ '^finished_jobs'"
        assert await db.fetchval(read) < 1000


@pytest.mark.parametrize("cut", ["before the COMMIT", "before its answer", "after it"])
async def test_a_handler_knows_whether_its_transaction_has_committed(
    dsn: str, db: asyncpg.Connection[Any], cut: str
) -> None:
    """Once the COMMIT is acknowledged nothing fails any more, even if the connection is broken."""
    steps = {
        "before the COMMIT": ("clientQ",),
        "before its answer": ("clientQ", "serverC"),
        "after it": ("clientQ", "serverC", "serverZ", "clientQ"),
    }
    scissors, app, said = Scissors(*steps[cut]), App(), list[str]()

    @app.handler("q", max_attempts=3, backoff=0.0)
    async def handle(job: Job) -> None:
        try:
            async with job.transaction() as connection:
                scissors.ready = scissors.cut == 0
                await connection.execute("INSERT INTO written VALUES ($1)", job.attempt)
            said.append("done")
        except OutcomeUnknown:
            said.append("unknown")
            raise

    await db.execute("CREATE TABLE written (attempt int)")
    async with Proxy(dsn) as proxy:
        proxy.on_message = scissors
        async with running(app, proxy.dsn, **ALONE) as (_, seen):
            job_id = await insert(db, "q")
            await seen.wait(events.JOB_COMPLETED, job_id=str(job_id))
            assert seen.all(events.JOB_STALE) == []
    assert scissors.cut == 1
    assert (
        said == {"before the COMMIT": ["unknown", "done"], "before its answer": ["unknown"], "after it": ["done"]}[cut]
    )
    attempts = await db.fetchval("SELECT attempts FROM pgworkd.finished_jobs")
    assert attempts == (2 if cut == "before the COMMIT" else 1)
    assert [row[0] for row in await db.fetch("SELECT attempt FROM written")] == [attempts]


async def test_an_operator_command_reports_whether_it_may_have_taken_effect(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with Proxy(dsn) as proxy, Admin(ConnectionOptions(proxy.dsn)) as admin:
        proxy.mode = "refuse"
        with pytest.raises(DatabaseUnavailable) as refused:
            await admin.jobs.enqueue("q")
        assert not isinstance(refused.value, OutcomeUnknown)
        proxy.mode = "pass"
        scissors = proxy.on_message = Scissors("clientE", "serverD")
        await admin.queues.names()
        scissors.ready = True
        with pytest.raises(OutcomeUnknown, match="may have taken effect") as unknown:
            await admin.jobs.enqueue("q")
        shown = hinted(unknown.value, Settings(dsn=proxy.dsn))
        assert isinstance(shown, OutcomeUnknown)
        assert "may have taken effect; tried postgresql://" in str(shown)
    await until(lambda: db.fetchval("SELECT count(*) = 1 FROM pgworkd.jobs"))
