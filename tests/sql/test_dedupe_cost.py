"""What dedupe keys cost, and which statements."""

from __future__ import annotations

import json

import pytest

from tests.kits.sessions import NO_STATISTICS, blocks
from tests.kits.verbs import T0, Db

pytestmark = pytest.mark.usefixtures("t0")


async def test_jobs_without_a_key_cost_nothing_extra(db: Db) -> None:
    async def triggers(columns: str) -> dict[str, int]:
        sql = f"EXPLAIN (ANALYZE, FORMAT JSON) INSERT INTO pgworkd.jobs ({columns}) VALUES ('q', NULL), ('q', 'k')"  # noqa: S608
        (plan,) = json.loads(await db.fetchval(sql))
        return {trigger["Trigger Name"]: trigger["Calls"] for trigger in plan["Triggers"]}

    assert (await triggers("queue, dedupe_key"))["jobs_key_wanted"] == 1
    assert "jobs_key_wanted" not in await triggers("queue, kind")


async def test_many_kept_keys_do_not_slow_an_insert(db: Db, other: Db) -> None:
    """All of them may have expired before maintenance ran, and no statistics tell the planner that there are many."""
    await db.execute(NO_STATISTICS)
    await db.execute("INSERT INTO pgworkd.jobs (queue, dedupe_key) SELECT 'q', i::text FROM generate_series(1, 9000) i")
    await db.execute("ANALYZE pgworkd.jobs")
    sql = "INSERT INTO pgworkd.jobs (queue, dedupe_key) VALUES ('q', $1)"
    for _ in range(4):  # a generic plan
        before = await blocks(db, sql, "k")
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, dedupe_key, dedupe_until, status) "
        "SELECT 'q', 'k' || i, $1::timestamptz, 'completed' FROM generate_series(1, 20000) i",
        T0,
    )
    for session in (db, other):  # one session with a plan from before, one that plans now
        assert await blocks(session, sql, "k") <= before + 40
        assert await blocks(session, sql, "k77") <= before + 40
