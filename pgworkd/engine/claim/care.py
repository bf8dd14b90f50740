"""Claims after one was refused because of a row, as a trigger of others may: see `32_refused.sql`.

The next claim takes one job, the one after it two, then four, until a claim is refused again; a job that is refused
alone is set aside. Such claims pass over what is set aside. After a while a claim of the usual kind is tried.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import anyio

from pgworkd.errors import DatabaseBusy, DatabaseUnavailable, PgworkdError, WorkerLost

CARE_S, CARE_WAITED_S = 60.0, 600.0
"""How long claims stay careful after one was refused, or has waited for as long as it may."""


class Care:
    """How careful the claims of one queue are."""

    def __init__(self, set_aside: Callable[[PgworkdError | None], Awaitable[int | None]]) -> None:
        """`set_aside`: sets aside the job that the last claim took first, and more of the kind; how many.

        With the error without a trial, else if it is refused again. None: a claim would wait for a lock on all jobs.
        Raises PgworkdError.
        """
        self._set_aside = set_aside
        self._until = -math.inf  # on the loop's clock
        self._most: int | None = None
        self._in_vain = False  # no job was refused alone in a trial, yet the claim of one was

    @property
    def on(self) -> bool:
        """True while claims are to pass over what is set aside."""
        return self._most is not None

    def most(self, limit: int) -> int:
        """How many jobs the next claim may ask for, of `limit`."""
        return limit if self._most is None else min(limit, self._most)

    def passed(self) -> None:
        """Notes that a claim was answered."""
        if self._most is None:
            return
        self._in_vain = False
        self._most = None if anyio.current_time() >= self._until else 2 * self._most

    async def refused(self, error: PgworkdError) -> bool:
        """Notes that a claim failed; True if another may succeed at once. Raises PgworkdError."""
        waited = isinstance(error, DatabaseBusy) and (error.timed_out or error.locked)
        if isinstance(error, WorkerLost) or (isinstance(error, DatabaseUnavailable) and not waited):
            return False
        if self._most != 1:
            self._until = anyio.current_time() + (CARE_WAITED_S if waited else CARE_S)
            self._most, self._in_vain = 1, False
            return True
        forced = self._in_vain
        try:
            count = await self._set_aside(error if forced else None)
        except DatabaseBusy:
            if forced or not waited:
                raise
            count = await self._set_aside(error)  # the trial waited, too: no lock that is gone by now was the reason
        self._in_vain = count == 0
        return count is not None and (count > 0 or not forced)
