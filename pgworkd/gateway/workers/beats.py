"""Beats of remote workers: those of one second are one statement, however many workers there are.

A beat renews the worker's lease, stores the progress that it reports, and is answered with what the worker is to do.
A claim counts as a beat whose answer nobody waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

import anyio

from pgworkd.core.events import Events
from pgworkd.core.fence import Fence
from pgworkd.database.reconnect import Outage
from pgworkd.database.remote_store import LOCKED, LOST, News, RemoteStore
from pgworkd.errors import DatabaseBusy, DatabaseError, DatabaseUnavailable, PgworkdError, WorkerLost
from pgworkd.gateway.workers.workers import RemoteWorker, RemoteWorkers

PERIOD_S = 1.0
"""Between two statements."""
NEWS_PERIOD_S = 0.1
"""Between two lookups because of notifications."""
LOCKED_MAX = 3
"""A worker whose row is locked is tried in this many statements."""
WORKERS_MAX = 2_000
"""Per statement; the rest follow at once."""


class Report(NamedTuple):
    """What a worker says in a beat. `state`: running or stopping.

    `held`: what it says that it holds; `progress`: of attempts, from 0 to 1, and a text.
    """

    held: Sequence[Fence] = ()
    progress: Sequence[tuple[Fence, float, str]] = ()
    state: str = "running"


class Beaten(NamedTuple):
    """What became of a beat. `gone`: the jobs of `held` that the worker runs no more.

    `is_listed`: the database knows that all of `held` has begun.
    """

    gone: set[UUID]
    is_listed: bool


class _Beat:
    """One that waits for its answer."""

    def __init__(self, worker: RemoteWorker, report: Report) -> None:
        self.worker, self.report = worker, report
        self.tries = 0
        self.gone: set[UUID] = set()
        self.is_listed = True
        self.error: PgworkdError | None = None
        self.answered = anyio.Event()

    @property
    def may_run(self) -> bool:
        """True unless the worker is known to run nothing: then there is nothing to tell."""
        return bool(self.report.held or self.worker.held or self.worker.elsewhere)

    def fail(self, error: PgworkdError) -> None:
        self.error = error
        self.answered.set()


class Beats:
    """The beats of all workers, and one loop that sends them."""

    def __init__(self, store: RemoteStore, workers: RemoteWorkers, events_: Events) -> None:
        self._store, self._workers = store, workers
        self._waiting: list[_Beat] = []
        self._noted: set[int] = set()
        """The workers of those."""
        self._asked: set[int] = set()  # workers that the database has news for
        self._wanted = anyio.Event()
        self._asked_for = anyio.Event()
        self._outage = Outage("beats", events_)

    async def beat(self, worker: RemoteWorker, report: Report) -> Beaten:
        """Renews the lease. Raises WorkerLost, or DatabaseUnavailable when the lease was not renewed.

        While all jobs are locked nothing is known to be gone, and nothing that is new is listed.
        """
        beat = self._put(worker, report)
        await beat.answered.wait()
        if beat.error is not None:
            raise beat.error
        return Beaten(beat.gone, beat.is_listed)

    def note(self, worker: RemoteWorker) -> None:
        """Renews the lease soon: the worker has called."""
        if worker.id not in self._noted:
            self._put(worker, Report())

    def look(self, worker_id: int) -> None:
        """The database has news for this worker."""
        if self._workers.find(worker_id) is not None:
            self._asked.add(worker_id)
            self._asked_for.set()

    def _put(self, worker: RemoteWorker, report: Report) -> _Beat:
        beat = _Beat(worker, report)
        self._waiting.append(beat)
        self._noted.add(worker.id)
        self._wanted.set()
        return beat

    async def run(self) -> None:
        """Sends beats until cancelled; callers that wait then get an error."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_all)
                tasks.start_soon(self._look_up)
        finally:
            for beat in self._waiting:
                beat.fail(DatabaseUnavailable("the gateway stops"))

    async def _send_all(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            batch: dict[int, list[_Beat]] = {}
            waiting, self._waiting = self._waiting, []
            for beat in waiting:
                if len(batch) < WORKERS_MAX or beat.worker.id in batch:
                    batch.setdefault(beat.worker.id, []).append(beat)
                else:
                    self._waiting.append(beat)
            self._noted = {beat.worker.id for beat in self._waiting}
            began = anyio.current_time()
            await self._send_parts(batch)
            if self._waiting:
                self._wanted.set()
            if len(batch) < WORKERS_MAX:
                await anyio.sleep_until(began + PERIOD_S)

    async def _send_parts(self, batch: dict[int, list[_Beat]]) -> None:
        """Sends them; where the database refuses that, each half: the row of one of them may be the reason."""
        try:
            await self._send(batch)
        except PgworkdError as error:
            if len(batch) > 1 and not isinstance(error, DatabaseUnavailable):
                workers = list(batch)
                for part in (workers[: len(batch) // 2], workers[len(batch) // 2 :]):
                    await self._send_parts({each: batch[each] for each in part})
                return
            for beats in batch.values():
                for beat in beats:
                    beat.fail(error)
            delay_s = self._outage.failed(error)
            if isinstance(error, DatabaseUnavailable):
                await anyio.sleep(delay_s)
        else:
            self._outage.passed()

    async def _send(self, batch: dict[int, list[_Beat]]) -> None:
        """One statement for the leases, one for what has changed, and one for progress, if there is any."""
        states: dict[int, str] = {beats[0].worker.id: beats[-1].report.state for beats in batch.values()}
        asked: dict[int, str | None] = {}
        for worker_id, outcome, lease_s, requested in await self._store.heartbeats(states):
            beats = batch[worker_id]
            if outcome == LOST:
                self._workers.lose(worker_id)
                for beat in beats:
                    beat.fail(WorkerLost(f"worker {worker_id} is presumed dead"))
            elif outcome == LOCKED:
                self._again(beats)
            else:
                beats[0].worker.lease_s = lease_s or beats[0].worker.lease_s
                asked[worker_id] = requested
        held = [each for worker_id in asked for beat in batch[worker_id] for each in beat.report.held]
        # Apart, as it reads the jobs: whoever locks their table must not hold up the leases.
        busy = [worker_id for worker_id in asked if any(beat.may_run for beat in batch[worker_id])]
        gone = await self._tell(busy, held, asked)
        listing = [beat for worker_id in asked for beat in batch[worker_id] if beat.report.held]
        if gone is None:  # the next statement would wait as long, and workers give up a beat that takes long
            gone = set()
            for beat in listing:
                beat.is_listed = False
        else:
            await self._note_begun(listing)
        progress = [each for worker_id in asked for beat in batch[worker_id] for each in beat.report.progress]
        if progress:
            attempts, done, messages = zip(*progress, strict=True)
            try:
                await self._store.report_progress(attempts, done, messages)
            except DatabaseError as error:  # it costs no lease; the next report may be stored
                self._outage.failed(error)
        for worker_id in asked:
            for beat in batch[worker_id]:
                beat.gone = {each.job_id for each in beat.report.held if (each.job_id, each.attempt) in gone}
                beat.answered.set()

    async def _tell(
        self, busy: Sequence[int], held: Sequence[Fence], asked: Mapping[int, str | None]
    ) -> set[tuple[UUID, int]] | None:
        """Takes over what these workers are to do; returns what they hold and is not theirs any more.

        None: somebody has locked all jobs. The leases are renewed.
        """
        try:
            news = await self._store.news(busy, list(dict.fromkeys(held))) if busy else News([], [])
        except DatabaseBusy as error:
            self._outage.failed(error)
            return None
        self._workers.apply(news, asked)
        return {(job_id, attempt) for _, job_id, attempt in news.gone}

    async def _note_begun(self, beats: Sequence[_Beat]) -> None:
        """What a worker has listed once, in whatever gateway's sight, has begun."""
        held: dict[RemoteWorker, dict[Fence, None]] = {}
        for beat in beats:  # of several of one worker, each list counts
            own = [each for each in beat.report.held if each.worker_id == beat.worker.id]
            held.setdefault(beat.worker, {}).update(dict.fromkeys(own))
        new = [each for worker, all_ in held.items() for each in all_ if each[:2] not in worker.begun]
        failed = await self._list_held(new) if new else set()
        for worker, all_ in held.items():
            worker.begun = {each[:2] for each in all_ if each.job_id not in failed}
        for beat in beats:
            beat.is_listed = not any(each.job_id in failed for each in beat.report.held)

    async def _list_held(self, held: Sequence[Fence]) -> set[UUID]:
        """Returns the jobs that are locked or that something refuses to have changed: the next beat tries again."""
        try:
            return await self._store.list_held(held)
        except DatabaseBusy as error:  # of all jobs: rows that are locked are skipped
            self._outage.failed(error)
            return {each.job_id for each in held}
        except DatabaseError as error:
            if len(held) == 1:
                self._outage.failed(error)
                return {held[0].job_id}
            half = len(held) // 2
            return await self._list_held(held[:half]) | await self._list_held(held[half:])

    def _again(self, beats: Sequence[_Beat]) -> None:
        for beat in beats:
            beat.tries += 1
            if beat.tries < LOCKED_MAX:
                self._waiting.append(beat)
                self._noted.add(beat.worker.id)
            else:
                beat.fail(DatabaseBusy("the worker's row is locked by another transaction", sqlstate="55P03"))

    async def _look_up(self) -> None:
        """Reads news that a notification has announced: an attempt is to be cancelled, or a worker asked to stop."""
        while True:
            await self._asked_for.wait()
            self._asked_for = anyio.Event()
            asked, self._asked = self._asked, set()
            try:
                requested = await self._store.requested(
                    [each for each in asked if self._workers.find(each) is not None]
                )
                self._workers.apply(await self._store.news(list(requested)), requested)
            except PgworkdError as error:  # the next beat brings it
                await anyio.sleep(self._outage.failed(error))
            await anyio.sleep(NEWS_PERIOD_S)
