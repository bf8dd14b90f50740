"""Suspects among the jobs that several workers wait for: each worker gets what the database gave it."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.kits.daemon import until
from tests.kits.gateway import calling
from tests.kits.workers import registered

pytestmark = pytest.mark.slow("claims that wait")

Db: TypeAlias = "asyncpg.Connection[Any]"
JOBS = "INSERT INTO pgworkd.jobs (queue, priority, losses) SELECT 'q', u.* FROM unnest($1::int[], $2::int[]) u"
"""Two suspects take two claims in one call; the jobs of each are in order only among themselves."""


@pytest.mark.parametrize("slots", list(itertools.product((1, 2), repeat=3)), ids=str)
async def test_each_worker_gets_what_the_database_gave_it(dsn: str, db: Db, slots: tuple[int, ...]) -> None:
    async with calling(dsn, workers=True) as call:
        workers = [await registered(call, {"q": each}) for each in slots]
        gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        async with asyncio.TaskGroup() as tasks:
            waits: list[asyncio.Task[list[dict[str, Any]]]] = []
            for worker, most in zip(workers, slots, strict=True):
                waits.append(tasks.create_task(worker.claim(most=most, wait_s=20)))
                await until(lambda: gateway.claims.taken == len(waits))
            await db.execute(JOBS, [9, 8, 0, 0, 0], [2, 2, 0, 0, 0])
    got = {each["job"]["id"]: worker.id for worker, wait in zip(workers, waits, strict=True) for each in wait.result()}
    assert got == dict(await db.fetch("SELECT id::text, worker_id FROM pgworkd.jobs WHERE status = 'running'"))
    assert len(got) >= min(3, sum(slots))
