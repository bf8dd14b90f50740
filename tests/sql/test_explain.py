"""explain(): each reason alone keeps every claim from a job; without all of them the next claim takes it.

Drawn states: of each job in them the reasons are asked, and removed, all of them, and all but one.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from tests.kits import verbs as v
from tests.kits.models import examples
from tests.kits.schema import Roles
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")
KINDS = [None, None, "k"]
KEYS = [None, None, "a", "b"]
LATER = {"order", "key", "slots", "suspect"}
"""Reasons that may appear once others are gone: a place, a line, and the slots of workers that know its kind."""
SEEN: Counter[str] = Counter()
"""How often each reason was given."""

QUEUE = st.fixed_dictionaries(
    {
        "paused_until": st.sampled_from([None] * 6 + ["'infinity'", "pgworkd.clock() + interval '99 s'"]),
        "max_running": st.sampled_from([None, None, "1", "2"]),
        "limit_per_key": st.sampled_from([None, None, "1"]),
        "rate": st.sampled_from([None, None, None, "1", "2"]),
        "rate_per_key": st.sampled_from([None, None, None, "1"]),
        "fair": st.sampled_from(["false", "false", "true"]),
        "serialize_scope": st.sampled_from([None, None, "'stage'"]),
    }
)
WORKER = st.fixed_dictionaries(
    {
        "concurrency": st.sampled_from([1, 1, 2, 5]),
        "state": st.sampled_from(["running"] * 5 + ["blocked", "stopping"]),
        "requested": st.sampled_from([None] * 5 + ["quiet"]),
    }
)
JOB = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "priority": st.sampled_from([0, 0, 1]),
        "run_at": st.sampled_from([-9, -5, -5, -1, 10]).map(v.at),
        "serialize_key": st.sampled_from(KEYS),
        "limit_key": st.sampled_from([None, "x", "y"]),
        "yields": st.booleans(),
        "losses": st.sampled_from([0, 0, 0, 0, 2]),
        "expires_at": st.sampled_from([None] * 6 + [v.at(-3)]),
    }
)
STEP = st.tuples(
    st.integers(1, 3), st.sampled_from(["stay", "stay", "complete", "retry", "retry later", "die", "lose", "refuse"])
)
STATE = st.tuples(
    QUEUE,
    st.lists(WORKER, max_size=2),
    st.sampled_from([None, None, ["q"], ["q", "k"]]),  # what they know
    st.lists(JOB, min_size=1, max_size=5),
    st.lists(STEP, max_size=3),
    st.booleans(),  # the last job depends on the first
    st.sampled_from([False] * 9 + [True]),  # the database is a copy
)


async def reasons(db: Db, job_id: uuid.UUID) -> set[str]:
    """Why the job does not run."""
    return {row[0] for row in await db.fetch("SELECT reason FROM pgworkd.explain($1)", job_id)}


async def taken(db: Db, job_id: uuid.UUID) -> bool:
    """Whether a worker that can claim would take the job now; nothing of that remains."""

    async def claims() -> bool:
        await db.execute(PARK)
        rows = await db.fetch(
            """SELECT w.id, p.concurrency - (SELECT count(*) FROM pgworkd.jobs j WHERE j.worker_id = w.id
                    AND j.status = 'running' AND j.queue = 'q') AS free, w.kinds
                FROM pgworkd.pools p JOIN pgworkd.workers w ON w.id = p.worker_id
                WHERE p.queue = 'q' AND w.state = 'running' AND w.requested IS NULL AND w.lease_until > pgworkd.clock()
                    AND pgworkd.is_origin(NULL) ORDER BY w.id"""
        )
        found = set()
        for worker_id, free, kinds in rows:
            without = [] if kinds is None else list({"q", "k"} - set(kinds))
            await db.execute("SELECT pgworkd.carefully()")
            for _ in range(free):  # one at a time, so that the workers' slots fill together
                claimed = await db.fetch(
                    "SELECT id FROM pgworkd.claim($1, 'q', 1, p_without => $2) WHERE id IS NOT NULL", worker_id, without
                )
                if not claimed:
                    break
                found |= {row[0] for row in claimed}
        return job_id in found

    return await undone(db, claims)


PARK = """UPDATE pgworkd.jobs j SET status = 'blocked'
    WHERE j.status IN ('pending', 'failed') AND j.losses < 2 AND j.run_at <= pgworkd.clock()
      AND NOT pgworkd.key_is_free(coalesce(j.serialize_scope, j.queue), j.serialize_key,
                                  j.status = 'failed' AND NOT j.yields, j.run_at, j.id)"""
"""What claims that meet them do first. Until then such jobs use up the turn of their limit_key."""


async def undone(db: Db, call: Callable[[], Awaitable[Any]]) -> Any:
    """The answer to a call that is rolled back."""
    transaction = db.transaction()
    await transaction.start()
    try:
        return await call()
    finally:
        await transaction.rollback()


_SETTING = "UPDATE pgworkd.queues SET {} WHERE $1::uuid IS NOT NULL"
_WAITS = "UPDATE pgworkd.jobs SET status = 'pending', waiting_on = 0 WHERE id = $1"
REMOVALS = {
    "paused": _SETTING.format("paused_until = NULL"),
    "limit": _SETTING.format("max_running = NULL"),
    "limit_key": _SETTING.format("limit_per_key = NULL"),
    "rate": _SETTING.format("rate = NULL, rate_period_s = NULL"),
    "rate_key": _SETTING.format("rate_per_key = NULL, rate_per_key_period_s = NULL"),
    "expired": "UPDATE pgworkd.jobs SET expires_at = NULL WHERE id = $1",
    "dependency": "WITH gone AS (DELETE FROM pgworkd.job_dependencies WHERE job_id = $1) " + _WAITS,  # noqa: S608
    "unblocking": _WAITS,
    "refused": "DELETE FROM pgworkd.refused_rows WHERE key = $1::uuid::text",
    "copy": "DELETE FROM pgworkd.origin WHERE $1::uuid IS NOT NULL",
    "kind": "UPDATE pgworkd.workers SET kinds = NULL WHERE $1::uuid IS NOT NULL",
    "slots": "UPDATE pgworkd.pools SET concurrency = 9 WHERE $1::uuid IS NOT NULL",
    "suspect": "DELETE FROM pgworkd.jobs WHERE status = 'running' AND losses > 1 AND id <> $1",
    "order": """DELETE FROM pgworkd.jobs WHERE id <> $1 AND queue = 'q' AND status IN ('pending', 'failed')
        AND run_at <= pgworkd.clock()""",
    "dead": "SELECT pgworkd.retry(ARRAY[$1::uuid])",
    "running": "UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL WHERE id = $1",
    "lost": "UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL WHERE id = $1",
}
BEFORE = "SELECT pgworkd.before_in_line(j) FROM pgworkd.jobs j WHERE j.id = $1"


async def remove(db: Db, job_id: uuid.UUID, found: Iterable[str]) -> None:
    """Removes these reasons, and nothing else."""
    for reason in sorted(found):
        if reason == "key":
            while (before := await db.fetchval(BEFORE, job_id)) is not None:
                await db.execute("DELETE FROM pgworkd.jobs WHERE id = $1", before)
            await db.execute(_WAITS + " AND status = 'blocked'", job_id)
        elif reason == "no_worker":
            await add_worker(db, {"concurrency": 9, "kinds": None, "state": "running", "requested": None})
        elif reason in ("future", "retry"):
            await v.clock(70, db)
        else:
            await db.execute(REMOVALS[reason], job_id)


async def add_worker(db: Db, options: dict[str, Any]) -> int:
    worker_id = await v.worker(db, 3600)
    await db.execute(
        "UPDATE pgworkd.workers SET kinds = $2, state = $3, requested = $4 WHERE id = $1",
        worker_id,
        options["kinds"],
        options["state"],
        options["requested"],
    )
    await db.execute("SELECT pgworkd.set_pool($1, 'q', $2, false)", worker_id, options["concurrency"])
    return worker_id


async def build(db: Db, state: Any) -> list[uuid.UUID]:
    """The state in an empty database; its jobs."""
    queue, workers, kinds, jobs, steps, depends, is_copy = state
    await db.execute("TRUNCATE pgworkd.jobs, pgworkd.workers, pgworkd.pools, pgworkd.queues, pgworkd.rates CASCADE")
    await db.execute("TRUNCATE pgworkd.refused_rows, pgworkd.origin, pgworkd.finished_jobs")
    columns = {name: value for name, value in queue.items() if value is not None}
    columns |= {f"{name}_period_s": "600" for name in ("rate", "rate_per_key") if name in columns}
    paused = columns.pop("paused_until", "NULL")
    names, values = ", ".join(columns), ", ".join(columns.values())
    await db.execute(f"INSERT INTO pgworkd.queues (name, {names}) VALUES ('q', {values})")  # noqa: S608 - of this file
    ids = [await add_worker(db, each | {"kinds": kinds}) for each in workers]
    made = [await v.one(db, **each) for each in jobs]
    for number, (limit, end) in enumerate(steps):
        if ids:
            await play(db, ids[number % len(ids)], limit, end)
    if depends and len(made) > 1:
        async with db.transaction():
            made.append(await v.one(db, serialize_key="a"))
            await db.execute("SELECT pgworkd.depend($1, ARRAY[$2::uuid])", made[-1], made[0])
    await db.execute(f"UPDATE pgworkd.queues SET paused_until = {paused}")  # noqa: S608 - of this file
    if is_copy:
        await db.execute("INSERT INTO pgworkd.origin (server, database) VALUES (1, 'elsewhere')")
    return made


async def play(db: Db, worker_id: int, limit: int, end: str) -> None:
    """One claim by that worker, unless it is lost, and what becomes of it."""
    if not await db.fetchval("SELECT lease_until > pgworkd.clock() FROM pgworkd.workers WHERE id = $1", worker_id):
        return
    rows = [row for row in await v.claim(db, worker_id, limit) if row["id"]]
    ids, attempts = [row["id"] for row in rows], [row["attempt"] for row in rows]
    if end == "lose":
        await db.execute(
            "UPDATE pgworkd.workers SET lease_until = pgworkd.clock() - interval '1 s' WHERE id = $1", worker_id
        )
    elif not ids:
        return
    elif end == "complete":
        await v.complete(db, ids, attempts)
    elif end in ("retry", "retry later", "die"):
        await v.fail(db, ids, attempts, delay_s=60.0 if end == "retry later" else 0.0, permanent=end == "die")
    elif end == "refuse":
        await v.release(db, ids, attempts)
        await db.execute(
            "INSERT INTO pgworkd.refused_rows (what, key, sqlstate, error, until) "
            "VALUES ('claim', $1::uuid::text, '22000', 'no', pgworkd.clock() + interval '99 s') ON CONFLICT DO NOTHING",
            ids[0],
        )


INEXACT = """SELECT EXISTS (SELECT FROM pgworkd.jobs WHERE losses > 1) OR EXISTS (
    SELECT FROM pgworkd.queues WHERE fair OR limit_per_key IS NOT NULL OR rate_per_key IS NOT NULL)"""
"""By turns, and beside suspects, claims of many jobs and of one take others: `order` is what claims of one take."""


class Judge:
    """Compares the reasons of one job with what claims do."""

    def __init__(self, db: Db, job_id: uuid.UUID, found: set[str], *, exact: bool) -> None:
        """`exact`: jobs start by priority, so that `order` is exact."""
        self.db, self.job_id, self.found = db, job_id, found
        self.free = set() if exact else {"order"}
        """What may be there, or not."""
        self.wrong: list[str] = []
        self.waits = not found & {"dead", "running", "lost"}
        """Whether the job waits; else it has reasons of its own once it does."""

    async def without(self, left: set[str]) -> bool:
        """Whether it is taken without any reason but these."""
        gone = (self.found | self.free) - left
        await remove(self.db, self.job_id, gone)
        for _ in range(4):
            if not (more := await reasons(self.db, self.job_id) - left):
                break
            if not left and self.waits and not more <= LATER:
                self.wrong.append(f"without {gone} there are still {more}")
            await remove(self.db, self.job_id, more)
        remaining = await reasons(self.db, self.job_id)
        if not left and remaining:
            self.wrong.append(f"nothing ends {remaining} of {self.found}")
        # What ends one may end another: a job that holds a key and counts in a limit.
        return left <= remaining and await taken(self.db, self.job_id)

    async def around(self, reason: str, seconds: float) -> tuple[bool, bool]:
        """Whether a reason still holds shortly before its time, and at that."""
        await remove(self.db, self.job_id, self.found - {reason})
        held = []
        for before in (0.001, 0):
            await v.clock(seconds - before, self.db)
            held.append(reason in await reasons(self.db, self.job_id))
        return held[0], held[1]

    async def judge(self) -> list[str]:
        """What is wrong with the reasons."""
        if not self.free and await taken(self.db, self.job_id) is bool(self.found):
            self.wrong.append(f"it is {'' if self.found else 'not '}taken, and the reasons are {self.found}")
        if "ended" in self.found:
            return self.wrong
        if not await undone(self.db, lambda: self.without(set())):
            self.wrong.append(f"it is not taken without {self.found}")
        for reason in self.found - self.free if self.waits else ():
            if await undone(self.db, lambda reason=reason: self.without({reason})):  # type: ignore[misc]
                self.wrong.append(f"it is taken in spite of {reason} of {self.found}")
        sql = "SELECT reason, ends_at FROM pgworkd.explain($1) WHERE isfinite(ends_at) AND reason <> 'lost'"
        for reason, at in await self.db.fetch(sql, self.job_id):
            seconds = (at - v.T0).total_seconds()
            if await undone(self.db, lambda reason=reason, seconds=seconds: self.around(reason, seconds)) != (
                True,
                False,
            ):  # type: ignore[misc]
                self.wrong.append(f"{reason} does not end at {at}")
        return self.wrong


async def judged(db: Db, job_id: uuid.UUID) -> list[str]:
    """What is wrong with the reasons of this job."""
    found = await reasons(db, job_id)
    SEEN.update(found)
    exact = not await db.fetchval(INEXACT)
    return await Judge(db, job_id, found, exact=exact).judge()


async def explained(db: Db, count: int, part: int = 0) -> None:
    """Judges one job of each of that many drawn states, others for each part."""
    drawn: list[Any] = []

    @seed(part)
    @examples(count)
    @given(STATE)
    def collect(state: Any) -> None:
        drawn.append(state)

    collect()
    assert len(drawn) >= count
    for number, state in enumerate(drawn):
        ids = await build(db, state)
        wrong = await judged(db, ids[number % len(ids)])
        assert wrong == [], "\n".join([*wrong, str(state)])


async def test_each_reason_alone_keeps_a_job_and_nothing_else_does(db: Db) -> None:
    await explained(db, 55)


async def test_who_only_reads_may_ask(db: Db, roles: Roles) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, paused_until, limit_per_key) VALUES ('q', 'infinity', 1)")
    job_id = await v.one(db, serialize_key="a", limit_key="x")
    async with roles.session("reader") as session:
        assert await reasons(session, job_id) == {"future", "paused", "no_worker"}, "its clock is not ours"


@pytest.mark.slow("5,000 drawn states, each with every reason removed")
@pytest.mark.parametrize("part", range(8))
async def test_reasons_in_thousands_of_states(db: Db, part: int) -> None:
    SEEN.clear()
    await explained(db, 630, part)
    assert len(SEEN) >= 18, SEEN  # of 22 kinds
