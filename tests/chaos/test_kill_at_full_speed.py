"""kill -9 of daemons that drain a queue at full speed, with a thousand jobs prefetched."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from tests.kits import process
from tests.kits.daemon import until

pytestmark = pytest.mark.slow("daemons under faults")

JOBS = 30_000
RECORD = 32
"""Size of a record: the job's id and the attempt."""
INSERT = "INSERT INTO pgworkd.jobs (queue) SELECT 'quick' FROM generate_series(1, $1::int)"
HELD = """
    SELECT j.id, j.attempts FROM pgworkd.jobs j JOIN pgworkd.workers w ON w.id = j.worker_id WHERE w.pid = $1"""


def record(job: UUID, attempt: int) -> bytes:
    return job.bytes + attempt.to_bytes(16, "big")


def records(runs: Path) -> list[bytes]:
    data = runs.read_bytes()
    return [data[at : at + RECORD] for at in range(0, len(data), RECORD)]


def freeze(victim: subprocess.Popen[bytes]) -> None:
    victim.send_signal(signal.SIGSTOP)
    os.waitpid(victim.pid, os.WUNTRACED)


async def frozen_with(db: asyncpg.Connection[Any], victim: subprocess.Popen[bytes], runs: Path) -> set[bytes]:
    """Freezes the process; returns the jobs in flight that it has not started, so that it cannot be settling them.

    Resumes it if there are none: the outcomes of all its claimed jobs may be on their way to the database.
    """
    freeze(victim)
    held = {record(*row) for row in await db.fetch(HELD, victim.pid)}
    unbegun = {attempt[:16] for attempt in held.difference(records(runs))}
    if not unbegun:
        victim.send_signal(signal.SIGCONT)
    return unbegun


async def test_no_job_is_lost_when_busy_daemons_are_killed_twice(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    runs.touch()
    monkeypatch.setenv("RUNS_FILE", str(runs))

    await db.execute(process.TABLES)
    unbegun = set[bytes]()
    lease = {"lease_s": 3.0, "heartbeat_s": 0.5}
    with process.daemon_process(dsn, **lease):
        for killed in (1, 2):
            with process.daemon_process(dsn, **lease) as victim:
                before = runs.stat().st_size
                await until(lambda victim=victim: db.fetchval(process.SERVES, victim.pid))  # type: ignore[misc]
                await db.execute(INSERT, JOBS // 2)
                await until(lambda victim=victim: db.fetch(HELD, victim.pid))  # type: ignore[misc]
                await until(lambda before=before: runs.stat().st_size >= before + 500 * RECORD)  # type: ignore[misc]
                unbegun |= await until(lambda victim=victim: frozen_with(db, victim, runs))  # type: ignore[misc]
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                assert runs.stat().st_size < JOBS // 2 * killed * RECORD, f"all was over before kill {killed}"
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=90)

    finished = await db.fetch(process.EXPLAINED)
    assert len(finished) == len({row["id"] for row in finished}) == JOBS
    assert {row["status"] for row in finished} == {"completed"}
    began = records(runs)
    assert len(began) == len(set(began)), "an attempt ran twice"
    starts = Counter(UUID(bytes=begun[:16]) for begun in began)
    for row in finished:
        assert row["failures"] == 0  # a lost attempt does not count as a failure
        assert row["attempts"] == 1 + row["lost"] + row["given_back"]
        assert 1 <= starts[UUID(bytes=row["id"].bytes)] <= 1 + row["lost"], "what was given back had begun"
    told = {row["id"].bytes for row in finished if row["lost"] + row["given_back"]}
    assert unbegun <= told, "the table does not tell of all that the victims held when they were killed"
