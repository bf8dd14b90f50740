"""Objects of others on our tables hold up the rows that they refuse, and nothing else."""

from __future__ import annotations

import pytest

from tests.kits.others import Thing, tables_of, things
from tests.kits.schema import plain_user
from tests.kits.verbs import Db

from .others_objects import play, quickly

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

TABLES = """
    audit batch_additions batches deaths error_groups finished_jobs idempotent_calls job_dependencies pending_effects
    progress queues rates schedules tokens workers
""".split()
STATISTICS = ("alerts", "queue_minutes", "queue_samples", "result_waiters", "samples")
OTHER = {
    "alert_rules", "endpoints", "operations", "origin",  # rows that only operators change
    "pools", "refused_rows", "schema_version",  # without which no daemon works
    "stack_requests",  # which operators ask for, and no daemon needs: tests/engine/test_stacks.py
}  # fmt: skip
FIRST, *REST = things(TABLES, STATISTICS)


@pytest.mark.parametrize("thing", [pytest.param(FIRST, marks=pytest.mark.fast), *REST], ids=repr)
async def test_an_object_of_others_holds_up_what_it_refuses(thing: Thing, dsn: str, db: Db) -> None:
    async with plain_user(dsn, db) as user, quickly():
        assert await play(thing, dsn, user) == []


async def test_no_table_is_left_out(db: Db) -> None:
    assert set(await tables_of(db)) == {"jobs", *TABLES, *STATISTICS, *OTHER}
