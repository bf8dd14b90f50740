"""What became of each attempt, as events; and runs that take far longer than their kind usually does."""

from __future__ import annotations

import time

import anyio

from pgworkd.database.reconnect import Outage
from pgworkd.database.store import Rescued, Store
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.registry import App
from pgworkd.errors import PgworkdError
from pgworkd.words import events
from pgworkd.words.events import Events
from pgworkd.words.job import Ending, Outcome, Reason

LOOK_S = 0.5
SAMPLES_LEAST = 20
"""Runs of a kind before we presume to know what is usual."""
PROGRESS_ROWS_MAX = 1000
WEIGHT = 0.05
"""Of the newest run in the moving average."""


class Reporter:
    """Turns settled attempts into events and watches the clock of those that run."""

    def __init__(
        self, store: Store, events_: Events, in_flight: InFlight, app: App, slow_min_s: float, slow_factor: float
    ) -> None:
        self._store = store
        self._outage = Outage("progress", events_)
        self._events = events_
        self._in_flight = in_flight
        self._app = app
        self._slow_min_s = slow_min_s
        self._slow_factor = slow_factor
        self._usual: dict[str, tuple[int, float]] = {}
        """By kind: completed runs and their average duration in seconds."""

    def completed(self, batch: list[Attempt]) -> None:
        """Reports completed attempts."""
        has_listener = self._events.has_listener(events.JOB_COMPLETED)
        kind, runs, usual_s = "", 0, 0.0
        for attempt in batch:
            duration_s = 0.0 if attempt.started is None else attempt.ended - attempt.started
            if attempt.claimed.kind != kind:  # nearly all have the same: what is known of it is kept at hand
                self._usual[kind] = runs, usual_s
                kind = attempt.claimed.kind
                runs, usual_s = self._usual.get(kind, (0, duration_s))
            usual_s += (WEIGHT if runs > SAMPLES_LEAST else 1 / (runs + 1)) * (duration_s - usual_s)
            runs += 1
            if has_listener:
                self._events.emit(events.JOB_COMPLETED, **attempt.facts(), duration_s=round(duration_s, 6))
        self._usual[kind] = runs, usual_s

    def settled(self, attempt: Attempt, outcome: Outcome, status: str | None) -> None:
        """Reports one attempt that was settled otherwise; `status` None was reported as stale."""
        if status is None:
            return
        duration_s = 0.0 if attempt.started is None else attempt.ended - attempt.started
        facts = attempt.facts() | {"duration_s": round(duration_s, 6)}
        if outcome.ending is Ending.RELEASED:
            self._events.emit(events.JOB_RELEASED, **facts, reason=outcome.reason, delay_s=outcome.delay_s)
        elif status == "expired":
            self._events.emit(
                events.SCHEDULE_SKIPPED, **attempt.facts(), schedule=attempt.claimed.schedule, reason=outcome.message
            )
        elif status == "cancelled":
            self._events.emit(events.JOB_CANCELLED, **facts, reason=outcome.reason)
        elif status == "dead":
            self._events.emit(events.JOB_DEAD, **facts, error=outcome.message, **_trace(outcome))
        else:
            retry = {"retry_in_s": outcome.delay_s}
            self._events.emit(events.JOB_FAILED, **facts, error=outcome.message, **retry, **_trace(outcome))

    def died(self, rescued: Rescued) -> None:
        """Reports a job that died with its worker."""
        self._events.emit(
            events.JOB_DEAD,
            job_id=str(rescued.id),
            queue=rescued.queue,
            kind=rescued.kind,
            attempt=rescued.attempt,
            duration_s=None,
            error=rescued.error,
        )

    async def run(self) -> None:
        """Until cancelled. What runs is watched in a task of its own: a slow database holds up only what is written."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            tasks.start_soon(self._write_progress)

    async def _watch(self) -> None:
        while True:
            now = time.monotonic()
            for attempt in self._in_flight.running():
                self._time_out_thread(attempt, now)
                self._flag_slow(attempt, now)
            await anyio.sleep(LOOK_S)

    async def _write_progress(self) -> None:
        while True:
            reporting = [attempt for attempt in self._in_flight.running() if attempt.progress is not None]
            for worker_id in {attempt.worker_id for attempt in reporting}:  # two, while a lost registration is replaced
                ours = [attempt for attempt in reporting if attempt.worker_id == worker_id]
                for at in range(0, len(ours), PROGRESS_ROWS_MAX):
                    await self._write(ours[at : at + PROGRESS_ROWS_MAX])
            await anyio.sleep(LOOK_S)

    async def _write(self, reporting: list[Attempt]) -> None:
        """Writes what handlers have said since the last time; what cannot be written now is kept for the next."""
        said = [attempt.progress or (0.0, "") for attempt in reporting]
        rows = [
            (attempt.claimed.id, attempt.claimed.attempt, *noted)
            for attempt, noted in zip(reporting, said, strict=True)
        ]
        try:
            await self._store.report_progress(rows, reporting[0].worker_id)
        except PgworkdError as error:
            self._outage.failed(error)
            return
        self._outage.passed()
        for attempt, noted in zip(reporting, said, strict=True):
            if attempt.progress is noted:  # else it has said more meanwhile
                attempt.progress = None

    def _time_out_thread(self, attempt: Attempt, now: float) -> None:
        """A thread past its time-out cannot be stopped: it is told, reported, and still ours until it returns."""
        handler = self._app.handlers.get(attempt.claimed.kind)
        if handler is None or handler.mode != "thread" or attempt.reason is not None or attempt.started is None:
            return
        timeout_s = attempt.claimed.timeout_s or handler.timeout_s
        if timeout_s is not None and now - attempt.started > timeout_s:
            attempt.stop(Reason.TIMEOUT)
            self._events.emit(events.JOB_OVERDUE, **attempt.facts(), timeout_s=timeout_s)

    def _flag_slow(self, attempt: Attempt, now: float) -> None:
        runs, usual_s = self._usual.get(attempt.claimed.kind, (0, 0.0))
        if attempt.reported_slow or attempt.started is None or runs < SAMPLES_LEAST:
            return
        running_s = now - attempt.started
        if running_s > max(self._slow_min_s, self._slow_factor * usual_s):
            attempt.reported_slow = True
            self._events.emit(
                events.JOB_SLOW, **attempt.facts(), running_s=round(running_s, 3), usual_s=round(usual_s, 3)
            )


def _trace(outcome: Outcome) -> dict[str, object]:
    traceback = (outcome.error or {}).get("traceback")
    return {"exception": traceback} if traceback else {}
