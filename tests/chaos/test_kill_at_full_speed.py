"""kill -9 of daemons that drain a queue as fast as they can, with a thousand jobs claimed ahead of their slots."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from tests import process
from tests.kit import until

JOBS = 30_000
RECORD = 20
"""Bytes of a run: the job's id and the attempt."""
HOLDS_MANY = """
    SELECT count(*) > 100 FROM pgworkd.jobs j JOIN pgworkd.workers w ON w.id = j.worker_id WHERE w.pid = $1"""


async def test_kill_minus_nine_at_full_speed_twice(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    runs.touch()
    monkeypatch.setenv("RUNS_FILE", str(runs))

    async def have_run(count: int) -> bool:
        return runs.stat().st_size >= count * RECORD

    await db.execute(process.TABLES)
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'quick' FROM generate_series(1, $1::int)", JOBS)
    lease = {"lease_s": 3.0, "heartbeat_s": 0.5}
    with process.daemon_process(dsn, **lease):
        for killed in (1, 2):
            with process.daemon_process(dsn, **lease) as victim:
                before = runs.stat().st_size // RECORD
                await until(lambda victim=victim: db.fetchval(HOLDS_MANY, victim.pid))  # type: ignore[misc]
                await until(lambda before=before: have_run(before + 500))  # type: ignore[misc]
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                assert runs.stat().st_size < JOBS * RECORD, f"all was over before kill {killed}"
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=90)

    finished = await db.fetch(process.EXPLAINED)
    assert len(finished) == len({row["id"] for row in finished}) == JOBS
    assert {row["status"] for row in finished} == {"completed"}
    data = runs.read_bytes()
    records = [data[at : at + RECORD] for at in range(0, len(data), RECORD)]
    assert len(records) == len(set(records)), "an attempt ran twice"
    starts = Counter(UUID(bytes=record[:16]) for record in records)
    for row in finished:
        assert row["failures"] == row["lost"]
        assert row["attempts"] == 1 + row["lost"] + row["given_back"]
        assert 1 <= starts[UUID(bytes=row["id"].bytes)] <= 1 + row["lost"], "what was given back had begun"
    assert sum(row["lost"] for row in finished) >= 2, "the victims held nothing when they were killed"
