"""Claim and settle where keys and limits count: index scans only, no sort of the table, and a constant cost."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.kits.flow import line, take_ids
from tests.kits.sessions import NO_STATISTICS, blocks, rows_read
from tests.kits.verbs import Db, at, complete, insert, one, worker

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]

FUNCTIONS = ["claim", "pick", "in_order", "of_key", "next_keys", "due_keys", "by_turn", "running_in", "promote"]
FUNCTIONS += ["keyed_behind", "places_after", "kinds_waiting"]
CALLERS = {"of_key": "by_turn", "keyed_behind": "claim", "places_after": "pick", "promote": "settle_completed"}
"""Another function under whose settings a function runs, apart from its own."""
INDEXES = {"keyed_behind": {"jobs_claimable_keyed", "jobs_promoted"}, "kinds_waiting": {"jobs_turns_of_kind"}}
"""Indexes that a function has to use where others would fit that have another order."""
STATEMENT = re.compile(r"^\s*(?:IF EXISTS \()?(SELECT|UPDATE|WITH|PERFORM|RETURN QUERY|\w+ := )", re.M)
SCANS = {"Index Scan", "Index Only Scan", "Tid Scan"}
CLAIM = "SELECT * FROM pgworkd.claim($1, 'q', 10)"


async def _statements(db: Db, function: str) -> tuple[list[str], list[str], list[str]]:
    """The statements in a function's body that read `jobs`, their parameters' types, and the function's settings."""
    row = await db.fetchrow(
        "SELECT prosrc, proargnames AS names, proconfig,"
        " (SELECT array_agg(format_type(t, NULL) ORDER BY n)"
        "  FROM unnest(coalesce(proallargtypes, proargtypes::oid[])) WITH ORDINALITY AS a (t, n)) AS types"
        " FROM pg_proc WHERE oid = ('pgworkd.' || $1)::regproc",
        function,
    )
    assert row is not None
    source = re.sub(r"--.*", "", row["prosrc"])
    declared = re.findall(r"^    (v_\w+)\s+([\w\[\]]+)", source, re.M)
    variables = dict(zip(row["names"], row["types"], strict=True)) | dict(declared)
    variables |= {"v_row.priority": "integer", "i": "integer"}
    variables = {
        name: kind for name, kind in variables.items() if kind != "record" and re.search(rf"\b{name}\b", source)
    }
    names = sorted(
        (name for name in variables if name.startswith(("p_", "v_", "picked", "room", "met"))), key=len, reverse=True
    )
    found = []
    for part in source.split(";"):
        begin = STATEMENT.search(part)
        if begin is None or "jobs j" not in part:
            continue
        text = part[begin.start(1) :]
        text = re.sub(r"^\w+ := ", "SELECT ", text)
        text = re.sub(r"^(PERFORM)\b", "SELECT", text)
        text = re.sub(r"^RETURN QUERY\s", "", text)
        text = re.sub(r"\bINTO\s+v_\w+(?:,\s*v_\w+)*", " ", text)
        for name in names:  # a row type keeps its fields: ($n).field
            text = re.sub(rf"(?<![.\w]){re.escape(name)}\b(?!\()", f"(${names.index(name) + 1})", text)
        found.append(text)
    return found, [variables[name] for name in names], row["proconfig"]


def _walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from _walk(child)


def _fault(plan: dict[str, Any], indexes: set[str] | None = None) -> str | None:
    """What is wrong with a plan; None: nothing. `indexes`: those it has to use."""
    for node in _walk(plan):
        if indexes is not None and "Index Name" in node and node["Index Name"] not in indexes:
            return f"by {node['Index Name']}"
        if node.get("Relation Name") == "jobs" and "Scan" in node["Node Type"]:
            if node["Node Type"] not in SCANS:
                return f"{node['Node Type']} on jobs"
            if node["Node Type"] != "Tid Scan" and "queue" not in node.get("Index Cond", ""):
                return f"all of {node['Index Name']}"
        if "Sort" in node["Node Type"]:
            inputs = [below for below in _walk(node) if below.get("Relation Name") == "jobs"]
            if any(
                "Index" in below["Node Type"] and "SubPlan" not in below.get("Subplan Name", "") for below in inputs
            ):
                return "a sort of what an index gave"
    return None


async def _plans(db: Db, function: str) -> list[tuple[str, dict[str, Any]]]:
    statements, types, config = await _statements(db, function)
    around = (await _statements(db, CALLERS.get(function, function)))[2]
    plans = []
    for statement in statements:
        async with db.transaction():
            for setting in [*around, *config, "plan_cache_mode=force_generic_plan"]:
                await db.execute("SELECT set_config($1, $2, true)", *setting.split("=", 1))
            await db.execute(f"PREPARE pinned ({', '.join(types)}) AS {statement}")
            nulls = ", ".join(["NULL"] * len(types))
            (plan,) = json.loads(await db.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE pinned ({nulls})"))
            await db.execute("DEALLOCATE pinned")
        plans.append((statement, plan["Plan"]))
    return plans


@pytest.mark.parametrize("function", FUNCTIONS)
async def test_plans_use_indexes_whatever_the_statistics(db: Db, function: str) -> None:
    await db.execute(NO_STATISTICS)
    keyed = (
        "INSERT INTO pgworkd.jobs (queue, serialize_key, limit_key, status) SELECT 'q', $1 || n % $2, 'l' || n % 7, $3"
    )
    steps: list[Callable[[], Awaitable[Any]]] = [
        lambda: db.execute("SELECT 'never analysed'"),
        lambda: db.execute("ANALYZE pgworkd.jobs"),  # while it is empty
        lambda: insert(db, 500),
        lambda: db.execute(f"{keyed} FROM generate_series(1, 3000) n", "s", 3000, "pending"),
        lambda: db.execute("ANALYZE pgworkd.jobs"),
        lambda: db.execute(f"{keyed} FROM generate_series(1, 3000) n", "b", 2, "blocked"),
        lambda: db.execute("ANALYZE pgworkd.jobs"),
    ]
    expected = len((await _statements(db, function))[0])
    assert expected > 0, "nothing found to look at"
    for number, step in enumerate(steps):
        await step()
        for statement, plan in await _plans(db, function):
            fault = _fault(plan, {"jobs_turns_of_kind"} if "u.kind" in statement else INDEXES.get(function))
            if fault == "all of jobs_running_since" and "min(j.worker_id)" in statement:
                continue  # the next worker that runs anything
            if fault == "all of jobs_pkey" and "pgworkd.careful" in statement:
                continue  # those few ids
            assert fault is None, f"step {number}: {fault} in {statement}"


async def _blocked(db: Db, count: int, queue: str = "q") -> None:
    """Jobs blocked behind two keys that others hold."""
    for key in ("k0", "k1"):
        await one(db, queue, serialize_key=key, run_at=at(-5), status="running", worker_id=await worker(db), attempts=1)
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, serialize_key, status, run_at)"
        " SELECT $1, 'k' || n % 2, 'blocked', $2::timestamptz + n * interval '1 us' FROM generate_series(1, $3) n",
        queue,
        at(-4),
        count,
    )


async def test_a_hundred_thousand_blocked_jobs_do_not_slow_a_claim(db: Db, other: Db) -> None:
    worker_id = await worker(db)
    await db.execute(NO_STATISTICS)
    await insert(db, 30)
    await line(db, *(f"free {number}" for number in range(30)))
    few = await blocks(db, CLAIM, worker_id)
    await _blocked(db, 100_000)
    for session in (db, other):
        assert await blocks(session, CLAIM, worker_id) <= few + 30
        async with session.transaction():
            seq, idx = await rows_read(session)
            assert len(await take_ids(session, worker_id)) == 10
            seq_after, idx_after = await rows_read(session)
            assert seq_after == seq
            assert idx_after - idx <= 150
            await session.execute("UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL WHERE worker_id = $1",
                                  worker_id)  # fmt: skip


async def test_a_settle_that_frees_a_key_reads_only_the_first_job_of_that_key(db: Db, other: Db) -> None:
    await db.execute(NO_STATISTICS)
    await _blocked(db, 30_000)
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, serialize_key, status, worker_id)"
        " SELECT 'r', 'k' || n, 'running', 99 FROM generate_series(1, 10000) n"
    )
    rows = await db.fetch("SELECT id FROM pgworkd.jobs WHERE status = 'running' AND queue = 'q'")
    for session, row in zip((db, other), rows, strict=True):
        async with session.transaction():
            seq, idx = await rows_read(session)
            await complete(session, [row["id"]])
            seq_after, idx_after = await rows_read(session)
            assert seq_after == seq
            assert idx_after - idx <= 10
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'pending'") == 2
