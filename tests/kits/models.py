"""Tests with generated inputs: the number of examples and a limit of time; and worlds, in which several sessions play.

A world is a model test: random operations of several sessions, each example played from an empty database, step by
step. Each session runs one verb per transaction, as a daemon does, and may leave it open: operations of other sessions
meanwhile wait for it, or do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import anyio
import anyio.lowlevel
import asyncpg
import pytest
from anyio.abc import TaskGroup
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.kits.server import create_database, drop_database
from tests.kits.sessions import Later
from tests.kits.verbs import Db, at, clock, rescue, worker

EXAMPLES = os.environ.get("PGWORKD_TEST_EXAMPLES")
"""Number of examples of each model and fuzz test, random on each run. Unset: the same examples on every run."""


def examples(count: int, **changes: Any) -> settings:
    """Hypothesis settings: `count` examples unless PGWORKD_TEST_EXAMPLES is set."""
    return settings(
        max_examples=int(EXAMPLES or count),
        derandomize=EXAMPLES is None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **changes,
    )


FUZZ = examples(200)
CASE_S_MAX = 1.0
"""CPU seconds within which any input must be accepted or rejected."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Fails if the block takes too long."""
    gc.disable()  # collecting hypothesis' objects must not count as this example's time
    began_s = time.process_time()
    try:
        yield
    finally:
        took_s = time.process_time() - began_s
        gc.enable()
    assert took_s < CASE_S_MAX, f"took {took_s:.3f} s"


@pytest.fixture(autouse=True, scope="module")
def nowhere() -> Iterator[Path]:
    """An empty working directory and no PGWORKD_ variables, for all examples of a module."""
    before = Path.cwd()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        for name in list(os.environ):
            if name.upper().startswith("PGWORKD_") and name != "PGWORKD_TEST_EXAMPLES":
                patch.delenv(name)
        os.chdir(directory)
        yield Path(directory)
        os.chdir(before)


# Worlds

QUICK = examples(14, phases=[Phase.explicit, Phase.generate])
"""Shrinking takes minutes: a failing example is short enough as it is."""
LEASE_S = 3600.0

# Of the worlds with batches.
EMPTY = """TRUNCATE pgworkd.jobs, pgworkd.finished_jobs, pgworkd.batches, pgworkd.batch_additions, pgworkd.workers,
    pgworkd.audit"""
ADDING = {"add", "insert", "child", "root", "seal"}
"""The operations of an application's transaction."""
RUNNING = "SELECT id, attempts FROM pgworkd.jobs WHERE status = 'running' AND queue = 'q' ORDER BY id"
WAITING = """SELECT id FROM pgworkd.jobs
    WHERE status IN ('blocked', 'pending', 'failed', 'dead') AND queue = 'q' ORDER BY created_at, id"""


class Step(NamedTuple):
    """One operation: session, verb, row (0 to 1), and whether its transaction stays open. `key`: of a new row."""

    session: int
    what: str
    which: float
    open: bool
    key: str = ""


def steps(whats: list[str]) -> st.SearchStrategy[list[Step]]:
    """Generates schedules of steps."""
    step = st.builds(
        Step,
        session=st.integers(0, 2),
        what=st.sampled_from(whats),
        which=st.floats(0, 1, allow_nan=False),
        open=st.booleans(),
    )
    return st.lists(step, min_size=15, max_size=40)


class Session:
    """A connection, its open transaction, the operations in it, and the call that waits for another."""

    def __init__(self, db: Db) -> None:
        self.db = db
        self.is_open = False
        self.what = ""
        self.busy: Later[Any] | None = None


class World(ABC):
    """The database of one example after the other; subclasses define its contents and invariants."""

    setup: ClassVar[str] = ""
    """SQL that is installed once."""
    empty: ClassVar[str]
    adding: ClassVar[set[str]] = set()
    may_wait: ClassVar[set[str]] = set()
    """Only these may wait for a transaction that has only executed `adding`."""
    refusals: ClassVar[tuple[str, ...]] = ()
    """SQLSTATEs that are no failure: they end the statement, or with a commit its transaction."""

    def __init__(self, dsn: str, observer: Db) -> None:
        self._dsn = dsn
        self.observer = observer
        self.sessions: list[Session] = []
        self.now = 0.0
        self.workers: list[int] = []
        self._tasks: TaskGroup | None = None

    @classmethod
    async def open(cls, dsn: str) -> Self:
        """Connects."""
        world = cls(dsn, await asyncpg.connect(dsn))
        if cls.setup:  # asyncpg cannot execute nothing
            await world.observer.execute(cls.setup)
        await world.renew()
        return world

    async def renew(self) -> None:
        """Opens fresh sessions: a failed example leaves them in the middle of something."""
        for session in self.sessions:
            session.db.terminate()
        self.sessions = [Session(await asyncpg.connect(self._dsn)) for _ in range(3)]
        for session in self.sessions:
            await session.db.execute("SET deadlock_timeout = '20ms'; SET lock_timeout = '5s'")

    async def play(self, steps: list[Step], *how: Any) -> None:
        """Plays one example, from an empty database until everything is finished; `how` it is planted."""
        await self.observer.execute(self.empty)
        self.now = 0.0
        await clock(0, self.observer)
        self.workers = [await worker(self.observer, LEASE_S) for _ in range(2)]
        await self.plant(*how)
        async with anyio.create_task_group() as self._tasks:
            for step in steps:
                await self._step(step)
                await self.check()
            for session in self.sessions * 3:  # a call that waits can end when the one before it has
                await self._look(session)
                if session.is_open and session.busy is None:
                    await self._end(session, "COMMIT")
            assert self.calm
            await clock(self.now, self.observer)
            await self.finish()

    @property
    def calm(self) -> bool:
        """Every session is idle."""
        return not any(session.is_open or session.busy for session in self.sessions)

    async def _step(self, step: Step) -> None:
        session = self.sessions[step.session]
        if session.busy is not None:
            return
        if session.is_open:
            await self._end(session, "ROLLBACK" if step.what == "rollback" else "COMMIT")
            return
        call = await self.call(step, session.db)
        if call is None:
            return
        await clock(self.now, session.db)
        if step.open:
            await session.db.execute("BEGIN")
            session.is_open = True
        assert self._tasks is not None
        session.what = step.what
        session.busy = Later(self._tasks, self.passes(session.db, call))
        await self._look(session)

    async def _end(self, session: Session, how: str) -> None:
        assert self._tasks is not None
        session.is_open = False
        session.busy = Later(self._tasks, self._allowed(session.db.execute(how)))  # deferred triggers run here
        await self._look(session)
        for other in self.sessions:
            await self._look(other)

    async def _look(self, session: Session) -> None:
        """Waits until its call has returned, or waits for another session that has done more than add."""
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

    async def passes(self, db: Db, call: Callable[[], Awaitable[Any]]) -> None:
        """A refusal ends the statement and not the transaction."""
        in_transaction = db.is_in_transaction() and bool(self.refusals)
        if in_transaction:
            await db.execute("SAVEPOINT before")
        try:
            await call()
        except asyncpg.PostgresError as error:
            if error.sqlstate not in self.refusals:
                raise
            if in_transaction:
                await db.execute("ROLLBACK TO before")

    async def _allowed(self, commit: Awaitable[Any]) -> None:
        """A commit may be refused, too: data it relies on has changed in between."""
        try:
            await commit
        except asyncpg.PostgresError as error:
            if error.sqlstate not in self.refusals:
                raise

    async def crash(self, victim: int) -> None:
        """A worker is lost, the other takes its jobs back, a new one registers."""
        db, rescuer = self.observer, self.workers[1 - victim]
        await clock(self.now, db)
        await db.execute("UPDATE pgworkd.workers SET lease_until = $2 WHERE id = $1", self.workers[victim], at(-1))
        await db.execute(
            "UPDATE pgworkd.workers SET steady_since = $2, seen_at = $3, lease_until = $4 WHERE id = $1",
            rescuer,
            at(self.now - LEASE_S),
            at(self.now),
            at(self.now + LEASE_S),
        )
        await rescue(db, rescuer)
        self.workers[victim] = await worker(db, LEASE_S)

    # For subclasses

    @abstractmethod
    async def plant(self, *how: Any) -> None:
        """Inserts the initial rows."""

    @abstractmethod
    async def call(self, step: Step, db: Db) -> Callable[[], Awaitable[Any]] | None:
        """The verb to call; None: nothing to do, or done."""

    @abstractmethod
    async def check(self) -> None:
        """Checks the invariants that hold after each step."""

    @abstractmethod
    async def finish(self) -> None:
        """No transaction is open: runs all jobs to the end, and nothing may be left."""


@contextlib.contextmanager
def playing(server_dsn: str, world_class: type[World]) -> Iterator[Callable[..., None]]:
    """A function that plays one example in a `world_class`, on a database that all examples of a test share."""
    name = f"pgworkd_world_{uuid.uuid4().hex[:12]}"
    with asyncio.Runner() as runner:
        world = runner.run(world_class.open(runner.run(create_database(server_dsn, name))))

        async def play(*example: Any) -> None:
            if any(session.is_open or session.busy for session in world.sessions):
                await world.renew()
            await world.play(*example)

        try:
            yield lambda *example: runner.run(play(*example))
        finally:
            for db in [world.observer, *(session.db for session in world.sessions)]:
                db.terminate()
            runner.run(drop_database(server_dsn, name))
