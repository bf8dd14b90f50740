"""How long the jobs of a worker that has died wait for a rescue."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anyio

from tests.chaos.history import AWAY, now_s

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet

GIVEN_UP_S_MAX = 30.0
"""Seconds until the server notices that a daemon has died: keepalives, and then the proxy, take 25 s."""
_HELD_BY = """SELECT EXISTS (SELECT FROM pgworkd.jobs j JOIN chaos.workers w ON w.id = j.worker_id
                             WHERE w.name = $1 AND j.status = 'running')"""
_ALL_LOCKED = """WITH free AS (SELECT FROM pgworkd.jobs j WHERE j.status = 'running' AND j.worker_id IN (
                     SELECT w.id FROM chaos.workers w WHERE w.name = $1) FOR UPDATE SKIP LOCKED)
                 SELECT NOT EXISTS (SELECT FROM free)"""
_LEASES = """SELECT jsonb_agg(to_jsonb(w) || jsonb_build_object(
                        'now', clock_timestamp(), 'up_since', pg_postmaster_start_time()))
             FROM pgworkd.workers w"""


async def see_taken_back(fleet: Fleet, name: str, since_s: float, lease_s: float) -> None:
    """Records how long a dead daemon's jobs waited for a rescue; if for long, also the other workers' leases."""
    said, began_s = False, since_s
    while True:
        try:
            async with fleet.connection(600) as db:
                while await db.fetchval(_HELD_BY, name):
                    if now_s() - max(since_s, fleet.disturbed_s) > lease_s + 1.0:
                        if not said:
                            fleet.note("still_held", name=name, workers=json.loads(await db.fetchval(_LEASES)))
                        said = True
                        if now_s() < began_s + GIVEN_UP_S_MAX and await db.fetchval(_ALL_LOCKED, name):
                            # A job.transaction() on a dead connection may commit until the server ends it.
                            since_s = now_s() - lease_s
                    await anyio.sleep(0.05)
            break
        except AWAY:
            await anyio.sleep(0.05)
    waited_s = now_s() - max(since_s, fleet.disturbed_s)
    fleet.note("taken_back", name=name, after_s=max(0.0, waited_s))
