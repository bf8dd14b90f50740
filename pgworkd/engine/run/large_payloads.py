"""Payloads that a claim leaves out: they are read when a slot is about to run the job.

Large ones: a claim holds its locks until its answer has been sent, so the answer has to be small; these reads hold
none, and jobs claimed ahead do not take up memory before they run. And those of jobs that can expire: the read is where
such a job begins, or has expired.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Protocol
from uuid import UUID

import anyio

from pgworkd.core.events import Events
from pgworkd.core.job import Reason
from pgworkd.database.reconnect import Outage
from pgworkd.engine.attempts import Attempt
from pgworkd.errors import DatabaseError, PgworkdError

READ_MAX = 500
READ_BYTES = 1024 * 1024
"""A read ends with the payload that reaches this size: a second or two on a connection of 1 MB/s."""


class Reads(Protocol):
    """The calls of the store for large payloads."""

    async def payloads(
        self,
        ids: list[UUID],
        attempts: list[int],
        bytes_max: int,
        worker_id: int | None = None,
        begin: int | None = None,
    ) -> list[tuple[UUID, str | None, str | None, bool]]:
        """Reads (id, payload, meta, expired) in this order, up to `bytes_max`; the first `begin` are about to begin.

        A payload of None: the attempt is not ours, or its job has expired.
        """


class Payloads:
    """Large payloads of one pool: one read at a time, for all slots that wait, and for the next jobs if they fit."""

    def __init__(self, store: Reads, queue: str, events_: Events) -> None:
        self._store = store
        self._outage = Outage(f"payloads {queue}", events_)
        self._wanted: dict[UUID, Attempt] = {}
        """The attempts whose payload slots wait for, by id, in order."""
        self._reading = False
        self._singly = False
        """True once the database failed to return one of several payloads: reading each alone finds out which."""
        self._changed = anyio.Event()

    async def read(self, attempt: Attempt, following: Iterable[Attempt]) -> None:
        """Returns when the attempt has its payload, or a reason not to run, or is `unreadable`.

        `following`: the next attempts, some of which may be read with it. Waits through outages.
        """
        self._wanted[attempt.claimed.id] = attempt
        try:
            while attempt.claimed.payload is None and attempt.reason is None and attempt.unreadable is None:
                if self._reading:
                    await self._changed.wait()
                else:
                    await self._read(following)
        finally:
            if self._wanted.get(attempt.claimed.id) is attempt:
                del self._wanted[attempt.claimed.id]

    def stop(self, reason: Reason) -> None:
        """Stops the attempts whose payload is waited for: they have not begun, so another worker may run them."""
        for attempt in self._wanted.values():
            attempt.stop(reason)
        self._wake_waiters()

    async def _read(self, following: Iterable[Attempt]) -> None:
        ahead = (attempt for attempt in following if attempt.claimed.payload is None)
        wanted = [h for h in chain(self._wanted.values(), ahead) if h.reason is None and h.unreadable is None]
        worker_id = wanted[0].worker_id if wanted else None
        wanted = [h for h in islice(wanted, 1 if self._singly else READ_MAX) if h.worker_id == worker_id]
        begin = sum(h.claimed.id in self._wanted for h in wanted)
        self._reading = True
        try:
            ids, attempts = [h.claimed.id for h in wanted], [h.claimed.attempt for h in wanted]
            rows = await self._store.payloads(ids, attempts, READ_BYTES, worker_id, begin)
        except DatabaseError as error:
            if len(wanted) == 1:
                wanted[0].unreadable = error  # its row is damaged: the run fails, as with an invalid payload
            self._singly = len(wanted) > 1
        except PgworkdError as error:
            await self._outage.wait(error)
        else:
            self._outage.passed()
            for attempt, (_, payload, meta, expired) in zip(wanted, rows, strict=False):
                if payload is None:
                    attempt.stop(Reason.EXPIRED if expired else Reason.FENCE)  # else it is no longer ours
                else:
                    attempt.claimed = attempt.claimed._replace(payload=payload, meta=meta)
        finally:
            self._reading = False
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
