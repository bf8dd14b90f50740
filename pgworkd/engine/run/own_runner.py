"""Runs attempts in the transaction that has claimed them, and settles them there, before the slot is free again.

What cannot be settled there is claimed again, and settled as every other attempt is: with the retries of the settler,
and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from pgworkd.core.error_report import ErrorFacts
from pgworkd.core.job import Ending, Outcome, Reason
from pgworkd.database.own_transaction import OwnTransaction
from pgworkd.database.store import Store
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.counters import Counters
from pgworkd.engine.run.runner import Runner, RunnerParts
from pgworkd.engine.runner_task import RunnerTask
from pgworkd.errors import OutcomeUnknown, PgworkdError


class OwnRunner(Runner):
    """`Runner` for the jobs of an `OwnPool`."""

    def __init__(self, parts: RunnerParts, database: Store, counters: Counters) -> None:
        super().__init__(parts)
        self._database, self._counters = database, counters

    async def run(self, attempt: Attempt, task: RunnerTask) -> Outcome:
        """Runs an attempt to its outcome, which is settled if it was claimed in a transaction of its own."""
        outcome = await super().run(attempt, task)
        if attempt.own is None:
            return outcome
        handler = self._handlers.get(attempt.claimed.kind)
        if attempt.reason is Reason.LOST and attempt.started and handler and outcome.ending is Ending.RELEASED:
            facts = ErrorFacts("TransactionLost", Reason.LOST.value, "")
            outcome = self.failure(facts, self.backoff_s(attempt, handler), permanent=False)
        if attempt.settled:
            attempt.status_after = "completed"
        elif not await self._settled(attempt, attempt.own, outcome, task):
            attempt.own.abandon()
            if attempt.reason in (None, Reason.TIMEOUT, Reason.LOST):  # else it is given back as it was
                with contextlib.suppress(PgworkdError):  # it is somebody else's now, or will be
                    claimed = attempt.claimed
                    await self._database.claim_again(attempt.fence, attempt.queue, claimed.kind, claimed.max_attempts)
                attempt.own = None
        return outcome

    async def _settled(self, attempt: Attempt, own: OwnTransaction, outcome: Outcome, task: RunnerTask) -> bool:
        """Settles and commits; False if that is not possible, or may not have been done."""
        if not own.is_open:
            return False
        attempt.outcome, began_s = outcome, time.monotonic()
        try:
            status = await own.end(lambda connection: self._database.settle_on(connection, attempt), attempt.committing)
        except asyncio.CancelledError as error:
            if await task.leave(error):
                raise  # the daemon itself is being torn down
            attempt.outcome_unknown = True
            return False
        except PgworkdError as error:
            attempt.outcome_unknown = isinstance(error, OutcomeUnknown)
            return False
        self._counters.settle_s.observe(time.monotonic() - began_s)
        attempt.status_after = status
        return status is not None
