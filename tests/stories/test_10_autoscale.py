"""Autoscaling: a backlog starts more workers, an empty queue stops all but one, and no job is lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.engine.test_autoscale_whole import APP
from tests.kits import process
from tests.kits.commands import Start, ended, events, logged, start
from tests.kits.daemon import until

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["start"]  # a fixture


async def test_autoscale_starts_workers_for_a_backlog_and_stops_them_when_it_is_gone(
    start: Start, tmp_path: Path, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """From one worker to three and back; every job completes without a failure, and each worker exits with 0."""
    (tmp_path / "scaled.py").write_text(APP)
    await db.execute(process.TABLES)
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'embedding' FROM generate_series(1, 600)")
    environ = {"PGWORKD_LOG_FORMAT": "json", "PGWORKD_WORKER_NAME": "w", "PGWORKD_APP": "scaled:app"}
    flags = ["--queue=embedding", "--min=1", "--max=3", "--up-at=500", "--down-at=50", "--step=2"]
    flags += ["--cooldown-s=0.5", "--every-s=0.1", f"--dsn={dsn}"]
    run = start(
        "autoscale", *flags, "--", sys.executable, "-m", "pgworkd.cli", "run", "--queue", "embedding", **environ
    )
    await logged(run, "daemon.ready", 3)
    names = await db.fetch("SELECT name FROM pgworkd.workers ORDER BY name")
    assert [row["name"] for row in names] == ["w-1", "w-2", "w-3"]
    (tmp_path / "open").touch()
    await until(lambda: db.fetchval("SELECT count(*) = 600 FROM pgworkd.finished_jobs WHERE status = 'completed'"))
    await logged(run, "worker.ended", 2)
    assert [row["name"] for row in await db.fetch("SELECT name FROM pgworkd.workers")] == ["w-1"]
    assert [(facts["before"], facts["after"]) for facts in events(run, "autoscale.decided")] == [(1, 3), (3, 1)]
    run.stop()
    assert await ended(run) == 0
    assert [facts["exit_code"] for facts in events(run, "worker.ended")] == [0, 0, 0]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0
    rows = await db.fetch(process.EXPLAINED)
    assert len(rows) == 600
    for row in rows:  # a claim that arrives at a stopping worker is released
        assert (row["failures"], row["attempts"]) == (0, 1 + row["given_back"])
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 0
