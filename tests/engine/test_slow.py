"""A run that takes far longer than usual for its kind is reported once, while it still runs."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.core.histogram import Histogram
from pgworkd.engine.life.signals import FIRST_S
from pgworkd.engine.settle.job_events import RUNS_LEAST
from tests.kits.daemon import Recorder, insert, running, status, until, waits_for_status

pytestmark = pytest.mark.slow("runs that take several times as long as usual")


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In production runs are checked every 0.5 s."""
    monkeypatch.setattr("pgworkd.engine.settle.job_events.CHECK_S", 0.01)


def app_that_waits(go_on: anyio.Event, *kinds: str) -> App:
    """Handlers that return at once or, if their payload asks for it, when `go_on` is set."""
    app = App()

    async def handle(payload: dict[str, Any], job: Job) -> None:
        if payload:
            await go_on.wait()

    for kind in kinds:
        app.handler(kind, queue="q", concurrency=100)(handle)
    return app


async def _learn(db: asyncpg.Connection[Any], seen: Recorder, kind: str, runs: int) -> None:
    before = len(seen.all(events.JOB_COMPLETED))
    await db.execute("INSERT INTO pgworkd.jobs (queue, kind) SELECT 'q', $1 FROM generate_series(1, $2)", kind, runs)
    await seen.wait(events.JOB_COMPLETED, count=before + runs)


async def _checks(seen: Recorder) -> None:
    """Waits long enough for many checks of running jobs."""
    for _ in range(10):
        await anyio.sleep(0.02)


async def test_a_job_far_beyond_its_usual_duration_is_reported_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    go_on = anyio.Event()
    async with running(app_that_waits(go_on, "quick"), dsn, slow_min_s=0.1) as (_, seen):
        await _learn(db, seen, "quick", RUNS_LEAST)
        job_id = await insert(db, "q", '{"wait": 1}', kind="quick")
        slow = await seen.wait(events.JOB_SLOW)
        assert await status(db, job_id) == "running"
        assert (slow["job_id"], slow["kind"], slow["attempt"]) == (str(job_id), "quick", 1)
        assert slow["running_s"] >= 0.1
        assert slow["usual_s"] * 5 < slow["running_s"]
        await _checks(seen)
        go_on.set()
        await until(waits_for_status(db, job_id, "completed"))
        assert len(seen.all(events.JOB_SLOW)) == 1


async def test_a_short_job_is_never_slow(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Two hundred times a usual duration of microseconds is not worth a report."""
    go_on = anyio.Event()
    async with running(app_that_waits(go_on, "quick"), dsn, slow_min_s=60) as (_, seen):
        await _learn(db, seen, "quick", RUNS_LEAST)
        job_id = await insert(db, "q", '{"wait": 1}', kind="quick")
        await seen.wait(events.JOB_STARTED, job_id=str(job_id))
        await _checks(seen)
        go_on.set()
        await until(waits_for_status(db, job_id, "completed"))
        assert seen.all(events.JOB_SLOW) == []


@pytest.mark.parametrize("learned", ["nothing", "too little", "another kind"])
async def test_no_job_is_slow_before_the_usual_duration_is_known(
    dsn: str, db: asyncpg.Connection[Any], learned: str
) -> None:
    go_on = anyio.Event()
    async with running(app_that_waits(go_on, "new", "old"), dsn, slow_min_s=0.02) as (_, seen):
        if learned != "nothing":
            other, runs = ("old", RUNS_LEAST) if learned == "another kind" else ("new", RUNS_LEAST - 1)
            await _learn(db, seen, other, runs)
        job_id = await insert(db, "q", '{"wait": 1}', kind="new")
        await seen.wait(events.JOB_STARTED, job_id=str(job_id))
        await _checks(seen)
        assert seen.all(events.JOB_SLOW) == []
        go_on.set()
        await until(waits_for_status(db, job_id, "completed"))


STORED = """SELECT pgworkd.append_minutes('other', 10, '{q}', '{new}', '{20}', '{20}', '{0}', '{0}', '{0}', ARRAY[$1],
    ARRAY[$1], '{0}', '{0}')"""


async def test_what_is_usual_is_known_from_the_start(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the runs of other processes, and before a restart: a deploy must not make a program blind."""
    monkeypatch.setitem(FIRST_S, "usual", 0.0)
    go_on, runs = anyio.Event(), Histogram()
    runs.observe_all([0.001] * RUNS_LEAST)
    await db.execute(STORED, "{" + ",".join(map(str, runs.counts)) + "}")
    async with running(app_that_waits(go_on, "new"), dsn, slow_min_s=0.02) as (_, seen):
        job_id = await insert(db, "q", '{"wait": 1}', kind="new")
        slow = await seen.wait(events.JOB_SLOW)
        assert (slow["job_id"], slow["usual_s"]) == (str(job_id), 0.001)
        go_on.set()


async def test_slow_runs_do_not_make_slow_ones_usual(dsn: str, db: asyncpg.Connection[Any]) -> None:
    go_on = anyio.Event()
    async with running(app_that_waits(go_on, "quick"), dsn, slow_min_s=0.1) as (daemon, seen):
        await _learn(db, seen, "quick", RUNS_LEAST)
        before = daemon.counters.usual_s("q", "quick", RUNS_LEAST)
        daemon.counters.of("q", "quick").runs.observe_all([500.0] * (RUNS_LEAST - 1))
        after = daemon.counters.usual_s("q", "quick", RUNS_LEAST)
    assert before is not None
    assert after is not None
    assert after < 0.1, "half of them are still quick"


async def test_a_long_kind_is_not_slow_and_every_slow_run_is_reported(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q", concurrency=100)
    async def handle(payload: dict[str, Any]) -> None:
        await anyio.sleep(payload["s"])

    async with running(app, dsn, slow_min_s=0.01, slow_factor=5.0) as (_, seen):
        usual = "INSERT INTO pgworkd.jobs (queue, payload) SELECT 'q', '{\"s\": 0.4}' FROM generate_series(1, 40)"
        await db.execute(usual)
        await seen.wait(events.JOB_COMPLETED, count=40)
        await db.execute(usual)
        await seen.wait(events.JOB_COMPLETED, count=80)
        assert seen.all(events.JOB_SLOW) == []
        slow = [await insert(db, "q", '{"s": 30}') for _ in range(3)]
        await seen.wait(events.JOB_SLOW, count=3)
        assert {facts["job_id"] for facts in seen.all(events.JOB_SLOW)} == {str(job_id) for job_id in slow}
        # Both are rounded to milliseconds.
        assert all(facts["running_s"] > 4.9 * facts["usual_s"] > 1.5 for facts in seen.all(events.JOB_SLOW))
        await db.execute("SELECT pgworkd.cancel($1)", slow)
        await seen.wait(events.JOB_CANCELLED, count=3)
