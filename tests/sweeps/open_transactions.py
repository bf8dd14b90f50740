"""An application's open transaction delays only what it has locked: a small data set, and all operations on it.

Each operation runs in a transaction that stays open. Meanwhile two daemons must finish everything else within a
second, rescue the jobs of a lost worker, and must not report the database as unavailable.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import anyio
import asyncpg

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.errors import PermanentError, RetryAfter
from tests.kits.daemon import Recorder, insert, running, until

# ruff: noqa: S608 - all SQL is written here

DONE_S_MAX = 1.0
"""Every due job that is not locked finishes within that time."""
SAMPLE_S = 0.05
_LATE = """
    SELECT id, queue::text, status::text,
           extract(epoch FROM clock_timestamp() - greatest(run_at, created_at))::float8 AS age_s
    FROM pgworkd.jobs
    WHERE status IN ('pending', 'running', 'failed') AND run_at < clock_timestamp() - make_interval(secs => $2)
      AND created_at < clock_timestamp() - make_interval(secs => $2) AND id <> ALL ($1)
      AND NOT (schedule = $3 AND status = 'pending')"""
_LOST = """
    WITH lost AS (
        INSERT INTO pgworkd.workers (name, pid, version, lease_s, started_at, seen_at, steady_since, lease_until)
        SELECT 'lost', 1, '0', 1, t, t, t, t FROM (SELECT clock_timestamp() - interval '1 hour' AS t) x RETURNING id
    )
    INSERT INTO pgworkd.jobs (queue, status, worker_id, started_at, attempts)
    SELECT 'other', 'running', lost.id, clock_timestamp() - interval '1 hour', 1 FROM lost, generate_series(1, 5)
    RETURNING id"""


@dataclass
class World:
    """The rows that can be locked: ids of jobs by their purpose."""

    dsn: str
    ids: dict[str, UUID] = field(default_factory=dict)
    gates: dict[str, anyio.Event] = field(default_factory=dict)
    opened_at: dict[UUID, float] = field(default_factory=dict)

    def open(self, gate: str) -> None:
        """Lets the job that waits at a gate continue."""
        self.gates[gate].set()

    def app(self) -> App:
        app = App()

        @app.handler("q", concurrency=20)
        @app.handler("other", concurrency=20)
        @app.handler("limited", concurrency=20)
        async def quick() -> None: ...

        @app.handler("gated", concurrency=20)
        async def gated(payload: dict[str, Any], job: Job) -> None:
            await self.gates[payload["gate"]].wait()

        @app.handler("bad")
        async def bad() -> None:
            raise PermanentError("no use")

        @app.handler("flaky")
        async def flaky() -> None:
            raise RetryAfter(3600)

        return app


@dataclass(frozen=True)
class Act:
    """A statement, with :names of the world's ids; `locks`: the jobs that it may delay."""

    name: str
    sql: str
    locks: Sequence[str] = ()

    def __repr__(self) -> str:
        return self.name


def _verb(call: str) -> str:
    return f"SELECT * FROM pgworkd.{call}"


def _duplicate(key: str, how: str) -> str:
    return _verb(f"enqueue('q', p_dedupe_key => '{key}', p_delay_s => 3600, p_on_duplicate => '{how}')")


_COMPLETE = "SELECT pgworkd.complete_own(ARRAY[:{}], '{{1}}', '{{NULL}}', NULL, NULL, NULL, NULL, NULL)"
_KEYS = "INSERT INTO pgworkd.jobs (queue, serialize_key, limit_key, dedupe_key)"
_ON_CONFLICT = "ON CONFLICT (queue, dedupe_key) WHERE dedupe_key IS NOT NULL AND status <> 'dead' DO NOTHING"
OFTEN = "often"
"""A schedule: changing it deletes its next occurrence, and so locks that."""
LATER = ("future", "keyed", "failed")
ENDING = ("running", "upstream", "holder")
ENDED_LATER = (*ENDING, "behind", "dependent")
"""Jobs that wait for a gate: they have the same time limit as others, once it is open."""
TREE = ("tree 0", "tree 1", "tree 2", "tree 3", "tree 4", "tree 5")
ACTS = (
    Act("cancel a running job", _verb("cancel(ARRAY[:running])"), ["running"]),
    Act("cancel who holds a key", _verb("cancel(ARRAY[:holder])"), ["holder", "behind"]),
    Act("cancel a waiting job with a key", _verb("cancel(ARRAY[:keyed])"), ["keyed"]),
    Act("cancel a dead job", _verb("cancel(ARRAY[:dead])"), ["dead"]),
    Act("edit a waiting job with a key", _verb("edit(:keyed, p_run_at => now() + interval '2 h')"), ["keyed"]),
    Act("edit a waiting job", _verb("edit(:future, p_priority => 7)"), ["future"]),
    Act("retry a dead job", _verb("retry(ARRAY[:dead])"), ["dead"]),
    Act("retry a failed job", _verb("retry(ARRAY[:failed])"), ["failed"]),
    Act("discard a dead job", _verb("discard(ARRAY[:dead])"), ["dead"]),
    Act("cancel a batch", _verb("cancel_batch(:batch)"), TREE),
    Act("delete a finished batch", _verb("delete_batch(:finished_batch)")),
    Act("seal a batch", _verb("seal_batch(:batch)")),
    Act("add to a batch", _verb("add_jobs(:batch, ARRAY['{\"n\": 1}'::jsonb], 'q', 'q')")),
    Act("make a child of a batch", _verb("create_batch('child', 'q', p_parent => :batch)")),
    Act("make a batch with a key", _verb("create_batch('new', 'q', p_dedupe_key => 'month')")),
    Act("lock a batch", "SELECT FROM pgworkd.batches WHERE id = :batch FOR UPDATE"),
    Act("enqueue", _verb("enqueue('q')")),
    Act("enqueue behind a key", _verb("enqueue('gated', '{\"gate\": \"all\"}', p_serialize_key => 'held')")),
    Act("replace a dependent", _duplicate("dependent", "replace"), ["dependent"]),
    Act("reschedule a job with a key", _duplicate("keyed", "reschedule"), ["keyed"]),
    Act("skip a duplicate", _duplicate("keyed", "skip")),
    Act("depend on a running job", "SELECT pgworkd.depend(e.id, ARRAY[:upstream]) FROM pgworkd.enqueue('q') e"),
    Act("undepend", _verb("undepend(ARRAY[:dependent])"), ["dependent"]),
    Act("lock a dependent", "SELECT FROM pgworkd.jobs WHERE id = :dependent FOR UPDATE", ["dependent"]),
    Act("set a limit", _verb("set_queue('limited', '{\"max_running\": 15}')")),
    Act("pause another queue", _verb("set_queue('elsewhere', '{\"concurrency\": 3}')")),
    Act("update the settings of a limited queue", "UPDATE pgworkd.queues SET max_running = 16 WHERE name = 'limited'"),
    Act("delete the settings of a limited queue", "DELETE FROM pgworkd.queues WHERE name = 'limited'"),
    Act("update a schedule", "UPDATE pgworkd.schedules SET payload = '{\"a\": 1}' WHERE name = 'often'", [OFTEN]),
    Act("insert a schedule", "INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('new', 'q', 3600)"),
    Act("delete a schedule", "DELETE FROM pgworkd.schedules WHERE name = 'often'", [OFTEN]),
    Act("insert jobs", "INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 1000)"),
    Act("insert jobs with keys", _KEYS + " SELECT 'q', 'new ' || n, 'new', 'new ' || n FROM generate_series(1, 100) n"),
    Act("insert on conflict", f"INSERT INTO pgworkd.jobs (queue, dedupe_key) VALUES ('q', 'keyed') {_ON_CONFLICT}"),
    Act("insert into a batch", "INSERT INTO pgworkd.jobs (queue, batch_id) VALUES ('q', :batch)"),
    Act("update a waiting job", "UPDATE pgworkd.jobs SET priority = 3 WHERE id = :future", ["future"]),
    Act("update a running job", "UPDATE pgworkd.jobs SET meta = '{}' WHERE id = :running", ["running"]),
    Act("delete a waiting job", "DELETE FROM pgworkd.jobs WHERE id = :future", ["future"]),
    Act("delete a running job", "DELETE FROM pgworkd.jobs WHERE id = :running", ["running"]),
    Act("delete who holds a key", "DELETE FROM pgworkd.jobs WHERE id = :holder", ["holder", "behind"]),
    Act("lock a running job", "SELECT FROM pgworkd.jobs WHERE id = :running FOR UPDATE", ["running"]),
    Act("lock the next of a line", "SELECT FROM pgworkd.jobs WHERE id = :behind FOR UPDATE", ["behind"]),
    Act("refer to the next of a line", "SELECT FROM pgworkd.jobs WHERE id = :behind FOR KEY SHARE", ["behind"]),
    Act("lock a lost job", "SELECT FROM pgworkd.jobs WHERE id = :lost FOR UPDATE", ["lost"]),
    Act("complete who holds a key, as its handler", _COMPLETE.format("holder"), ["holder", "behind"]),
    Act("complete a running job, as its handler", _COMPLETE.format("upstream"), ["upstream", "dependent"]),
    Act("await results", _verb("await_results(ARRAY[:running], 'someone', 60)")),
    Act("delete history", "DELETE FROM pgworkd.finished_jobs"),
    Act("read everything", "SELECT count(*) FROM pgworkd.all_jobs, pgworkd.queue_stats"),
)  # fmt: skip


async def prepare(world: World, db: asyncpg.Connection[Any]) -> None:
    """Creates the rows that the operations use, while daemons are running."""

    async def gated(name: str, **columns: Any) -> None:
        world.gates[name] = anyio.Event()
        world.ids[name] = await insert(db, "gated", f'{{"gate": "{name}"}}', **columns)
        await until(lambda: db.fetchval("SELECT status = 'running' FROM pgworkd.jobs WHERE id = $1", world.ids[name]))

    world.gates["all"] = anyio.Event()
    await gated("running")
    await gated("upstream")
    await gated("holder", serialize_key="held")
    world.gates["behind"] = anyio.Event()
    world.gates["behind"].set()
    ids = world.ids
    ids["behind"] = await insert(db, "gated", '{"gate": "behind"}', serialize_key="held")
    later = await db.fetchval("SELECT now() + interval '1 h'")
    ids["future"] = await insert(db, "q", run_at=later)
    ids["keyed"] = await insert(db, "q", run_at=later, serialize_key="later", dedupe_key="keyed")
    ids["dead"], ids["failed"] = await insert(db, "bad"), await insert(db, "flaky")
    async with db.transaction():
        ids["dependent"] = await insert(db, "q", dedupe_key="dependent")
        await db.execute("SELECT pgworkd.depend($1, ARRAY[$2::uuid])", ids["dependent"], ids["upstream"])
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('often', 'q', 1)")
    ids["finished_batch"] = await db.fetchval("SELECT id FROM pgworkd.create_batch('over', 'q')")
    await db.execute("SELECT pgworkd.add_jobs($1, ARRAY['{}'::jsonb]), pgworkd.seal_batch($1)", ids["finished_batch"])
    ids["batch"] = await db.fetchval("SELECT id FROM pgworkd.create_batch('tree', 'q')")
    await until(lambda: db.fetchval("SELECT count(*) = 1 FROM pgworkd.batches WHERE tree_finished_at IS NOT NULL"))
    await until(lambda: db.fetchval("SELECT count(*) = 2 FROM pgworkd.jobs WHERE status IN ('dead', 'failed')"))
    await db.execute("SELECT pgworkd.set_queue('limited', '{\"max_running\": 18}')")


async def unroll(world: World, db: asyncpg.Connection[Any]) -> None:
    """What happens while the transaction is open: lost jobs, and jobs of the tree that become due one by one."""
    lost = await db.fetch(_LOST)
    world.ids |= {"lost" if n == 0 else f"lost {n}": row["id"] for n, row in enumerate(lost)}
    for n, name in enumerate(TREE):
        due = await db.fetchval("SELECT now() + make_interval(secs => $1)", 0.2 + 0.3 * n)
        add = "SELECT (pgworkd.add_jobs($1, ARRAY['{}'::jsonb], p_run_at => $2))[1]"
        world.ids[name] = await db.fetchval(add, world.ids["batch"], due)


async def probe(db: asyncpg.Connection[Any]) -> None:
    """Inserts new jobs of all kinds ten times per second, until cancelled."""
    n = 0
    while True:
        n += 1
        await db.execute(
            "INSERT INTO pgworkd.jobs (queue, serialize_key, payload)"
            ' SELECT u.queue, u.key, \'{"gate": "behind"}\' FROM unnest($1::text[], $2::text[]) u (queue, key)',
            ["q", "other", "limited", "q", "q", "gated"],
            [None, None, None, f"own {n}", "shared", f"own {n}"],
        )
        await anyio.sleep(0.1)


async def hold(
    act: Act, world: World, db: asyncpg.Connection[Any], eyes: asyncpg.Connection[Any], hold_s: float
) -> list[str]:
    """Runs the operation and keeps its transaction open for that long; returns what was delayed meanwhile."""
    await unroll(world, eyes)
    sql, arguments = act.sql, []
    for name, job_id in sorted(world.ids.items(), reverse=True):
        if f":{name}" in sql:
            arguments.append(job_id)
            sql = sql.replace(f":{name}", f"${len(arguments)}::uuid")
    transaction = db.transaction()
    await transaction.start()
    await (db.fetch if arguments else db.execute)(sql, *arguments)
    exempt = [world.ids[name] for name in (*act.locks, *LATER) if name != OFTEN]
    schedule = OFTEN if OFTEN in act.locks else ""
    for name in ENDING:
        world.open(name)
    began, found, lag_s = anyio.current_time(), [], 0.0
    while anyio.current_time() < began + hold_s and not found:
        before = anyio.current_time()
        await anyio.sleep(SAMPLE_S)
        lag_s = max(lag_s, anyio.current_time() - before - SAMPLE_S)  # delay of this machine, not of the engine
        bound_s = DONE_S_MAX + 5 * lag_s
        ending = [] if anyio.current_time() > began + bound_s else [world.ids[name] for name in ENDED_LATER]
        before = anyio.current_time()
        late = await eyes.fetch(_LATE, exempt + ending, bound_s, schedule)
        lag_s = max(lag_s, anyio.current_time() - before)
        found = [f"{row['queue']} {row['status']} for {row['age_s']:.1f} s" for row in late[:5]]
    await transaction.commit()
    return found


_UNFINISHED = """
    SELECT queue, status::text, serialize_key, batch_id FROM pgworkd.jobs
    WHERE status IN ('running', 'blocked') AND schedule IS NULL AND run_at < clock_timestamp()
       OR status = 'pending' AND run_at < clock_timestamp() - interval '2 s'"""


async def settled(world: World, db: asyncpg.Connection[Any]) -> list[str]:
    """Opens all gates; returns the jobs that still have not finished."""
    for gate in world.gates.values():
        gate.set()
    left: list[Any] = []
    with anyio.move_on_after(15):
        while left := await db.fetch(_UNFINISHED):
            await anyio.sleep(SAMPLE_S)
        return []
    return [f"left at the end: {dict(row)}" for row in left[:5]]


async def play(act: Act, dsn: str, hold_s: float) -> list[str]:
    """Runs one operation on an empty database; returns the violations."""
    async with contextlib.AsyncExitStack() as stack:
        world = World(dsn)
        seen: list[Recorder] = []
        for _ in range(2):
            daemon = running(world.app(), dsn, lease_s=2.5, heartbeat_s=0.2)
            seen.append((await stack.enter_async_context(daemon))[1])
        db, eyes, prober = [await stack.enter_async_context(_connected(dsn)) for _ in range(3)]
        await prepare(world, eyes)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(probe, prober)
                await anyio.sleep(2.6)  # rescue waits until its worker has been steady for a lease
                found = await hold(act, world, db, eyes, hold_s)
                tasks.cancel_scope.cancel()
            outages = [str(facts) for each in seen for facts in each.all(events.DATABASE_UNAVAILABLE)]
            return found + await settled(world, eyes) + outages
        finally:
            for gate in world.gates.values():
                gate.set()


@contextlib.asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    db = await asyncpg.connect(dsn)
    try:
        yield db
    finally:
        db.terminate()
