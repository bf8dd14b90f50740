"""Batch trees on daemons that are killed again and again; every count is compared with an independent one.

PGWORKD_CHAOS_TREES, _JOBS (of each stage) and _KILLS make it larger.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from pgworkd.client import batch
from tests.chaos.test_kill_at_full_speed import HELD, freeze
from tests.kits import process
from tests.kits.daemon import until

pytestmark = pytest.mark.slow("daemons under faults")

TREES, JOBS = int(os.environ.get("PGWORKD_CHAOS_TREES", "10")), int(os.environ.get("PGWORKD_CHAOS_JOBS", "100"))
STAGES, DAEMONS = 3, 3
LEASE = {"lease_s": 2.0, "heartbeat_s": 0.4, "poll_s": 0.5}
KILLS = int(os.environ.get("PGWORKD_CHAOS_KILLS", "5"))
LIMIT_S = 60 + TREES * JOBS / 100

_COUNTED = """
    SELECT b.depth, b.added, b.completed, b.dead + b.cancelled AS bad, b.finished_at IS NOT NULL AS finished,
           count(j.*) AS jobs, count(j.*) FILTER (WHERE j.status = 'completed') AS completed_jobs,
           count(DISTINCT (j.result ->> 'n')::int) AS results,
           min((j.result ->> 'n')::int) AS least, max((j.result ->> 'n')::int) AS most
    FROM pgworkd.batches b LEFT JOIN pgworkd.finished_jobs j ON j.batch_id = b.id GROUP BY b.id ORDER BY b.id"""
_UNFINISHED = "SELECT EXISTS (SELECT FROM pgworkd.batches WHERE parent_id IS NULL AND tree_finished_at IS NULL)"
_TOLD = """
    SELECT b.id, count(j.*) AS jobs, min(j.payload -> 'batch' ->> 'state') AS state,
           min((j.payload -> 'batch' ->> 'completed')::int) AS completed
    FROM pgworkd.batches b
    LEFT JOIN pgworkd.all_jobs j ON j.queue = 'told' AND j.payload -> 'batch' ->> 'id' = b.id::text
    WHERE b.parent_id IS NULL GROUP BY b.id"""


async def make_tree(db: asyncpg.Connection[Any]) -> UUID:
    async with db.transaction(), batch(db, "0", kind="stage", on_complete={"queue": "told"}) as root:
        above = root
        for number in range(1, STAGES):
            above = await above.child(str(number), kind="stage", stream=True)
        await root.add({"n": n} for n in range(JOBS))
    return UUID(str(root.id))


async def frozen_amid_a_tree(db: asyncpg.Connection[Any], made: list[UUID], victim: subprocess.Popen[bytes]) -> bool:
    """Makes a tree, and freezes the daemon while it has jobs in flight; false if others finish the tree without it."""
    made.append(await make_tree(db))
    while await db.fetchval(_UNFINISHED):
        if await db.fetch(HELD, victim.pid):
            freeze(victim)
            if await db.fetch(HELD, victim.pid):
                return True
            victim.send_signal(signal.SIGCONT)
    return False


async def test_batch_counts_are_correct_while_daemons_are_killed(dsn: str, db: asyncpg.Connection[Any]) -> None:
    def start() -> subprocess.Popen[bytes]:
        return stack.enter_context(process.daemon_process(dsn, **LEASE))

    with contextlib.ExitStack() as stack:
        daemons = [start() for _ in range(DAEMONS)]
        made = [await make_tree(db) for _ in range(TREES)]
        for _ in range(KILLS):
            victim = daemons.pop(0)
            await until(lambda victim=victim: db.fetchval(process.SERVES, victim.pid))  # type: ignore[misc]
            await until(lambda victim=victim: frozen_amid_a_tree(db, made, victim))  # type: ignore[misc]
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            daemons.append(start())
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=LIMIT_S)

    counted, trees = await db.fetch(_COUNTED), len(made)
    assert len(counted) == trees * STAGES
    for row in counted:
        assert (row["added"], row["completed"], row["bad"], row["finished"]) == (JOBS, JOBS, 0, True), dict(row)
        assert (row["jobs"], row["completed_jobs"], row["results"]) == (JOBS, JOBS, JOBS), dict(row)
        assert (row["least"], row["most"]) == (row["depth"] + 1, row["depth"] + JOBS), dict(row)
    told = [tuple(row)[1:] for row in await db.fetch(_TOLD)]
    assert told == [(1, "completed", STAGES * JOBS)] * trees
    assert await db.fetchval("SELECT count(*) FROM pgworkd.batch_additions") == 0
