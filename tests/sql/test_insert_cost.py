"""The cost of an insert does not grow with the pools that are not idle."""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import asyncpg
import pytest

pytestmark = pytest.mark.alone("compares how long statements take")

Db: TypeAlias = "asyncpg.Connection[Any]"


async def took_s(db: Db) -> float:
    began = time.perf_counter()
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 20000)")
    return time.perf_counter() - began


async def test_a_large_insert_is_fast_with_many_polling_pools_and_no_statistics(db: Db) -> None:
    """Each row was compared with each pool: five times as long, and more with more pools."""
    alone = max(await took_s(db), await took_s(db))
    await db.execute(
        """INSERT INTO pgworkd.pools (worker_id, queue, concurrency, idle)
           SELECT n, 'q', 1, false FROM generate_series(1, 2000) n UNION ALL SELECT 1, 'other', 1, true"""
    )
    assert min(await took_s(db), await took_s(db)) < 2 * alone
