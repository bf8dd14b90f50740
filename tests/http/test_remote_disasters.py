"""Disasters of the database under remote daemons: a dump restored in place, a crash that empties unlogged tables."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.database import schema
from tests.kits.daemon import running, until
from tests.kits.remote_daemon import remote_daemons
from tests.kits.server import create_database, create_template, start_test_server
from tests.sweeps import test_dba_disasters
from tests.sweeps.test_dba_disasters import bin_dir  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

SLOTS = 3
FILL = "INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, $1)"
OVER = "SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"


@pytest.fixture
async def through_a_gateway(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """All daemons."""
    async with remote_daemons(dsn, monkeypatch):
        yield


@pytest.mark.usefixtures("through_a_gateway")
async def test_remote_daemons_survive_a_dump_restored_in_place(
    dsn: str,
    db: asyncpg.Connection[Any],
    bin_dir: Any,  # noqa: F811
) -> None:
    await test_dba_disasters.test_daemons_survive_a_dump_restored_in_place(dsn, db, bin_dir)


async def test_remote_daemons_have_their_slots_again_after_a_crash(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of slots is not logged: a crash empties it."""
    app, now, most = App(), 0, 0

    @app.handler("q", concurrency=SLOTS)
    async def handle() -> None:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await anyio.sleep(0.02)
        now -= 1

    server = start_test_server(request.config.getoption("--pg-bin"))
    try:
        await create_template(server.dsn(), schema.text())
        dsn = await create_database(server.dsn(), "crash")
        async with remote_daemons(dsn, monkeypatch), running(app, dsn, lease_s=10.0):
            for _ in range(2):
                db = await asyncpg.connect(dsn)
                await db.execute(FILL, 50)
                await until(lambda db=db: db.fetchval(OVER), limit_s=60)
                assert await db.fetchval("SELECT sum(concurrency) FROM pgworkd.pools WHERE queue = 'q'") == SLOTS
                db.terminate()
                await anyio.to_thread.run_sync(server.kill)
                await anyio.to_thread.run_sync(server.start)
            db = await asyncpg.connect(dsn)
            await db.execute(FILL, 50)
            await until(lambda: db.fetchval(OVER), limit_s=60)
            await until(lambda: db.fetchval("SELECT sum(concurrency) = $1 FROM pgworkd.pools WHERE queue = 'q'", SLOTS))
            db.terminate()
        assert most == SLOTS
    finally:
        server.stop("immediate")
