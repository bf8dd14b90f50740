"""A job as its handler sees it, and the ways an attempt can end."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, NoReturn
from uuid import UUID

from pgworkd.errors import JobStopped, UsageError

PROGRESS_CHARS_MAX = 200
"""Maximum length of a progress message; the rest is cut off."""

NOT_IN_THREADS = (
    "it works only in `async def` handlers, in the event loop that runs them. Make the handler an `async def`, or "
    "write on a connection of its own, idempotently (job.id is the same in each run)"
)
"""The error for a transaction in a thread or process."""


@dataclass(slots=True, kw_only=True)
class Job:
    """The context of one attempt. A handler gets it by annotating a parameter with `Job`.

    Read-only for the handler, except `result` inside `transaction()`.
    """

    id: UUID
    queue: str
    kind: str
    attempt: int
    """Counts claims, also those after which the job was given back before it began; (id, attempt) never repeats."""
    failures: int
    """Failures before this attempt."""
    max_attempts: int
    payload: Mapping[str, Any]
    created_at: datetime
    run_at: datetime
    """When this attempt was due."""
    schedule: str | None = None
    """Name of the schedule that inserted it, if any."""
    occurrence: datetime | None = None
    """The instant of the schedule that this job is for."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None
    """The result to store when `transaction()` completes the job; set it inside the block."""
    stopping: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set when this run should end: it timed out, was cancelled, or the daemon stops. A handler in a thread cannot be
    interrupted: it calls `check()` regularly, or waits on this. Never set in a process, which is killed."""
    is_done: bool = field(default=False, repr=False)
    """`done()` was called."""
    opener: Callable[[Job], AbstractAsyncContextManager[Any]] | None = field(default=None, repr=False)
    on_progress: Callable[[float, str], None] | None = field(default=None, repr=False)

    def check(self) -> None:
        """Raises `JobStopped` if this run should end. It takes a microsecond: call it in each iteration of a loop.

        Do not catch it: the run then ends by its reason (a time-out counts as a failure, a cancellation cancels the
        job, a stop of the daemon releases it). In a process, which is killed instead, it never raises.
        """
        if self.stopping.is_set():
            raise JobStopped("this run was asked to end: do not catch this")

    def done(self, result: Any = None) -> None:
        """Declares the work done: the run is completed, even if it has been, or will be, asked to end.

        A run that was asked to end (`stopping`, a cancellation) and returns without this call is taken as incomplete:
        it ends by the reason for which it was asked. `result` is stored unless the handler returns one. An exception
        of the handler's own still fails the run. In a process it has no effect.
        """
        if result is not None:
            self.result = result
        self.is_done = True

    def progress(self, done: float, message: str = "") -> None:
        """Reports the progress of this run: `done` from 0 to 1, and a message, shown by `pgworkd job`.

        Never blocks, and may be called at any rate, from threads and processes, too: the latest is written about twice
        a second. It is deleted when the attempt ends. Raises UsageError for a number out of bounds.
        """
        if isinstance(done, bool) or not isinstance(done, int | float) or not 0 <= done <= 1:
            raise UsageError(f"the progress of a job is {done!r}: give a number from 0 to 1")
        if self.on_progress is not None:
            text = str(message).replace("\0", "").encode("utf-8", "replace").decode()
            self.on_progress(float(done), text[:PROGRESS_CHARS_MAX])

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """A connection (asyncpg) on which the handler's writes and the job's completion commit together.

        The job is completed, with `self.result`, when the block ends; what the handler returns after that is not
        stored. An exception rolls everything back, and the attempt ends by it as usual.
        Raises `LeaseLost` at the end of the block, with nothing written, when the attempt is no longer ours, and
        `OutcomeUnknown` when the answer to the COMMIT is lost: all is written, or nothing; do not catch it.
        One per run: UsageError for a second one after a successful first, and for a nested one. Only for handlers in
        the event loop (`async def`): elsewhere UsageError, before anything is written. What is raised after the block
        is logged, and does not undo the completion.
        """
        return _Transaction(self)


CONTEXT = tuple(Job.__dataclass_fields__)[: tuple(Job.__dataclass_fields__).index("result")]
"""The fields of `Job` that say what the job is, and not how this run of it goes."""
FACTS = tuple(name for name in CONTEXT if name not in ("payload", "meta"))


class _Transaction(AbstractAsyncContextManager[Any]):
    """`async with job.transaction()`; what else is tried is explained."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._block: AbstractAsyncContextManager[Any] | None = None

    async def __aenter__(self) -> Any:
        if self._job.opener is None:
            self._refuse()
        self._block = self._job.opener(self._job)
        return await self._block.__aenter__()

    async def __aexit__(self, *raised: Any) -> bool | None:
        return None if self._block is None else await self._block.__aexit__(*raised)

    def __enter__(self) -> NoReturn:
        if self._job.opener is None:
            self._refuse()
        raise UsageError(f"job.transaction() of job {self._job.id}: write `async with job.transaction() as connection`")

    def __exit__(self, *_: object) -> None:
        """Refuses `with` in place of `async with`, which finds both methods before it calls the first."""

    def _refuse(self) -> NoReturn:
        raise UsageError(f"job.transaction() of job {self._job.id}: {NOT_IN_THREADS}")


class Status(enum.StrEnum):
    """What a job is, as all commands and answers have it; discarded is what the history has as dead."""

    PENDING = "pending"
    RUNNING = "running"
    FAILED = "failed"
    DEAD = "dead"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DISCARDED = "discarded"
    BLOCKED = "blocked"


IN_HISTORY = frozenset({Status.COMPLETED, Status.CANCELLED, Status.EXPIRED, Status.DISCARDED})
"""A job of these is in the history."""
ENDED = IN_HISTORY | {Status.DEAD}
"""A job of these runs no more, unless an operator retries it."""


class Ending(enum.Enum):
    """How an attempt ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    RELEASED = "released"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # past its expires_at, or an occurrence that was missed while no worker served its queue
    SETTLED = "settled"  # by the handler itself, in job.transaction()
    HANDED_OVER = "handed over"  # it goes on under the standing worker, until somebody else settles it


STATUSES_AFTER: Mapping[Ending, tuple[str, ...]] = {
    Ending.COMPLETED: ("completed",),
    Ending.FAILED: ("failed", "dead", "cancelled"),
    Ending.RELEASED: ("pending", "blocked", "cancelled"),
    Ending.CANCELLED: ("cancelled",),
    Ending.EXPIRED: ("expired",),
}
"""What a job may be after its attempt was settled in each way, the usual first."""


def outcome_of(status: str | None) -> str:
    """What an attempt is counted as that left its job with this status; None: it was rescued or settled before."""
    return "stale" if status is None else "released" if status in ("pending", "blocked") else status


OUTCOMES = tuple(dict.fromkeys(outcome_of(each) for after in (*STATUSES_AFTER.values(), (None,)) for each in after))
"""What attempts are counted as. failed: to be retried; stale: not stored."""


class Reason(enum.Enum):
    """Why the daemon ends a run before the handler does."""

    TIMEOUT = "timeout"
    CANCEL = "cancelled on request"
    SHUTDOWN = "the daemon stops"
    FENCE = "the worker could not renew its lease"
    LOST = "the connection was lost on whose transaction it was claimed"
    ELSEWHERE = "another worker may be free sooner"
    EXPIRED = "expired before it could start"


class Outcome(NamedTuple):
    """How one attempt ended. The runner always makes one, whatever the handler does."""

    ending: Ending
    result: str | None = None
    """Completed: JSON text; None when the handler returned None."""
    delay_s: float | None = None
    """Seconds until the retry (failed), or until it is due again (released; None: keeps its place in the queue)."""
    permanent: bool = False
    """Failed: do not retry."""
    message: str | None = None
    """The job's new `error`, one line; None: unchanged."""
    error: Mapping[str, Any] | None = None
    """Failed: the entry for the job's error history (type, message, traceback, worker, duration)."""
    reason: str = ""
    """Why it was released or cancelled, for the log."""
    begun: bool = True
    """Released by a gateway: False if the worker has not begun it."""


def stopped(reason: Reason) -> Outcome:
    """The outcome of an attempt that the daemon has stopped, or never begun, for any reason except a time-out."""
    if reason is Reason.CANCEL:
        return Outcome(Ending.CANCELLED, message=reason.value, reason=reason.value)
    if reason is Reason.EXPIRED:
        return Outcome(Ending.EXPIRED, message=reason.value)
    return Outcome(Ending.RELEASED, reason=reason.value)


DONE = Outcome(Ending.COMPLETED)
"""Without a result: how most attempts end."""
