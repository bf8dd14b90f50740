"""Dedupe keys that are kept after the end of what had them: what operators ask about them, and freeing one."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from pgworkd.admin.queries import read
from pgworkd.database.connection import Connection
from pgworkd.words import validation

# Each table is walked from the key that is kept longest: the view alone would find out of every row how its job ended.
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
# Of jobs with a queue and key there are one that holds it, and any number that are dead; of trees the same.
_HOLDER = """SELECT id, status::text FROM pgworkd.jobs
    WHERE queue = $1::text AND dedupe_key = $2::text AND status <> 'dead'
      AND (status <> 'completed' OR dedupe_until > pgworkd.clock())"""
_BATCH_HOLDER = """SELECT id, CASE WHEN tree_finished_at IS NULL THEN 'not finished' ELSE 'completed' END
    FROM pgworkd.batches
    WHERE parent_id IS NULL AND name = $1::text AND dedupe_key = $2::text
      AND (tree_finished_at IS NULL OR dedupe_until > pgworkd.clock())"""


class KeptKey(NamedTuple):
    """A dedupe key that is taken until then, although what had it is over: a job, or a tree of batches named `batch`.

    `id` is that job's, or the root's; `became` says how it ended, 'gone' where the history has forgotten it.
    """

    queue: str
    dedupe_key: str
    until: datetime | None
    id: UUID
    batch: str | None
    became: str


class KeyActs:
    """The part of `Admin` that is about dedupe keys. Raises what that raises."""

    _connection: Connection

    async def kept_keys(self, queue: str | None = None, key: str | None = None, limit: int = 20) -> list[KeptKey]:
        """The kept keys that match, at most `limit` (1 to ROWS_MAX): first those that are kept longest from now."""
        validation.bounded(limit)
        rows = await self._connection.fetch(KEPT, validation.name(queue), validation.name(key), limit)
        return [read(KeptKey, row) for row in rows]

    async def free_key(self, queue: str, key: str) -> bool:
        """Frees a key that a job which is over keeps; False if none does: a live job's is not freed."""
        wanted = (validation.text(queue, "the queue's name", 200), validation.text(key, "the key", 512))
        return bool(await self._connection.value("SELECT pgworkd.free_key($1, $2)", *wanted))

    async def free_batch_key(self, name: str, key: str) -> bool:
        """The same of a tree of batches, by the name of its root."""
        wanted = (validation.text(name, "the batch's name", 200), validation.text(key, "the key", 512))
        return bool(await self._connection.value("SELECT pgworkd.free_batch_key($1, $2)", *wanted))

    async def key_refusal(self, queue: str, key: str) -> str:
        """Why `free_key` leaves this key alone, as it is now."""
        found = await self._connection.fetch(_HOLDER, queue, key)
        if not found:
            return "no job has it: it is free"
        job_id, status = found[0]
        if status == "completed":
            return _CHANGED
        return f"job {job_id} is {status} and holds it: wait until that has ended, or cancel it"

    async def batch_key_refusal(self, name: str, key: str) -> str:
        """Why `free_batch_key` leaves this key alone, as it is now."""
        found = await self._connection.fetch(_BATCH_HOLDER, name, key)
        if not found:
            return "no batch has it: it is free"
        batch_id, status = found[0]
        if status == "completed":
            return _CHANGED
        return f"batch {batch_id} is {status} and holds it: wait until it is, or cancel it, which frees the key"


_CHANGED = "it has changed meanwhile: try again"
