"""The phases of a run, in order: round trips, enqueueing one by one, many at once, drain, latency in an idle queue.

Every statement runs to its answer or its deadline, also when the run is stopped: no row shall appear after the removal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio

from pgworkd import App
from pgworkd.admin.admin import Admin
from pgworkd.bench import cpu
from pgworkd.bench.figures import BulkFigures, Drain, Figures, Held, Spread
from pgworkd.bench.scratch import ScratchOptions
from pgworkd.client import NewJob, enqueue_many
from pgworkd.database.connection import Connection, connect
from pgworkd.database.driver_errors import BROKEN, translate
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import DatabaseUnavailable, PgworkdError
from pgworkd.process import cpus

ROUND_TRIPS = 200
WARM_UP = 5
"""Calls before those that count: the first ones find cold caches on both sides."""
CHUNK_JOBS, CHUNK_BYTES = 1_000, 4 * 1024 * 1024
"""Maximum jobs and bytes of one bulk insert."""
EVERY_S = 0.02
"""Time between two jobs of the latency phase."""
LOOK_S = 0.01
HELD_S = 1.0
"""A transaction is reported as held open only if it was that old when the run began."""

_INSERT = "INSERT INTO pgworkd.jobs (queue, payload) VALUES ($1, $2)"
_SESSIONS = "SELECT pid FROM pg_stat_activity WHERE starts_with(application_name, 'pgworkd ' || $1)"
_RUNNING = """SELECT EXISTS (SELECT FROM pgworkd.workers w JOIN pgworkd.jobs j ON j.worker_id = w.id
    WHERE w.name = $1 AND j.status = 'running')"""
_IDLE = "SELECT EXISTS (SELECT FROM pgworkd.pools WHERE queue = $1 AND idle)"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much a run does. `seconds`: the limit of each phase; `jobs`: all that it writes, in all phases."""

    jobs: int
    seconds: float
    payload_bytes: int
    concurrency: int

    @property
    def singles(self) -> int:
        """Jobs enqueued one by one, durably; as many again without waiting for the disk."""
        return min(500, max(10, self.jobs // 40))

    @property
    def latencies(self) -> int:
        """Jobs of the latency phase."""
        return min(200, max(10, self.jobs // 50))

    @property
    def bulk(self) -> int:
        """Jobs enqueued many at once."""
        return self.jobs - 2 * self.singles - self.latencies


class Handled:
    """The handler, which does nothing but count and note when it was called."""

    def __init__(self) -> None:
        self.calls = 0
        self.first_s = self.last_s = 0.0
        self.waits_s: list[float] = []

    async def __call__(self, payload: dict[str, Any]) -> None:
        """Runs one job."""
        self.last_s = time.monotonic()
        if not self.calls:
            self.first_s = self.last_s
        self.calls += 1
        if "sent_ns" in payload:
            self.waits_s.append((time.monotonic_ns() - payload["sent_ns"]) / 1e9)

    def app(self, queue: str, concurrency: int) -> App:
        """An application with this handler for the queue."""
        app = App()

        @app.handler(queue, concurrency=concurrency)
        async def noop(payload: dict[str, Any]) -> None:
            await self(payload)

        return app


class Phases:
    """Measures, phase by phase. `shown(phase, done, total)` is called as they advance.

    All methods raise PgworkdError.
    """

    def __init__(
        self, plan: Plan, options: ScratchOptions, handled: Handled, shown: Callable[[str, int, int], None]
    ) -> None:
        self._plan, self._options, self._handled, self._shown = plan, options, handled, shown
        self._queue = options.queue
        self._synced = Connection(options, "insert")
        self._unsynced = Connection(replace(options, synced=False), "unsynced")
        self._began_s = time.monotonic()

    async def close(self) -> None:
        """Closes its connections."""
        await self._synced.close()
        await self._unsynced.close()

    async def run(self, daemon: Daemon) -> Figures:
        """Runs all phases. The daemon is ready, and does not serve the queue yet."""
        self._began_s = time.monotonic()
        round_trip = await self._round_trips()
        single, unsynced = await self._singles()
        bulk = await self._bulk()
        drain = await self._drain(daemon, single.count + unsynced.count + bulk.jobs)
        latency = await self._latency() if drain.complete else None
        held = await self._held()
        return Figures(round_trip, single, unsynced, bulk, drain, latency, held, cpus.available())

    def _payload(self, **facts: int) -> str:
        """A JSON object of about `payload_bytes` bytes."""
        size = self._plan.payload_bytes - len(json.dumps({**facts, "pad": ""}))
        return json.dumps({**facts, "pad": "x" * max(0, size)})

    async def _round_trips(self) -> Spread:
        samples = []
        for number in range(ROUND_TRIPS + WARM_UP):
            began_s = time.monotonic()
            await self._synced.value("SELECT 1")
            samples.append(time.monotonic() - began_s)
            self._shown("round trips", number + 1, ROUND_TRIPS + WARM_UP)
            if len(samples) > WARM_UP and time.monotonic() - self._began_s > self._plan.seconds:
                break
        return Spread.of(samples[WARM_UP:])

    async def _singles(self) -> tuple[Spread, Spread]:
        """Enqueues one job per transaction, durably and not, in turn, so that both find the same conditions."""
        took: tuple[list[float], list[float]] = ([], [])
        payload, began_s = self._payload(), time.monotonic()
        for number in range(self._plan.singles):
            for connection, samples in zip((self._synced, self._unsynced), took, strict=True):
                sent_s = time.monotonic()
                await connection.fetch(_INSERT, self._queue, payload)
                samples.append(time.monotonic() - sent_s)
            self._shown("enqueue one by one", 2 * (number + 1), 2 * self._plan.singles)
            if time.monotonic() - began_s > self._plan.seconds:
                break
        synced, unsynced = took
        skip = min(WARM_UP, len(synced) - 1)
        return _all_counted(synced, skip), _all_counted(unsynced, skip)

    async def _bulk(self) -> BulkFigures:
        """Enqueues with enqueue_many, in chunks, each a transaction."""
        chunk = max(1, min(CHUNK_JOBS, CHUNK_BYTES // max(1, self._plan.payload_bytes)))
        payload, done = json.loads(self._payload()), 0
        try:
            connection = await connect(self._options, "bulk")
        except Exception as error:
            raise translate(error) from error
        began_s = time.monotonic()
        try:
            while done < self._plan.bulk and (not done or time.monotonic() - began_s < self._plan.seconds):
                jobs = [NewJob(self._queue, payload) for _ in range(min(chunk, self._plan.bulk - done))]
                await _whole(partial(enqueue_many, connection, jobs), self._options.command_timeout_s)
                done += len(jobs)
                self._shown("enqueue in bulk", done, self._plan.bulk)
            return BulkFigures(done, time.monotonic() - began_s)
        finally:
            connection.terminate()

    async def _drain(self, daemon: Daemon, jobs: int) -> Drain:
        """Drains the backlog, from the first handler call until none of it runs, as benchmarks/drain.py does."""
        handled, control = self._handled, self._synced
        before = cpu.read(await self._sessions())
        began_s = time.monotonic()
        daemon.add_queue(self._queue)
        while handled.calls < jobs and time.monotonic() - began_s < self._plan.seconds:
            self._shown("drain", handled.calls, jobs)
            await self._check(daemon)
            await anyio.sleep(LOOK_S)
        complete = handled.calls >= jobs
        while complete and await control.value(_RUNNING, self._queue):
            await self._check(daemon)
            complete = time.monotonic() - began_s < self._plan.seconds
        ended_s, calls = time.monotonic(), handled.calls
        after = cpu.read(await self._sessions())
        if not calls:
            raise PgworkdError(
                f"no job was run within {self._plan.seconds:g} s: perhaps another transaction holds a lock on "
                "pgworkd.jobs; see pgworkd doctor, and pg_blocking_pids()"
            )
        self._shown("drain", calls, jobs)
        return Drain(calls, max(ended_s - handled.first_s, 1e-6), *cpu.used(before, after), complete)

    async def _latency(self) -> Spread:
        """Enqueues a job every 20 ms, each sent only when the one before has begun."""
        handled, began_s, total = self._handled, time.monotonic(), self._plan.latencies
        while not await self._synced.value(_IDLE, self._queue) and time.monotonic() - began_s < self._plan.seconds:
            await anyio.sleep(LOOK_S)
        handled.waits_s.clear()
        for number in range(total):
            payload = self._payload(sent_ns=time.monotonic_ns())
            await self._synced.fetch(_INSERT, self._queue, payload)
            await anyio.sleep(EVERY_S)
            while len(handled.waits_s) <= number and time.monotonic() - began_s < self._plan.seconds:
                await anyio.sleep(LOOK_S)
            self._shown("latency", number + 1, total)
            if time.monotonic() - began_s > self._plan.seconds:
                break
        if not handled.waits_s:
            raise PgworkdError(f"no job of the idle queue was run within {self._plan.seconds:g} s: see pgworkd doctor")
        return _all_counted(handled.waits_s, min(WARM_UP, len(handled.waits_s) - 1))

    async def _held(self) -> Held | None:
        """The oldest transaction of this database, if it was open before the run began."""
        async with Admin(self._options) as admin:
            found = await admin.doctor()
        age_s, ran_s = found.oldest_transaction_s or 0.0, time.monotonic() - self._began_s
        return Held(str(found.oldest_transaction), age_s) if age_s > ran_s + HELD_S else None

    async def _sessions(self) -> list[int]:
        return [row[0] for row in await self._synced.fetch(_SESSIONS, self._queue)]

    async def _check(self, daemon: Daemon) -> None:
        if not daemon.healthy():
            raise DatabaseUnavailable("the worker of this run could not renew its lease")


def _all_counted(samples_s: list[float], skip: int) -> Spread:
    """The spread of what follows the warm-up, with the count of all: each was a job."""
    return replace(Spread.of(samples_s[skip:]), count=len(samples_s))


async def _whole(call: Callable[[], Any], limit_s: float) -> None:
    """Makes a call that no stop cuts off: rows that are on their way could not be found. Raises PgworkdError."""
    with anyio.CancelScope(shield=True, deadline=anyio.current_time() + limit_s + 2):
        try:
            await call()
        except BROKEN as error:
            raise translate(error) from error
        return
    raise DatabaseUnavailable("the database did not answer in time")
