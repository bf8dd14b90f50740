"""The exceptions of pgworkd: what it raises at its callers, and what handlers raise at it.

All of them survive pickling, because handlers may run in another process.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

SHOWN_MAX = 10**15
"""Integers up to that are repeated in errors: Python refuses to write one of thousands of digits."""
DELAY_S_MAX = 366 * 86_400.0
"""The longest delay anywhere, in seconds: 366 days."""


class PgworkdError(Exception):
    """Base of everything pgworkd raises at its callers."""


class UsageError(PgworkdError):
    """A wrong call or configuration: nothing was done, trying again will not help (exit code 2)."""


class InvalidPayload(UsageError, ValueError):  # noqa: N818 - reads as what happened
    """A payload or result that cannot be stored or read.

    `path` names the value ("payload.items[3].name"), `reason` says what is wrong and what to do about it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)  # both stay in `args`, which is what pickle rebuilds from
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path} {self.reason}"


class BadSchedule(UsageError, ValueError):  # noqa: N818
    """A cron expression, interval or time zone that can never work."""


class SchemaError(PgworkdError):
    """The database's schema is missing, older or newer than this program, or not as it was installed."""


class SchemaAwaited(SchemaError):  # noqa: N818
    """The schema is missing or older than this program: `pgworkd migrate` mends that."""


class DatabaseUnavailable(PgworkdError):  # noqa: N818
    """No answer from the database: nothing was done, unless it is an OutcomeUnknown."""


class DatabaseBusy(DatabaseUnavailable):
    """The server answered that it cannot do it now: nothing was done, and the connection stands.

    A lock or statement time-out, a deadlock, a serialization failure, resources short. `sqlstate` says which.
    """

    def __init__(self, message: str, *, sqlstate: str = "") -> None:
        super().__init__(message)
        self.sqlstate = sqlstate

    def __reduce__(self) -> tuple[object, ...]:
        return _busy, (str(self), self.sqlstate)

    @property
    def locked(self) -> bool:
        """True if it did not get a lock in time."""
        return self.sqlstate == "55P03"

    @property
    def timed_out(self) -> bool:
        """True if the statement took too long."""
        return self.sqlstate == "57014"


def _busy(message: str, sqlstate: str) -> DatabaseBusy:
    return DatabaseBusy(message, sqlstate=sqlstate)


class OutcomeUnknown(DatabaseUnavailable):
    """The connection was lost, or the time was up, before the answer: what was asked for may have been done or not."""


class DatabaseError(PgworkdError):
    """The database refused a statement for what it says: trying the same again will not help.

    `sqlstate` is the five-character code, `constraint` the violated constraint's name, if there is one.
    """

    def __init__(self, message: str, *, sqlstate: str = "", constraint: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.constraint = constraint


class NotWaiting(PgworkdError):  # noqa: N818
    """The job runs, is dead, over or unknown: what was asked can only be done to a waiting one."""


class BatchClosed(PgworkdError):  # noqa: N818
    """The batch is sealed, finished, cancelled, in use or unknown: it can no longer, or not yet, do what was asked."""


class WorkerLost(PgworkdError):  # noqa: N818
    """This worker was declared lost: its row is gone or taken over, it may no longer claim or settle."""


class LeaseLost(PgworkdError):  # noqa: N818
    """This attempt is no longer ours: someone else may run the job, what we report about it is refused."""


class JobFailed(PgworkdError):  # noqa: N818
    """The job that was waited for is over, or dead, and has no result: `status` is dead, cancelled or expired."""

    def __init__(self, job_id: UUID, status: str, error: str | None) -> None:
        super().__init__(job_id, status, error)
        self.job_id = job_id
        self.status = status
        self.error = error

    def __str__(self) -> str:
        return f"job {self.job_id} is {self.status}" + (f": {self.error}" if self.error else "")


class JobUnknown(PgworkdError):  # noqa: N818
    """There is no such job, or its history is forgotten."""


class PermanentError(Exception):
    """Raised by a handler: retrying cannot help, the job goes to dead at once."""


class Snooze(Exception):  # noqa: N818
    """Raised by a handler: run me again after `delay` (seconds or timedelta, 0 to 366 days).

    It spends nothing of the budget. Raises UsageError for a delay out of bounds.
    """

    def __init__(self, delay: float | timedelta) -> None:
        self.delay_s = delay_seconds(delay, "Snooze delay")
        super().__init__(self.delay_s)

    def __str__(self) -> str:
        return f"snoozed for {self.delay_s:g} s"


class RetryAfter(Exception):  # noqa: N818
    """Raised by a handler: this attempt failed, retry after `delay` (seconds or timedelta, 0 to 366 days).

    Unlike `Snooze` it spends one failure of the budget. Raises UsageError for a delay out of bounds.
    """

    def __init__(self, delay: float | timedelta, message: str = "") -> None:
        self.delay_s = delay_seconds(delay, "RetryAfter delay")
        self.message = message
        super().__init__(self.delay_s, message)

    def __str__(self) -> str:
        return self.message or f"retry after {self.delay_s:g} s"


class JobStopped(BaseException):
    """Raised by `job.check()` when the run was asked to end: let it pass, the attempt ends by that reason."""


def delay_seconds(value: float | timedelta, what: str) -> float:
    """`value` as seconds between 0 and 366 days; UsageError naming `what` for all else (bool, NaN)."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{what} is a {type(value).__name__}: give seconds as a number, or a timedelta")
    if not 0 <= value <= DELAY_S_MAX:  # NaN compares false and lands here too
        shown = value if isinstance(value, float) or -SHOWN_MAX < value < SHOWN_MAX else "out of bounds"
        raise UsageError(f"{what} is {shown}: give 0 to {DELAY_S_MAX:.0f} seconds (366 days)")
    return float(value)
