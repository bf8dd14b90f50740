"""Trees of batches under several sessions, driven one statement at a time, and what must hold after each.

Each session runs one verb per transaction and may leave it open: what another does meanwhile may have to wait, except
that nobody ever waits for a transaction that only adds and seals.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import asyncpg
from anyio.abc import TaskGroup

from .trees import LIVE, add, cancel_batch, counted, create
from .verbs import BATCH_CLOSED, Db, Later, at, cancel, clock, complete, end, fail, release, rescue, retry, worker

EMPTY = """TRUNCATE pgworkd.jobs, pgworkd.finished_jobs, pgworkd.batches, pgworkd.batch_additions, pgworkd.workers,
    pgworkd.audit"""
RUNNING = "SELECT id, attempts FROM pgworkd.jobs WHERE status = 'running' AND queue = 'q' ORDER BY id"
WAITING = """SELECT id FROM pgworkd.jobs
    WHERE status IN ('blocked', 'pending', 'failed', 'dead') AND queue = 'q' ORDER BY created_at, id"""
BATCHES = "SELECT id, root_id, stream FROM pgworkd.batches ORDER BY created_at, id"
CALLED = """SELECT r.id, r.tree_finished_at IS NOT NULL AS finished, count(j.id) AS calls
    FROM pgworkd.batches r LEFT JOIN pgworkd.all_jobs j
      ON j.queue = 'done' AND j.payload -> 'batch' ->> 'id' = r.id::text
    WHERE r.parent_id IS NULL GROUP BY r.id"""
STREAMED = """SELECT c.id, count(j.id) AS jobs,
       (SELECT count(*) FROM pgworkd.finished_jobs f
        WHERE f.batch_id = c.parent_id AND f.status = 'completed') AS completed
    FROM pgworkd.batches c LEFT JOIN pgworkd.all_jobs j ON j.batch_id = c.id AND j.payload ? 'input'
    WHERE c.stream AND c.cancelled_at IS NULL GROUP BY c.id"""
OPEN = f"""SELECT b.id FROM pgworkd.batches b
    WHERE b.finished_at IS NULL AND b.sealed_at IS NOT NULL
      AND NOT EXISTS (SELECT FROM pgworkd.jobs j WHERE j.batch_id = b.id AND j.status IN {LIVE})
      AND (NOT b.stream OR EXISTS (SELECT FROM pgworkd.batches p
                                   WHERE p.id = b.parent_id AND p.finished_at IS NOT NULL))"""  # noqa: S608
LEASE_S = 3600.0
UNIQUE_VIOLATION, TRY_AGAIN = "23505", "40001"
ADDING = {"add", "insert", "child", "root", "seal"}
"""What an application's transaction does."""
MAY_WAIT = ADDING | {"retry"}
"""Of those: keys that are unique are waited for, as by any INSERT."""


class Step(NamedTuple):
    """One thing to do: who, what, to which batch or job (from 0 to 1), and whether its transaction stays open."""

    session: int
    what: str
    which: float
    open: bool


class Session:
    """A connection, the transaction it has open, what that has done, and the call that waits for another."""

    def __init__(self, db: Db) -> None:
        self.db = db
        self.is_open = False
        self.what = ""
        self.busy: Later[Any] | None = None


class World:
    """The database of one example after the other."""

    empty, adding, may_wait = EMPTY, ADDING, MAY_WAIT

    def __init__(self, dsn: str, observer: Db, sessions: list[Db]) -> None:
        self._dsn = dsn
        self.observer = observer
        self.sessions = [Session(db) for db in sessions]
        self.now = 0.0
        self.workers: list[int] = []
        self._finished: dict[uuid.UUID, Any] = {}
        self._tasks: TaskGroup | None = None

    @classmethod
    async def open(cls, dsn: str) -> World:
        """Connects."""
        return cls(dsn, await asyncpg.connect(dsn), [await _session(dsn) for _ in range(3)])

    async def play(self, steps: list[Step]) -> None:
        """One example, from an empty database to one where all is over."""
        await self.observer.execute(self.empty)
        self.now, self._finished = 0.0, {}
        await clock(0, self.observer)
        self.workers = [await worker(self.observer, LEASE_S) for _ in range(2)]
        await self._plant(self.observer)
        async with anyio.create_task_group() as self._tasks:
            for step in steps:
                await self._step(step)
                await self.check()
            await self.finish()

    async def renew(self) -> None:
        """Sessions without a past: an example that failed has left them in the middle of something."""
        for session in self.sessions:
            session.db.terminate()
        self.sessions = [Session(await _session(self._dsn)) for _ in self.sessions]

    # Steps

    async def _plant(self, db: Db) -> None:
        """A tree: a root, one child that streams from it, one that does not, and one that streams from the first."""
        root = (await create(db, "root", on_complete={"queue": "done"}, max_failures=2))["id"]
        child = (await create(db, "streams", parent=root, stream=True))["id"]
        await create(db, "grand", parent=child, stream=True)
        await create(db, "plain", parent=root)
        await add(db, root, 2)

    async def _step(self, step: Step) -> None:
        session = self.sessions[step.session]
        if session.busy is not None:
            return
        if session.is_open:
            await self._end(session, "ROLLBACK" if step.what == "rollback" else "COMMIT")
            return
        call = await self._call(step, session.db)
        if call is None:
            return
        await clock(self.now, session.db)
        if step.open:
            await session.db.execute("BEGIN")
            session.is_open = True
        assert self._tasks is not None
        session.what = step.what
        session.busy = Later(self._tasks, _passes(session.db, call))
        await self._look(session)

    async def _end(self, session: Session, how: str) -> None:
        assert self._tasks is not None
        session.is_open = False
        session.busy = Later(self._tasks, _allowed(session.db.execute(how)))  # a seal is carried out here
        await self._look(session)
        for other in self.sessions:
            await self._look(other)

    async def _look(self, session: Session) -> None:
        """Waits until its call has been answered, or waits for another session; that one does more than to add."""
        pid = session.db.get_server_pid()
        while session.busy is not None and not session.busy.is_done:
            blockers = await self.observer.fetchval("SELECT pg_blocking_pids($1)", pid)
            if blockers and not session.busy.is_done:
                by = {s.what for s in self.sessions if s.db.get_server_pid() in blockers and s.is_open}
                assert session.what in self.may_wait or not by or by - self.adding, f"{session.what} waits for {by}"
                return
            await anyio.lowlevel.checkpoint()
        if session.busy is not None:
            await session.busy.answer()
            session.busy = None

    @property
    def _calm(self) -> bool:
        return not any(session.is_open or session.busy for session in self.sessions)

    async def _call(self, step: Step, db: Db) -> Callable[[], Awaitable[Any]] | None:
        """The verb to call; None: nothing to do, or done."""
        running, waiting = await self.observer.fetch(RUNNING), await self.observer.fetch(WAITING)
        batches = await self.observer.fetch(BATCHES)
        chosen = batches[int(step.which * (len(batches) - 1))]
        begin = int(step.which * max(len(running) - 1, 0))
        some = running[begin : begin + 1 + int(step.which * 3)]
        ids, attempts = [row["id"] for row in some], [row["attempts"] for row in some]
        everyone = [*running, *waiting]
        job_id = everyone[int(step.which * (len(everyone) - 1))]["id"] if everyone else uuid.uuid4()
        worker_id = self.workers[step.session % 2]
        on_batches: dict[str, Callable[[], Awaitable[Any]]] = {
            "add": lambda: add(db, chosen["id"], 1 + int(step.which * 3)),
            "insert": lambda: _insert(db, chosen["id"], int(step.which * 8) % 4),
            "child": lambda: create(db, f"child {len(batches)}", parent=chosen["id"], stream=step.which > 0.8),
            "root": lambda: self._plant(db),
            "seal": lambda: db.fetchval("SELECT pgworkd.seal_batch($1)", chosen["id"]),
            "cancel_batch": lambda: cancel_batch(db, chosen["id"], 1 + int(step.which * 4)),
            "claim": lambda: db.fetch("SELECT * FROM pgworkd.claim($1, 'q', $2)", worker_id, 1 + int(step.which * 4)),
            "unblock": lambda: db.execute("SELECT pgworkd.unblock()"),
            "expire": lambda: db.execute("SELECT pgworkd.expire()"),
        }
        on_jobs: dict[str, Callable[[], Awaitable[Any]]] = {
            "cancel": lambda: cancel(db, job_id),
            "retry": lambda: retry(db, job_id),
            "complete": lambda: complete(db, ids, attempts, [json.dumps(step.which)] * len(ids)),
            "fail": lambda: fail(db, ids, attempts, delay_s=step.which, permanent=step.which < 0.3),
            "release": lambda: release(db, ids, attempts),
            "end": lambda: end(db, ids, attempts, status="expired" if step.which > 0.5 else "cancelled"),
            "both": lambda: db.fetch(
                "SELECT * FROM pgworkd.settle_and_claim($1, $2, $3, $4, 'q', 3, '{}', '{}', '{}', '{}', '{}')",
                *(ids, attempts, [None] * len(ids), worker_id),
            ),
        }
        self.now += 0.01
        if step.what == "tick":
            self.now += 0.01 * 1000**step.which
        elif step.what == "crash" and self._calm:
            await self._crash(int(step.which > 0.5))
        elif step.what in on_batches:
            return on_batches[step.what]
        elif step.what in on_jobs and (ids or (step.what in {"cancel", "retry"} and everyone)):
            return on_jobs[step.what]
        return None

    async def _crash(self, victim: int) -> None:
        """A worker is lost, the other takes its jobs back, a new one comes."""
        db, rescuer = self.observer, self.workers[1 - victim]
        await clock(self.now, db)
        await db.execute("UPDATE pgworkd.workers SET lease_until = $2 WHERE id = $1", self.workers[victim], at(-1))
        await db.execute(
            "UPDATE pgworkd.workers SET steady_since = $2, seen_at = $3, lease_until = $4 WHERE id = $1",
            *(rescuer, at(self.now - LEASE_S), at(self.now), at(self.now + LEASE_S)),
        )
        await rescue(db, rescuer)
        self.workers[victim] = await worker(db, LEASE_S)

    # What must hold

    async def check(self) -> None:
        """In what is committed: counters are exact, trees call back once, what streams has all, the end is the end."""
        db = self.observer
        async with db.transaction(isolation="repeatable_read"):
            await counted(db)
            for row in await db.fetch(CALLED):
                assert row["calls"] == int(row["finished"]), dict(row)
            for row in await db.fetch(STREAMED):
                assert row["jobs"] == row["completed"], dict(row)
            rows = await db.fetch("SELECT id, finished_at FROM pgworkd.batches")
        finished = {row["id"]: row["finished_at"] for row in rows}
        for batch_id, instant in self._finished.items():
            assert instant is None or finished[batch_id] == instant, "finished twice"
        self._finished = finished

    async def finish(self) -> None:
        """Ends what is open; then seals everything and gets all jobs through, and every tree must be finished."""
        for session in self.sessions * 3:  # one that waits can end when the one before it has
            await self._look(session)
            if session.is_open and session.busy is None:
                await self._end(session, "COMMIT")
        assert self._calm
        db = self.observer
        await clock(self.now, db)
        await db.execute("SELECT pgworkd.unblock()")  # for what was rolled back
        assert await db.fetch(OPEN) == [], "left to nobody"
        for row in await db.fetch(BATCHES):
            await _passes(db, lambda batch_id=row["id"]: db.fetchval("SELECT pgworkd.seal_batch($1)", batch_id))
        for _ in range(500):
            self.now += 5.0
            await clock(self.now, db)
            await db.execute("SELECT pgworkd.expire()")
            await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 20)", self.workers[0])
            running = await db.fetch(RUNNING)
            await complete(db, [row["id"] for row in running], [row["attempts"] for row in running])
            await self.check()
            if not await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status <> 'dead' AND queue = 'q'"):
                break
        left = await db.fetch("SELECT name, sealed_at FROM pgworkd.batches WHERE finished_at IS NULL")
        assert left == [], "stuck"
        assert all(row["calls"] == 1 for row in await db.fetch(CALLED))


async def _insert(db: Db, batch_id: uuid.UUID, kind: int) -> None:
    """A plain INSERT: with a key, or with one that may be taken, or with a time to expire, or two rows."""
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, batch_id, serialize_key, dedupe_key, expires_at, max_attempts)"
        " SELECT 'q', $1, $2, $3, $4, 2 FROM generate_series(1, $5) ON CONFLICT DO NOTHING",
        *(batch_id, "k" if kind == 0 else None, "d" if kind == 1 else None, at(2) if kind == 2 else None),
        2 if kind == 3 else 1,
    )


async def _passes(db: Db, call: Callable[[], Awaitable[Any]]) -> None:
    """A refusal by a batch ends the statement and not the transaction."""
    in_transaction = db.is_in_transaction()
    if in_transaction:
        await db.execute("SAVEPOINT before")
    try:
        await call()
    except asyncpg.PostgresError as error:
        if error.sqlstate not in (BATCH_CLOSED, UNIQUE_VIOLATION, TRY_AGAIN):
            raise
        if in_transaction:
            await db.execute("ROLLBACK TO before")


async def _allowed(call: Awaitable[Any]) -> None:
    """A commit may be refused: a stream that was made beside the first end would miss it."""
    try:
        await call
    except asyncpg.PostgresError as error:
        if error.sqlstate != BATCH_CLOSED:
            raise


async def _session(dsn: str) -> Db:
    db = await asyncpg.connect(dsn)
    await db.execute("SET deadlock_timeout = '20ms'; SET lock_timeout = '5s'")
    return db
