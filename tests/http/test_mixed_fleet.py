"""A daemon and a worker in another language serve one queue: each kind is run by who knows it, and nothing waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pgworkd import App
from pgworkd.admin import Admin
from pgworkd.admin.findings import judged
from pgworkd.database.connection import ConnectionOptions
from tests.kits.daemon import running, until
from tests.kits.gateway import calling
from tests.kits.verbs import Db, insert
from tests.kits.workers import Worker, registered

OWN, THEIRS = 20, 60


def an_app() -> App:
    app = App()

    @app.handler("own", queue="q", concurrency=4)
    async def handle() -> None:
        return None

    return app


async def serve(worker: Worker, done: Callable[[], bool], ran: list[str]) -> None:
    """Runs whatever it is given; what is the daemon's it fails."""
    while not done():
        for each in await worker.claim(most=8, wait_s=0.2):
            ran.append(each["job"]["kind"])
            known = each["job"]["kind"] != "own"
            await (worker.settle(each) if known else worker.settle(each, "fail", retry_in_s=0))


@pytest.mark.parametrize("first", ["daemon", "worker"])
async def test_kinds_that_a_daemon_does_not_know_are_left_to_a_worker_in_another_language(
    dsn: str, db: Db, first: str
) -> None:
    """A daemon that gave them back for 30 s took them from the worker as well, which stood idle."""
    none = "SELECT count(*) = 0 FROM pgworkd.jobs WHERE kind = $1"
    ran: list[str] = []
    async with calling(dsn, workers=True) as call:
        worker = await registered(call, {"q": 8})
        if first == "worker":
            await worker.claim()
        async with running(an_app(), dsn):
            await insert(db, THEIRS, kind="theirs")
            await insert(db, OWN, kind="own", max_attempts=1000)
            ended = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(serve(worker, ended.is_set, ran))
                for kind in ("theirs", "own"):
                    await until(lambda kind=kind: db.fetchval(none, kind))  # type: ignore[misc]
                ended.set()
    assert ran.count("theirs") == THEIRS


async def test_doctor_advises_nobody_to_cancel_what_a_worker_may_know(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call, running(an_app(), dsn):
        await insert(db, kind="theirs")
        await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE error LIKE 'no handler%'"))
        async with Admin(ConnectionOptions(dsn)) as admin:
            (alone,) = [each for each in judged(await admin.health()) if each.subject == "kinds"]
            await registered(call)
            (beside,) = [each for each in judged(await admin.health()) if each.subject == "kinds"]
    assert (alone.level, "pgworkd cancel" in alone.remedy) == ("bad", True)
    assert (beside.level, "pgworkd cancel" in beside.remedy) == ("warn", False)
    assert "had no handler for 'theirs'" in beside.finding
