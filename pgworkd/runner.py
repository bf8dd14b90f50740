"""Running one attempt: always to an Outcome, whatever the handler does.

The road is a column of small steps: find the handler, read the payload, validate it, call, read the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import anyio
import anyio.to_thread

from . import events
from .app import App, Handler
from .cancellation import forget_stray_cancellation, leave_open_scopes
from .child import Request
from .errors import LeaseLost, PermanentError, RetryAfter, Snooze
from .events import Events
from .failure import ErrorFacts, describe_error
from .held import Held
from .job import Ending, Job, Outcome, Reason
from .payload import decode, encode
from .processes import ChildDied, Processes
from .settler import Planner
from .store import Store

UNKNOWN_KIND_DELAY_S = 30.0
_NULL = "null"


class Runner:
    """Runs attempts of any kind the app knows."""

    def __init__(self, app: App, store: Store, planner: Planner, events_: Events, worker_name: str) -> None:
        self._app = app
        self._events = events_
        self._store = store
        self._planner = planner
        self._worker = worker_name
        self.processes = Processes()
        # Slots are counted by the pools; this only has to stay out of the way.
        self._threads = anyio.CapacityLimiter(math.inf)

    async def run(self, held: Held) -> Outcome:
        """The outcome of this attempt. Raises only when the daemon itself is being torn down."""
        if held.reason is not None:
            return self._stopped(held.reason, None)
        handler = self._app.handlers.get(held.claimed.kind)
        if handler is None:
            return _unknown(held.claimed.kind)
        try:
            payload, value = self._read(handler, held)
            held.job = self._context(held, payload)
        except Exception as error:  # noqa: BLE001 - also what a validator of the user's, or a row odd in any way, raises
            return self._failed(error, held, handler, permanent=isinstance(error, (ValueError, RecursionError)))
        task = asyncio.current_task()
        cancelling = task.cancelling() if task is not None else 0
        try:
            return await self._call(handler, held, value)
        finally:
            await forget_stray_cancellation(task, cancelling)

    def _read(self, handler: Handler, held: Held) -> tuple[dict[str, Any], Any]:
        payload = decode(held.claimed.payload)
        if handler.adapter is None:
            return payload, payload
        return payload, handler.adapter.validate_python(payload)

    def _context(self, held: Held, payload: dict[str, Any]) -> Job:
        claimed = held.claimed
        return Job(
            id=claimed.id,
            queue=held.queue,
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
            opener=functools.partial(self._transaction, held),
        )

    async def _call(self, handler: Handler, held: Held, value: Any) -> Outcome:
        timeout_s = held.claimed.timeout_s or handler.timeout_s
        # A thread cannot be interrupted: its time-out is told to it, and waited out.
        limit_s = math.inf if timeout_s is None or handler.mode == "thread" else timeout_s
        scope = held.scope = anyio.CancelScope(deadline=anyio.current_time() + limit_s)
        held.started = anyio.current_time()
        outcome: Outcome | None = None
        error: BaseException | None = None
        try:
            with scope:
                outcome = await self._invoke(handler, held, value)
        except BaseException as raised:
            if isinstance(raised, RuntimeError) and "cancel scope" in str(raised):
                leave_open_scopes(scope)
            if anyio.current_effective_deadline() == -math.inf:
                raise  # the daemon itself is being torn down
            error = raised
        finally:
            held.scope = None
        if held.settled:
            return Outcome(Ending.SETTLED)
        if outcome is not None:
            return outcome
        if held.reason is not None:
            return self._stopped(held.reason, timeout_s, held, handler)
        if error is None or scope.cancel_called:  # nobody else cancels, so it was the deadline
            return self._stopped(Reason.TIMEOUT, timeout_s, held, handler)
        return self._raised(error, held, handler)

    async def _invoke(self, handler: Handler, held: Held, value: Any) -> Outcome:
        if handler.mode == "process":
            return await self._invoke_process(handler, held, value)
        arguments: dict[str, Any] = {}
        if handler.payload_parameter is not None:
            arguments[handler.payload_parameter] = value
        if handler.job_parameter is not None:
            arguments[handler.job_parameter] = held.job
        if handler.mode == "loop":
            result = await handler.function(**arguments)
        else:
            call = functools.partial(_in_thread, handler.function, arguments)
            result, error = await anyio.to_thread.run_sync(call, limiter=self._threads)
            if error is not None:
                raise error
        return Outcome(
            Ending.COMPLETED, result=_NULL if result is None else encode(result, "result", object_only=False)
        )

    async def _invoke_process(self, handler: Handler, held: Held, value: Any) -> Outcome:
        job = held.job
        assert job is not None  # noqa: S101 - set before every call
        request = Request(
            handler.function.__module__,
            handler.function.__qualname__,
            handler.payload_parameter,
            pickle.dumps(value),
            handler.job_parameter,
            {name: getattr(job, name) for name in _CHILD_FIELDS} | {"id": UUID(bytes=job.id.bytes)},
        )
        answer = await self.processes.call(request)
        if answer.ending == "result":
            return Outcome(Ending.COMPLETED, result=answer.result)
        if answer.ending == "snooze":
            return Outcome(Ending.RELEASED, delay_s=answer.delay_s, reason="snoozed")
        delay_s = answer.delay_s if answer.ending == "retry_after" else self._backoff_s(held, handler)
        return self._failure(ErrorFacts(**(answer.error or {})), delay_s, permanent=answer.ending == "permanent")

    def _raised(self, error: BaseException, held: Held, handler: Handler) -> Outcome:
        if isinstance(error, Snooze):
            return Outcome(Ending.RELEASED, delay_s=error.delay_s, reason="snoozed")
        if isinstance(error, LeaseLost):
            return Outcome(Ending.RELEASED, reason="another worker has taken over")
        if isinstance(error, RetryAfter):
            return self._failed(error, held, handler, delay_s=error.delay_s)
        return self._failed(error, held, handler, permanent=isinstance(error, PermanentError))

    def _failed(
        self,
        error: BaseException,
        held: Held,
        handler: Handler,
        *,
        delay_s: float | None = None,
        permanent: bool = False,
    ) -> Outcome:
        facts = ErrorFacts("ChildDied", str(error), "") if isinstance(error, ChildDied) else describe_error(error)
        return self._failure(facts, self._backoff_s(held, handler) if delay_s is None else delay_s, permanent=permanent)

    def _failure(self, facts: ErrorFacts, delay_s: float, *, permanent: bool) -> Outcome:
        error = {**asdict(facts), "worker": self._worker}
        return Outcome(Ending.FAILED, delay_s=delay_s, permanent=permanent, message=facts.summary, error=error)

    def _backoff_s(self, held: Held, handler: Handler) -> float:
        def warn(text: str) -> None:
            self._events.emit(events.HOOK_FAILED, hook=f"backoff of {handler.kind}", error=text)

        return handler.backoff.delay_s(held.claimed.failures + 1, warn=warn)

    def _stopped(
        self, reason: Reason, timeout_s: float | None, held: Held | None = None, handler: Handler | None = None
    ) -> Outcome:
        if reason is Reason.TIMEOUT and held is not None and handler is not None:
            facts = ErrorFacts("Timeout", f"no result within {timeout_s:g} s", "")
            return self._failure(facts, self._backoff_s(held, handler), permanent=False)
        if reason is Reason.CANCEL:
            return Outcome(Ending.CANCELLED, message=reason.value, reason=reason.value)
        return Outcome(Ending.RELEASED, reason=reason.value)

    @contextlib.asynccontextmanager
    async def _transaction(self, held: Held, job: Job) -> AsyncIterator[Any]:
        async with self._store.transactions.begin() as connection:
            yield connection
            result = _NULL if job.result is None else encode(job.result, "result", object_only=False)
            following = self._planner.following(held)
            if not await self._store.complete_on(connection, job.id, job.attempt, result, following):
                raise LeaseLost(f"attempt {job.attempt} of job {job.id} is no longer ours; nothing was written")
        held.settled = True


_CHILD_FIELDS = (
    *("id", "queue", "kind", "attempt", "failures", "max_attempts", "payload", "created_at", "run_at", "schedule"),
    *("occurrence", "meta"),
)


def _unknown(kind: str) -> Outcome:
    message = f"no handler for kind {kind!r}"
    return Outcome(Ending.RELEASED, delay_s=UNKNOWN_KIND_DELAY_S, message=message, reason=message)


def _in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
    """Calls a handler; what it raises is returned, because a GeneratorExit thrown into the loop closes coroutines."""
    try:
        return function(**arguments), None
    except BaseException as error:  # noqa: BLE001 - raised again in the loop
        return None, error
