"""Large payloads: a claim's answer carries small ones only, the others are read when a slot is about to run the job.

A claim holds its locks until its answer has gone out, so the answer has to be small; what is read here holds none. And
what has been claimed ahead does not take up memory before its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Protocol
from uuid import UUID

import anyio

from pgworkd.database.reconnect import Outage
from pgworkd.engine.attempts import Attempt
from pgworkd.errors import DatabaseError, PgworkdError
from pgworkd.words.events import Events
from pgworkd.words.job import Reason

READ_MAX = 500
READ_BYTES = 1024 * 1024
"""One read ends with the payload that makes it this much: a second or two on a connection of 1 MB/s."""


class Reads(Protocol):
    """The store, as far as it is needed here."""

    async def payloads(
        self, ids: list[UUID], attempts: list[int], bytes_max: int, worker_id: int | None = None
    ) -> list[tuple[UUID, str | None, str | None]]:
        """(id, payload, meta), in this order, until they come to `bytes_max`; without a payload: it is not ours."""


class Payloads:
    """Those of one pool: one read at a time, for all slots that wait, and for the jobs that come next if they fit."""

    def __init__(self, store: Reads, queue: str, events_: Events) -> None:
        self._store = store
        self._outage = Outage(f"payloads {queue}", events_)
        self._wanted: dict[UUID, Attempt] = {}
        """By id, in order: slots wait for these."""
        self._reading = False
        self._singly = False
        """The database could not give one of several: which, only reading each alone can tell."""
        self._changed = anyio.Event()

    async def read(self, attempt: Attempt, following: Iterable[Attempt]) -> None:
        """Returns when the attempt has its payload, or a reason not to be run, or is `unreadable`.

        `following`: what comes next, some of which may be read with it. Waits through outages.
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
        """Whoever waits here shall wait no longer: the job has not begun, so another worker may have it."""
        for attempt in self._wanted.values():
            attempt.stop(reason)
        self._wake_waiters()

    async def _read(self, following: Iterable[Attempt]) -> None:
        ahead = (attempt for attempt in following if attempt.claimed.payload is None)
        wanted = [h for h in chain(self._wanted.values(), ahead) if h.reason is None and h.unreadable is None]
        worker_id = wanted[0].worker_id if wanted else None
        wanted = [h for h in islice(wanted, 1 if self._singly else READ_MAX) if h.worker_id == worker_id]
        self._reading = True
        try:
            ids, attempts = [h.claimed.id for h in wanted], [h.claimed.attempt for h in wanted]
            rows = await self._store.payloads(ids, attempts, READ_BYTES, worker_id)
        except DatabaseError as error:
            if len(wanted) == 1:
                wanted[0].unreadable = error  # its row is damaged: the run fails, as it would with a bad payload
            self._singly = len(wanted) > 1
        except PgworkdError as error:
            await self._outage.wait(error)
        else:
            self._outage.passed()
            for attempt, (_, payload, meta) in zip(wanted, rows, strict=False):
                if payload is None:
                    attempt.stop(Reason.FENCE)  # someone has taken it back
                else:
                    attempt.claimed = attempt.claimed._replace(payload=payload, meta=meta)
        finally:
            self._reading = False
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
