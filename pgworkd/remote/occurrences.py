"""The occurrences that follow those which end here: inserted by the settle itself, as a daemon does.

Of an attempt that was claimed through another gateway, the database knows whether it is an occurrence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pgworkd.database.remote_store import Held, RemoteStore
from pgworkd.database.schedule_store import Occurrence
from pgworkd.engine.life.recurring import Recurring
from pgworkd.remote.workers import RemoteWorkers


class Following(NamedTuple):
    """What to insert with a settle. `is_complete` False: the rule of a schedule is not known here."""

    occurrences: Sequence[Occurrence] = ()
    is_complete: bool = True


class Occurrences:
    """Says what follows."""

    def __init__(
        self, store: RemoteStore, workers: RemoteWorkers, recurring: Recurring, on_unknown: Callable[[], None]
    ) -> None:
        """`on_unknown` is called when an occurrence has been settled whose schedule is not known here."""
        self._store, self._workers, self._recurring, self._on_unknown = store, workers, recurring, on_unknown

    async def following(self, held: Sequence[Held]) -> Following:
        """The occurrences after those among these attempts. Raises PgworkdError."""
        if self._recurring.knows_none:
            return Following()
        found, elsewhere = list[Occurrence | None](), list[Held]()
        for each in held:
            attempt = self._workers.attempt(each)
            if attempt is None:
                elsewhere.append(each)
            elif attempt.claimed.schedule is not None and attempt.claimed.occurrence is not None:
                ran_s = time.monotonic() - (attempt.started or time.monotonic())
                found.append(self._recurring.after(attempt.claimed.schedule, attempt.claimed.occurrence, ran_s))
        if elsewhere:
            rows = await self._store.occurrences([each.job_id for each in elsewhere])
            found += [self._recurring.after(*row) for row in rows]
        known = [each for each in found if each is not None]
        return Following(known, len(known) == len(found))

    def settled(self, following: Following) -> None:
        """They have been inserted."""
        if not following.is_complete:
            self._on_unknown()
