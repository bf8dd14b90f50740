"""Claims of daemons that work through a gateway, whose answers come late or never."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.errors import DatabaseUnavailable
from pgworkd.remote.client import GatewayClient
from tests.kits.daemon import insert, running, until
from tests.kits.remote_daemon import remote_daemons
from tests.kits.verbs import Db


@pytest.fixture(autouse=True)
async def url(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Of the gateway."""
    async with remote_daemons(dsn, monkeypatch) as address:
        yield address


async def ran(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch, hears: Callable[[str, Any], Awaitable[None]]) -> Any:
    """The attempts that a daemon runs of one job; `hears` gets the path and the answer of each of its calls."""
    app, attempts = App(), list[int]()
    call = GatewayClient.call

    async def called(self: GatewayClient, method: str, path: str, *args: Any, **more: Any) -> Any:
        answer = await call(self, method, path, *args, **more)
        await hears(path, answer)
        return answer

    @app.handler("q", max_attempts=1)
    async def handle(job: Job) -> None:
        attempts.append(job.attempt)

    monkeypatch.setattr(GatewayClient, "call", called)
    monkeypatch.setattr("pgworkd.gateway.workers.watch.PERIOD_S", 0.1)
    async with running(app, dsn, heartbeat_s=0.2) as (_, seen):
        await insert(db, "q")
        await seen.wait(events.JOB_COMPLETED)
    return attempts


async def test_what_a_late_answer_brings_is_given_to_nobody_else(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network holds up the answer to a claim, and not the beats."""
    beats = list[str]()

    async def hears(path: str, answer: Any) -> None:
        if path == "/v1/claims" and answer["assignments"]:
            beats.clear()
            await until(lambda: len(beats) > 10)
        elif path.endswith("/beat"):
            beats.append(path)

    assert await ran(dsn, db, monkeypatch, hears) == [1]


async def test_a_claim_whose_answer_is_lost_gives_its_jobs_back(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = list[int]()

    async def hears(path: str, answer: Any) -> None:
        if path == "/v1/claims" and answer["assignments"] and not lost:
            lost.extend(each["job"]["attempt"] for each in answer["assignments"])
            raise DatabaseUnavailable("the answer was lost")

    assert await ran(dsn, db, monkeypatch, hears) == [2], "it had not begun"
    assert lost == [1]


async def test_an_answer_that_comes_after_the_daemon_was_presumed_dead_is_not_run(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has the job by then."""
    app, attempts, late = App(), list[int](), list[int]()
    call = GatewayClient.call

    async def called(self: GatewayClient, method: str, path: str, *args: Any, **more: Any) -> Any:
        answer = await call(self, method, path, *args, **more)
        if path == "/v1/claims" and answer["assignments"] and not late:
            late.append(answer["assignments"][0]["job"]["attempt"])
            await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock() WHERE kind = 'remote'")
            await seen.wait(events.LEASE_RENEWED)
            await until(lambda: db.fetchval("SELECT status = 'failed' FROM pgworkd.jobs"))
        return answer

    @app.handler("q")
    async def handle(job: Job) -> None:
        attempts.append(job.attempt)

    monkeypatch.setattr(GatewayClient, "call", called)
    async with running(app, dsn, heartbeat_s=0.2) as (_, seen):
        await insert(db, "q")
        await seen.wait(events.JOB_COMPLETED)
    assert (late, attempts) == ([1], [2])
