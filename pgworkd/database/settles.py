"""The calls that end attempts, for whoever has claimed them: one statement for each ending."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from pgworkd.core.fence import Fence, Settling
from pgworkd.core.job import STATUSES_AFTER, Ending
from pgworkd.core.source import Occurrence
from pgworkd.database.connection import Connection
from pgworkd.database.schedule_store import columns

LOCK_TIMEOUT_S = 0.2
"""A settle that waits longer for a lock is retried without the locked rows; maintenance is retried later."""

_CALLS = {
    Ending.COMPLETED: "SELECT pgworkd.settle_completed($1, {attempts}, {0}, {1}, {2}, {3}, {fence}, {4})",
    Ending.FAILED: """SELECT id, status
        FROM pgworkd.settle_failed($1, {attempts}, {0}, {1}, {2}, {3}, {4}, {5}, {6}, {fence})""",
    Ending.RELEASED: "SELECT pgworkd.settle_released($1, {attempts}, {0}, {1}, {fence}, {2})",
    Ending.CANCELLED: "SELECT pgworkd.settle_ended($1, {attempts}, {0}, {1}, {fence})",
}
"""By numbers, the columns of `_COLUMNS`."""
_CALLS[Ending.EXPIRED] = _CALLS[Ending.CANCELLED]
_NO_WAIT = {  # by skip_locked and deferred
    (False, False): "ATTEMPTS",
    (True, False): "pgworkd.unlocked($1, ATTEMPTS)",
    (False, True): "pgworkd.deferred(ATTEMPTS)",
    (True, True): "pgworkd.deferred(pgworkd.unlocked($1, ATTEMPTS))",
}


def _statement(call: str, attempts: str, *, several: bool) -> str:
    """A call for attempts of one worker, or of several, which `fenced()` has checked before."""
    columns = [f"${number}" for number in range(6 if several else 5, 13)]
    attempts = attempts.replace("ATTEMPTS", "pgworkd.fenced($1, $2, $3, $4, $5)" if several else "$2")
    return call.format(*columns, attempts=attempts, fence="NULL, NULL" if several else "$3, $4")


STATEMENTS: Mapping[tuple[bool, Ending, bool, bool], str] = {
    (several, ending, *how): _statement(_CALLS[ending], attempts, several=several)
    for several, ending, (how, attempts) in itertools.product((False, True), _CALLS, _NO_WAIT.items())
}
"""The statements, by whether the attempts are of several workers, ending, `skip_locked` and `deferred`."""
_BY_HANDLER = "SELECT pgworkd.complete_own($1, $2, $5, $6, $7, $8, $3, $4, $9)"
_BY_CALLER = STATEMENTS[True, Ending.COMPLETED, False, False]
_RUNNING = "SELECT pgworkd.fenced($1, $2, $3, $4, $5)"
SETTLED = """SELECT a.id, CASE a.status WHEN 'discarded' THEN 'dead' ELSE a.status END
    FROM unnest($1::uuid[], $2::int[], $3::int[]) AS s (id, attempt, worker)
    JOIN pgworkd.jobs_of($1) a ON a.id = s.id AND a.attempts = s.attempt AND a.status <> 'running'
    WHERE (s.worker = 0 OR coalesce(a.worker_id, s.worker) = s.worker)
      AND NOT coalesce(a.errors -> -1 @> jsonb_build_object('type', 'lost', 'attempt', s.attempt), false)"""


class SettleStore:
    """Ends attempts, each fenced by its worker; all methods raise PgworkdError."""

    _settles: Connection
    _of_several_workers = False
    """True if a call has attempts of several workers, or with leases of their own; else all of a call are of one."""

    async def settle(
        self,
        ending: Ending,
        settles: Sequence[Settling],
        following: Sequence[Occurrence] = (),
        *,
        skip_locked: bool = False,
        deferred: bool = False,
    ) -> dict[UUID, str]:
        """Ends attempts of different jobs in one way; the new status of each that ran under its fence.

        What each ending does, and the two options, says `core.source.SettleSource`.
        """
        sql = STATEMENTS[self._of_several_workers, ending, skip_locked, deferred]
        rows = await self._settles.fetch(sql, *self._fence(settles), *_COLUMNS[ending](settles, following))
        return _statuses(ending, rows)

    async def settle_on(self, connection: Any, settling: Settling) -> str | None:
        """Ends an attempt, of a job without a schedule, in the transaction that claimed it; the job's new status.

        None: its claim is gone. Waits for no lock. The driver's errors pass through.
        """
        ending = settling.outcome.ending
        sql = STATEMENTS[self._of_several_workers, ending, True, False]
        rows = await connection.fetch(sql, *self._fence([settling]), *_COLUMNS[ending]([settling], ()))
        return _statuses(ending, rows).get(settling.job_id)

    async def complete_on(self, connection: Any, settling: Settling, following: Sequence[Occurrence] = ()) -> bool:
        """Completes a job in the transaction of a connection of the driver; False if the attempt runs no more."""
        sql = _BY_CALLER if self._of_several_workers else _BY_HANDLER
        return bool(await connection.fetchval(sql, *self._fence([settling]), *_completed([settling], following)))

    async def running(self, fences: Sequence[Fence]) -> set[UUID]:
        """The jobs of the attempts among these that still run, each under its worker."""
        found = await self._settles.value(_RUNNING, *fence_columns(fences)) or []
        return {each.job_id for each, attempt in zip(fences, found, strict=True) if attempt == each.attempt}

    async def settled(self, fences: Sequence[Fence]) -> dict[UUID, str]:
        """The status each of these attempts was settled with; running, rescued and pruned ones are missing."""
        return dict(map(tuple, await self._settles.fetch(SETTLED, *fence_columns(fences)[:3])))

    def _fence(self, settles: Sequence[Settling]) -> list[Any]:
        if self._of_several_workers:
            return fence_columns([each.fence for each in settles])
        first = settles[0].fence if settles else Fence(UUID(int=0), 0)
        ids, attempts = [each.job_id for each in settles], [each.number for each in settles]
        return [ids, attempts, first.worker_id or None, first.token]


def fence_columns(fences: Sequence[Fence]) -> list[list[Any]]:
    """The ids, attempts, workers, tokens and nonces of these attempts, for `fenced()`."""
    return [list(column) for column in zip(*fences, strict=True)] if fences else [[], [], [], [], []]


def _statuses(ending: Ending, rows: Sequence[Any]) -> dict[UUID, str]:
    if ending is Ending.FAILED:
        return {row[0]: row[1] for row in rows}
    return dict.fromkeys(rows[0][0], STATUSES_AFTER[ending][0])


def _completed(settles: Sequence[Settling], following: Sequence[Occurrence]) -> list[Any]:
    results = [each.outcome.result for each in settles]
    now = time.monotonic()
    began_ago_s = [None if each.started is None else now - each.started for each in settles]
    return [results if any(results) else None, *_occurrences(following), began_ago_s]


def _failed(settles: Sequence[Settling], following: Sequence[Occurrence]) -> list[Any]:
    outcomes = [each.outcome for each in settles]
    return [
        [each.delay_s for each in outcomes],
        [each.permanent for each in outcomes],
        [each.message or "" for each in outcomes],
        [json.dumps(each.error) for each in outcomes],
        *_occurrences(following),
    ]


def _released(settles: Sequence[Settling], _: Sequence[Occurrence]) -> list[Any]:
    outcomes = [each.outcome for each in settles]
    return [[each.delay_s for each in outcomes], _messages(settles), [each.begun for each in outcomes]]


def _ended(settles: Sequence[Settling], _: Sequence[Occurrence]) -> list[Any]:
    return [[each.outcome.ending.value for each in settles], _messages(settles)]


def _messages(settles: Sequence[Settling]) -> list[str | None]:
    return [each.outcome.message for each in settles]


def _occurrences(following: Sequence[Occurrence]) -> Sequence[Any]:
    return columns(following) if following else (None, None, None)


_COLUMNS: Mapping[Ending, Callable[[Sequence[Settling], Sequence[Occurrence]], list[Any]]] = {
    Ending.COMPLETED: _completed,
    Ending.FAILED: _failed,
    Ending.RELEASED: _released,
    Ending.CANCELLED: _ended,
    Ending.EXPIRED: _ended,
}
