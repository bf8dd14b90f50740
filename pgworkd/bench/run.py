"""One run, from the first look to the last row removed: whatever ends it, the scratch queue goes.

Its phases, in order: round trips, enqueueing one by one, many at once, drain, latency in an idle queue.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import anyio
from anyio.abc import TaskGroup

from pgworkd.admin.admin import Admin
from pgworkd.app import App
from pgworkd.bench import scratch
from pgworkd.bench.measure import Drain, Times, host_ticks, sessions_s
from pgworkd.bench.scratch import ScratchOptions
from pgworkd.bench.verdict import Figures
from pgworkd.client import NewJob, enqueue_many
from pgworkd.database.connection import Connection, connect
from pgworkd.database.driver_errors import BROKEN, translate
from pgworkd.engine.life.daemon import Daemon, DaemonOptions
from pgworkd.engine.life.maintenance import Periods
from pgworkd.errors import DatabaseUnavailable, PgworkdError
from pgworkd.process import cpus, stop_signals

LEASE_S, HEARTBEAT_S = 15.0, 2.0
"""Shorter than by default: what a killed run has left can be removed once its lease has expired."""
COMMAND_S_MAX = 7.0
"""Less than half of the lease, as for every daemon."""
READY_S = 20.0
STOP_S = 40.0
"""How long the daemon may take to stop; it has limits of its own."""
ROUND_TRIPS = 200
WARM_UP = 5
"""Calls before those that count: the first ones find cold caches on both sides."""
CHUNK_JOBS, CHUNK_BYTES = 1_000, 4 * 1024 * 1024
"""At most these in one bulk insert."""
EVERY_S = 0.02
"""Time between two jobs of the latency phase."""
LOOK_S = 0.005
HELD_S = 1.0
"""A transaction is reported as held open only if it was that old when the run began."""
_KEPT = Periods(keep_days=3650, keep_dead_days=3650, schedules_s=86_400.0)
"""How long history is kept, and which schedules are obsolete, is for the daemons of this database to say."""

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


class BenchRun:
    """One run in the scratch queue of `options`; `say` prints a line."""

    def __init__(self, plan: Plan, options: ScratchOptions, say: Callable[[str], None]) -> None:
        self._plan, self._options, self._say = plan, options, say
        self._queue = options.queue
        self._control = Connection(options, "control")
        self._unsynced = Connection(replace(options, synced=False), "unsynced")
        self._work = anyio.CancelScope()
        self._is_stopped = False
        self._problem: PgworkdError | None = None
        self._calls, self._first_s = 0, 0.0
        self._waits_ms: list[float] = []

    async def run(self) -> Figures:
        """Measures, and removes the scratch queue. Raises PgworkdError, also after a signal."""
        figures: Figures | None = None
        with stop_signals.received() as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._heed, signals)
                try:
                    with self._work:
                        await self._prepare()
                        figures = await self._measured(tasks)
                except PgworkdError as error:
                    self._problem = self._problem or error
                tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._control.close()
        if self._problem is not None:
            raise self._problem
        if figures is None or self._is_stopped:
            raise PgworkdError("stopped; nothing is left of it in the database")
        return figures

    async def _heed(self, signals: Any) -> None:
        """A signal ends the run; the removal is not cut short by another one."""
        async for _ in signals:
            self._is_stopped = True
            self._work.cancel()

    async def _prepare(self) -> None:
        """Refuses to begin what could not be ended; and removes what dead runs have left."""
        async with Admin(self._options) as admin:
            await admin.verify()
        await scratch.remove(self._control, self._queue)  # nothing yet: but it needs the rights
        for name in (await scratch.remove_leftovers(self._control))[0]:
            self._say(f"removed the scratch queue {name}, which an earlier run had left")

    async def _measured(self, tasks: TaskGroup) -> Figures:
        daemon, ended = await self._daemon(), anyio.Event()
        tasks.start_soon(self._serve, daemon, ended)
        try:
            with anyio.move_on_after(READY_S):
                await daemon.ready.wait()
            if not daemon.ready.is_set():
                raise DatabaseUnavailable(
                    f"the worker was not ready within {READY_S:g} s ({daemon.status()}): perhaps another transaction "
                    "holds a lock on a table of the schema; see pg_blocking_pids()"
                )
            await scratch.create(self._control, self._queue)
            return await self._phases(daemon)
        finally:
            with anyio.CancelScope(shield=True):
                daemon.request_stop(now=True)
                with anyio.move_on_after(STOP_S):
                    await ended.wait()
                await self._unsynced.close()
                await self._remove()

    async def _remove(self) -> None:
        try:
            await scratch.remove(self._control, self._queue)
        except PgworkdError as error:
            raise PgworkdError(
                f"the scratch queue {self._queue} could not be removed ({error}): its jobs and its rows in "
                "pgworkd.queues, pools and workers are left; remove them with: pgworkd bench --clean"
            ) from None

    async def _daemon(self) -> Daemon:
        """One that does not serve the queue before the backlog is complete. Its handler does nothing but count."""
        app = App()

        @app.handler(self._queue, concurrency=self._plan.concurrency)
        async def noop(payload: dict[str, Any]) -> None:
            if "sent_ns" in payload:
                self._waits_ms.append((time.monotonic_ns() - payload["sent_ns"]) / 1e6)
            self._first_s = self._first_s or time.monotonic()
            self._calls += 1

        options = DaemonOptions(
            self._options,
            worker_name=self._queue,
            lease_s=LEASE_S,
            heartbeat_s=HEARTBEAT_S,
            shutdown_s=0.0,
            statistics=False,
            periods=_KEPT,
        )
        daemon = Daemon(app, options)
        await daemon.remove_queue(self._queue)
        return daemon

    async def _serve(self, daemon: Daemon, ended: anyio.Event) -> None:
        try:
            await daemon.run()
            if not daemon.stop_requested.is_set():
                self._problem = PgworkdError("the worker of this run ended early")
        except PgworkdError as error:
            self._problem = error
        finally:
            ended.set()
            self._work.cancel()

    async def _phases(self, daemon: Daemon) -> Figures:
        began_s = time.monotonic()
        trips = [await _ms(self._control.value("SELECT 1")) for _ in self._steps("round trips", ROUND_TRIPS)]
        synced, unsynced = await self._singles()
        bulk = await self._bulk()
        drain, complete, busiest_s, host = await self._drain(daemon, len(synced) + len(unsynced) + bulk.jobs)
        latency = _waits(await self._latency()) if complete else None
        async with Admin(self._options) as admin:
            found = await admin.doctor()
        age_s = found.oldest_transaction_s or 0.0
        held = (str(found.oldest_transaction), age_s) if age_s > time.monotonic() - began_s + HELD_S else None
        waits = _waits(trips), _waits(synced), _waits(unsynced)
        return Figures(*waits, bulk, drain, complete, busiest_s, host, latency, held, cpus.available())

    def _steps(self, phase: str, count: int) -> Iterator[int]:
        """The steps of a phase, until its time is up; one at least."""
        self._say(f"measuring: {phase}")
        until = time.monotonic() + self._plan.seconds
        for number in range(count):
            yield number
            if time.monotonic() > until:
                return

    def _payload(self, **facts: int) -> str:
        """A JSON object of about `payload_bytes` bytes."""
        size = self._plan.payload_bytes - len(json.dumps({**facts, "pad": ""}))
        return json.dumps({**facts, "pad": "x" * max(0, size)})

    async def _singles(self) -> tuple[list[float], list[float]]:
        """One job per transaction, durably and not, in turn, so that both find the same conditions."""
        synced: list[float] = []
        unsynced: list[float] = []
        for _ in self._steps("enqueueing one by one", self._plan.singles):
            for connection, samples in ((self._control, synced), (self._unsynced, unsynced)):
                samples.append(await _ms(connection.fetch(_INSERT, self._queue, self._payload())))
        return synced, unsynced

    async def _bulk(self) -> Drain:
        """By enqueue_many, in chunks, each a transaction."""
        chunk = max(1, min(CHUNK_JOBS, CHUNK_BYTES // self._plan.payload_bytes))
        payload, done = json.loads(self._payload()), 0
        try:
            connection = await connect(self._options, "bulk")
            try:
                began_s = time.monotonic()
                for _ in self._steps("enqueueing in bulk", -(-self._plan.bulk // chunk)):
                    jobs = [NewJob(self._queue, payload) for _ in range(min(chunk, self._plan.bulk - done))]
                    with anyio.fail_after(self._options.command_timeout_s):
                        await enqueue_many(connection, jobs)
                    done += len(jobs)
                return Drain(done, time.monotonic() - began_s)
            finally:
                connection.terminate()
        except BROKEN as error:
            raise translate(error) from error

    async def _drain(self, daemon: Daemon, jobs: int) -> tuple[Drain, bool, float | None, float | None]:
        """The drain, whether it is complete, CPU seconds of the busiest session, and how busy the host was."""
        self._say("measuring: drain")
        before, worker_s, host = await self._sessions(), time.process_time(), host_ticks()
        until = time.monotonic() + self._plan.seconds
        daemon.add_queue(self._queue)
        while not (complete := await self._is_drained(jobs)) and time.monotonic() < until:
            if not daemon.healthy():
                raise DatabaseUnavailable("the worker of this run could not renew its lease")
            await anyio.sleep(LOOK_S)
        seconds, calls = time.monotonic() - self._first_s, self._calls
        worker_s, host_now, after = time.process_time() - worker_s, host_ticks(), await self._sessions()
        if not calls:
            raise PgworkdError(
                f"no job was run within {self._plan.seconds:g} s: perhaps another transaction holds a lock on "
                "pgworkd.jobs; see pgworkd doctor, and pg_blocking_pids()"
            )
        if before is None or after is None:
            return Drain(calls, seconds, worker_s), complete, None, None
        used = [cpu_s - before.get(pid, 0.0) for pid, cpu_s in after.items()]
        share = (host_now[0] - host[0]) / max(1, host_now[1] - host[1])
        return Drain(calls, seconds, worker_s, sum(used)), complete, max(used), share

    async def _is_drained(self, jobs: int) -> bool:
        return self._calls >= jobs and not await self._control.value(_RUNNING, self._queue)

    async def _sessions(self) -> dict[int, float] | None:
        """CPU seconds of the sessions of this run, by process id."""
        return sessions_s([row[0] for row in await self._control.fetch(_SESSIONS, self._queue)])

    async def _latency(self) -> list[float]:
        """One job every 20 ms, each sent only when the one before has begun."""
        until = time.monotonic() + self._plan.seconds
        while not await self._control.value(_IDLE, self._queue) and time.monotonic() < until:
            await anyio.sleep(LOOK_S)
        for number in self._steps("latency", self._plan.latencies):
            await self._control.fetch(_INSERT, self._queue, self._payload(sent_ns=time.monotonic_ns()))
            await anyio.sleep(EVERY_S)
            while len(self._waits_ms) <= number and time.monotonic() < until:
                await anyio.sleep(LOOK_S)
        if not self._waits_ms:
            raise PgworkdError(f"no job of the idle queue was run within {self._plan.seconds:g} s: see pgworkd doctor")
        return self._waits_ms


async def _ms(call: Awaitable[object]) -> float:
    """How long a call takes, in ms."""
    began_s = time.monotonic()
    await call
    return (time.monotonic() - began_s) * 1e3


def _waits(samples_ms: list[float]) -> Times:
    """What follows the warm-up; the last one if the time was up before."""
    return Times(samples_ms[WARM_UP:] or samples_ms[-1:])
