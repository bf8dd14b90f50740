"""What operators do to jobs: cancel, retry, discard, edit; on jobs they name, or on all that match; and the audit.

Each call is one short statement, a transaction of its own. The database notes every act in `audit`, in that
transaction, under the name that LinkOptions.by gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from pgworkd.admin import queries as sql
from pgworkd.admin import refusals
from pgworkd.admin.refusals import Refused
from pgworkd.database.connection import Connection
from pgworkd.errors import DatabaseError, InvalidPayload, UsageError, delay_seconds
from pgworkd.words import validation
from pgworkd.words.payload import BYTES_MAX, decode, encode
from pgworkd.words.validation import ROWS_MAX

LOOK_MAX = 10_000
"""Ids per answer of `matching`."""
ACTS = {
    "cancel": ("pending", "blocked", "failed", "running"),
    "retry": ("dead", "failed"),
    "discard": ("dead",),
}
"""What can be done to all jobs that match, and in which states they may be."""
_UNIQUE_VIOLATION = "23505"


class Which(NamedTuple):
    """The jobs that match everything that is not None; `key` is any of a job's three keys.

    Without queue, kind, key and batch they are none, unless `every` says that this is meant. Without `status` they are
    the waiting and running ones to cancel, the dead ones to retry or discard.
    """

    queue: str | None = None
    kind: str | None = None
    key: str | None = None
    batch: UUID | None = None
    status: str | None = None
    every: bool = False

    @property
    def narrow(self) -> bool:
        """True if something says which jobs of all there are."""
        return (self.queue, self.kind, self.key, self.batch) != (None,) * 4


class Matched(NamedTuple):
    """Ids in their order; `last`: the next ones are behind it, None: that was all."""

    ids: Sequence[UUID]
    last: UUID | None


class Retried(NamedTuple):
    """`changed` run again; `held_back` would, but another live job holds their dedupe key."""

    changed: list[UUID]
    held_back: list[UUID]


class Acts:
    """The verbs, on one link. All methods raise what Admin's raise."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def matching(self, act: str, which: Which, after: UUID | None = None, limit: int = ROWS_MAX) -> Matched:
        """The next jobs, at most `limit` (1 to LOOK_MAX), that match and to which `act`, one of ACTS, can be done."""
        validation.whole(limit, "limit", 1, LOOK_MAX)
        if which.status not in (None, *ACTS[act]):
            raise UsageError(f"status {which.status!r}: only jobs that are {_either(ACTS[act])} are there to {act}")
        if not (which.narrow or which.every):
            raise UsageError(f"nothing says which jobs to {act}: give a queue, kind, key or batch, or ask for all")
        key = None if which.key is None else validation.text(which.key, "key", 512)
        wanted = (validation.name(which.queue), validation.name(which.kind), key, which.batch, which.status)
        ids, last = (await self._connection.fetch(sql.MATCHING, act, *wanted, after, limit, which.every))[0]
        return Matched(ids, last)

    async def count(self, act: str, which: Which) -> int:
        """How many match now."""
        found = await self.matching(act, which, limit=LOOK_MAX)
        total = len(found.ids)
        while found.last is not None:
            found = await self.matching(act, which, found.last, LOOK_MAX)
            total += len(found.ids)
        return total

    async def retry(self, ids: Sequence[UUID], *, call_back: bool = False) -> Retried:
        """Runs dead jobs again with a fresh budget and waiting retries now; at most ROWS_MAX, others are left alone.

        A finished batch opens again with its dead jobs. When it is over again, it inserts the job of `on_complete` or
        `on_failure`, unless it did so before; `call_back`: also if it did.
        """
        validation.bounded(len(ids))
        try:
            changed = await self._connection.value("SELECT pgworkd.retry($1, NULL, $2)", ids, call_back)
            return Retried(list(changed), [])
        except DatabaseError as error:
            if error.sqlstate != _UNIQUE_VIOLATION:
                raise
            if len(ids) == 1:
                return Retried([], list(ids))
        # One of them cannot be: find out which, half by half.
        middle = len(ids) // 2
        halves = [await self.retry(some, call_back=call_back) for some in (ids[:middle], ids[middle:])]
        return Retried([i for half in halves for i in half.changed], [i for half in halves for i in half.held_back])

    async def cancel(self, ids: Sequence[UUID]) -> Mapping[UUID, str]:
        """Ends waiting jobs ('cancelled') and has running ones ended ('requested'); at most ROWS_MAX.

        Jobs that are dead, over or unknown are missing from the answer; `refusals` says why.
        """
        validation.bounded(len(ids))
        rows = await self._connection.fetch("SELECT id, outcome FROM pgworkd.cancel($1)", ids)
        return {row[0]: row[1] for row in rows}

    async def discard(self, ids: Sequence[UUID]) -> int:
        """Moves dead jobs to the history; how many. At most ROWS_MAX, others are left alone."""
        validation.bounded(len(ids))
        return int(await self._connection.value("SELECT pgworkd.discard($1)", ids))

    async def refusals(self, act: str, ids: Sequence[UUID]) -> dict[UUID, Refused]:
        """Why `act`, one of ACTS, leaves each of these jobs alone, as they are now: for those that it did not change.

        At most ROWS_MAX; `refusals.grouped` counts the reasons of many.
        """
        if act not in ACTS:
            raise UsageError(f"act {act!r}: give {_either(tuple(ACTS))}")
        validation.bounded(len(ids))
        return refusals.reasons(act, await self._connection.fetch(refusals.SQL, ids))

    async def undepend(self, ids: Sequence[UUID]) -> set[UUID]:
        """Lets jobs that wait for others run all the same; those that did. At most ROWS_MAX, others are left alone."""
        validation.bounded(len(ids))
        return set(await self._connection.value("SELECT pgworkd.undepend($1)", ids))

    async def edit(
        self,
        job_id: UUID,
        payload_text: str | None = None,
        *,
        run_at: datetime | None = None,
        delay_s: float | None = None,
        priority: int | None = None,
    ) -> list[str]:
        """Changes what is given of a waiting job; the names of what is different now. NotWaiting if it does not wait.

        The payload is a JSON object, stored as it is written. `run_at` (with a time zone, 1970 to 2199), or `delay_s`
        from now (0 to 366 days).
        """
        if run_at is not None and delay_s is not None:
            raise UsageError("run_at and delay_s are both given: pass one of them")
        if (payload_text, run_at, delay_s, priority) == (None,) * 4:
            raise UsageError("nothing to edit: give a payload, run_at, delay_s or priority")
        if payload_text is not None:
            check_payload(payload_text)
        answer = await self._connection.value(
            sql.EDIT,
            job_id,
            payload_text,
            None if run_at is None else validation.instant(run_at, "run_at"),
            None if delay_s is None else delay_seconds(delay_s, "delay_s"),
            None if priority is None else validation.whole(priority, "priority", -(2**31), 2**31 - 1),
        )
        return list(answer)

    async def audit(self, job_id: UUID | None = None, queue: str | None = None, limit: int = 20) -> list[sql.AuditRow]:
        """The newest acts, at most `limit` (1 to ROWS_MAX), of one job, one queue or all."""
        validation.bounded(limit)
        rows = await self._connection.fetch(sql.AUDIT, job_id, validation.name(queue), limit)
        return [sql.read(sql.AuditRow, row) for row in rows]


def check_payload(text: str) -> None:
    """Refuses what is no JSON object, cannot be stored, or is too large; InvalidPayload says why."""
    if len(text.encode(errors="surrogatepass")) > BYTES_MAX:
        raise InvalidPayload("payload", f"takes more than the {BYTES_MAX:,} bytes that are allowed")
    encode(decode(text))  # for its refusals


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
