"""Deaths, groups of errors and alerts in SQL; and a mail server."""

from __future__ import annotations

import uuid
from typing import Any

import asyncpg

from tests.kits.verbs import Db, fail, insert_running


async def die(db: Db, message: str = "it broke", jobs: int = 1, **columns: Any) -> list[uuid.UUID]:
    """Inserts jobs that die at once with this error; their ids."""
    ids = await insert_running(db, jobs, **columns)
    assert set((await fail(db, ids, permanent=True, message=message)).values()) == {"dead"}
    return ids


async def count(db: Db, limit: int = 1000) -> int | None:
    """count_deaths."""
    found: int | None = await db.fetchval("SELECT pgworkd.count_deaths($1)", limit)
    return found


async def dead(db: Db, *args: Any) -> list[asyncpg.Record]:
    """dead_groups."""
    marks = ", ".join(f"${number}" for number in range(1, len(args) + 1))
    return await db.fetch(f"SELECT * FROM pgworkd.dead_groups({marks})", *args)  # noqa: S608 - marks only


async def group_of(db: Db, pattern: str) -> int:
    """The id of the group of errors."""
    return int(await db.fetchval("SELECT id FROM pgworkd.error_groups WHERE pattern = $1", pattern))


async def mute(db: Db, group: int, until: Any) -> bool:
    """mute_errors, by ann."""
    return bool(await db.fetchval("SELECT pgworkd.mute_errors($1, $2, 'ann')", group, until))
