"""Keys and limits under any interleaving of sessions, with rollbacks, crashes and changed limits at every step."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kits.flow import HOLDERS, most_in_window, settings
from tests.kits.models import QUICK, Step, World, playing
from tests.kits.verbs import Db, at, cancel, clock, complete, end, fail, release, retry

pytestmark = pytest.mark.slow("a model against the database")

AUDIT = """
    CREATE TABLE public.audit (n bigserial PRIMARY KEY, job uuid, attempt int, queue text, key text, old text, new text,
                               run_at timestamptz, started_at timestamptz);
    CREATE FUNCTION public.audit() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'DELETE' THEN
            INSERT INTO public.audit (job, attempt, queue, key, old, new, run_at, started_at)
            VALUES (OLD.id, OLD.attempts, OLD.queue, OLD.serialize_key, OLD.status, 'gone', OLD.run_at, OLD.started_at);
        ELSIF TG_OP = 'INSERT' OR NEW.status <> OLD.status THEN
            INSERT INTO public.audit (job, attempt, queue, key, old, new, run_at, started_at)
            VALUES (NEW.id, NEW.attempts, NEW.queue, NEW.serialize_key,
                    CASE WHEN TG_OP = 'UPDATE' THEN OLD.status END, NEW.status, NEW.run_at, NEW.started_at);
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON pgworkd.jobs
    FOR EACH ROW EXECUTE FUNCTION public.audit();
"""
"""Every change of a status, in the order in which it was made, without what was rolled back."""

ORDER = """
    CREATE FUNCTION public.in_order() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF EXISTS (SELECT FROM pgworkd.jobs e
                   WHERE coalesce(e.serialize_scope, e.queue) = coalesce(NEW.serialize_scope, NEW.queue)
                     AND e.serialize_key = NEW.serialize_key
                     AND e.status IN ('blocked', 'pending', 'failed') AND (e.run_at, e.id) < (NEW.run_at, NEW.id)
                     AND (e.expires_at IS NULL OR e.expires_at > pgworkd.clock() OR e.begun > 0)) THEN
            RAISE EXCEPTION 'job % overtakes', NEW.id;
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER in_order AFTER UPDATE ON pgworkd.jobs FOR EACH ROW
    WHEN (NEW.status = 'running' AND OLD.status <> 'running' AND NOT (OLD.status = 'failed' AND NOT OLD.yields))
    EXECUTE FUNCTION public.in_order();
"""
"""A retry that has held its key all along may be due later than other jobs of the key: the one exception."""

EMPTY = """TRUNCATE pgworkd.jobs, pgworkd.finished_jobs, pgworkd.pending_effects, pgworkd.queues, pgworkd.rates,
    pgworkd.workers, public.audit"""
RUNNING = "SELECT id, attempts FROM pgworkd.jobs WHERE status = 'running' ORDER BY id"
WAITING = "SELECT id FROM pgworkd.jobs WHERE status IN ('blocked', 'pending', 'failed', 'dead') ORDER BY run_at, id"
COUNTS = """SELECT coalesce(limit_key, '') AS key, count(*)::int AS n
    FROM pgworkd.jobs WHERE status = 'running' AND queue = 'q' GROUP BY limit_key"""


class FlowWorld(World):
    """Queues, their keys and limits: one, or two whose keys are those of one scope."""

    setup = AUDIT + ORDER
    empty = EMPTY

    async def plant(self, *how: Any) -> None:
        """Sets the limits."""
        limits, self.scopes = how
        self.limits: dict[str, Any] = {}
        self.hand = False
        self._bounds: dict[str, int] = {}
        await self._set(limits)
        for queue, scope in self.scopes.items():
            await self.observer.execute(
                "SELECT pgworkd.set_queue($1, $2)", queue, json.dumps({"serialize_scope": scope})
            )

    def _queue(self, which: float) -> str:
        """One of the queues."""
        names = list(self.scopes) or ["q"]
        return names[int(which * 1000) % len(names)]

    async def call(self, step: Step, db: Db) -> Callable[[], Awaitable[Any]] | None:
        worker_id = self.workers[step.session % 2]
        running, waiting = await self.observer.fetch(RUNNING), await self.observer.fetch(WAITING)
        ids, attempts = self._some(running, step.which)
        some = running + waiting
        one_of_all = some[int(step.which * (len(some) - 1))]["id"] if some else None
        match step.what:
            case "insert":
                return lambda: self._insert(db, step)
            case "claim":
                some_of = "SELECT * FROM pgworkd.claim($1, $2, $3)"
                return lambda: db.fetch(some_of, worker_id, self._queue(step.which), 1 + int(step.which * 4))
            case "cancel" | "retry" | "edit" if one_of_all is not None:
                return lambda: self._operate(step, db, one_of_all)
            case "tick":
                self.now += 0.01 * 1000**step.which
            case "crash" if self.calm:
                await self.crash(int(step.which > 0.5))
            case "limits" if self.calm and self.limits:
                await self._set({name: max(1, int(step.which * 6)) for name in ("max_running", "limit_per_key")})
            case "lock" if self.calm and waiting:
                self.hand = True
                return lambda: db.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", one_of_all)
            case _ if ids:
                return self._settle(step, db, ids, attempts, worker_id)
        return None

    def _some(self, running: list[asyncpg.Record], which: float) -> tuple[list[uuid.UUID], list[int]]:
        begin = int(which * max(len(running) - 1, 0))
        rows = running[begin : begin + 1 + int(which * 3)]
        return [row["id"] for row in rows], [row["attempts"] for row in rows]

    async def _insert(self, db: Db, step: Step) -> None:
        serialize_key, limit_key = (key if key != "-" else None for key in step.key)
        for number in range(1 + int(step.which * 3)):
            await db.execute(
                "INSERT INTO pgworkd.jobs (queue, serialize_key, limit_key, priority, run_at, yields, expires_at)"
                " VALUES ($7, $1, $2, $3, $4, $5, $6)",
                serialize_key,
                limit_key,
                number - 1,
                at(self.now + (0.0, -5.0, 0.5)[int(step.which * 9) % 3]),
                step.which > 0.8,
                at(self.now + 3) if 0.4 < step.which < 0.5 else None,
                self._queue(step.which + number / 1000),
            )

    def _operate(self, step: Step, db: Db, job_id: uuid.UUID) -> Awaitable[Any]:
        if step.what == "edit":
            return self._edit(db, job_id, self.now + step.which * 4 - 2)
        return cancel(db, job_id) if step.what == "cancel" else retry(db, job_id)

    async def _edit(self, db: Db, job_id: uuid.UUID, seconds: float) -> None:
        """Edits a job; an edit that is refused leaves the transaction usable."""
        names = "SELECT set_config('test.job', $1, false), set_config('test.run_at', $2, false)"
        await db.execute(names, str(job_id), str(at(seconds)))
        await db.execute(
            "DO $$ BEGIN PERFORM pgworkd.edit(current_setting('test.job')::uuid,"
            " p_run_at => current_setting('test.run_at')::timestamptz);"
            " EXCEPTION WHEN SQLSTATE 'PW002' THEN NULL; END $$"
        )

    def _settle(
        self, step: Step, db: Db, ids: list[uuid.UUID], attempts: list[int], worker_id: int
    ) -> Callable[[], Awaitable[Any]] | None:
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "complete": lambda: complete(db, ids, attempts),
            "fail": lambda: fail(db, ids, attempts, delay_s=step.which * 2, permanent=step.which < 0.2),
            "release": lambda: release(db, ids, attempts, delay_s=step.which if step.which > 0.5 else None),
            "unknown": lambda: release(db, ids, attempts, delay_s=step.which * 2, message="no handler"),
            "begin": lambda: db.fetch("SELECT * FROM pgworkd.payloads($1, $2, 1000)", ids, attempts),
            "end": lambda: end(db, ids, attempts, status="expired" if step.which > 0.5 else "cancelled"),
        }
        return calls.get(step.what)

    async def _set(self, limits: dict[str, Any]) -> None:
        if limits:
            self.limits |= limits
            await settings(self.observer, **limits)

    # What must hold

    async def check(self) -> None:
        """Checks what is committed now: one holder per key, and no limit exceeded."""
        assert await self.observer.fetch(HOLDERS) == []
        counts = {row["key"]: row["n"] for row in await self.observer.fetch(COUNTS)}
        total = sum(counts.values())
        for name, limit, running in [
            ("max_running", self.limits.get("max_running"), total),
            *((key, self.limits.get("limit_per_key"), counts.get(key, 0)) for key in "xyz"),
        ]:
            if limit is not None:
                # A limit that was lowered is met as jobs finish.
                self._bounds[name] = max(limit, min(self._bounds.get(name, limit), running))
                assert running <= self._bounds[name], f"{running} of {name} {limit}"

    async def check_rates(self) -> None:
        """In every window: no more starts than the burst plus what the rate allows in that time."""
        for scope, column in (("rate", None), ("rate_per_key", "limit_key")):
            rate = self.limits.get(scope)
            if rate is None:
                continue
            burst = self.limits[f"{scope}_burst"]
            cost_s = self.limits[f"{scope}_period_s"] / rate
            for key in [None] if column is None else "xyz":
                starts = await self.observer.fetch(
                    "SELECT a.started_at FROM public.audit a LEFT JOIN pgworkd.all_jobs j ON j.id = a.job"
                    " WHERE a.new = 'running' AND ($1::text IS NULL OR j.limit_key = $1)",
                    key,
                )
                instants = [row["started_at"] for row in starts]
                for window_s in (0.0, cost_s, 1.0, 10.0):
                    assert most_in_window(instants, window_s) <= burst + window_s / cost_s + 1e-6, (scope, key)

    async def finish(self) -> None:
        """By claims, settles, and what maintenance does where a job expires."""
        db = self.observer
        await self.check()
        for _ in range(500):
            self.now += 5.0
            await clock(self.now, db)
            if self.hand:
                await db.execute("SELECT pgworkd.unblock()")
            await db.execute("SELECT pgworkd.expire(), pgworkd.apply_effects()")  # which expire() may leave to it
            running = await db.fetch(RUNNING)
            await end(db, [row["id"] for row in running], [row["attempts"] for row in running])
            for queue in self.scopes or ["q"]:
                await db.fetch("SELECT * FROM pgworkd.claim($1, $2, 3)", self.workers[0], queue)
            await self.check()
            if not await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status <> 'dead'"):
                break
        left = await db.fetch("SELECT status::text, serialize_key, run_at FROM pgworkd.jobs WHERE status <> 'dead'")
        assert left == [], "stuck"
        await self.check_rates()


# The tests

SETTLES = ["complete", "fail", "fail", "release", "release", "unknown", "begin", "end", "complete", "complete"]
PLAIN = ["insert", "insert", "claim", "claim", "claim", "tick", "commit", "rollback", "cancel", "retry", "crash"]
LIMITS = {"max_running": 2, "limit_per_key": 1}
RATES: dict[str, Any] = {
    "rate": 5,
    "rate_period_s": 1.0,
    "rate_burst": 3,
    "rate_per_key": 2,
    "rate_per_key_period_s": 1.0,
    "rate_per_key_burst": 2,
}


def steps(whats: list[str], keys: list[str]) -> st.SearchStrategy[list[Step]]:
    """Generates schedules: most begin with jobs that compete."""
    step = st.builds(
        Step,
        session=st.integers(0, 2),
        what=st.sampled_from(whats),
        which=st.floats(0, 1, allow_nan=False),
        key=st.sampled_from(keys),
        open=st.booleans(),
    )
    first = st.builds(
        Step, st.integers(0, 2), st.just("insert"), st.floats(0, 1), st.just(False), st.sampled_from(keys)
    )
    heads, tails = st.lists(first, min_size=1, max_size=4), st.lists(step, min_size=12, max_size=28)
    return st.builds(lambda head, tail: head + tail, heads, tails)


def _holds(
    server_dsn: str,
    whats: list[str],
    keys: list[str],
    limits: dict[str, Any],
    scopes: dict[str, str | None] | None = None,
) -> None:
    with playing(server_dsn, FlowWorld) as play:
        QUICK(given(steps=steps(whats, keys))(lambda steps: play(steps, limits, scopes or {})))()


def test_jobs_of_a_serialize_key_run_one_at_a_time_in_order_and_none_is_stuck(server_dsn: str) -> None:
    _holds(server_dsn, PLAIN + SETTLES, ["a-", "a-", "b-", "--"], {})


@pytest.mark.parametrize("scopes", [{"q": "both", "r": "both"}, {"q": None, "r": "q"}])
@pytest.mark.parametrize("more", [[], ["edit", "edit"], ["limits"]], ids=["runs", "edits", "limits"])
def test_jobs_of_a_scope_run_one_at_a_time_in_order_over_its_queues(
    server_dsn: str, scopes: dict[str, str | None], more: list[str]
) -> None:
    limits = {"max_running": 3} if more == ["limits"] else {}
    _holds(server_dsn, PLAIN + SETTLES + more, ["a-", "a-", "b-", "--"], limits, scopes)


def test_keys_whose_jobs_are_edited_make_progress(server_dsn: str) -> None:
    _holds(server_dsn, [*PLAIN, *SETTLES, "edit", "edit"], ["a-", "a-", "b-"], {})


def test_keys_make_progress_after_a_row_was_locked(server_dsn: str) -> None:
    _holds(server_dsn, [*PLAIN, *SETTLES, "lock", "lock"], ["a-", "a-", "b-"], {})


def test_limits_hold_in_every_snapshot_while_they_change(server_dsn: str) -> None:
    _holds(server_dsn, [*PLAIN, *SETTLES, "limits"], ["-x", "-y", "--", "ax", "ay"], LIMITS)


@pytest.mark.parametrize("more", [{}, LIMITS, {"fair": True}])
def test_rates_hold_in_every_window(server_dsn: str, more: dict[str, Any]) -> None:
    _holds(server_dsn, PLAIN + SETTLES, ["-x", "-y", "--", "ax", "ay"], RATES | more)
