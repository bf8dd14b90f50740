"""Payroll as a tree of batches: calculate for each employee, send each a cheque, then report. Results of the first
stage are streamed into the second."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.client import Batch, Progress
from pgworkd.core import events
from tests.kits.daemon import running

EMPLOYEES = 25


class Payroll:
    """An application that pays employees and records what it did."""

    def __init__(self) -> None:
        self.app = App()
        self.cheques: list[tuple[int, int]] = []
        self.reports: list[dict[str, Any]] = []
        self.refuses_employee: int | None = None
        self.app.handler("calculate", concurrency=4, max_attempts=1)(self.calculate)
        self.app.handler("send_cheque", concurrency=4)(self.send_cheque)
        self.app.handler("report")(self.report)

    async def calculate(self, payload: dict[str, Any]) -> dict[str, int]:
        if payload["employee"] == self.refuses_employee:
            raise ValueError("no contract")
        return {"net": 1000 + payload["employee"]}

    async def send_cheque(self, payload: dict[str, Any]) -> str:
        self.cheques.append((payload["input"]["employee"], payload["result"]["net"]))
        return f"cheque {payload['input']['employee']}"

    async def report(self, payload: dict[str, Any]) -> None:
        self.reports.append(payload)


async def test_a_batch_tree_created_in_python_runs_both_stages_and_its_callback(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Each completed calculation streams a job into the child batch; `on_complete` runs once, after both batches."""
    payroll = Payroll()
    async with (
        db.transaction(),
        payroll.app.batch(
            db,
            "payroll",
            kind="calculate",
            dedupe_key="2026-11",
            on_complete={"queue": "report", "payload": {"month": 11}},
        ) as root,
    ):
        cheques = await root.child("cheques", kind="send_cheque", stream=True, final=True)
        ids = await root.add({"employee": n} for n in range(EMPLOYEES))
    assert len(set(ids)) == EMPLOYEES
    sealed, open_ = await root.progress()
    assert sealed == Progress(root.id, "payroll", 0, "sealed", EMPLOYEES, 0, 0, 0, 0)
    assert open_ == Progress(cheques.id, "cheques", 1, "open", 0, 0, 0, 0, 0)
    again = await payroll.app.batch(db, "payroll", kind="calculate", dedupe_key="2026-11")
    assert (again.id, again.created) == (root.id, False), "the month is paid once"

    async with running(payroll.app, dsn) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, kind="report")

    assert sorted(payroll.cheques) == [(n, 1000 + n) for n in range(EMPLOYEES)]
    facts = {"completed": 2 * EMPLOYEES, "dead": 0, "cancelled": 0, "state": "completed"}
    assert payroll.reports == [{"month": 11, "batch": {"id": str(root.id), "name": "payroll", **facts}}]
    done = [(each.name, each.state, each.done, each.total) for each in await root.progress()]
    assert done == [("payroll", "completed", EMPLOYEES, EMPLOYEES), ("cheques", "completed", EMPLOYEES, EMPLOYEES)]
    with pytest.raises(asyncpg.PostgresError, match="is finished: it takes no more jobs") as refused:
        await root.add([{"employee": 99}])
    assert refused.value.sqlstate == "PW003"


async def test_a_batch_tree_created_in_plain_sql_does_the_same(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """No client library needed: `create_batch`, plain INSERTs with a `batch_id`, and `seal_batch`."""
    payroll = Payroll()
    async with db.transaction():
        root = await db.fetchval("""SELECT id FROM pgworkd.create_batch('payroll', 'calculate',
                                        p_on_complete => '{"queue": "report", "payload": {"month": 11}}')""")
        await db.execute(
            "SELECT pgworkd.create_batch('cheques', 'send_cheque', p_parent => $1, p_stream => true)", root
        )
        await db.execute(
            """INSERT INTO pgworkd.jobs (queue, batch_id, payload)
               SELECT 'calculate', $1, jsonb_build_object('employee', n) FROM generate_series(0, $2::int - 1) n""",
            root,
            EMPLOYEES,
        )
        await db.execute("SELECT pgworkd.seal_batch($1)", root)
    async with running(payroll.app, dsn) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, kind="report")
    assert sorted(payroll.cheques) == [(n, 1000 + n) for n in range(EMPLOYEES)]
    rows = await db.fetch("SELECT name, state, done, total FROM pgworkd.batch_tree($1)", root)
    assert [tuple(row) for row in rows] == [
        ("payroll", "completed", EMPLOYEES, EMPLOYEES),
        ("cheques", "completed", EMPLOYEES, EMPLOYEES),
    ]


async def test_a_dead_job_in_a_batch_runs_on_failure_with_the_counts(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """One employee's calculation ends dead: the others are paid, and `on_failure` runs in place of `on_complete`."""
    payroll = Payroll()
    payroll.refuses_employee = 7
    async with payroll.app.batch(
        db,
        "payroll",
        kind="calculate",
        on_complete={"queue": "report"},
        on_failure={"queue": "report", "meta": {"bad": 1}},
    ) as root:
        await root.child("cheques", kind="send_cheque", stream=True)
        await root.add({"employee": n} for n in range(10))
    async with running(payroll.app, dsn) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, kind="report")
    assert len(payroll.cheques) == 9
    (report,) = payroll.reports
    assert (report["batch"]["state"], report["batch"]["dead"]) == ("completed with failures", 1)
    meta = await db.fetchval("SELECT meta FROM pgworkd.finished_jobs WHERE queue = 'report'")
    assert json.loads(meta) == {"bad": 1}


async def test_a_stream_function_turns_each_result_into_jobs_of_the_next_stage(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """A stream function yields none, one or many jobs; its first call raises, and is retried on its own."""
    payroll, calls = Payroll(), list[int]()

    @payroll.app.stream("payroll", "cheques", backoff=0)
    def cheques(input: dict[str, Any], result: dict[str, int]) -> Iterator[dict[str, Any]]:  # noqa: A002
        calls.append(input["employee"])
        if input["employee"] == 2 and calls.count(2) == 1:
            raise ConnectionError("the bank is away")
        for _ in range(input["employee"]):  # nothing for employee 0
            yield {"input": input, "result": result}

    async with payroll.app.batch(db, "payroll", kind="calculate", on_complete={"queue": "report"}) as root:
        await root.child("cheques", kind="send_cheque", stream=True)
        await root.add({"employee": n} for n in range(4))
    async with running(payroll.app, dsn) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, kind="report")
    assert sorted(payroll.cheques) == [(1, 1001), *[(2, 1002)] * 2, *[(3, 1003)] * 3]
    assert sorted(calls) == [0, 1, 2, 2, 3]
    (failed,) = seen.all(events.JOB_FAILED)
    assert (failed["kind"], failed["attempt"]) == ("payroll -> cheques", 1)
    assert payroll.reports[0]["batch"]["completed"] == 4 + 4 + 6


async def test_a_running_job_adds_jobs_to_its_own_batch(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """A crawler: each page adds the pages it links to, and the last page seals the batch."""
    app, visited = App(), list[int]()

    @app.handler("visit")
    async def visit(payload: dict[str, Any], job: Job) -> None:
        async with job.transaction() as connection:
            pages = Batch(connection, UUID(payload["batch"]))
            visited.append(page := payload["page"])
            await pages.add({"page": n, "batch": payload["batch"]} for n in (2 * page, 2 * page + 1) if n < 16)
            if page == 15:
                await pages.seal()

    @app.handler("told")
    async def told() -> None:
        return None

    pages = await app.batch(db, "pages", kind="visit", on_complete={"queue": "told"})
    await pages.add([{"page": 1, "batch": str(pages.id)}])
    async with running(app, dsn, queues={"visit": 1, "told": 1}) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, kind="told")
    assert sorted(visited) == list(range(1, 16))
    assert [each.state for each in await pages.progress()] == ["completed"]
