"""Jobs of kinds that this app has no handler for: as in a rolling deploy, in the old daemon.

If another worker of the queue has a handler, the job is released at once, and claims leave the kind to that worker; a
worker in another language, which does not say what it has, may have any.
Otherwise it is released with a delay and an error that says what is missing; very many such jobs are claimed in doses,
so that they do not hold up the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.job import Ending, Outcome
from pgworkd.core.source import WorkSource
from pgworkd.engine.attempts import Attempt
from pgworkd.errors import PgworkdError

FIRST_S, DELAY_S = 2.0, 30.0
"""The delay after a job's first attempt, and the longest, doubled each time: a new daemon may be about to come."""
RECHECK_S = 10.0
"""How often to check that a worker with a handler still exists."""
ASK_S = 1.0
"""How often at most, as jobs of a kind are claimed, to check whether there is a handler by now."""
DOSE = 1_000
"""At least this many jobs of a kind without any handler are released with their error per `RECHECK_S` before claims
pass over the rest."""
KINDS_MAX = 1_000
"""Kinds remembered per queue; beyond that, those checked longest ago are forgotten, and released one by one."""


@dataclass(slots=True)
class _Kind:
    elsewhere: bool
    asked_at: float
    since: float
    met: int = 0
    """Jobs claimed since the last check."""


class UnknownKinds:
    """The unknown kinds of one daemon, by queue. Times are on the loop's clock."""

    def __init__(self, store: WorkSource, events_: Events) -> None:
        self._store = store
        self._events = events_
        self._queues: dict[str, dict[str, _Kind]] = {}
        self._asking = anyio.Lock()

    async def outcome_of(self, attempt: Attempt) -> Outcome:
        """The outcome of a claimed attempt that has no handler here."""
        kind = attempt.claimed.kind
        try:
            await self._ask(attempt.queue, attempt.worker_id or 0, kind)
        except PgworkdError:
            return _released(attempt)
        known = self._queues[attempt.queue][kind]
        known.met += 1
        if not known.elsewhere:
            return _released(attempt)
        return Outcome(Ending.RELEASED, reason=f"kind {kind!r} is left to another worker of the queue")

    def left_out(self, queue: str) -> list[str]:
        """The kinds that a claim of this queue passes over now."""
        if not (kinds := self._queues.get(queue)):
            return []
        fresh = anyio.current_time() - RECHECK_S
        return [k for k, known in kinds.items() if known.elsewhere or (known.met >= DOSE and known.since > fresh)]

    async def refresh(self, queue: str, worker_id: int) -> None:
        """Checks again, when due, the kinds that are left out. Raises PgworkdError."""
        if left_out := self.left_out(queue):
            await self._ask(queue, worker_id, *left_out)

    async def _ask(self, queue: str, worker_id: int, *about: str) -> None:
        async with self._asking:  # jobs of one kind are claimed together: one of them asks for all
            kinds, now = self._queues.setdefault(queue, {}), anyio.current_time()
            wanted = [kind for kind in about if kind not in kinds or now >= _ask_at(kinds[kind])]
            if not wanted:
                return
            elsewhere = await self._store.kinds_elsewhere(worker_id, queue, wanted)
            for kind in wanted:
                if (known := kinds.get(kind)) is None:
                    known = kinds[kind] = _Kind(elsewhere=False, asked_at=now, since=now)
                    self._events.emit(events.KIND_UNKNOWN, queue=queue, kind=kind, elsewhere=kind in elsewhere)
                known.elsewhere, known.asked_at = kind in elsewhere, now
                kinds[kind] = kinds.pop(kind)
                if now >= known.since + RECHECK_S:
                    known.since, known.met = now, 0
            for kind in list(kinds)[: max(0, len(kinds) - max(KINDS_MAX, len(wanted)))]:
                del kinds[kind]


def _ask_at(known: _Kind) -> float:
    return known.asked_at + (RECHECK_S if known.elsewhere else ASK_S)


def _released(attempt: Attempt) -> Outcome:
    message = f"no handler for kind {attempt.claimed.kind!r}"
    delay_s = min(DELAY_S, FIRST_S * 2.0 ** min(attempt.claimed.attempt - 1, 10))
    return Outcome(Ending.RELEASED, delay_s=delay_s, message=message, reason=message)
