"""Runs one attempt: always to an Outcome, whatever the handler does.

The path is short and the same for every job: find the handler, decode the payload, call, read how it ended. What only
some jobs need (a time-out, the `Job`, a thread, a process) costs the others nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import math
import pickle  # nosec B403 # writes for a child, reads nothing
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

import anyio
from anyio.to_thread import run_sync

from pgworkd.core import events
from pgworkd.core.decorated import explained
from pgworkd.core.error_report import ErrorFacts, describe_error
from pgworkd.core.events import Events
from pgworkd.core.fence import Settlement
from pgworkd.core.job import CONTEXT, DONE, NOT_IN_THREADS, Ending, Job, Outcome, Reason, stopped
from pgworkd.core.payload import decode, encode_result
from pgworkd.core.source import WorkSource
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.registry import Handler, Registry
from pgworkd.engine.run.in_thread import in_thread
from pgworkd.engine.run.process_child import Request
from pgworkd.engine.run.process_pool import ChildDied, Processes
from pgworkd.engine.run.unknown_kinds import UnknownKinds
from pgworkd.engine.runner_task import RunnerTask
from pgworkd.engine.settle.loop import Planner
from pgworkd.errors import (
    InvalidPayload,
    JobStopped,
    LeaseLost,
    OutcomeUnknown,
    PermanentError,
    PgworkdError,
    RetryAfter,
    Snooze,
    UsageError,
)
from pgworkd.process import forks

_SETTLED = Outcome(Ending.SETTLED)


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner works with, whatever it runs."""

    app: Registry
    store: WorkSource
    planner: Planner
    events: Events
    worker_name: str
    backoffs: Mapping[str, Mapping[str, float]]
    """By queue, the numbers that override the handlers' own backoff (`Backoff.overridden_by`)."""
    grace_s: Callable[[Reason], float]
    """Seconds for the clean-up of a cancelled run until it is cancelled again."""


class Runner:
    """Runs attempts of any kind that the app has a handler for."""

    def __init__(self, parts: RunnerParts) -> None:
        self._grace_s = parts.grace_s
        self._handlers, self._any_kind = parts.app.handlers, parts.app.any_kind
        self._backoffs = parts.backoffs
        self._events = parts.events
        self._store = parts.store
        self._planner = parts.planner
        self._worker = parts.worker_name
        self.processes = Processes()
        self.unknown = UnknownKinds(parts.store, parts.events)
        # The pools limit concurrency; this limiter must not.
        self._threads = anyio.CapacityLimiter(math.inf)

    def knows(self, attempt: Attempt) -> bool:
        """True if there is a handler for the attempt's kind."""
        return self._handlers.get(attempt.claimed.kind, self._any_kind) is not None

    async def run(self, attempt: Attempt, task: RunnerTask) -> Outcome:
        """Runs an attempt in `task`; its outcome. Raises only when the daemon itself is being torn down."""
        claimed = attempt.claimed
        if claimed.schedule is not None and (ended := await self._missed(attempt)) is not None:
            return ended
        if attempt.reason is not None:
            return stopped(attempt.reason)
        handler = self._handlers.get(claimed.kind, self._any_kind)
        if handler is None:
            return await self.unknown.outcome_of(attempt)
        try:
            arguments = self._arguments(handler, attempt)
        except BaseException as error:  # noqa: BLE001 - also from the user's validators, or an odd row
            return self._failed(error, attempt, handler, permanent=isinstance(error, (ValueError, RecursionError)))
        timeout_s = claimed.timeout_s or handler.timeout_s
        # A thread cannot be interrupted: at its time-out it is asked to end, and waited for.
        limited = timeout_s is not None and handler.mode != "thread"
        scope = task.scope
        if limited:
            scope.on_deadline = functools.partial(attempt.stop, Reason.TIMEOUT)
            scope.deadline = anyio.current_time() + (timeout_s or 0.0)
        attempt.grace_s, attempt.scope, task.attempt = self._grace_s, scope, attempt
        attempt.started, here = time.monotonic(), forks.generation
        try:
            if handler.mode == "loop" and attempt.trace is None:
                outcome = _completed(await handler.function(**arguments), attempt.job)
            else:
                outcome = await self._run_with_more(handler, attempt, arguments)
            if attempt.reason is not None and (attempt.stop_seen or scope.stop_seen) and not _is_done(attempt):
                outcome = self._ended(attempt.reason, attempt, handler)
            if forks.generation != here:
                forks.stay(here)  # a child that the handler has forked does not
        except BaseException as error:
            forks.stay(here, error)
            attempt.scope = None  # too late to stop this run
            stop_seen = attempt.stop_seen or scope.stop_seen
            if (scope.asked or isinstance(error, asyncio.CancelledError) or not task.clean) and await task.leave(error):
                raise  # the daemon itself is being torn down
            outcome = self._outcome_of_error(error, attempt, handler, stop_seen=stop_seen)
        attempt.ended = time.monotonic()
        attempt.scope = task.attempt = None
        if limited or scope.asked:
            scope.deadline = math.inf
            scope.finished()
        return outcome if outcome.error is None and not attempt.settled else _final(outcome, attempt)

    def _outcome_of_error(
        self, error: BaseException, attempt: Attempt, handler: Handler, *, stop_seen: bool
    ) -> Outcome:
        """The outcome of a run that raised; `stop_seen`: after it was asked to end."""
        if attempt.settled or (stop_seen and _is_done(attempt)):
            self._report_late(error, attempt)
        if attempt.reason is not None and stop_seen:
            return self._ended(attempt.reason, attempt, handler)
        return self._raised(error, attempt, handler)

    async def _missed(self, attempt: Attempt) -> Outcome | None:
        """The outcome of an occurrence that must be skipped; None: run it."""
        try:
            why = await self._planner.missed(attempt)
        except PgworkdError as error:
            return Outcome(Ending.RELEASED, reason=f"cannot tell whether it was missed: {error}")
        return None if why is None else Outcome(Ending.EXPIRED, message=why)

    def _ended(self, reason: Reason, attempt: Attempt, handler: Handler) -> Outcome:
        """The outcome of a run that was asked to end: by that reason, unless it has called `job.done()`."""
        if attempt.handed_over and reason is not Reason.CANCEL:
            return Outcome(Ending.HANDED_OVER)  # whoever was sent it may have begun, and may end it
        if _is_done(attempt):
            try:
                return _completed(None, attempt.job)
            except InvalidPayload as error:
                return self._failed(error, attempt, handler)
        if reason is Reason.TIMEOUT:
            return self._timed_out(attempt.claimed.timeout_s or handler.timeout_s, attempt, handler)
        if reason is not Reason.CANCEL and attempt.claimed.max_attempts == 1:
            text = f"{reason.value}; the job has begun and may run only once (max_attempts is 1)"
            return self.failure(ErrorFacts("Stopped", text, ""), 0.0, permanent=True)
        return stopped(reason)

    def _arguments(self, handler: Handler, attempt: Attempt) -> dict[str, Any]:
        if attempt.unreadable is not None:
            raise attempt.unreadable
        if handler.takes_attempt:
            return {"attempt": attempt}
        payload = decode(attempt.claimed.payload or "")  # the executor has read large ones
        arguments: dict[str, Any] = {}
        if handler.payload_parameter is not None:
            adapter = handler.adapter
            arguments[handler.payload_parameter] = payload if adapter is None else adapter.validate_python(payload)
        if handler.job_parameter is not None or handler.mode == "process":
            attempt.job = self._context(attempt, payload, in_loop=handler.mode == "loop")
            if handler.job_parameter is not None:
                arguments[handler.job_parameter] = attempt.job
        return arguments

    def _context(self, attempt: Attempt, payload: dict[str, Any], *, in_loop: bool) -> Job:
        claimed = attempt.claimed
        return Job(
            id=claimed.id,
            queue=attempt.queue,
            kind=claimed.kind,
            attempt=claimed.attempt,
            failures=claimed.failures,
            max_attempts=claimed.max_attempts,
            payload=payload,
            created_at=datetime.fromtimestamp(claimed.created_at, UTC),
            run_at=datetime.fromtimestamp(claimed.run_at, UTC),
            schedule=claimed.schedule,
            occurrence=None if claimed.occurrence is None else datetime.fromtimestamp(claimed.occurrence, UTC),
            meta={} if claimed.meta is None else json.loads(claimed.meta),
            opener=functools.partial(self._transaction, attempt, asyncio.get_running_loop()) if in_loop else None,
            on_progress=functools.partial(_note, attempt),
        )

    async def _run_with_more(self, handler: Handler, attempt: Attempt, arguments: dict[str, Any]) -> Outcome:
        """Runs an attempt traced, outside the loop, or both."""
        with attempt.trace or contextlib.nullcontext():  # left before the runner asks whether the task is clean
            if handler.mode == "loop":
                return _completed(await handler.function(**arguments), attempt.job)
            return await self._run_outside_loop(handler, attempt, arguments)

    async def _run_outside_loop(self, handler: Handler, attempt: Attempt, arguments: dict[str, Any]) -> Outcome:
        if handler.mode == "thread":
            attempt.in_thread = True  # so that only the end of the daemon cancels the await
            call = functools.partial(in_thread, handler.function, arguments, attempt)
            result, error, stop_seen = await run_sync(call, limiter=self._threads, abandon_on_cancel=True)
            attempt.stop_seen = stop_seen or attempt.reason is Reason.TIMEOUT
            if error is not None:
                raise error
            if inspect.isawaitable(result):
                result = await self._awaited(result, attempt)
            return _completed(result, attempt.job)
        job = cast("Job", attempt.job)  # set before every call
        request = Request(
            handler.function.__module__,
            handler.function.__qualname__,
            handler.payload_parameter,
            pickle.dumps(arguments.get(handler.payload_parameter or "")),
            handler.job_parameter,
            {name: getattr(job, name) for name in CONTEXT} | {"id": UUID(bytes=job.id.bytes)},
            None if attempt.trace is None else attempt.trace.carrier,
        )
        answer = await self.processes.call(request, job.progress, attempt)
        if answer.ending == "result":
            return Outcome(Ending.COMPLETED, result=answer.result)
        if answer.ending == "snooze":
            return Outcome(Ending.RELEASED, delay_s=answer.delay_s, reason="snoozed")
        delay_s = answer.delay_s if answer.ending == "retry_after" else self.backoff_s(attempt, handler)
        facts = ErrorFacts(**(answer.error or {})).redacted()
        return self.failure(facts, delay_s, permanent=answer.ending == "permanent")

    async def _awaited(self, result: Awaitable[Any], attempt: Attempt) -> Any:
        """Awaits the result of a decorated `async def` whose decorator did not tell that there is one below it."""
        attempt.in_thread = False  # from here on it can be cancelled
        if attempt.job is not None:
            attempt.job.opener = functools.partial(self._transaction, attempt, asyncio.get_running_loop())
        if attempt.reason is not None:
            attempt.stop(attempt.reason)
        return await result

    def _raised(self, error: BaseException, attempt: Attempt, handler: Handler) -> Outcome:
        if isinstance(error, Snooze):
            return Outcome(Ending.RELEASED, delay_s=error.delay_s, reason="snoozed")
        if isinstance(error, RetryAfter):
            return self._failed(error, attempt, handler, delay_s=error.delay_s)
        error = explained(handler.function, error)
        return self._failed(error, attempt, handler, permanent=isinstance(error, PermanentError))

    def _failed(
        self,
        error: BaseException,
        attempt: Attempt,
        handler: Handler,
        *,
        delay_s: float | None = None,
        permanent: bool = False,
    ) -> Outcome:
        facts = ErrorFacts("ChildDied", str(error), "") if isinstance(error, ChildDied) else describe_error(error)
        return self.failure(
            facts, self.backoff_s(attempt, handler) if delay_s is None else delay_s, permanent=permanent
        )

    def failure(self, facts: ErrorFacts, delay_s: float, *, permanent: bool) -> Outcome:
        """The outcome of a failed run; `permanent`: it is not retried after `delay_s`, but dead."""
        error = {**asdict(facts), "worker": self._worker}
        return Outcome(Ending.FAILED, delay_s=delay_s, permanent=permanent, message=facts.summary, error=error)

    def backoff_s(self, attempt: Attempt, handler: Handler) -> float:
        """The delay of a retry, in seconds, by the settings of the queue and the handler."""

        def warn(text: str) -> None:
            self._events.emit(events.HOOK_FAILED, hook=f"backoff of {handler.kind}", error=text)

        backoff = handler.backoff.overridden_by(self._backoffs.get(attempt.queue, {}))
        return backoff.delay_s(attempt.claimed.failures + 1, warn=warn)

    def _timed_out(self, timeout_s: float | None, attempt: Attempt, handler: Handler) -> Outcome:
        facts = ErrorFacts("Timeout", f"no result within {timeout_s:g} s", "")
        return self.failure(facts, self.backoff_s(attempt, handler), permanent=False)

    @contextlib.asynccontextmanager
    async def _transaction(self, attempt: Attempt, loop: asyncio.AbstractEventLoop, job: Job) -> AsyncIterator[Any]:
        if asyncio.get_running_loop() is not loop:
            raise UsageError(f"job.transaction() of job {job.id} in another event loop than its own: {NOT_IN_THREADS}")
        if attempt.settled or attempt.in_transaction:
            state = "is completed by its job.transaction() already" if attempt.settled else "is in a job.transaction()"
            raise UsageError(
                f"job {job.id} {state}: a run has one, whose end completes the job; put all writes into one block"
            )
        attempt.in_transaction = True
        try:
            begin = (attempt.own or self._store.transactions).begin
            async with begin(attempt.committing, attempt.untimed) as connection:
                yield connection
                if not connection.is_in_transaction():
                    raise UsageError(f"job {job.id}: COMMIT or ROLLBACK inside job.transaction(), whose end does that")
                result = None if job.result is None else encode_result(job.result)
                following = self._planner.following(attempt)
                settlement = Settlement(attempt.fence, Outcome(Ending.COMPLETED, result), attempt.started)
                if not await self._store.complete_on(connection, settlement, [following] if following else ()):
                    raise LeaseLost(f"attempt {job.attempt} of job {job.id} is no longer ours; nothing was written")
        except OutcomeUnknown:
            attempt.outcome_unknown = True
            raise
        finally:
            attempt.in_transaction = False
        attempt.settled = True

    def _report_late(self, error: BaseException, attempt: Attempt) -> None:
        """Reports what was raised after the job was completed, which it stays."""
        if not isinstance(error, (asyncio.CancelledError, JobStopped)):
            facts = describe_error(error)
            self._events.emit(events.JOB_RAISED, **attempt.facts(), error=facts.summary, exception=facts.traceback)


def _note(attempt: Attempt, done: float, message: str) -> None:
    attempt.progress = (done, message)


def _final(outcome: Outcome, attempt: Attempt) -> Outcome:
    if attempt.settled:
        return _SETTLED
    ran_s = attempt.ended - (attempt.started or attempt.ended)
    return outcome._replace(error={**(outcome.error or {}), "ran_s": round(ran_s, 6)})


def _is_done(attempt: Attempt) -> bool:
    return attempt.job is not None and attempt.job.is_done


def _completed(result: object, job: Job | None) -> Outcome:
    if result is None and job is not None and job.is_done:
        result = job.result
    if result is None or isinstance(result, Outcome):
        return result or DONE
    return Outcome(Ending.COMPLETED, result=encode_result(result))
