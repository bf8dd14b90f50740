"""Schedules in SQL: a rule, its row, and the chain of its occurrences."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

import asyncpg

from tests.kits.verbs import T0, Db, claim_ids


async def put(db: Db, name: str = "s", **changes: Any) -> None:
    """put_schedule, every minute by default."""
    rule = {"queue": "q", "kind": None, "cron": None, "every_s": 60, "timezone": "UTC", "missed": "skip"}
    sql = "SELECT pgworkd.put_schedule($1, $2, $3, $4, $5, $6, $7, $8)"
    await db.execute(sql, name, *{**rule, "payload": "{}", **changes}.values())


async def add(db: Db, *occurrences: tuple[str, datetime, int]) -> list[str]:
    """add_occurrences; the names of the schedules that got one."""
    columns = [list(column) for column in zip(*occurrences, strict=True)]
    return sorted(await db.fetchval("SELECT pgworkd.add_occurrences($1, $2, $3)", *columns))


async def schedule(db: Db, name: str = "s") -> asyncpg.Record:
    """The schedule's row."""
    row = await db.fetchrow("SELECT * FROM pgworkd.schedules WHERE name = $1", name)
    assert row is not None
    return row


async def occurrences(db: Db, name: str = "s") -> list[tuple[datetime, str]]:
    """The schedule's occurrences in jobs: instant and status, in order."""
    sql = "SELECT occurrence, status::text FROM pgworkd.jobs WHERE schedule = $1 ORDER BY occurrence"
    return [(row[0], row[1]) for row in await db.fetch(sql, name)]


async def due_occurrence(db: Db, worker_id: int, instant: datetime = T0) -> uuid.UUID:
    """Adds the occurrence of schedule s at `instant`, which is due, and claims it."""
    assert await add(db, ("s", instant, (await schedule(db))["revision"])) == ["s"]
    (job_id,) = await claim_ids(db, worker_id)
    return job_id
