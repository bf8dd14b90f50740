"""A life of jobs of all sorts beside an object of somebody else that refuses, keeps, changes or delays some rows.

While it is there: whatever does not need those rows goes on, what is refused is named, nothing runs twice. When it is
gone, everything ends as it would have.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import anyio
import asyncpg

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.engine.claim import care
from pgworkd.engine.life import maintenance
from pgworkd.engine.life.maintenance import Periods
from pgworkd.engine.settle import delayed
from pgworkd.errors import PermanentError, Snooze
from tests.kits.daemon import Recorder, running, until
from tests.kits.others import MARK, Thing, marked

# ruff: noqa: S608 - all SQL is written here

GOOD_S = 15.0
"""What does not need a refused row ends within that time; on an idle machine within a second or two."""
PERIODS = Periods(*[0.1] * 6, keep_days=1, keep_dead_days=2)
LIVE = "status IN ('blocked', 'pending', 'running', 'failed')"
REFUSED = "coalesce(error LIKE 'the outcome % could not be stored: %', false)"
"""Settled as refused: dead, or to be retried in a minute."""
NAMING = {events.ROWS_REJECTED, events.OUTCOME_REJECTED, events.OUTCOMES_DELAYED, events.STATEMENT_FAILED,
          events.MAINTENANCE_FAILED}  # fmt: skip
_LOST = """WITH lost AS (
        INSERT INTO pgworkd.workers (name, pid, version, lease_s, started_at, seen_at, steady_since, lease_until)
        SELECT $1, 1, '0', 1, t, t, t, t FROM (SELECT clock_timestamp() - interval '1 hour' AS t) x RETURNING id)
    INSERT INTO pgworkd.jobs (id, queue, payload, status, worker_id, started_at, attempts)
    SELECT j.id, 'plain', j.payload, 'running', l.id, clock_timestamp() - interval '1 hour', 1
    FROM lost l, unnest($2::uuid[], $3::jsonb[]) AS j (id, payload)"""


@dataclass
class Life:
    """The jobs, by what is expected of them, and what their handlers did."""

    expected: dict[UUID, str] = field(default_factory=dict)
    """The final status of those that need no refused row."""
    runs: list[tuple[UUID, int]] = field(default_factory=list)
    running: Counter[UUID] = field(default_factory=Counter)
    twice: list[UUID] = field(default_factory=list)
    once: set[UUID] = field(default_factory=set)

    @contextlib.contextmanager
    def run(self, job: Job) -> Any:
        self.runs.append((job.id, job.attempt))
        self.running[job.id] += 1
        if self.running[job.id] > 1:
            self.twice.append(job.id)
        try:
            yield
        finally:
            self.running[job.id] -= 1

    def app(self) -> App:
        app = App()

        @app.handler("plain", concurrency=10, backoff=0.05)
        @app.handler("limited", backoff=0.05)
        @app.handler("fair", backoff=0.05)
        @app.handler("once", queue="plain", max_attempts=1)
        async def plain(job: Job) -> dict[str, str]:
            with self.run(job):
                await anyio.sleep(0.001)
                return {"of": str(job.id)}

        @app.handler("flaky", queue="plain", backoff=0.05)
        async def flaky(job: Job) -> None:
            with self.run(job):
                if job.attempt == 1:
                    raise ValueError(f"not yet, {job.payload.get('mark')}")

        @app.handler("dies", queue="plain")
        async def dies(job: Job) -> None:
            with self.run(job):
                raise PermanentError(f"no use {job.payload.get('mark')}")

        @app.handler("snoozes", queue="plain")
        async def snoozes(job: Job) -> None:
            with self.run(job):
                if job.attempt == 1:
                    raise Snooze(0.05)

        @app.handler("writes", queue="plain", backoff=0.05)
        async def writes(job: Job) -> None:
            with self.run(job):
                async with job.transaction() as connection:
                    await connection.execute("INSERT INTO public.written VALUES ($1)", job.id)

        @app.handler("reports", queue="plain", backoff=0.05)
        async def reports(job: Job) -> None:
            with self.run(job):
                job.progress(0.5, "half")
                await anyio.sleep(0.2)

        @app.handler("hangs", queue="plain")
        async def hangs(job: Job) -> None:
            with self.run(job):
                await anyio.sleep_forever()

        return app


async def _job(db: Any, life: Life, kind: str, ends: str | None, *, bad: bool = False, **columns: Any) -> UUID:
    job_id = marked() if bad else await db.fetchval("SELECT pgworkd.new_id()")
    queue = columns.pop("queue", "plain")
    names = ["id", "queue", "kind", "payload", *columns]
    marks = [f"${n}" + ("::text::jsonb" if name == "payload" else "") for n, name in enumerate(names, 1)]
    payload = json.dumps({"mark": MARK} if bad else {})
    sql = f"INSERT INTO pgworkd.jobs ({', '.join(names)}) VALUES ({', '.join(marks)})"
    await db.execute(sql, job_id, queue, kind, payload, *columns.values())
    if ends is not None and not bad:
        life.expected[job_id] = ends
    if kind == "once":
        life.once.add(job_id)
    return job_id


async def _jobs(db: Any, life: Life) -> None:
    """Some of each sort, of which one is marked; the marked one comes first."""
    soon = await db.fetchval("SELECT now() + interval '1 s'")
    past = await db.fetchval("SELECT now() - interval '1 s'")
    for bad in (True, False, False):
        for kind, ends in {
            "plain": "completed",
            "once": "completed",
            "flaky": "completed",
            "dies": "dead",
            "snoozes": "completed",
            "writes": "completed",
            "reports": "completed",
        }.items():
            await _job(db, life, kind, ends, bad=bad)
        await _job(db, life, "plain", "expired", bad=bad, run_at=soon, expires_at=past)
        await _job(db, life, "plain", "completed", bad=bad, serialize_key=f"own {bad}")
        await _job(db, life, "limited", "completed", bad=bad, queue="limited")
        await _job(db, life, "fair", "completed", bad=bad, queue="fair", limit_key=f"k{MARK if bad else ''}")
        key = {"dedupe_key": str(len(life.expected)), "dedupe_until": soon}
        await _job(db, life, "plain", "completed", bad=bad, **key)
    for bad, ends in ((False, "completed"), (True, None), (False, None)):  # who is behind the marked one waits
        await _job(db, life, "plain", ends, bad=bad, serialize_key="line")
    for name, bad in (("lost", True), (f"lost {MARK}", False)):
        ids = [await db.fetchval("SELECT pgworkd.new_id()") for _ in range(2)] + ([marked()] if bad else [])
        payloads = [json.dumps({"mark": MARK} if str(i).endswith(MARK) else {}) for i in ids]
        await db.execute(_LOST, name, ids, payloads)
        if name == "lost":
            life.expected |= dict.fromkeys(ids[:2], "completed")


async def _flow(db: Any, life: Life) -> None:
    """Dependencies and batches."""
    for parent_bad, child_bad in ((False, False), (False, True), (True, False)):
        async with db.transaction():
            parent = await _job(db, life, "plain", "completed", bad=parent_bad)
            child = await _job(db, life, "plain", None if parent_bad else "completed", bad=child_bad)
            await db.execute("SELECT pgworkd.depend($1, ARRAY[$2::uuid])", child, parent)
    for name in ("good", MARK):
        async with db.transaction():
            call = json.dumps({"queue": "plain", "payload": {"of": name}})
            made = "SELECT id FROM pgworkd.create_batch($1, 'plain', p_on_complete => $2::text::jsonb)"
            batch_id = await db.fetchval(made, name, call)
            await _job(db, life, "plain", "completed", batch_id=batch_id)
            await _job(db, life, "dies", "dead", batch_id=batch_id)
            if name == "good":
                await _job(db, life, "plain", "completed", bad=True, batch_id=batch_id)
            await db.execute("SELECT pgworkd.seal_batch($1)", batch_id)
    for name in ("good", MARK):
        await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ($1, 'plain', 1)", name)


_OLD = f"""
    INSERT INTO pgworkd.queues (name, max_running) VALUES ('limited', 1);
    INSERT INTO pgworkd.queues (name, limit_per_key, fair) VALUES ('fair', 1, true);
    INSERT INTO pgworkd.queues (name, keep_s) VALUES ('{MARK}', 10);
    INSERT INTO pgworkd.audit (at, who, what, queue, before, after)
        SELECT now() - interval '30 days', 'x', 'queue', q, '{{}}', '{{}}' FROM unnest(ARRAY['{MARK}', 'old']) q;
    INSERT INTO pgworkd.finished_jobs
        (id, finished_at, run_at, created_at, status, priority, attempts, failures, queue, payload, errors)
        SELECT pgworkd.new_id(), now() - interval '30 days', now(), now(), 'completed', 0, 1, 0, q, '{{}}', '[]'
        FROM unnest(ARRAY['{MARK}', 'old']) q;
    INSERT INTO pgworkd.tokens (id, name, sha256, scopes, revoked_at)
        SELECT q, 'x', sha256('x'), '{{}}', now() - interval '30 days' FROM unnest(ARRAY['{MARK}', 'oldoldold']) q;
    INSERT INTO pgworkd.idempotent_calls (caller, key, sha256, at)
        SELECT 'x', q, '', now() - interval '30 days' FROM unnest(ARRAY['{MARK}', 'old']) q;
    INSERT INTO pgworkd.progress (job_id, at, attempt, done)
        SELECT i::uuid, now(), 1, 0 FROM unnest(ARRAY['00000000-0000-7000-8000-{MARK}',
                                                      '00000000-0000-7000-8000-000000000001']) i;
    INSERT INTO pgworkd.jobs (queue, payload, status, failed_at)
        SELECT 'old', jsonb_build_object('mark', q), 'dead', now() - interval '30 days'
        FROM unnest(ARRAY['{MARK}', 'old']) q;
    CREATE TABLE public.written (job uuid PRIMARY KEY);
    GRANT ALL ON public.written TO PUBLIC"""
"""For retention, of each one that is marked."""
_LEFT = f"""SELECT 'audit' WHERE EXISTS (SELECT FROM pgworkd.audit WHERE queue = 'old')
    UNION ALL SELECT 'history' WHERE EXISTS (SELECT FROM pgworkd.finished_jobs_other WHERE queue = 'old')
    UNION ALL SELECT 'tokens' WHERE EXISTS (SELECT FROM pgworkd.tokens WHERE id <> '{MARK}')
    UNION ALL SELECT 'calls' WHERE EXISTS (SELECT FROM pgworkd.idempotent_calls WHERE key = 'old')
    UNION ALL SELECT 'progress' WHERE EXISTS (SELECT FROM pgworkd.progress WHERE job_id::text LIKE '%000000000001')
    UNION ALL SELECT 'dead' WHERE EXISTS (SELECT FROM pgworkd.jobs WHERE queue = 'old' AND payload ->> 'mark' = 'old')
    UNION ALL SELECT 'deaths' WHERE EXISTS (SELECT FROM pgworkd.deaths d WHERE d.group_id IS NULL
                                            AND d.error NOT LIKE '%{MARK}%' AND d.job_id::text NOT LIKE '%{MARK}')"""
"""What retention and the counting of deaths have not done, of what is not marked."""


async def play(thing: Thing, dsn: str, user: str) -> list[str]:
    """What is wrong; `user`: the DSN for daemons, of a user who is no superuser."""
    life = Life()
    db = await asyncpg.connect(dsn)
    try:
        await db.execute(_OLD)
        await _jobs(db, life)
        await _flow(db, life)
        await db.execute(thing.create)
        async with running(life.app(), user, periods=PERIODS) as (_, seen):
            wrong = [*await _beside(db, life), *([] if thing.hides else await _named(db, seen))]
            await db.execute(thing.drop)
            wrong += await _after(db, life, thing)
        return [*wrong, *_twice(life)]
    finally:
        db.terminate()


async def _unfinished(db: Any, life: Life) -> list[str]:
    rows = await db.fetch("SELECT id, status, kind FROM pgworkd.all_jobs WHERE id = ANY ($1)", list(life.expected))
    found = {row[0]: (row[1], row[2]) for row in rows}
    return [
        f"{job_id} ({found.get(job_id, (None, '?'))[1]}) is {found.get(job_id, ('gone',))[0]}, not {ends}"
        for job_id, ends in life.expected.items()
        if found.get(job_id, (None,))[0] != ends
    ]


async def _within(fact: Any, limit_s: float = GOOD_S) -> list[str]:
    """What `fact` returns at last: nothing, as soon as it does.

    It is not asked again then: what is refused may go on a moment later, and is no fault.
    """
    last = [f"not known within {limit_s} s"]

    async def none() -> bool:
        last[:] = await fact()
        return not last

    with contextlib.suppress(AssertionError):
        await until(none, limit_s)
    return last


async def _beside(db: Any, life: Life) -> list[str]:
    """What does not go on while the object is there."""

    async def left() -> list[str]:
        retention = [row[0] for row in await db.fetch(_LEFT)]
        schedules = await db.fetch("SELECT FROM pgworkd.finished_jobs WHERE schedule = 'good'")
        return [*await _unfinished(db, life), *retention, *([] if schedules else ["no occurrence has run"])]

    wrong = [f"beside it: {each}" for each in await _within(left)]
    job_id = await _job(db, life, "plain", None, run_at=await db.fetchval("SELECT now() + interval '1 hour'"))
    outcome = await db.fetchval("SELECT outcome FROM pgworkd.cancel(ARRAY[$1::uuid])", job_id)
    return wrong if outcome == "cancelled" else [*wrong, f"cancel: {outcome}"]


async def _named(db: Any, seen: Recorder) -> list[str]:
    """Unless marked jobs have all ended as well, something says what is wrong."""
    waiting = await db.fetchval(f"SELECT count(*) FROM pgworkd.jobs WHERE {LIVE} AND id::text LIKE '%{MARK}'")
    if not waiting:
        return []

    async def none() -> list[str]:
        named = await db.fetchval("SELECT count(*) FROM pgworkd.refused_rows WHERE reported")
        return [] if named or any(name in NAMING for name, _ in seen.seen) else ["not named"]

    return await _within(none, 3)


async def _after(db: Any, life: Life, thing: Thing) -> list[str]:
    """What is not done once the object is gone."""

    async def left() -> list[str]:
        # what was refused just before may be noted only now
        await db.execute("UPDATE pgworkd.refused_rows SET until = clock_timestamp() WHERE until > clock_timestamp()")
        refused = await db.fetchval(f"SELECT count(*) FROM pgworkd.jobs WHERE {REFUSED}") or "changes id" in thing.name
        live = await db.fetch(
            f"SELECT id, status::text, kind, error FROM pgworkd.jobs WHERE {LIVE} AND schedule IS NULL"
            f" AND NOT ({REFUSED})"
            " AND NOT (status = 'blocked' AND $1)",  # behind those that are refused, or dependent on them
            bool(refused),
        )
        rows = await db.fetch(
            "SELECT name, state, total, done FROM pgworkd.batch_trees t WHERE NOT EXISTS"
            f" (SELECT FROM pgworkd.jobs WHERE batch_id = t.id AND {REFUSED} AND {LIVE})"
        )
        trees = [f"batch {tuple(row)}" for row in rows if not row["state"].startswith("completed")]
        trees += [f"batch counts {tuple(row)}" for row in rows if row["total"] != row["done"]]
        for table in ("pending_effects", "batch_additions", *(() if refused else ("job_dependencies",))):
            trees += [table] * min(1, await db.fetchval(f"SELECT count(*) FROM pgworkd.{table}"))
        trees += [row[0] for row in await db.fetch(_LEFT)]
        return [*(f"live {tuple(row)}" for row in live), *trees, *await _unfinished(db, life)]

    wrong = [f"after it: {each}" for each in await _within(left)]
    for name in ("good", MARK):
        calls = await db.fetchval(
            "SELECT count(*) FROM pgworkd.all_jobs WHERE payload ->> 'of' = $1 AND payload ? 'batch'", name
        )
        waits = await db.fetchval(
            f"SELECT count(*) FROM pgworkd.jobs WHERE batch_id IS NOT NULL AND {REFUSED} AND {LIVE}"
        )
        if calls != 1 and not (thing.keeps and name == MARK) and not waits:
            wrong.append(f"{calls} callbacks of {name}")
    return wrong


def _twice(life: Life) -> list[str]:
    wrong = [f"{job_id} ran twice at once" for job_id in life.twice]
    wrong += [f"{key} began {count} times" for key, count in Counter(life.runs).items() if count > 1]
    count = Counter(job_id for job_id, _ in life.runs)
    return wrong + [
        f"{job_id} may run once, and ran {count[job_id]} times" for job_id in life.once if count[job_id] > 1
    ]


@contextlib.asynccontextmanager
async def quickly() -> AsyncIterator[None]:
    """Pauses after something was refused are short."""
    names = ((care, "CARE_S", 0.3), (care, "CARE_WAITED_S", 0.3), (delayed, "CAP_S", 0.5),
             (maintenance, "REFUSED_PAUSE_S", 0.2))  # fmt: skip
    were = [getattr(module, name) for module, name, _ in names]
    for module, name, value in names:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(names, were, strict=True):
            setattr(module, name, value)
