"""Operations on keys: what runs and waits under one; dedupe keys that stay taken after the end of a job or batch."""

from __future__ import annotations

import shlex
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from pgworkd.admin import lines
from pgworkd.admin.lines import KeyInUse, UnderKey
from pgworkd.admin.queries import read
from pgworkd.core import validation
from pgworkd.database.connection import Connection

# Each table is read from the key that is kept longest: the view alone would look up the end of every row's job.
KEPT = """WITH ids AS (
        (SELECT j.id FROM pgworkd.jobs j
         WHERE j.status = 'completed' AND j.dedupe_until > pgworkd.clock()
           AND ($1::text IS NULL OR j.queue = $1) AND ($2::text IS NULL OR j.dedupe_key = $2)
         ORDER BY j.dedupe_until DESC LIMIT $3)
        UNION ALL
        (SELECT b.id FROM pgworkd.batches b
         WHERE b.parent_id IS NULL AND b.tree_finished_at IS NOT NULL AND b.dedupe_until > pgworkd.clock()
           AND ($1::text IS NULL OR b.queue = $1) AND ($2::text IS NULL OR b.dedupe_key = $2)
         ORDER BY b.dedupe_until DESC LIMIT $3))
    SELECT queue, dedupe_key, extract(epoch FROM k.until)::float8, id, batch, became
    FROM pgworkd.kept_keys k WHERE k.id = ANY (ARRAY(SELECT i.id FROM ids i))
    ORDER BY k.until DESC LIMIT $3"""
# At most one job of a queue has the key, besides any number of dead ones; for trees of batches the same.
_HOLDER = """SELECT id, status::text FROM pgworkd.jobs
    WHERE queue = $1::text AND dedupe_key = $2::text AND status <> 'dead'
      AND (status <> 'completed' OR dedupe_until > pgworkd.clock())"""
_BATCH_HOLDER = """SELECT id, CASE WHEN tree_finished_at IS NULL THEN 'not finished' ELSE 'completed' END
    FROM pgworkd.batches
    WHERE parent_id IS NULL AND name = $1::text AND dedupe_key = $2::text
      AND (tree_finished_at IS NULL OR dedupe_until > pgworkd.clock())"""


_BATCHES_OF = """SELECT name::text FROM pgworkd.batches
    WHERE parent_id IS NULL AND (queue = $1::text OR name = $1) AND dedupe_key = $2::text
      AND (tree_finished_at IS NULL OR dedupe_until > pgworkd.clock()) ORDER BY id LIMIT 1"""


class KeptKey(NamedTuple):
    """A dedupe key that is taken until `until`, although its job, or its tree of batches named `batch`, has finished.

    `id` is the job's or the root batch's; `ended_as` is how it ended, 'gone' if its history has been deleted.
    """

    queue: str
    dedupe_key: str
    until: datetime | None
    id: UUID
    batch: str | None
    ended_as: str


class KeyOperations:
    """`admin.keys`. Raises the errors of `Admin`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(self, queue: str | None = None, key: str | None = None, limit: int = 20) -> list[KeptKey]:
        """The kept keys that match, at most `limit` (1 to ROWS_MAX), those with the latest `until` first."""
        validation.bounded(limit)
        rows = await self._connection.fetch(KEPT, validation.name(queue), validation.name(key), limit)
        return [read(KeptKey, row) for row in rows]

    async def under(self, queue: str, key: str, limit: int = 50) -> UnderKey:
        """What runs and waits with the key as its serialize_key or limit_key, in each list at most `limit`."""
        return await lines.under(self._connection, queue, key, limit)

    async def in_use(self, queue: str | None = None, limit: int = 50) -> list[KeyInUse]:
        """The first keys by name with which jobs run, of each use at most `limit`."""
        return await lines.in_use(self._connection, queue, limit)

    async def holder(self, queue: str, key: str) -> UUID | None:
        """The live job that has a dedupe key; None: no live job has it."""
        found = await self._connection.fetch(_HOLDER, validation.name(queue), validation.name(key))
        return found[0][0] if found and found[0][1] != "completed" else None

    async def free(self, queue: str, key: str) -> bool:
        """Frees a key kept by a finished job; False if there is none. The key of a live job is not freed."""
        wanted = (validation.text(queue, "the queue's name", 200), validation.text(key, "the key", 512))
        return bool(await self._connection.value("SELECT pgworkd.free_key($1, $2)", *wanted))

    async def free_of_batch(self, name: str, key: str) -> bool:
        """Frees a key kept by a finished tree of batches whose root has the name; False if there is none."""
        wanted = (validation.text(name, "the batch's name", 200), validation.text(key, "the key", 512))
        return bool(await self._connection.value("SELECT pgworkd.free_batch_key($1, $2)", *wanted))

    async def refusal(self, queue: str, key: str) -> str:
        """Why `free` does not free this key, as things are now."""
        found = await self._connection.fetch(_HOLDER, queue, key)
        if not found and (batches := await self._connection.fetch(_BATCHES_OF, queue, key)):
            return f"no job has it, but a batch: pgworkd keys free --batch {shlex.join((batches[0][0], key))}"
        if not found:
            return "no job has it: it is free"
        job_id, status = found[0]
        if status == "completed":
            return _CHANGED
        return f"job {job_id}, whose status is {status}, has it: wait until that job has finished, or cancel it"

    async def refusal_of_batch(self, name: str, key: str) -> str:
        """Why `free_of_batch` does not free this key, as things are now."""
        found = await self._connection.fetch(_BATCH_HOLDER, name, key)
        if not found and await self._connection.fetch(_HOLDER, name, key):
            return f"no batch has it, but a job of the queue {name}: leave out --batch"
        if not found:
            return "no batch has it: it is free"
        batch_id, status = found[0]
        if status == "completed":
            return _CHANGED
        return f"batch {batch_id} is {status} and has it: wait until it is finished, or cancel it, which frees the key"


_CHANGED = "the key changed in the meantime: try again"
