"""Where running jobs are: asked of their workers by way of the database, and answered within a heartbeat."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from pgworkd.admin.queries import IS_STANDBY, read, select
from pgworkd.database.connection import Connection


class Stack(NamedTuple):
    """The stack of a job that was asked for last; it is forgotten after an hour."""

    id: UUID
    attempt: int
    worker_id: int
    worker: str | None
    asked_at: datetime | None
    asked_by: str
    answered_at: datetime | None
    stack: str | None
    """Files, lines and functions, never the value of a variable; or why there is none. None: no answer yet."""
    running: bool
    """The attempt still runs; else no answer may come."""

    @property
    def awaited(self) -> bool:
        """True while an answer may still come."""
        return self.stack is None and self.running


_STACK = select(
    Stack,
    """FROM pgworkd.stack_requests r LEFT JOIN pgworkd.jobs j
        ON j.id = r.job_id AND j.attempts = r.attempt AND j.worker_id = r.worker_id
    WHERE r.job_id = $1""",
    "r.",
    id="r.job_id",
    worker="(SELECT w.name FROM pgworkd.workers w WHERE w.id = r.worker_id)",
    running="j.id IS NOT NULL",
)


async def ask(connection: Connection, job_id: UUID) -> None:
    """Asks the worker of a running job where that is; NoStack for a job that has no worker which can be asked."""
    await connection.fetch("SELECT pgworkd.ask_stack($1)", job_id)


async def stack(connection: Connection, job_id: UUID) -> Stack | None:
    """What was asked and answered last; None: nothing within the last hour, or this is a standby."""
    if await connection.value(IS_STANDBY):  # which has no unlogged tables
        return None
    rows = await connection.fetch(_STACK, job_id)
    return read(Stack, rows[0]) if rows else None
