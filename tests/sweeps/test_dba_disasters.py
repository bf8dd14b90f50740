"""Lost commits under two live daemons: a dump restored in place, a failover to an asynchronous standby.

Jobs known to the restored or promoted database are completed, new jobs run, and no queue stalls.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from tests.kits.daemon import running, until
from tests.kits.server import CUT_OFF, binaries, create_database, create_template, standby_of, start_test_server

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

JOBS = 300
FILL = """INSERT INTO pgworkd.jobs (queue, serialize_key, payload)
    SELECT 'q', CASE WHEN n % 3 = 0 THEN 'k' || n % 20 END, jsonb_build_object('part', $2::text)
    FROM generate_series(1, $1) n"""
OVER = "SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"
COMPLETED = "SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed' AND payload->>'part' = $1"

TOLD = """SELECT id, payload, started_at, attempts, failures, errors FROM pgworkd.finished_jobs
    WHERE id = ANY ($1::text[]::uuid[])"""


class Fleet:
    """An app, how often each of its jobs ran, and which daemons would have ended their process."""

    def __init__(self) -> None:
        self.app, self.runs, self.ended = App(), Counter[str](), list[str]()

        @self.app.handler("q", concurrency=10)
        async def handle(job: Job) -> None:
            await anyio.sleep(0.01)
            self.runs[str(job.id)] += 1

    @contextlib.asynccontextmanager
    async def at_work(self, dsn: str) -> Any:
        """Two daemons."""
        # Attempts running only in the database are released once no claim's reply can be in transit any more.
        options = {
            "connection": ConnectionOptions(dsn, connect_timeout_s=5, command_timeout_s=2),
            "end_process": self.ended.append,
        }
        async with running(self.app, dsn, **options), running(self.app, dsn, **options):
            yield


@pytest.fixture
def bin_dir(request: pytest.FixtureRequest) -> Path:
    """Where the programs of the server's version are."""
    found = binaries(request.config.getoption("--pg-bin"))
    if not (found / "pg_basebackup").exists():
        pytest.skip("these binaries have no pg_basebackup")
    return found


async def test_daemons_survive_a_dump_restored_in_place(dsn: str, db: asyncpg.Connection[Any], bin_dir: Path) -> None:
    fleet = Fleet()
    async with fleet.at_work(dsn):
        await db.execute(FILL, JOBS, "known")
        await until(lambda: db.fetchval("SELECT count(*) > 60 FROM pgworkd.finished_jobs"))
        dump = await anyio.to_thread.run_sync(
            lambda: subprocess.run([bin_dir / "pg_dump", "-n", "pgworkd", dsn], check=True, capture_output=True).stdout
        )
        done_by_then = await db.fetch("SELECT id FROM pgworkd.finished_jobs")
        await db.execute(FILL, JOBS, "lost")
        await until(lambda: db.fetchval(COMPLETED + " AND $1 <> ''", "lost"))
        restore = [bin_dir / "psql", "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", dsn]
        script = b"DROP SCHEMA pgworkd CASCADE;\n" + dump

        async def restored() -> bool:  # it may deadlock with the daemons' statements
            done = await anyio.to_thread.run_sync(
                lambda: subprocess.run(restore, input=script, check=False, capture_output=True)
            )
            assert done.returncode == 0 or b"deadlock detected" in done.stderr, done.stderr
            return done.returncode == 0

        await until(restored)
        await db.execute(FILL, JOBS, "new")
        await until(lambda: db.fetchval(OVER), limit_s=30)
        for part in ("known", "new"):
            assert await db.fetchval(COMPLETED, part) == JOBS
        dumped = set(map(str, [row["id"] for row in done_by_then]))
        thrice = [each for each, count in fleet.runs.items() if count > 2]
        assert thrice == [], [tuple(row) for row in await db.fetch(TOLD, thrice)]
        assert sum(fleet.runs[each] == 1 for each in dumped) >= 60, "what the dump knew to be done is not done again"
    assert fleet.ended == []


async def test_daemons_survive_the_promotion_of_a_lagging_standby(
    request: pytest.FixtureRequest, bin_dir: Path
) -> None:
    fleet, primary = Fleet(), start_test_server(request.config.getoption("--pg-bin"))
    try:
        await create_template(primary.dsn(), schema.text())
        first = await create_database(primary.dsn(), "fleet")
        with standby_of(primary, bin_dir) as standby:
            hosts = ",".join(urlsplit(each.dsn()).netloc.rpartition("@")[2] for each in (primary, standby))
            url = urlsplit(first)
            both = url._replace(netloc=f"{url.netloc.rpartition('@')[0]}@{hosts}").geturl()
            second = urlsplit(standby.dsn())._replace(path=url.path).geturl()
            before, after = await asyncpg.connect(first), await asyncpg.connect(second)
            async with fleet.at_work(both):
                await before.execute(FILL, JOBS, "known")
                await until(lambda: after.fetchval("SELECT count(*) > 60 FROM pgworkd.finished_jobs"))
                known_done = {str(row["id"]) for row in await after.fetch("SELECT id FROM pgworkd.finished_jobs")}
                await after.execute(CUT_OFF)
                await after.execute("SELECT pg_reload_conf()")
                await until(lambda: after.fetchval("SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)"))
                await before.execute(FILL, JOBS, "lost")
                await until(lambda: before.fetchval(COMPLETED + " AND $1 <> ''", "lost"))
                before.terminate()
                await anyio.to_thread.run_sync(primary.kill)
                await after.fetchval("SELECT pg_promote()")
                await after.execute(FILL, JOBS, "new")
                await until(lambda: after.fetchval(OVER), limit_s=30)
                for part in ("known", "new"):
                    assert await after.fetchval(COMPLETED, part) == JOBS
                assert max(fleet.runs.values()) <= 2
                assert {fleet.runs[each] for each in known_done} == {1}
            await after.close()
        assert fleet.ended == []
    finally:
        primary.stop("immediate")
