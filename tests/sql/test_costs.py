"""What a statement costs beside a crowd of rows that are not its business: a table of cases, in pages touched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.kits.flow import settings
from tests.kits.sessions import NO_STATISTICS, blocks
from tests.kits.verbs import Db, at, insert, worker

pytestmark = pytest.mark.usefixtures("t0")

ME = "me"
"""The worker that claims, in a column of a row."""
Rows = tuple[int, dict[str, Any]] | str
"""This many jobs with these columns; or the statement that inserts them."""
CLAIM = "SELECT * FROM pgworkd.claim($1, 'q', 10)"
WANTED = "INSERT INTO pgworkd.jobs (queue, dedupe_key) VALUES ('q', '{}')"
KEPT = """INSERT INTO pgworkd.jobs (queue, dedupe_key, dedupe_until, status)
    SELECT 'q', 'k' || n, pgworkd.clock(), 'completed' FROM generate_series(1, 20000) n"""
LIVE = "INSERT INTO pgworkd.jobs (queue, dedupe_key) SELECT 'q', n::text FROM generate_series(1, 9000) n"
SERIAL = "INSERT INTO pgworkd.jobs (queue, serialize_key) SELECT 'q', 'k' || n FROM generate_series({}) n"
LIMITED = """INSERT INTO pgworkd.jobs (queue, limit_key, run_at)
    SELECT 'q', 'k' || n, pgworkd.clock() + interval '{} s' FROM generate_series({}) n"""
RUNNING = """INSERT INTO pgworkd.jobs (queue, limit_key, status, worker_id, attempts)
    SELECT '{}', 'l' || n % 100, 'running', 100 + n % 20, 1 FROM generate_series(1, 20000) n"""
ONE_OF_EACH = [(5, {"queue": "small"}), *((1, {"queue": "crowd", key: "k"}) for key in ("serialize_key", "limit_key"))]


@dataclass(frozen=True)
class Case:
    """A statement that may touch `times` the pages that it touches beside the few, and some more."""

    sql: str
    few: list[Rows]
    crowd: list[Rows]
    times: float = 1.0
    pages: int = 20
    limits: dict[str, Any] = field(default_factory=dict)


CASES = {
    "a claim, jobs of a higher priority that are not due": Case(
        CLAIM, [(5, {})], [(20_000, {"priority": 1, "run_at": at(3600)})]
    ),
    "a claim, jobs that are due in each queue": Case(
        CLAIM, [(10, {})], [(10_000, {"run_at": at(-1), "queue": "r"}), (10_000, {})]
    ),
    "a claim, suspects while it has one": Case(
        CLAIM,
        [(1, {"losses": 2, "status": "running", "worker_id": ME, "attempts": 1}), (10, {"losses": 2}), (10, {})],
        [(10_000, {"losses": 2, "priority": 5})],
    ),
    **{
        f"an insert, keys that are no longer kept: {key}": Case(WANTED.format(key), [LIVE], [KEPT], pages=40)
        for key in ("k", "k77")
    },
    "next_due, jobs in each queue": Case(
        "SELECT * FROM pgworkd.next_due('{q,r}')",
        [(1, {"run_at": at(5)}), (1, {"priority": 1, "run_at": at(6)})],
        [(10_000, {"priority": 1, "run_at": at(7)}), (10_000, {"queue": "r", "run_at": at(7)})],
    ),
    "next_due, jobs with keys": Case(
        "SELECT * FROM pgworkd.next_due('{q}')",
        [(3, {"limit_key": "a", "run_at": at(10)})],
        [
            (5_000, {"limit_key": "a", "run_at": at(20)}),
            (5_000, {"serialize_key": "s", "run_at": at(9), "priority": 3}),
        ],
    ),
    "depth, jobs that are not due or elsewhere": Case(
        "SELECT pgworkd.depth('q')",
        [(10, {})],
        [
            (10_000, {"run_at": at(60)}),
            (5_000, {"run_at": at(60), "limit_key": "l", "priority": 1}),
            (5_000, {"queue": "r"}),
        ],
        1.5,
        10,
    ),
    "depth, jobs beyond its bound": Case("SELECT pgworkd.depth('q', 10)", [(10, {})], [(30_000, {})], 3.0, 0),
    "a claim, jobs of many keys": Case(CLAIM, [SERIAL.format("1, 30")], [SERIAL.format("31, 20000")], pages=60),
    **{
        f"a claim by {limits}, jobs that wait": Case(
            CLAIM,
            [(20, {"limit_key": "a"}), (20, {"limit_key": "b"})],
            [(10_000, {"limit_key": "a"}), (10_000, {"limit_key": "c"})],
            pages=60,
            limits=limits,
        )
        for limits in ({"max_running": 100_000}, {"fair": True}, {"limit_per_key": 5})
    },
    **{
        f"a claim by {limits}, keys without a due job": Case(
            CLAIM, [LIMITED.format(0, "1, 100")], [LIMITED.format(60, "101, 20000")], 3.0, 0, limits
        )
        for limits in ({"fair": True}, {"limit_per_key": 5}, {"rate_per_key": 9, "rate_per_key_period_s": 1})
    },
    **{
        f"a claim by {limits}, jobs that run in queue {queue}": Case(
            CLAIM, [(20, {"limit_key": "a"})], [RUNNING.format(queue)], 3.0, 0, limits
        )
        for queue, limits in (
            ("r", {"max_running": 50}),
            ("r", {"limit_per_key": 5}),
            ("r", {"limit_per_key": 5, "max_running": 50}),
            ("q", {"limit_per_key": 5}),
        )
    },
    **{
        f"matching({wanted}), a large queue": Case(
            f"SELECT pgworkd.matching({wanted})",
            [*ONE_OF_EACH, (5, {"queue": "crowd", "status": "dead", "failed_at": at(0)})],
            [(20_000, {"queue": "crowd"})],
            pages=100,
        )
        for wanted in (
            "'cancel', 'small'",
            "'cancel', 'small', p_kind => 'small'",
            "'cancel', 'crowd', p_key => 'k'",
            "'cancel', 'crowd', p_status => 'running'",
            "'retry', 'crowd'",
            "'discard', p_all => true",
            "'cancel', 'crowd', p_batch => '00000000-0000-0000-0000-000000000000'",
        )
    },
}
QUICK = 9
SLOW = pytest.mark.slow("thousands of rows for each case: what they cost has to show")


async def _insert(db: Db, me: int, rows: list[Rows]) -> None:
    for each in rows:
        if isinstance(each, str):
            await db.execute(each)
        else:
            await insert(db, each[0], **{name: me if value == ME else value for name, value in each[1].items()})


@pytest.mark.parametrize("name", [pytest.param(each, marks=SLOW if n >= QUICK else ()) for n, each in enumerate(CASES)])
async def test_a_statement_costs_the_same_beside_a_crowd(db: Db, other: Db, name: str) -> None:
    """In a session with a plan from before, and in one that plans now; no statistics tell that there are many."""
    case, me = CASES[name], await worker(db)
    await db.execute(NO_STATISTICS)
    if case.limits:
        await settings(db, **case.limits)
    args = [me] if "$1" in case.sql else []
    await _insert(db, me, case.few)
    await db.execute("ANALYZE pgworkd.jobs")
    for _ in range(2):  # for a plan that is kept
        few = await blocks(db, case.sql, *args)
    await _insert(db, me, case.crowd)
    for session in (db, other):
        assert await blocks(session, case.sql, *args) <= case.times * few + case.pages
