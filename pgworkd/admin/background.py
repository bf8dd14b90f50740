"""Operations in the background: daemons do them in short steps, however many jobs match, and whoever has left."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from pgworkd.admin.jobs import OPERATIONS, JobSelection
from pgworkd.admin.queries import read, select
from pgworkd.core import validation
from pgworkd.database.connection import Connection


class BackgroundOperation(NamedTuple):
    """One operation; `done`, `requested` and `refused` count jobs so far.

    `requested`: running ones that were asked to stop. `refused`: ones that could not be changed; `reason` is one of the
    reasons. `left_behind`: some were locked, and are tried again. The fields from `queue` to `group_id` are its filter.
    """

    id: int
    what: str
    who: str
    queue: str | None
    kind: str | None
    key: str | None
    batch_id: UUID | None
    status: str | None
    group_id: int | None
    started_at: datetime | None
    expected: int | None
    """Jobs that matched at the start; None: more than could be counted at once."""
    done: int
    requested: int
    refused: int
    reason: str | None
    left_behind: bool
    finished_at: datetime | None
    """When it was over; None: it goes on."""
    stopped_by: str | None
    """Who stopped it before all was done."""

    @property
    def state(self) -> str:
        """running, stopped or finished."""
        return "running" if self.finished_at is None else "finished" if self.stopped_by is None else "stopped"

    @property
    def filter(self) -> str:
        """The jobs that it is for, such as "queue mail, status dead"; all: of all queues."""
        names = ("queue", "kind", "key", "batch", "status", "group")
        values = (self.queue, self.kind, self.key, self.batch_id, self.status, self.group_id)
        given = [f"{name} {value}" for name, value in zip(names, values, strict=True) if value is not None]
        return ", ".join(given) or "all"

    @property
    def looked_at(self) -> int:
        """The jobs that it is through with."""
        return self.done + self.requested + self.refused


def _select(rest: str) -> str:
    again = "(o.left_behind OR o.rounds > 0)"
    return select(BackgroundOperation, f"FROM pgworkd.operations o {rest}", "o.", left_behind=again)


_ONE = _select("WHERE o.id = $1")
# Those that go on come first; each of the two is read by its index.
_NEWEST = _select("""WHERE o.id = ANY (ARRAY(
        SELECT n.id FROM pgworkd.operations n WHERE n.finished_at IS NULL
        UNION ALL
        (SELECT n.id FROM pgworkd.operations n WHERE n.finished_at IS NOT NULL ORDER BY n.finished_at DESC LIMIT $1)))
    ORDER BY o.finished_at IS NOT NULL, o.id DESC LIMIT $1""")
_START = "SELECT pgworkd.start_operation($1, $2, $3, $4, $5, $6, $7, $8, $9)"
_STOP = "SELECT pgworkd.stop_operation($1)"


class BackgroundOperations:
    """`admin.background`. Raises the errors of `Admin`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def start(self, what: str, which: JobSelection, *, call_back: bool = False) -> int:
        """Starts retry, cancel or discard of all jobs that match and are there now; its id.

        Returns the id of one that goes on if it is the same. `call_back` as of `jobs.retry`.
        """
        validation.one_of(what, "what", tuple(OPERATIONS))
        names = (validation.name(which.queue), validation.name(which.kind), validation.name(which.key))
        rest = (which.batch, which.status, which.all_queues, which.group, call_back)
        return int(await self._connection.value(_START, what, *names, *rest))

    async def stop(self, operation_id: int) -> bool:
        """Stops it; what it has done stays done. False: it is over, or unknown."""
        return bool(await self._connection.value(_STOP, operation_id))

    async def find(self, limit: int = 20) -> list[BackgroundOperation]:
        """Operations that go on, and the newest of the others, at most `limit` (1 to ROWS_MAX)."""
        validation.bounded(limit)
        return [read(BackgroundOperation, row) for row in await self._connection.fetch(_NEWEST, limit)]

    async def get(self, operation_id: int) -> BackgroundOperation | None:
        """One operation; None: unknown, or deleted, which each is a week after its end at the earliest."""
        rows = await self._connection.fetch(_ONE, operation_id)
        return read(BackgroundOperation, rows[0]) if rows else None
