"""Every statement of a daemon fails, once or for a while, and no job is lost, no queue stuck, no statement hammered.

The errors are the server's own: each function that the daemon calls is wrapped in one of the same signature, which
raises the error in the table `fault`, and counts its calls in a sequence, which no rollback undoes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import asyncpg

import pgworkd
from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.errors import PermanentError, Snooze
from tests.kits.daemon import running, until

DATABASE = Path(pgworkd.__file__).parent / "database"
SENT_BY = (
    "store.py",
    "heartbeat_store.py",
    "maintenance_store.py",
    "schedule_store.py",
    "settles.py",
)
CODES = ("57014", "55P03", "40001", "40P01", "53200", "55000", "22P05", "P0001")
"""Timeout, lock not available, serialization, deadlock, out of memory, wrong state, bad text, a trigger's RAISE."""
AT_START = {"register", "belong"}
"""Called before the daemon is ready: their errors make the start fail."""
ABOUT_THE_LEASE = {"heartbeat"}
"""Without these a daemon must cancel what it runs, which other tests cover."""
CALLS_PER_S_MAX = 120
"""Calls of one statement that always fails: ten ticks per second, each halving down to a single one of 40 jobs."""
MAINTENANCE = {"apply_effects", "drop_partition", "ensure_partitions", "expire_jobs", "prune", "rescue", "unblock"}
MAINTENANCE |= {"advance_operations"}
MAINTENANCE_CALLS_PER_S_MAX = 20
"""Its periods are 0.1 s here."""
FAULTY_S = 2.0
_SETUP = """
    CREATE SCHEMA fault;
    CREATE TABLE fault.plan (name text PRIMARY KEY, code text NOT NULL, times int NOT NULL);
    CREATE FUNCTION fault.strike(p_name text) RETURNS void LANGUAGE plpgsql AS $$
    DECLARE
        v_code text := (SELECT code FROM fault.plan WHERE name = p_name);
    BEGIN
        IF v_code IS NOT NULL AND nextval('fault.calls') <= (SELECT times FROM fault.plan WHERE name = p_name) THEN
            RAISE EXCEPTION 'planted: %', v_code USING ERRCODE = v_code;
        END IF;
    END $$;
    CREATE SEQUENCE fault.calls;
    GRANT USAGE ON SCHEMA fault TO PUBLIC;
    GRANT SELECT ON fault.plan TO PUBLIC;
    GRANT USAGE ON SEQUENCE fault.calls TO PUBLIC"""
OF_A_HANDLER = {"complete_own"}
"""Called in job.transaction(): an error there is the handler's failure."""
SELDOM = """
    answer_stack carefully deferred drop_pool fail_schedule fenced forget_rates jobs_of kinds_elsewhere may_stay_open
    mend_dependencies payloads refuse_claims retire_schedules rule_out_days settle_ended sign_off unlocked validate_days
""".split()
"""Functions that a run of this application may not call; it must call all others."""
_WRAP = r"""
    DO $do$
    DECLARE
        f record;
        v_call text;
    BEGIN
        FOR f IN SELECT p.oid, p.pronargs, pg_get_function_arguments(p.oid) AS arguments,
                        pg_get_function_result(p.oid) AS result, pg_get_function_identity_arguments(p.oid) AS signature
                 FROM pg_proc p WHERE p.pronamespace = 'pgworkd'::regnamespace AND p.proname = '{f}' LOOP
            EXECUTE format('ALTER FUNCTION pgworkd.{f}(%s) RENAME TO {f}_behind', f.signature);
            v_call := (SELECT coalesce(string_agg('$' || i, ', '), '') FROM generate_series(1, f.pronargs) i);
            EXECUTE format('CREATE FUNCTION pgworkd.{f}(%s) RETURNS %s LANGUAGE sql VOLATILE AS '
                           '$f$ SELECT fault.strike(''{f}''); SELECT * FROM pgworkd.{f}_behind(%s) $f$',
                           f.arguments, f.result, v_call);
        END LOOP;
    END $do$"""


def statements() -> list[str]:
    """The functions that the daemon calls."""
    text = "".join((DATABASE / name).read_text(encoding="utf-8") for name in SENT_BY)
    return sorted(set(re.findall(r"pgworkd\.([a-z_]+)\(", text)) - AT_START - ABOUT_THE_LEASE - OF_A_HANDLER)


@dataclass(frozen=True)
class Fault:
    """That error code for the first calls of that function."""

    function: str
    code: str
    always: bool

    def __repr__(self) -> str:
        return f"{self.function} {self.code} {'always' if self.always else 'once'}"


def faults() -> list[Fault]:
    """All faults, in a different order for each statement: any slice has every code, once and for a while."""
    found = []
    for turn in range(2 * len(CODES)):
        for number, function in enumerate(statements()):
            code = CODES[(number + turn) % len(CODES)]
            always = (number // len(CODES) + turn + turn // len(CODES)) % 2 == 0
            found.append(Fault(function, code, always))
    return found


def app_for(ran: Counter[Any]) -> App:
    app = App()

    @app.handler("ok", concurrency=20)
    async def ok(job: Job) -> None:
        ran[job.id, job.attempt] += 1

    @app.handler("told", concurrency=5)
    async def told(job: Job) -> None:
        ran[job.id, job.attempt] += 1
        job.progress(0.5, "half")
        await anyio.sleep(0.3)

    @app.handler("bad", concurrency=20)
    async def bad(job: Job) -> None:
        ran[job.id, job.attempt] += 1
        raise PermanentError("no use")

    @app.handler("later", concurrency=20)
    async def later(job: Job) -> None:
        ran[job.id, job.attempt] += 1
        if job.attempt == 1:
            raise Snooze(0.1)

    @app.handler("tick", every=1)
    async def tick(job: Job) -> None:
        ran[job.id, job.attempt] += 1

    return app


_JOBS = """
    INSERT INTO pgworkd.jobs (queue, serialize_key, max_attempts)
    SELECT queue, key, 3 FROM unnest(ARRAY['ok', 'ok', 'bad', 'later', 'told']) queue,
                              unnest(ARRAY[NULL, 'a', 'b']) key, generate_series(1, 4)"""
_LEFT = """
    SELECT j.queue::text, j.status::text, count(*) FROM pgworkd.jobs j
    WHERE j.schedule IS NULL AND j.status <> 'dead' AND NOT EXISTS (
        SELECT FROM pgworkd.jobs f
        WHERE f.status = 'failed' AND f.run_at > now() + interval '10 s' AND f.error LIKE '%could not be stored%'
          AND (f.id = j.id OR j.status = 'blocked' AND (f.queue, f.serialize_key) = (j.queue, j.serialize_key)))
    GROUP BY 1, 2 ORDER BY 1, 2"""
"""Except jobs whose outcome was rejected for good: they have failed instead, and are retried in a minute."""


async def play(fault: Fault, db: asyncpg.Connection[Any], dsn: str) -> list[str]:
    """Runs one fault on an empty database; returns the violations. Raises AssertionError if any job ran twice."""
    ran: Counter[Any] = Counter()
    found: list[str] = []
    await db.execute(_SETUP)
    await db.execute(_WRAP.replace("{f}", fault.function))
    async with running(app_for(ran), dsn, lease_s=30.0, heartbeat_s=0.5) as (_, seen):
        times = 1 << 30 if fault.always else 1
        await db.execute("INSERT INTO fault.plan VALUES ($1, $2, $3)", fault.function, fault.code, times)
        await db.execute(_JOBS)
        if fault.function not in SELDOM:
            await until(lambda: db.fetchval("SELECT is_called FROM fault.calls"))
        if fault.always:
            began = anyio.current_time()
            await anyio.sleep(FAULTY_S)
            calls = await db.fetchval("SELECT last_value FROM fault.calls")
            most = MAINTENANCE_CALLS_PER_S_MAX if fault.function in MAINTENANCE else CALLS_PER_S_MAX
            if calls > most * (faulty_s := anyio.current_time() - began):
                found.append(f"{calls} calls of {fault.function} in {faulty_s:.1f} s, all refused")
            await db.execute("DELETE FROM fault.plan")
        left: list[Any] = []
        with anyio.move_on_after(20):
            while left := await db.fetch(_LEFT):
                await anyio.sleep(0.05)
        if left:
            found.append(f"left 20 s after the last refusal: {[tuple(row) for row in left]}")
        found += [f"taken for an outage: {dict(facts)}" for facts in seen.all(events.DATABASE_UNAVAILABLE)]
    assert not [run for run, count in ran.items() if count > 1], "attempts that ran twice"
    return found
