"""A job as its handler sees it, and the ways an attempt can end."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from pgworkd.errors import JobStopped, UsageError

PROGRESS_CHARS_MAX = 200
"""Of its word; the rest is cut."""

NOT_IN_THREADS = (
    "it works only in handlers that are `async def`, in the loop that runs them. A `def` handler writes on a "
    "connection of its own, in a way that may happen twice (job.id is the same in each run), or is made an `async def`"
)
"""What who asks for a transaction elsewhere is told."""


@dataclass(slots=True, kw_only=True)
class Job:
    """The context of one attempt. A handler gets it by annotating a parameter with `Job`.

    Read-only for the handler, but for `result` inside `transaction()`.
    """

    id: UUID
    queue: str
    kind: str
    attempt: int
    """1 at the first run; (id, attempt) is unique for ever."""
    failures: int
    """Failures before this attempt."""
    max_attempts: int
    payload: Mapping[str, Any]
    created_at: datetime
    run_at: datetime
    """When it was due; for a retry, when that was due."""
    schedule: str | None = None
    """The schedule that inserted it."""
    occurrence: datetime | None = None
    """The instant of the schedule that this run stands for."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None
    """What to store with a completion by `transaction()`; set it inside the block."""
    stopping: threading.Event = field(default_factory=threading.Event, repr=False)
    """Set when this run should end: timed out, cancelled or the daemon stops. A handler in a thread cannot be
    interrupted: it calls `check()` now and then, or waits on this. Never set in a process, which is killed."""
    is_done: bool = field(default=False, repr=False)
    """`done()` was called."""
    opener: Callable[[Job], AbstractAsyncContextManager[Any]] | None = field(default=None, repr=False)
    on_progress: Callable[[float, str], None] | None = field(default=None, repr=False)

    def check(self) -> None:
        """Raises `JobStopped` if this run should end; else does nothing. It costs a microsecond: call it in each turn.

        Let it pass: the run then ends by the reason for which it was asked to (a time-out counts as a failure, a
        cancellation cancels, a stop of the daemon gives the job back). In a process, which is killed, it never raises.
        """
        if self.stopping.is_set():
            raise JobStopped("this run was asked to end: let this pass")

    def done(self, result: Any = None) -> None:
        """Says that the work is done: this run is completed, also if it is, or was, asked to end.

        A run that was asked to end (`stopping`, a cancellation) and returns without having said so has stopped
        half-way: it ends by the reason for which it was asked. `result` is stored unless the handler returns one.
        What the handler raises of its own accord still fails it. In a process it changes nothing.
        """
        if result is not None:
            self.result = result
        self.is_done = True

    def progress(self, done: float, message: str = "") -> None:
        """Says how far this run has come: `done` from 0 to 1, and a word about it, for `pgworkd job` and the like.

        Never waits, may be called as often as you like, from threads and processes, too: the latest is written about
        twice a second. It is gone when the attempt ends. UsageError for a number out of bounds.
        """
        if isinstance(done, bool) or not isinstance(done, int | float) or not 0 <= done <= 1:
            raise UsageError(f"the progress of a job is {done!r}: give a number from 0 to 1")
        if self.on_progress is not None:
            text = str(message).replace("\0", "").encode("utf-8", "replace").decode()
            self.on_progress(float(done), text[:PROGRESS_CHARS_MAX])

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A connection (asyncpg) on which the handler's writes and the job's completion commit together.

        The job is completed, with `self.result`, when the block ends; what the handler returns after that is
        not stored. An exception rolls everything back, and the attempt ends by it as usual.
        Raises `LeaseLost` at the end of the block, with nothing written, when the attempt is no longer ours, and
        `OutcomeUnknown` when the answer to the COMMIT is lost: all is written, or nothing; let the exception pass.
        One per run: UsageError for a second, once the first has ended well, and for one inside another. Only for
        handlers that run in the loop (`async def`); UsageError, before anything is touched, elsewhere. What is raised
        after the block changes nothing of the completion, and is logged.
        """
        if self.opener is None:
            raise UsageError(f"job.transaction() of job {self.id}: {NOT_IN_THREADS}")
        async with self.opener(self) as connection:
            yield connection


class Ending(enum.Enum):
    """How an attempt ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    RELEASED = "released"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # an occurrence that was missed while no worker served its queue
    SETTLED = "settled"  # by the handler itself, in job.transaction()


class Reason(enum.Enum):
    """Why the daemon ends a run before the handler does."""

    TIMEOUT = "timeout"
    CANCEL = "cancelled on request"
    SHUTDOWN = "the daemon stops"
    FENCE = "the worker could not renew its lease"
    ELSEWHERE = "another worker may be free sooner"


class Outcome(NamedTuple):
    """The end of one attempt. A runner always makes one, whatever the handler does."""

    ending: Ending
    result: str | None = None
    """Of a completion: JSON text; None when the handler returned nothing."""
    delay_s: float | None = None
    """Until the retry (failed), or until it is due again (released; None: keeps its place in line)."""
    permanent: bool = False
    """Of a failure: do not retry."""
    message: str | None = None
    """The job's new `error`, one line; None leaves it as it is."""
    error: Mapping[str, Any] | None = None
    """Of a failure: the entry for the job's history (type, message, traceback, worker, how long it ran)."""
    reason: str = ""
    """Why it was released or cancelled, for the log."""


def stopped(reason: Reason) -> Outcome:
    """The end of an attempt that the daemon has ended, or never begun, for any reason but a time-out."""
    if reason is Reason.CANCEL:
        return Outcome(Ending.CANCELLED, message=reason.value, reason=reason.value)
    return Outcome(Ending.RELEASED, reason=reason.value)
