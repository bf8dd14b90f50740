"""The registry: which function handles which kind, in which queue, how.

Nothing is ever imported or called because a row names it; only what is registered here runs.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar, Unpack, overload

from pydantic import TypeAdapter

from pgworkd.client.batch_types import BatchOptions
from pgworkd.client.batches import AsyncT, Batch, Opening, SyncT, batch
from pgworkd.client.streams import stream_handler, stream_kind
from pgworkd.core.backoff import Backoff
from pgworkd.core.recurrence import MISSED_GRACE_S, Recurrence
from pgworkd.database.signal_store import AlertRule
from pgworkd.engine.functions import Examined, Mode, examined, name_of
from pgworkd.errors import UsageError
from pgworkd.process import cpus

Function = TypeVar("Function", bound=Callable[..., Any])

CONCURRENCY_DEFAULT = 10
MAX_ATTEMPTS_DEFAULT = 3
NAME_LENGTH_MAX = 200
ANY_QUEUE = ""
_OWN = "transaction=True of handler {!r}"


@dataclass(slots=True, frozen=True)
class DeadJob:
    """A job that is dead, as passed to `on_dead` hooks."""

    id: str
    queue: str
    kind: str
    attempt: int
    error: str
    payload: Mapping[str, Any] | None
    """None when it could not be read, or when the job died because another worker was lost."""


DeadHook = Callable[[DeadJob], Awaitable[None] | None]


@dataclass(slots=True, frozen=True)
class Handler:
    """A function and how to run it."""

    kind: str
    queue: str
    """The queue of the kind; ANY_QUEUE: any that another handler serves, as for stream functions."""
    function: Callable[..., Any]
    mode: Mode
    payload_parameter: str | None
    """Name of the parameter that takes the payload; None: there is none."""
    job_parameter: str | None
    adapter: TypeAdapter[Any] | None
    """Validates the payload; None: it is passed as a dict."""
    concurrency: int | None = None
    max_attempts: int = MAX_ATTEMPTS_DEFAULT
    timeout_s: float | None = None
    backoff: Backoff = field(default_factory=Backoff)
    recurrence: Recurrence | None = None
    schedule_payload: Mapping[str, Any] = field(default_factory=dict)
    wait_for_retries: bool = False
    transaction: bool = False
    """True for a handler whose jobs run in the transactions in which they are claimed."""
    takes_attempt: bool = False
    """True for a function of `attempt`, an `Attempt` whose payload is as it was written. It returns the `Outcome`."""


class Registry:
    """A set of handlers. `pgworkd run --app module:attribute` names one of these."""

    any_kind: Handler | None = None
    """The handler of all kinds that have none of their own."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        self.dead_hooks: list[DeadHook] = []
        self.alert_rules: dict[str, AlertRule] = {}
        self.mails = False  # True: alerts or digests go by mail

    def handler(
        self,
        kind: str,
        *,
        queue: str | None = None,
        concurrency: int | None = None,
        max_attempts: int = MAX_ATTEMPTS_DEFAULT,
        timeout_s: float | timedelta | None = None,
        backoff: object = None,
        run_in: Mode | None = None,
        every: str | float | timedelta | None = None,
        timezone: str = "UTC",
        missed: Literal["skip", "once", "all"] = "skip",
        missed_grace_s: float = MISSED_GRACE_S,
        wait_for_retries: bool = False,
        payload: Mapping[str, Any] | None = None,
        transaction: bool = False,
    ) -> Callable[[Function], Function]:
        """Registers a function for a kind of job, in the queue of the same name unless `queue` is given.

        concurrency: slots of the queue in each daemon, 1 to 10,000; default 10, for processes one per usable CPU.
        max_attempts: failures after which a job is dead, 1 to 1,000; 1: at most once. timeout_s: time limit of a run.
        backoff: numbers, a list of seconds, a function of the failures, or a `Backoff`; a row of `queues` overrides it.
        run_in: "loop" (`async def`), "thread" (`def`; its default) or "process" (`def`, for code that is CPU-bound or
        may crash or hang; a `def` can be stopped in this mode only; it is no sandbox).
        every: makes it recurring: a cron expression in `timezone`, or seconds between runs, each with `payload`.
        missed: which occurrences run that were due while no daemon ran: "skip" (none; one that starts up to
        `missed_grace_s` seconds late is not missed), "once" (one run for all of them) or "all".
        wait_for_retries: no new occurrence while the last one waits for a retry.
        transaction: claim, run and completion of a job are one, that of `job.transaction()`; all handlers of a queue.

        Raises UsageError for a value out of bounds, a second handler of a kind, or an unsupported signature.
        """
        _check(kind, "kind")
        _check(queue if queue is not None else kind, "queue")
        _bound(concurrency, "concurrency", 1, 10_000, kind)
        _bound(max_attempts, "max_attempts", 1, 1_000, kind)
        timeout_s = _time_limit_s(timeout_s, kind)
        _check_transaction(kind, transaction, max_attempts, recurs=every is not None)

        def register(function: Function) -> Function:
            if (other := self.handlers.get(kind)) is not None:
                raise UsageError(f"two handlers for kind {kind!r}: {name_of(other.function)} and {name_of(function)}")
            scope = dict(sys._getframe(1).f_locals)  # noqa: SLF001 - annotations may name what encloses the handler
            self.handlers[kind] = Handler(
                kind,
                queue or kind,
                *_examined(function, run_in, kind, scope, transaction=transaction),
                concurrency=concurrency,
                max_attempts=max_attempts,
                timeout_s=timeout_s,
                backoff=Backoff() if backoff is None else Backoff.parse(backoff),
                recurrence=None if every is None else Recurrence.parse(every, timezone, missed, missed_grace_s),
                schedule_payload=payload or {},
                wait_for_retries=wait_for_retries,
                transaction=transaction,
            )
            return function

        return register

    def on_dead(self, hook: DeadHook) -> DeadHook:
        """Registers a hook that is called for each job that dies; it may take 30 s, its errors are only reported.

        At most once per job: not called if the daemon ends, or its connection breaks, before it learns of the death.
        """
        self.dead_hooks.append(hook)
        return hook

    def stream(
        self,
        parent: str,
        child: str,
        *,
        max_attempts: int = MAX_ATTEMPTS_DEFAULT,
        timeout_s: float | timedelta | None = None,
        backoff: object = None,
    ) -> Callable[[Function], Function]:
        """Registers a stream function: it makes jobs of batches named `child` from each job completed in a `parent`.

        The function is called with that job's payload and result, and returns or yields payloads: none, one, or many.
        It runs as a job of its own in the child batch, in that batch's queue; the options are those of `handler()`.
        """
        kind = stream_kind(parent, child)

        def register(function: Function) -> Function:
            self.handler(kind, max_attempts=max_attempts, timeout_s=timeout_s, backoff=backoff)(
                stream_handler(function)
            )
            self.handlers[kind] = replace(self.handlers[kind], queue=ANY_QUEUE)
            return function

        return register

    @overload
    def batch(self, conn: SyncT, name: str, **options: Unpack[BatchOptions]) -> Batch[SyncT]: ...
    @overload
    def batch(self, conn: AsyncT, name: str, **options: Unpack[BatchOptions]) -> Opening[AsyncT]: ...
    def batch(self, conn: Any, name: str, **options: Unpack[BatchOptions]) -> Any:
        """`pgworkd.client.batch()` with the queues of this app's kinds, and its stream functions."""
        return batch(conn, name, kinds=self, **options)

    def queue_of(self, kind: str) -> str | None:
        """The queue of the kind's handler; None without one."""
        handler = self.handlers.get(kind)
        return None if handler is None else handler.queue

    def stream_kind(self, parent: str, child: str) -> str | None:
        """The kind of the stream function from `parent` to `child`; None without one."""
        kind = stream_kind(parent, child)
        return kind if kind in self.handlers else None

    def queues(self) -> dict[str, int]:
        """The queues of all handlers with their concurrency per daemon.

        Raises UsageError when two handlers of one queue state different concurrencies.
        """
        stated: dict[str, Handler] = {}
        result: dict[str, int] = {}
        for handler in self.handlers.values():
            if handler.queue == ANY_QUEUE:
                continue
            other = stated.get(handler.queue)
            if handler.concurrency is None:
                default = cpus.available() if handler.mode == "process" else CONCURRENCY_DEFAULT
                if other is None:
                    result[handler.queue] = min(default, result.get(handler.queue, default))
            elif other is not None and other.concurrency != handler.concurrency:
                raise UsageError(
                    f"queue {handler.queue!r} is given two concurrencies: {other.concurrency} by kind {other.kind!r}, "
                    f"{handler.concurrency} by kind {handler.kind!r}; state it once"
                )
            else:
                stated[handler.queue] = handler
                result[handler.queue] = handler.concurrency
        return result

    def runs_in_claims(self, queue: str) -> bool:
        """Whether jobs of the queue run in the transactions in which they are claimed.

        Raises UsageError if that is said of some of its handlers only.
        """
        said = {handler.transaction: kind for kind, handler in self.handlers.items() if handler.queue == queue}
        if len(said) > 1:
            raise UsageError(
                f"queue {queue!r} has handlers with transaction=True ({said[True]!r}) and without ({said[False]!r}): "
                "a claim does not know what it takes; give one of them a queue of its own"
            )
        return True in said

    def slots(self, queues: Mapping[str, int | None] | None) -> dict[str, int]:
        """The concurrency of each of these queues (None: the handlers' own); of all when none is named.

        Raises UsageError for an app without handlers or a queue that no handler serves.
        """
        known = self.queues()
        if not known:
            raise UsageError("the app has no handlers: register one with @app.handler(...)")
        for queue in known:
            self.runs_in_claims(queue)
        for queue in queues or ():
            if queue not in known:
                raise UsageError(f"no handler serves queue {queue!r}; the app knows: {', '.join(sorted(known))}")
        return {queue: slots or known[queue] for queue, slots in (queues or known).items()}


def _check(name: object, what: str) -> None:
    sound = isinstance(name, str) and 1 <= len(name) <= NAME_LENGTH_MAX and "\x00" not in name
    if not sound or any("\ud800" <= character <= "\udfff" for character in str(name)):
        raise UsageError(
            f"{what} {name!r}: give a name of 1 to {NAME_LENGTH_MAX} characters, without NUL and lone surrogates"
        )


def _time_limit_s(timeout_s: float | timedelta | None, kind: str) -> float | None:
    seconds = timeout_s.total_seconds() if isinstance(timeout_s, timedelta) else timeout_s
    _bound(seconds, "timeout_s", 0.001, 31_622_400, kind)
    return seconds


def _examined(
    function: Callable[..., Any], run_in: Mode | None, kind: str, scope: dict[str, Any], *, transaction: bool
) -> Examined:
    found = examined(function, run_in, kind, scope)
    if transaction and found.mode != "loop":
        raise UsageError(f"{_OWN.format(kind)} needs an `async def`, in the event loop: {name_of(function)}")
    return found


def _check_transaction(kind: str, transaction: object, max_attempts: int, *, recurs: bool) -> None:
    if not isinstance(transaction, bool):
        raise UsageError(f"transaction of handler {kind!r} is {transaction!r}: give True or False")
    if not transaction:
        return
    if max_attempts == 1:
        raise UsageError(
            f"{_OWN.format(kind)} does not go with max_attempts=1: a run that its process does not survive leaves no "
            "trace, so the job would run again; leave out one of them"
        )
    if recurs:
        raise UsageError(
            f"{_OWN.format(kind)} does not go with `every`: changes of the schedule would wait for its runs; leave out "
            "one of them, and use job.transaction()"
        )


def _bound(value: float | None, what: str, least: float, most: float, kind: str) -> None:
    if value is None:
        return
    whole = isinstance(least, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not least <= value <= most:
        number = "whole number" if whole else "number"
        raise UsageError(f"{what} of handler {kind!r} is {value!r}: give a {number} from {least:g} to {most:,}")
