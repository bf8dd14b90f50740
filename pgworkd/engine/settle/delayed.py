"""Outcomes that cannot be stored now: when to retry each, and what to store instead."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from uuid import UUID

import anyio

from pgworkd.engine.attempts import Attempt
from pgworkd.words.job import Ending, Outcome

FIRST_S, LOCKED_CAP_S, CAP_S = 0.05, 0.5, 30.0
"""The first delay; it doubles up to a cap, which is lower for locked rows."""
TICK_S = 0.1
"""Retries are aligned to ticks, so that a thousand locked jobs make one flush each time, not a thousand."""

Item = tuple[Attempt, Outcome]


class Delayed:
    """A heap of outcomes by the time of their retry, on the loop's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._number = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, item: Item, *, locked: bool) -> float:
        """Adds one; returns the seconds until its retry."""
        attempt = item[0]
        delay_s = min(LOCKED_CAP_S if locked else CAP_S, FIRST_S * 2.0 ** min(attempt.delays, 20))
        delay_s *= random.uniform(0.5, 1.0)  # noqa: S311 # nosec B311 # jitter, no secret
        attempt.delays += 1
        now = anyio.current_time()
        at = math.ceil((now + delay_s) / TICK_S) * TICK_S
        heapq.heappush(self._heap, (at, next(self._number), item))
        return at - now

    @property
    def wait_s(self) -> float:
        """Seconds until the first retry. There must be one."""
        return self._heap[0][0] - anyio.current_time()

    def due(self) -> Item | None:
        """The first, if its retry is due."""
        return self._heap[0][2] if self._heap and self.wait_s <= 0 else None

    def pop(self) -> Item:
        """Removes and returns the first."""
        return heapq.heappop(self._heap)[2]


_UNSTORABLE = "unstorable"
_KEPT = "27000"
"""A trigger keeps the row: the same would become of another run."""


def is_last_resort(outcome: Outcome) -> bool:
    """True if there is no simpler outcome to store: the job is dead, with a plain text."""
    return outcome.permanent and (outcome.error or {}).get("type") == _UNSTORABLE


def fallback(outcome: Outcome, code: str) -> Outcome:
    """What to store in place of an outcome that the database rejects: a failure with a plain text, then a dead job."""
    failed = outcome.ending is Ending.FAILED
    ours = failed and (outcome.error or {}).get("type") == _UNSTORABLE
    kept = " (a trigger keeps the row)" if code == _KEPT else ""
    message = f"the outcome {outcome.ending.value!r} could not be stored: {code}{kept}"
    if ours and outcome.message:
        message = outcome.message
    return Outcome(
        Ending.FAILED,
        delay_s=outcome.delay_s if failed else 60.0,
        message=message,
        error={"type": _UNSTORABLE, "message": message},
        permanent=ours or outcome.permanent or code == _KEPT,
    )


def size_of(item: Item) -> int:
    """About how many bytes its settle sends or copies; most of them have been kept in memory since it ran."""
    attempt, outcome = item
    size = len(attempt.claimed.payload or "") + len(outcome.result or "")
    return size if outcome.error is None else size + len(str(outcome.error.get("traceback", "")))


def keys_of(items: Sequence[Item]) -> tuple[list[UUID], list[int]]:
    """The ids and the attempts of these, for a settle."""
    return [attempt.claimed.id for attempt, _ in items], [attempt.claimed.attempt for attempt, _ in items]


def worker_of(items: Sequence[Item]) -> int | None:
    """The worker id under which these were claimed, the same for all of a call."""
    return items[0][0].worker_id
