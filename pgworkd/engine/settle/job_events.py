"""What happened to each attempt, as events and `on_dead` hooks; slow runs, overdue threads, and progress.

Hooks are called after the fact: bounded in time and number, and unable to harm the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from pgworkd.core import events
from pgworkd.core.error_report import describe_error
from pgworkd.core.events import Events
from pgworkd.core.job import Ending, Outcome, Reason, outcome_of
from pgworkd.core.payload import decode
from pgworkd.core.source import WorkSource
from pgworkd.database.reconnect import Outage
from pgworkd.database.store import Rescued
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.registry import DeadJob, Registry
from pgworkd.engine.runner_task import discard_late_cancellation
from pgworkd.engine.shared import Shared
from pgworkd.errors import DatabaseUnavailable, InvalidPayload, PgworkdError

CHECK_S = 0.5
"""How often running attempts are checked and counted, and their progress is written."""
RUNS_LEAST = 20
"""Runs of a kind, of the last days or of this process, before their median is trusted."""
PROGRESS_ROWS_MAX = 1000
HOOK_LIMIT_S = 30.0
"""Time limit of one hook call."""
HOOKS_MAX = 100
"""Hook calls under way at once; beyond that a dead job is only reported, not queued without bound."""


class JobEvents:
    """Turns settled attempts into events and hook calls, and watches those that run."""

    def __init__(
        self,
        app: Registry,
        store: WorkSource,
        shared: Shared,
        slow_min_s: float,
        slow_factor: float,
    ) -> None:
        """A run counts as slow after `slow_min_s` seconds, and `slow_factor` times the median of its kind."""
        self._app = app
        self._store = store
        self._in_flight = shared.in_flight
        self._events = shared.events
        self._counters = shared.counters
        self._outage = Outage("progress", shared.events)
        self._hooks = _DeadHooks(app, shared.events)
        self._slow_min_s = slow_min_s
        self._slow_factor = slow_factor

    def completed(self, batch: Sequence[Attempt]) -> None:
        """Reports completed attempts."""
        self._counters.ended("completed", batch)
        if self._events.has_listener(events.JOB_COMPLETED):
            for attempt in batch:
                duration_s = 0.0 if attempt.started is None else attempt.ended - attempt.started
                self._events.emit(events.JOB_COMPLETED, **attempt.facts(), duration_s=round(duration_s, 6))

    def settled(self, attempt: Attempt, outcome: Outcome, status: str | None) -> None:
        """Reports one attempt that was settled otherwise; `status` None: stale, which was reported already."""
        self._counters.ended(outcome_of(status), [attempt])
        if status is None:
            return
        duration_s = 0.0 if attempt.started is None else attempt.ended - attempt.started
        facts = attempt.facts() | {"duration_s": round(duration_s, 6)}
        if outcome.ending is Ending.RELEASED:
            self._events.emit(events.JOB_RELEASED, **facts, reason=outcome.reason, delay_s=outcome.delay_s)
        elif status == "expired" and outcome.message == Reason.EXPIRED.value:
            job = attempt.claimed
            self._events.emit(events.JOBS_EXPIRED, queue=attempt.queue, kind=job.kind, count=1, job_id=str(job.id))
        elif status == "expired":
            self._events.emit(
                events.SCHEDULE_SKIPPED, **attempt.facts(), schedule=attempt.claimed.schedule, reason=outcome.message
            )
        elif status == "cancelled":
            self._events.emit(events.JOB_CANCELLED, **facts, reason=outcome.reason)
        elif status == "dead":
            self._events.emit(events.JOB_DEAD, **facts, error=outcome.message, **_trace(outcome))
            payload: Mapping[str, Any] | None = None
            with contextlib.suppress(InvalidPayload):
                payload = decode(attempt.claimed.payload or "")
            job = attempt.claimed
            dead = DeadJob(str(job.id), attempt.queue, job.kind, job.attempt, outcome.message or "", payload)
            self._hooks.call(dead)
        else:
            retry = {"retry_in_s": outcome.delay_s}
            self._events.emit(events.JOB_FAILED, **facts, error=outcome.message, **retry, **_trace(outcome))

    def died_with_worker(self, rescued: Rescued) -> None:
        """Reports a job that died because its worker was lost."""
        self._events.emit(events.JOB_DEAD, **rescued.facts(), duration_s=None, error=rescued.error)
        self._hooks.call(
            DeadJob(str(rescued.id), rescued.queue, rescued.kind, rescued.attempt, rescued.error, payload=None)
        )

    async def run(self) -> None:
        """Watches runs and writes progress until cancelled, apart: a slow database delays only progress."""
        async with anyio.create_task_group() as tasks:
            self._hooks.tasks = tasks
            tasks.start_soon(self._watch)
            tasks.start_soon(self._write_progress)

    async def _watch(self) -> None:
        while True:
            now = time.monotonic()
            self._counters.begun([attempt for attempt in self._in_flight if not attempt.start_counted])
            usual_s: dict[tuple[str, str], float | None] = {}
            for attempt in self._in_flight.running():
                self._time_out_thread(attempt, now)
                self._report_overrun(attempt)
                self._report_slow(attempt, now, usual_s)
            await anyio.sleep(CHECK_S)

    async def _write_progress(self) -> None:
        while True:
            reporting = [attempt for attempt in self._in_flight.running() if attempt.progress is not None]
            for worker_id in {attempt.worker_id for attempt in reporting}:  # two, while a lost registration is replaced
                ours = [attempt for attempt in reporting if attempt.worker_id == worker_id]
                for at in range(0, len(ours), PROGRESS_ROWS_MAX):
                    await self._write(ours[at : at + PROGRESS_ROWS_MAX])
            await anyio.sleep(CHECK_S)

    async def _write(self, reporting: list[Attempt]) -> None:
        """Writes the latest progress of each attempt, unless it is refused; what cannot be written now is kept."""
        latest = [attempt.progress or (0.0, "") for attempt in reporting]
        rows = [(a.claimed.id, a.claimed.attempt, *progress) for a, progress in zip(reporting, latest, strict=True)]
        try:
            await self._store.report_progress(rows, reporting[0].worker_id)
        except PgworkdError as error:
            self._outage.failed(error)
            if not isinstance(error, DatabaseUnavailable):  # the row of one of them may be the reason
                half = len(reporting) // 2
                for part in (reporting[:half], reporting[half:]) if half else ():
                    await self._write(part)
                if not half:
                    reporting[0].progress = None
            return
        self._outage.passed()
        for attempt, written in zip(reporting, latest, strict=True):
            if attempt.progress is written:  # else the handler has reported more meanwhile
                attempt.progress = None

    def _time_out_thread(self, attempt: Attempt, now: float) -> None:
        """Asks a thread to end past its time-out, and reports it: it cannot be stopped; its slot stays in use."""
        handler = self._app.handlers.get(attempt.claimed.kind)
        if handler is None or handler.mode != "thread" or attempt.reason is not None or attempt.started is None:
            return
        timeout_s = attempt.claimed.timeout_s or handler.timeout_s
        if timeout_s is not None and now - attempt.started > timeout_s:
            attempt.stop(Reason.TIMEOUT)
            attempt.reported_overdue = True
            self._events.emit(events.JOB_OVERDUE, **attempt.facts(), reason=Reason.TIMEOUT.value, timeout_s=timeout_s)

    def _report_overrun(self, attempt: Attempt) -> None:
        """Reports a handler that catches its cancellation and goes on: nothing ends it; its slot stays in use."""
        scope, reason = attempt.scope, attempt.reason
        if scope is None or reason is None or attempt.in_thread or attempt.reported_overdue or not scope.overrun:
            return
        attempt.reported_overdue = True
        handler = self._app.handlers.get(attempt.claimed.kind)
        timeout_s = attempt.claimed.timeout_s or (handler.timeout_s if handler is not None else None)
        self._events.emit(events.JOB_OVERDUE, **attempt.facts(), reason=reason.value, timeout_s=timeout_s)

    def _report_slow(self, attempt: Attempt, now: float, known: dict[tuple[str, str], float | None]) -> None:
        """Reports a run that takes much longer than usual; `known`: the medians that were computed at this check."""
        if attempt.reported_slow or attempt.started is None or (running_s := now - attempt.started) <= self._slow_min_s:
            return
        of = attempt.queue, attempt.claimed.kind
        usual_s = known[of] if of in known else known.setdefault(of, self._counters.usual_s(*of, RUNS_LEAST))
        if usual_s is not None and running_s > self._slow_factor * usual_s:
            attempt.reported_slow = True
            durations = {"running_s": round(running_s, 3), "usual_s": round(usual_s, 3)}
            self._events.emit(events.JOB_SLOW, **attempt.facts(), **durations)


class _DeadHooks:
    """Calls an app's hooks for each dead job, each call in a task of its own."""

    def __init__(self, app: Registry, events_: Events) -> None:
        self.tasks: TaskGroup | None = None
        """The group in which the calls run; no hook is called before it is set."""
        self._hooks = app.dead_hooks
        self._events = events_
        self._under_way = 0

    def call(self, dead: DeadJob) -> None:
        for hook in self._hooks if self.tasks is not None else ():
            if self._under_way >= HOOKS_MAX:
                self._failed(hook, f"not called for job {dead.id}: {HOOKS_MAX} calls are under way")
            elif self.tasks is not None:
                self._under_way += 1
                self.tasks.start_soon(self._call, hook, dead, name="on_dead")

    async def _call(self, hook: Callable[[DeadJob], Any], dead: DeadJob) -> None:
        task = asyncio.current_task()
        try:
            with anyio.fail_after(HOOK_LIMIT_S):
                answer = hook(dead)
                if inspect.isawaitable(answer):
                    await answer
        except BaseException as error:
            if anyio.current_effective_deadline() == -math.inf:
                raise  # the daemon itself is being torn down
            self._failed(hook, describe_error(error).summary)
        finally:
            self._under_way -= 1
            await discard_late_cancellation(task, 0)

    def _failed(self, hook: Callable[..., Any], error: str) -> None:
        self._events.emit(events.HOOK_FAILED, hook=getattr(hook, "__qualname__", repr(hook)), error=error)


def _trace(outcome: Outcome) -> dict[str, object]:
    traceback = (outcome.error or {}).get("traceback")
    return {"exception": traceback} if traceback else {}
