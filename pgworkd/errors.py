"""The exceptions of pgworkd: those that callers catch, and those that handlers raise.

The schema raises these SQLSTATEs of its own (SQLSTATES maps them to exceptions). On an application's own connection the
driver raises its error with that code; daemons, commands, `Admin` and `Results` raise the exception.

PW001  WorkerLost     the worker's lease has ended: it may no longer claim or settle
PW002  NotWaiting     the job is running, dead, finished or unknown: only a waiting job can be edited
PW003  BatchClosed    the batch is sealed, finished, cancelled, in use or unknown
PW004  DatabaseError  the dependency can never be met: a job that is unknown or cannot complete any more, or a cycle
PW005  NoStack        the job does not run in a daemon that can be asked for its stack

All exceptions can be pickled, because handlers may run in another process.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

SHOWN_MAX = 10**15
"""Larger integers are not repeated in errors: Python refuses to print one of thousands of digits."""
DELAY_S_MAX = 366 * 86_400.0
"""The longest delay anywhere, in seconds: 366 days."""


class PgworkdError(Exception):
    """Base of all exceptions that pgworkd raises for its callers."""


class UsageError(PgworkdError):
    """An invalid call or configuration: nothing was done, and a retry would not help (exit code 2)."""


class AccessRefused(UsageError):  # noqa: N818 - a state, not an error's name
    """The database, or the gateway, refuses who we are: user, password, token, database or rights.

    A command ends with it. A program that runs on waits, because it can be put right without it.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status`: of the gateway's answer, such as 401 or 403; None: the database has refused."""
        super().__init__(message)
        self.status = status


class InvalidPayload(UsageError, ValueError):  # noqa: N818
    """A payload or result that cannot be stored or read.

    `path` names the value ("payload.items[3].name"), `reason` is the fault and the remedy.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)  # both in `args`, from which pickle rebuilds it
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path} {self.reason}"


class BadSchedule(UsageError, ValueError):  # noqa: N818
    """A cron expression, interval or time zone that is invalid or has no occurrence."""


class SchemaError(PgworkdError):
    """The database's schema is missing, older or newer than this program needs, or was altered."""


class SchemaAwaited(SchemaError):  # noqa: N818
    """The schema is missing or older than this program needs: run `pgworkd migrate`."""


class DatabaseUnavailable(PgworkdError):  # noqa: N818
    """No answer from the database. Nothing was done, except perhaps if it is an OutcomeUnknown."""


class DatabaseBusy(DatabaseUnavailable):
    """The server could not execute the statement at this time: nothing was done, and the connection is usable.

    A lock or statement timeout, a deadlock, a serialization failure, insufficient resources: see `sqlstate`.
    """

    def __init__(self, message: str, *, sqlstate: str = "") -> None:
        super().__init__(message)
        self.sqlstate = sqlstate

    def __reduce__(self) -> tuple[object, ...]:
        return _busy, (str(self), self.sqlstate)

    @property
    def locked(self) -> bool:
        """True for a lock timeout."""
        return self.sqlstate == "55P03"

    @property
    def timed_out(self) -> bool:
        """True for a statement timeout."""
        return self.sqlstate == "57014"


def _busy(message: str, sqlstate: str) -> DatabaseBusy:
    return DatabaseBusy(message, sqlstate=sqlstate)


class OutcomeUnknown(DatabaseUnavailable):
    """The connection was lost, or a timeout expired, before the answer: the statement may have taken effect or not."""


class DatabaseError(PgworkdError):
    """The database rejected a statement permanently: a retry of the same would not help.

    `sqlstate` is the five-character code, `constraint` the name of the violated constraint, if there is one.
    """

    def __init__(self, message: str, *, sqlstate: str = "", constraint: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.constraint = constraint


class NotAdopted(DatabaseError):  # noqa: N818
    """The database is a copy, or of another environment: its jobs do not run here until `pgworkd adopt`."""


class NotWaiting(PgworkdError):  # noqa: N818
    """The job is running, dead, finished or unknown: the operation applies to waiting jobs only."""


class NoStack(PgworkdError):  # noqa: N818
    """The job has no stack that can be asked for: it does not run, or not in a daemon with the database."""


class BatchClosed(PgworkdError):  # noqa: N818
    """The batch is sealed, finished, cancelled, in use or unknown: the operation does not apply to it."""


class WorkerLost(PgworkdError):  # noqa: N818
    """This worker is presumed dead: its lease has ended or its row is gone, and it may no longer claim or settle."""


class LeaseLost(PgworkdError):  # noqa: N818
    """This attempt has lost its lease: another worker may run the job, and this attempt's outcome is rejected."""


class JobFailed(PgworkdError):  # noqa: N818
    """The job has no result: `status` is dead, cancelled or expired, `error` its last error."""

    def __init__(self, job_id: UUID, status: str, error: str | None) -> None:
        super().__init__(job_id, status, error)
        self.job_id = job_id
        self.status = status
        self.error = error

    def __str__(self) -> str:
        return f"job {self.job_id} is {self.status}" + (f": {self.error}" if self.error else "")


class JobUnknown(PgworkdError):  # noqa: N818
    """The job does not exist, or its history has been deleted."""


class PermanentError(Exception):
    """Raised by a handler: a retry would not help, so the job is dead at once."""


class Snooze(Exception):  # noqa: N818
    """Raised by a handler: run the job again after `delay` (seconds or a timedelta, 0 to 366 days).

    It does not count as a failure. Raises UsageError for a delay out of bounds.
    """

    def __init__(self, delay: float | timedelta) -> None:
        self.delay_s = delay_seconds(delay, "Snooze delay")
        super().__init__(self.delay_s)

    def __str__(self) -> str:
        return f"snoozed for {self.delay_s:g} s"


class RetryAfter(Exception):  # noqa: N818
    """Raised by a handler: this attempt failed, retry after `delay` (seconds or a timedelta, 0 to 366 days).

    Unlike `Snooze` it counts as a failure. Raises UsageError for a delay out of bounds.
    """

    def __init__(self, delay: float | timedelta, message: str = "") -> None:
        self.delay_s = delay_seconds(delay, "RetryAfter delay")
        self.message = message
        super().__init__(self.delay_s, message)

    def __str__(self) -> str:
        return self.message or f"retry after {self.delay_s:g} s"


class JobStopped(BaseException):
    """Raised by `job.check()` when the attempt was asked to stop: do not catch it; the attempt ends for that reason."""


class SqlState(NamedTuple):
    """An SQLSTATE of the schema: the exception that it becomes, and its meaning."""

    exception: type[PgworkdError]
    meaning: str


SQLSTATES = {
    "PW001": SqlState(WorkerLost, "the worker's lease has ended"),
    "PW002": SqlState(NotWaiting, "the job is not waiting"),
    "PW003": SqlState(BatchClosed, "the batch is sealed, finished, cancelled, in use or unknown"),
    "PW004": SqlState(DatabaseError, "the dependency can never be met"),
    "PW005": SqlState(NoStack, "the job has no stack that can be asked for"),
}
"""Every SQLSTATE that the schema defines."""


def delay_seconds(value: float | timedelta, what: str) -> float:
    """`value` as seconds between 0 and 366 days; UsageError, naming it `what`, for anything else (bool, NaN)."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{what} is a {type(value).__name__}: give seconds as a number, or a timedelta")
    if not 0 <= value <= DELAY_S_MAX:  # NaN compares false and lands here too
        shown = value if isinstance(value, float) or -SHOWN_MAX < value < SHOWN_MAX else "out of bounds"
        raise UsageError(f"{what} is {shown}: give 0 to {DELAY_S_MAX:.0f} seconds (366 days)")
    return float(value)
