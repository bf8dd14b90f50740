"""A daemon's calls for maintenance: what is taken back, expired, unblocked, deleted, and what runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast
from uuid import UUID

from pgworkd.core.registration import token_of
from pgworkd.database.connection import ConnectionOptions, connect
from pgworkd.database.driver_errors import BROKEN, translate
from pgworkd.database.schedule_store import ScheduleStore
from pgworkd.errors import DatabaseBusy, DatabaseError

DAYS_AHEAD, DAYS_RULED_OUT = 7, 31
"""Days ahead for which the history has a partition; how many where rows of no day have to be read first."""
SCAN_S_MAX = 3600.0
UNBLOCK_STEP = MEND_STEP = 1_000
RATES_STEP = 10_000
"""Rows that one step forgets."""
_EXPIRE = """SELECT queue, kind, jobs, example FROM pgworkd.expire_jobs($1) UNION ALL
    SELECT NULL, NULL, 0, NULL WHERE EXISTS (
        SELECT FROM pgworkd.jobs WHERE expires_at > pgworkd.clock() AND begun = 0
            AND status IN ('blocked', 'pending', 'failed'))"""


class Rescued(NamedTuple):
    """A job taken back from a worker; `status` is its new status: failed, dead or cancelled.

    `overdue`: it passed its deadline, or the lease of its own, which is a failure; else its worker was lost.
    """

    id: UUID
    queue: str
    kind: str
    attempt: int
    status: str
    worker_id: int
    worker: str
    error: str
    overdue: bool = False

    def facts(self) -> dict[str, object]:
        """The facts that every event about this attempt carries, as `Attempt.facts`."""
        return {"job_id": str(self.id), "queue": self.queue, "kind": self.kind, "attempt": self.attempt}


_RESCUE = """SELECT id, queue, kind, attempt, status, worker_id, worker, error, false FROM pgworkd.rescue($1, $2)
    UNION ALL
    SELECT id, queue, kind, attempt, status, worker_id, worker, error, true FROM pgworkd.fail_overdue($2, $3)"""
_KEPT_LONGER = "SELECT name, keep_s FROM pgworkd.queues WHERE keep_s > $1"


def fence(worker_id: int | None) -> tuple[int | None, UUID | None]:
    """A worker's id and token, which a statement must match; None: any worker's."""
    return worker_id, token_of(worker_id)


class MaintenanceStore(ScheduleStore):
    """The part of `Store` for maintenance. All methods raise PgworkdError."""

    options: ConnectionOptions

    async def rescue(self, worker_id: int, limit: int = 1000, overdue_s_max: float | None = None) -> list[Rescued]:
        """Takes back the jobs of lost workers, and attempts of remote ones that are overdue, up to `limit` each.

        `overdue_s_max`: only what became overdue at most this many seconds ago, at a cost independent of what has run
        before.
        """
        return [Rescued(*row) for row in await self._maintenance.fetch(_RESCUE, worker_id, limit, overdue_s_max)]

    async def running_of(
        self, worker_id: int, age_s: float, age_max_s: float | None = None, queues: Sequence[str] | None = None
    ) -> list[tuple[UUID, int]]:
        """Attempts running under this worker, by the database, that were claimed more than `age_s` seconds ago.

        With `queues`: of those only, and at most `age_max_s` ago, at a cost independent of what has run before.
        """
        args = (worker_id, token_of(worker_id), age_s, age_max_s, queues)
        rows = await self._maintenance.fetch("SELECT id, attempt FROM pgworkd.running_of($1, $2, $3, $4, $5)", *args)
        return [(row[0], row[1]) for row in rows]

    async def expire(self, limit: int = 1000) -> list[Sequence[Any]]:
        """Expires waiting jobs: (queue, kind, jobs, the id of one). Frees dedupe keys: (None, None, keys, None).

        The last row is (None, None, 0, None) if other jobs that wait may expire later.
        """
        return await self._maintenance.fetch(_EXPIRE, limit)

    async def unblock(self) -> int:
        """Unblocks jobs that wait in vain, cancels dependents of dead jobs; returns the number of keys and jobs."""
        keys = int(await self._maintenance.value("SELECT pgworkd.unblock()"))
        queue, key = "", ""
        while queue is not None:  # in steps: a million keys may be in use
            step = await self._maintenance.fetch(
                "SELECT promoted, last_queue, last_key FROM pgworkd.unblock_lines($1, $2, $3)",
                queue,
                key,
                UNBLOCK_STEP,
            )
            promoted, queue, key = step[0]
            keys += promoted
        mended = MEND_STEP
        while mended >= MEND_STEP:  # in steps: a job may have any number of dependents
            mended = int(await self._maintenance.value("SELECT pgworkd.mend_dependencies($1)", MEND_STEP))
            keys += mended
        queue, key = "", ""
        while queue is not None:
            sql = "SELECT last_queue, last_key FROM pgworkd.forget_rates($1, $2, $3)"
            queue, key = (await self._maintenance.fetch(sql, queue, key, RATES_STEP))[0]
        return keys

    async def apply_effects(self, limit: int = 1000) -> int | None:
        """Applies effects that were deferred: locked, or too many for one transaction.

        Returns how many are left, a negative number if more can be applied right now; None if another daemon does it.
        """
        return cast("int | None", await self._maintenance.value("SELECT pgworkd.apply_effects($1)", limit))

    async def advance_operations(self, limit: int = 500) -> float | None:
        """Does a step of an operation in the background, on at most `limit` jobs.

        Returns the seconds until the next step is due; None if no operation is unfinished.
        """
        sql = "SELECT pgworkd.advance_operations($1)"
        return cast("float | None", await self._maintenance.value(sql, limit))

    async def report_refused(self) -> list[Sequence[Any]]:
        """Rows that maintenance passed over as rejected, not yet logged: (what, sqlstate, count, key, error)."""
        return await self._maintenance.fetch("SELECT what, sqlstate, count, key, error FROM pgworkd.report_refused()")

    async def ensure_today(self) -> None:
        """Creates today's partition of the history if that takes no time; else its rows go where those of no day go."""
        with contextlib.suppress(DatabaseBusy, DatabaseError):
            await self._maintenance.value("SELECT pgworkd.ensure_partitions(0)")

    async def ensure_partitions(self) -> None:
        """Creates the partitions of the history for the coming days, each in a transaction of its own."""
        await self._add_days(DAYS_AHEAD)
        if await self._maintenance.value("SELECT pgworkd.rule_out_days()"):
            await self._validate_days()
            await self._add_days(DAYS_RULED_OUT)
            await self._maintenance.value("SELECT pgworkd.rule_out_days()")

    async def _add_days(self, ahead: int) -> None:
        for days in range(ahead + 1):
            await self._maintenance.value("SELECT pgworkd.ensure_partitions($1)", days)

    async def _validate_days(self) -> None:
        """Reads rows of no day, which may take long, and can be cancelled meanwhile."""
        connection = None
        try:
            connection = await connect(replace(self.options, command_timeout_s=SCAN_S_MAX), "days")
            await connection.execute("SELECT pgworkd.validate_days()")
        except BROKEN as error:
            raise translate(error) from error
        finally:
            if connection is not None:
                connection.terminate()

    async def prune(self, keep_days: int, keep_dead_days: int, limit: int = 5000) -> tuple[int, int]:
        """Deletes old history outside whole partitions; returns (rows deleted, dead jobs moved to the history)."""
        sql = "SELECT rows_deleted, dead_moved FROM pgworkd.prune($1, $2, $3)"
        rows, dead = (await self._maintenance.fetch(sql, keep_days, keep_dead_days, limit))[0]
        return rows, dead

    async def drop_partition(self, keep_days: int) -> bool:
        """Drops the oldest partition beyond `keep_days`; False: there is none, or it is being read."""
        return await self._maintenance.value("SELECT pgworkd.drop_partition($1)", keep_days) is not None

    async def kept_longer(self, keep_days: int) -> list[tuple[str, int]]:
        """(queue, keep_s) of queues whose keep_s is longer than the history is kept."""
        return [(queue, keep_s) for queue, keep_s in await self._maintenance.fetch(_KEPT_LONGER, keep_days * 86_400)]

    async def report_progress(self, rows: Sequence[tuple[UUID, int, float, str]], worker_id: int | None = None) -> None:
        """Stores the progress of attempts that still run: (id, attempt, 0 to 1, message) of each."""
        args = [list(column) for column in zip(*rows, strict=True)]
        await self._maintenance.value(
            "SELECT pgworkd.report_progress($1, $2, $3, $4, $5, $6)", *args, *fence(worker_id)
        )
