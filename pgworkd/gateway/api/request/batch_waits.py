"""Requests that wait for the ends of batches: one statement a second asks for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import anyio

from pgworkd.database.connection import Connection
from pgworkd.errors import PgworkdError

PERIOD_S = 1.0
_OVER = """SELECT u.id FROM unnest($1::uuid[]) AS u (id) LEFT JOIN pgworkd.batches b ON b.id = u.id
    WHERE b.id IS NULL OR CASE WHEN b.parent_id IS NULL THEN b.tree_finished_at IS NOT NULL
        ELSE NOT EXISTS (SELECT FROM pgworkd.batch_tree(b.id) t WHERE t.finished_at IS NULL) END"""


class BatchWaits:
    """The batches that requests wait for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ends: dict[UUID, anyio.Event] = {}
        self._waiters: dict[UUID, int] = {}
        self._wanted = anyio.Event()

    async def end(self, batch_id: UUID, wait_s: float) -> None:
        """Returns when a batch and all below it have finished, or it is gone; or after `wait_s`."""
        async with self._waiting(batch_id) as over:
            with anyio.move_on_after(wait_s):
                await over.wait()

    @asynccontextmanager
    async def _waiting(self, batch_id: UUID) -> AsyncIterator[anyio.Event]:
        over = self._ends.setdefault(batch_id, anyio.Event())
        self._waiters[batch_id] = self._waiters.get(batch_id, 0) + 1
        self._wanted.set()
        try:
            yield over
        finally:
            self._waiters[batch_id] -= 1
            if not self._waiters[batch_id]:
                del self._waiters[batch_id], self._ends[batch_id]

    async def run(self) -> None:
        """Asks as long as somebody waits; runs until it is cancelled. Without the database, waiters wait on."""
        while True:
            await self._wanted.wait()
            try:
                rows = await self._connection.fetch(_OVER, list(self._ends))
            except PgworkdError:
                rows = []
            for (batch_id,) in rows:
                if batch_id in self._ends:
                    self._ends[batch_id].set()
            await anyio.sleep(PERIOD_S)
            if not self._ends:
                self._wanted = anyio.Event()
