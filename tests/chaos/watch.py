"""Monitors a run: how soon jobs run again after a fault, and whether any due job waits beside an idle slot."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg

from tests.chaos.fleet import Fleet
from tests.chaos.history import AWAY, now_s

LOOK_S = 0.25
CALM_S = 4.0
"""Grace period after a fault, in seconds: a dead daemon's worker row has not yet expired."""

_WAITING = """
    SELECT *, array(SELECT id::text FROM pgworkd.jobs WHERE queue = $2 AND status = 'pending' AND losses = 0
                    AND serialize_key IS NULL AND run_at <= pgworkd.clock() AND coalesce(kind, queue) <> ALL ($3)
                    ORDER BY priority DESC, run_at, id LIMIT greatest(slots - running, 0)) AS ids
    FROM (SELECT coalesce(sum(concurrency), 0) AS slots FROM pgworkd.pools p JOIN pgworkd.workers w
          ON w.id = p.worker_id WHERE queue = $2 AND name = ANY ($1)) AS all_slots,
         (SELECT count(*) AS running FROM pgworkd.jobs j JOIN pgworkd.workers w ON w.id = j.worker_id
          WHERE queue = $2 AND j.status = 'running' AND name = ANY ($1)) AS all_running"""
"""The jobs that the idle slots would claim next. A job behind them waits for a slot, not beside one."""


async def probe(fleet: Fleet, fault: str, since_s: float) -> None:
    """Records when a job ran again after a fault that ended at `since_s`."""
    (job,) = await fleet.insert("probe", {})
    while True:
        try:
            async with fleet.connection(120) as db:
                while not await db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.finished_jobs WHERE id = $1)", job):
                    await anyio.sleep(0.02)
                break
        except AWAY:
            await anyio.sleep(0.02)
    fleet.note("probed", fault=fault, job=str(job), after_s=now_s() - since_s)
    if fault.startswith("postgres"):
        fleet.note("resumed", fault=fault, after_s=now_s() - since_s)


async def look(fleet: Fleet, queue: str = "mixed") -> None:
    """Records periodically for how long a due job has been waiting beside an idle slot; runs until cancelled."""
    while True:
        try:
            async with fleet.connection(600) as db:
                await _look(fleet, db, queue)
        except AWAY:
            await anyio.sleep(LOOK_S)


async def _look(fleet: Fleet, db: asyncpg.Connection[Any], queue: str) -> None:
    first_seen_s: dict[str, float] = {}
    while True:
        names = [member.name for member in fleet.members if member.alive]
        row = await db.fetchrow(_WAITING, names, queue, fleet.new_kinds)  # those that any idle slot is good for
        assert row is not None
        calm = now_s() - fleet.calm_since_s > CALM_S
        if not calm or row["running"] >= row["slots"]:
            first_seen_s = {}
        else:
            first_seen_s = {job: first_seen_s.get(job, now_s()) for job in row["ids"]}
            waited_s = max((now_s() - each for each in first_seen_s.values()), default=0.0)
            fleet.note(
                "looked",
                queue=queue,
                waited_s=waited_s,
                waiting=len(row["ids"]),
                slots=row["slots"],
                running=row["running"],
            )
        await anyio.sleep(LOOK_S)
