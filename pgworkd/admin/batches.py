"""Operations on batches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from pgworkd.admin.queries import read, select
from pgworkd.client.batch_types import Cancelled, Progress
from pgworkd.core import validation
from pgworkd.database.connection import Connection
from pgworkd.errors import BatchClosed


class TreeRow(NamedTuple):
    """A tree of batches, by its root. `done` of `total` jobs are finished; `batches` counts the root and all below.

    `state` is running, cancelling, cancelled, completed or completed with failures.
    """

    id: UUID
    name: str
    queue: str
    state: str
    batches: int
    total: int
    done: int
    dead: int
    cancelled: int
    created_at: datetime | None
    finished_at: datetime | None
    meta: str | None
    """JSON text, of the root."""


class ResultRow(NamedTuple):
    """A completed job of a batch; payload and result are JSON text."""

    batch_id: UUID
    batch: str
    id: UUID
    payload: str
    result: str | None


class ConnectedJob(NamedTuple):
    """A job that others wait for, or that waits: `after` are those that have not completed yet."""

    id: UUID
    queue: str
    kind: str
    status: str
    after: Sequence[UUID]


class ConnectedJobs(NamedTuple):
    """Jobs that wait for each other. `more`: there are others, which are connected with these."""

    rows: list[ConnectedJob]
    more: bool


class DeletedSome(NamedTuple):
    """How many batches and jobs are deleted. `more`: there are others."""

    deleted: int
    items: int
    more: bool


_IS_FINISHED = """SELECT r.tree_finished_at IS NOT NULL OR b.id <> r.id AND b.finished_at IS NOT NULL
    FROM pgworkd.batches b JOIN pgworkd.batches r ON r.id = b.root_id WHERE b.id = $1"""
_TREES = select(
    TreeRow,
    """FROM pgworkd.batch_trees WHERE id IN (SELECT b.id FROM pgworkd.batches b WHERE b.parent_id IS NULL
        AND ($1::text IS NULL OR b.name = $1) AND ($2::text IS NULL OR b.dedupe_key = $2)
        AND ($3::text IS NULL OR b.queue = $3) AND ($4::uuid IS NULL OR b.id < $4)
        AND ($5::text IS NULL OR (SELECT t.state FROM pgworkd.batch_trees t WHERE t.id = b.id) = $5)
        ORDER BY b.id DESC LIMIT $6)
    ORDER BY id DESC""",
)
_TREE = select(Progress, "FROM pgworkd.batch_tree($1) LIMIT 10000")
_QUEUES = """SELECT b.queue::text, r.queue::text FROM pgworkd.batches b JOIN pgworkd.batches r ON r.id = b.root_id
    WHERE b.id = $1"""
_RESULTS = select(ResultRow, "FROM pgworkd.batch_results($1, $2, $3, $4, $5)")

# Each step looks at one job's dependencies by the two indexes, and no step is made once enough jobs are found.
_CONNECTED = """WITH RECURSIVE reached (id) AS (
        SELECT s.id FROM (
            SELECT $2::uuid AS id WHERE $2 IS NOT NULL
            UNION ALL (
                SELECT b.id FROM (SELECT j.id, j.waiting_on FROM pgworkd.jobs j
                                  WHERE j.batch_id = $1::uuid AND j.status = 'blocked' LIMIT 10 * $3::int) b
                WHERE b.waiting_on > 0)) s
        UNION
        SELECT n.id FROM reached r CROSS JOIN LATERAL (
            (SELECT d.depends_on AS id FROM pgworkd.job_dependencies d WHERE d.job_id = r.id LIMIT $3)
            UNION ALL
            (SELECT d.job_id FROM pgworkd.job_dependencies d WHERE d.depends_on = r.id
             ORDER BY d.depends_on, d.job_id LIMIT $3)) n
    ), found AS MATERIALIZED (SELECT r.id FROM reached r LIMIT $3 + 1),
    ids AS MATERIALIZED (SELECT ARRAY(SELECT f.id FROM found f LIMIT $3) AS ids)
    SELECT j.id, j.queue, j.kind, j.status,
        ARRAY(SELECT d.depends_on FROM pgworkd.job_dependencies d
              WHERE d.job_id = j.id AND d.depends_on = ANY (i.ids) ORDER BY d.depends_on LIMIT $3),
        (SELECT count(*) FROM found) > $3
    FROM ids i, pgworkd.jobs_of(i.ids) j ORDER BY j.id"""
CONNECTED_MAX = 500


class BatchOperations:
    """`admin.batches`. Raises the errors of `Admin`, and BatchClosed where the batch's state forbids the operation."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(
        self,
        name: str | None = None,
        limit: int = 20,
        *,
        key: str | None = None,
        queue: str | None = None,
        state: str | None = None,
        before: UUID | None = None,
    ) -> list[TreeRow]:
        """The newest trees, at most `limit` (1 to ROWS_MAX), of those whose root has this name, dedupe key and queue.

        None stands for any. `state`: of the whole tree, as of `TreeRow`; each tree is looked at until `limit` are
        found. `before`: only trees whose ids are below that, as after a page that ended with it.
        """
        validation.bounded(limit)
        wanted = (validation.name(name), validation.name(key), validation.name(queue), before, state, limit)
        return [read(TreeRow, row) for row in await self._connection.fetch(_TREES, *wanted)]

    async def tree(self, batch_id: UUID) -> list[Progress]:
        """The progress of a batch and of the first 10,000 below it, parents before children. Counts no jobs.

        BatchClosed if the batch does not exist.
        """
        rows = await self._connection.fetch(_TREE, batch_id)
        if not rows:
            raise BatchClosed(f"batch {batch_id} does not exist. Check the id: the batch may have been deleted.")
        return [Progress(*row) for row in rows]

    async def connected(
        self, batch_id: UUID | None = None, job_id: UUID | None = None, most: int = CONNECTED_MAX
    ) -> ConnectedJobs:
        """The jobs that wait for each other, by whatever way, around the waiting ones of a batch, or around one job.

        At most `most` (1 to CONNECTED_MAX). What has completed is no longer waited for, and so is not connected.
        """
        validation.whole(most, "most", 1, CONNECTED_MAX)
        rows = await self._connection.fetch(_CONNECTED, batch_id, job_id, most)
        return ConnectedJobs([ConnectedJob(*row[:-1]) for row in rows], any(row[-1] for row in rows))

    async def queues(self, batch_id: UUID) -> tuple[str, str] | None:
        """The queue of the batch's jobs, and that of its root; None if there is no such batch."""
        rows = await self._connection.fetch(_QUEUES, batch_id)
        return tuple(rows[0]) if rows else None

    async def results(
        self, batch_id: UUID, after: tuple[UUID, UUID] | None = None, limit: int = 500, *, every: bool = False
    ) -> list[ResultRow]:
        """A page of the results of a tree: of its final batches, or of all (`every`); see pgworkd.batch_results().

        `after`: batch_id and id of the last row of the page before.
        """
        validation.bounded(limit)
        rows = await self._connection.fetch(_RESULTS, batch_id, every, *(after or (None, None)), limit)
        return [ResultRow(*row) for row in rows]

    async def seal(self, batch_id: UUID) -> bool:
        """Closes a batch to further jobs; False if it was sealed, cancelled or finished before."""
        return bool(await self._connection.value("SELECT pgworkd.seal_batch($1)", batch_id))

    async def cancel(self, batch_id: UUID) -> Cancelled:
        """Cancels a batch and all below it: up to ROWS_MAX waiting jobs now; running ones are asked to stop.

        If `more` is True there are further jobs: call again.
        """
        rows = await self._connection.fetch(
            "SELECT cancelled, requested, more FROM pgworkd.cancel_batch($1, $2)", batch_id, validation.ROWS_MAX
        )
        return Cancelled(*rows[0])

    async def delete_some(self, batch_id: UUID, *, items: bool = False, cancel: bool = False) -> DeletedSome:
        """One short step towards deleting a batch and all below it; `more`: call again.

        `items`: with its jobs, from the history, too; that needs the role of a gateway, or the owner's. `cancel`: a
        tree that is not finished is cancelled; what runs is waited for. BatchClosed for one, where it is not.
        """
        if cancel and not await self._connection.value(_IS_FINISHED, batch_id):
            await self.cancel(batch_id)
            if not await self._connection.value(_IS_FINISHED, batch_id):
                return DeletedSome(0, 0, more=True)
        if items:
            sql = "SELECT pgworkd.delete_items($1, $2)"
            if gone := int(await self._connection.value(sql, batch_id, validation.ROWS_MAX)):
                return DeletedSome(0, gone, more=True)
        return DeletedSome(await self.delete(batch_id), 0, more=False)

    async def delete(self, batch_id: UUID) -> int:
        """Deletes a batch and all below it, once their tree is finished; the number of batches deleted."""
        return int(await self._connection.value("SELECT pgworkd.delete_batch($1)", batch_id))
