"""Jobs that depend on others: `after`, and workflows by name."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import asyncpg
import pytest

from pgworkd.client import NewJob, Workflow, columns, connections, enqueue, enqueue_many
from pgworkd.errors import UsageError
from tests.kits.drivers import in_a_transaction, in_autocommit, settled

NOBODY = UUID(int=7)


@in_autocommit
async def test_each_driver_can_enqueue_a_job_after_others(opener: Any, dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with opener(dsn, autocommit=True) as caller:
        first, second = await settled(enqueue_many(caller.conn, [NewJob("q"), NewJob("q")]))
        third = await settled(enqueue(caller.conn, "q", after=[first, second]))
        (fourth,) = await settled(
            enqueue_many(caller.conn, [NewJob("q", after=(i for i in [third]), on_failed_dependency="run")])
        )
    rows = await db.fetch("SELECT id, status::text, waiting_on FROM pgworkd.jobs ORDER BY id")
    assert [tuple(row) for row in rows] == [
        (first, "pending", 0),
        (second, "pending", 0),
        (third, "blocked", 2),
        (fourth, "blocked", 1),
    ]


@in_a_transaction
async def test_a_workflow_is_part_of_the_callers_transaction(
    opener: Any, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=False) as caller:
        first = await settled(enqueue(caller.conn, "q"))
        await settled(enqueue(caller.conn, "q", after=[first]))
        await settled(caller.rollback())
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0
    assert await db.fetchval("SELECT count(*) FROM pgworkd.job_dependencies") == 0


async def test_a_workflow_larger_than_one_statement_is_inserted(
    db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "AFTER_MAX", 3)
    monkeypatch.setattr(columns, "STATEMENT_ROWS", 2)
    ids = await enqueue_many(db, [NewJob("q")] * 10)
    last = await enqueue(db, "q", after=ids)
    assert await db.fetchval("SELECT waiting_on FROM pgworkd.jobs WHERE id = $1", last) == 10


def test_invalid_graphs_are_refused() -> None:
    flow = Workflow()
    flow.add("a", "q", after=["b"])
    flow.add("b", "q", after=["c"])
    with pytest.raises(UsageError, match="step 'b' depends on 'c', which is not a step"):
        flow.enqueue(asyncpg.Pool.__new__(asyncpg.Pool))
    flow.add("c", "q", after=["a"])
    with pytest.raises(UsageError, match="in a cycle: "):
        flow.enqueue(asyncpg.Pool.__new__(asyncpg.Pool))
    with pytest.raises(UsageError, match="step 'a' exists already"):
        flow.add("a", "q")
    with pytest.raises(UsageError, match="step 'd': after must be a list"):
        flow.add("d", "q", after="a")
    with pytest.raises(UsageError, match="step 'd': queue must be text"):
        flow.add("d", "")
    with pytest.raises(UsageError, match="the step's name must be text of 1 to 200"):
        flow.add("", "q")


async def test_bad_dependencies_are_refused(db: asyncpg.Connection[Any]) -> None:
    for job, says in (
        (NewJob("q", after=["x"]), r"jobs\[0\].after must be a list of job ids"),  # type: ignore[list-item]
        (NewJob("q", after=NOBODY), r"jobs\[0\].after must be a list of job ids"),  # type: ignore[arg-type]
        (
            NewJob("q", after=[NOBODY], on_failed_dependency="no"),
            r"jobs\[0\].on_failed_dependency must be one of wait, cancel, run",
        ),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=says):
            enqueue_many(db, [job])
    with pytest.raises(UsageError, match="after cannot be combined with on_duplicate"):
        enqueue(db, "q", dedupe_key="k", on_duplicate="skip", after=[NOBODY])
    with pytest.raises(asyncpg.PostgresError, match="which does not exist") as missing:
        await enqueue(db, "q", after=[NOBODY])
    assert missing.value.sqlstate == "PW004"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0
