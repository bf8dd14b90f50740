"""Jobs that depend on others under any interleaving of sessions, with rollbacks, crashes, retries and old snapshots."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from hypothesis import given

from tests.kits.batches import counted, create, exact, mend, undepend
from tests.kits.models import ADDING as ADDS_TO_BATCHES
from tests.kits.models import EMPTY, QUICK, RUNNING, WAITING, Step, World, playing, steps
from tests.kits.verbs import NEVER, Db, at, cancel, clock, complete, end, fail, release, retry

pytestmark = pytest.mark.slow("a model against the database")

TABLES = "pgworkd.job_dependencies, public.edges, public.died"
TRIGGERS = """
    CREATE TABLE public.edges (job_id uuid, depends_on uuid, on_failed text);
    CREATE TABLE public.died (id uuid);
    CREATE FUNCTION public.noted() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.edges VALUES (NEW.job_id, NEW.depends_on, NEW.on_failed_dependency);
        RETURN NULL;
    END $$;
    CREATE TRIGGER noted AFTER INSERT ON pgworkd.job_dependencies FOR EACH ROW EXECUTE FUNCTION public.noted();
    CREATE FUNCTION public.let_go() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        DELETE FROM public.edges WHERE job_id = NEW.job_id;
        RETURN NULL;
    END $$;
    CREATE TRIGGER let_go AFTER INSERT ON pgworkd.audit FOR EACH ROW WHEN (NEW.what = 'undepend')
    EXECUTE FUNCTION public.let_go();
    CREATE FUNCTION public.changed() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.status = 'dead' THEN
            INSERT INTO public.died VALUES (NEW.id);
        ELSIF EXISTS (
            SELECT FROM public.edges e
            WHERE e.job_id = NEW.id
              AND NOT EXISTS (SELECT FROM pgworkd.finished_jobs f
                              WHERE f.id = e.depends_on AND (f.status = 'completed' OR e.on_failed = 'run'))
              AND NOT (e.on_failed = 'run' AND EXISTS (SELECT FROM public.died d WHERE d.id = e.depends_on))) THEN
            RAISE EXCEPTION 'job % starts too early', NEW.id;
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER changed AFTER UPDATE ON pgworkd.jobs FOR EACH ROW
    WHEN (NEW.status <> OLD.status AND NEW.status IN ('running', 'dead')) EXECUTE FUNCTION public.changed();
"""
# Of the dependents that still wait: those whose dependency ended so that their rule releases or cancels them.
OVERDUE = """
    SELECT d.job_id, d.depends_on, d.on_failed_dependency, f.status::text
    FROM pgworkd.job_dependencies d JOIN pgworkd.jobs j ON j.id = d.job_id AND j.waiting_on > 0
    JOIN pgworkd.all_jobs f ON f.id = d.depends_on
    WHERE f.status = 'completed'
        OR d.on_failed_dependency <> 'wait' AND f.status IN ('cancelled', 'expired', 'dead', 'discarded')
"""
# A job that still waits must have the rule 'wait', behind a job that has ended for good, or behind another such.
HOPELESS = """
    SELECT DISTINCT d.job_id FROM pgworkd.job_dependencies d JOIN pgworkd.all_jobs f ON f.id = d.depends_on
    WHERE d.on_failed_dependency = 'wait' AND f.status IN ('cancelled', 'expired')
"""
LIVE = "SELECT count(*) FROM pgworkd.jobs WHERE status <> 'completed' AND queue = 'q'"
MAKES_WAIT = {"insert", "after", "old"}
OPERATES = {"cancel", "retry", "undepend", "edit"}
COMPLETES = {"complete"}
DEADLOCK, OLD_SNAPSHOT = "40P01", "40001"
REFUSALS = (NEVER, "23505", DEADLOCK, OLD_SNAPSHOT)


class WaitWorld(World):
    """Jobs that depend on others, some with a key, some in a batch."""

    setup = TRIGGERS
    empty = f"{EMPTY}, {TABLES}"
    adding = MAKES_WAIT
    may_wait = MAKES_WAIT | OPERATES | COMPLETES | ADDS_TO_BATCHES

    refusals = REFUSALS

    async def plant(self, *how: Any) -> None:
        """Plants a job that depends on two others."""
        db = self.observer
        self.batch = (await create(db, "root", on_complete={"queue": "done"}))["id"]
        ids = [await _insert(db, n, None) for n in range(2)]
        await _after(db, 2, None, ids, "wait")

    async def call(self, step: Step, db: Db) -> Callable[[], Awaitable[Any]] | None:
        running, waiting = await self.observer.fetch(RUNNING), await self.observer.fetch(WAITING)
        begin = int(step.which * max(len(running) - 1, 0))
        some = running[begin : begin + 1 + int(step.which * 3)]
        ids, attempts = [row["id"] for row in some], [row["attempts"] for row in some]
        known = [row["id"] for row in await self.observer.fetch("SELECT id FROM pgworkd.all_jobs ORDER BY id DESC")]
        few = known[int(step.which * len(known)) % 4 :: 3][:4]
        everyone = [row["id"] for row in [*waiting, *running]]
        job_id = everyone[int(step.which * 97) % len(everyone)] if everyone else uuid.uuid4()
        number, rule = int(step.which * 1000), ("wait", "wait", "cancel", "run")[int(step.which * 100) % 4]
        worker_id = self.workers[step.session % 2]
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "insert": lambda: _insert(db, number, self.batch),
            "after": lambda: _after(db, number, self.batch, few, rule),
            "old": lambda: _after(db, number, self.batch, few, rule),
            "claim": lambda: db.fetch("SELECT * FROM pgworkd.claim($1, 'q', $2)", worker_id, 1 + int(step.which * 4)),
            "mend": lambda: mend(db),
            "expire": lambda: db.execute("SELECT pgworkd.expire()"),
            "cancel": lambda: cancel(db, job_id),
            "retry": lambda: retry(db, job_id),
            "undepend": lambda: undepend(db, job_id),
            "edit": lambda: _edit(db, job_id, at(self.now + step.which)),
        }
        if ids:
            calls |= {
                "complete": lambda: complete(db, ids, attempts, [json.dumps(step.which)] * len(ids)),
                "fail": lambda: fail(db, ids, attempts, delay_s=step.which, permanent=step.which < 0.7),
                "release": lambda: release(db, ids, attempts),
                "end": lambda: end(db, ids, attempts, status="expired" if step.which > 0.5 else "cancelled"),
            }
        self.now += 0.01
        if step.what == "tick":
            self.now += 0.01 * 1000**step.which
        elif step.what == "crash" and self.calm:
            await self.crash(int(step.which > 0.5))
        call = calls.get(step.what)
        isolation = "REPEATABLE READ" if step.what == "old" else "READ COMMITTED"
        await db.execute(f"SET default_transaction_isolation = '{isolation}'")
        return call

    async def check(self) -> None:
        """Of committed data: no job is released that has a dependency left, and batches are counted exactly."""
        async with self.observer.transaction(isolation="repeatable_read"):
            await counted(self.observer)
            wrong = await self.observer.fetch(
                "SELECT j.id FROM pgworkd.jobs j WHERE j.waiting_on > 0 AND j.waiting_on <> "
                "(SELECT count(*) FROM pgworkd.job_dependencies d WHERE d.job_id = j.id)"
            )
            assert wrong == [], "a counter that is wrong"

    async def finish(self) -> None:
        """Every job that should run does, and nothing is left."""
        db = self.observer
        await db.execute("SELECT pgworkd.unblock()")
        while await mend(db):
            pass  # its cancellations release others
        await exact(db)
        assert await db.fetch(OVERDUE) == [], "left to nobody"
        await self._run_all()
        stuck = {row[0] for row in await db.fetch("SELECT id FROM pgworkd.jobs WHERE waiting_on > 0")}
        hopeless = {row[0] for row in await db.fetch(HOPELESS)}
        edges = [tuple(row) for row in await db.fetch("SELECT job_id, depends_on FROM pgworkd.job_dependencies")]
        while more := {job_id for job_id, other in edges if other in hopeless} - hopeless:
            hopeless |= more
        assert stuck == hopeless, "blocked without a reason"
        await undepend(db, *stuck)
        await self._run_all()
        assert await db.fetchval(LIVE) == 0, "stuck"
        await exact(db)
        await counted(db)

    async def _run_all(self) -> None:
        """Retries dead jobs and completes all that can be claimed."""
        db = self.observer
        for _ in range(200):
            self.now += 5.0
            await clock(self.now, db)
            dead = [row["id"] for row in await db.fetch("SELECT id FROM pgworkd.jobs WHERE status = 'dead'")]
            await retry(db, *dead)
            await db.execute("SELECT pgworkd.expire()")
            await mend(db)
            await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 20)", self.workers[0])
            running = await db.fetch(RUNNING)
            await complete(db, [row["id"] for row in running], [row["attempts"] for row in running])
            if not await db.fetchval(f"{LIVE} AND waiting_on = 0"):
                return


async def _insert(db: Db, number: int, batch_id: uuid.UUID | None) -> uuid.UUID:
    """A plain INSERT: with a key, in the batch, with an expiry, or none of these."""
    columns = (
        batch_id if number % 5 == 0 else None,
        "k" if number % 3 == 1 else None,
        at(3) if number % 7 == 0 else None,
    )
    sql = """INSERT INTO pgworkd.jobs (queue, batch_id, serialize_key, expires_at, max_attempts)
             VALUES ('q', $1, $2, $3, 2) RETURNING id"""
    return uuid.UUID(str(await db.fetchval(sql, *columns)))


async def _after(db: Db, number: int, batch_id: uuid.UUID | None, others: list[uuid.UUID], rule: str) -> None:
    """Inserts a job that depends on others, in one transaction."""
    begins = not db.is_in_transaction()
    if begins:
        await db.execute("BEGIN")
    job_id = await _insert(db, number, batch_id)
    try:
        await db.execute("SELECT pgworkd.depend($1, $2, $3)", job_id, others, rule)
    except asyncpg.PostgresError:
        if begins:
            await db.execute("ROLLBACK")
        raise
    if begins:
        await db.execute("COMMIT")


async def _edit(db: Db, job_id: uuid.UUID, instant: object) -> None:
    """edit; a refused edit is ignored."""
    if await db.fetchval("SELECT status IN ('blocked', 'pending') FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", job_id):
        await db.execute("SELECT pgworkd.edit($1, p_run_at => $2)", job_id, instant)


# The tests

ADDS = ["insert", "after", "after", "after"]
RUNS = ["claim", "claim", "claim", "complete", "complete", "complete", "complete", "fail", "release", "end"]
ENDS = ["commit", "rollback", "rollback", "tick", "crash", "expire"]
MORE = ["old", "old", "cancel", "retry", "retry", "undepend", "edit", "mend"]


@pytest.mark.parametrize("more", [[], pytest.param(MORE, marks=pytest.mark.fast)], ids=["runs", "more"])
def test_no_job_runs_too_early_and_none_stays_blocked_for_ever(server_dsn: str, more: list[str]) -> None:
    with playing(server_dsn, WaitWorld) as play:
        QUICK(given(steps=steps([*ADDS, *RUNS, *ENDS, *more]))(lambda steps: play(steps)))()  # noqa: PLW0108 - by name
