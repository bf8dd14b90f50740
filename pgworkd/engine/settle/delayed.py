"""Outcomes that cannot be stored now: when to retry each, and what to store instead."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import Generic, TypeVar

import anyio

from pgworkd.core.job import Ending, Outcome
from pgworkd.engine.settle.item import Item

Ended = TypeVar("Ended", bound=Item)
FIRST_S, LOCKED_CAP_S, CAP_S = 0.05, 0.5, 30.0
"""The first delay; it doubles up to a cap, which is lower for locked rows."""
TICK_S = 0.1
"""Retries are aligned to ticks, so that a thousand locked jobs make one flush each time, not a thousand."""


class Delayed(Generic[Ended]):
    """A heap of outcomes by the time of their retry, on the loop's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ended]] = []
        self._number = itertools.count()
        self.bytes = 0
        """About how many bytes the delayed outcomes have."""

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, item: Ended, cap_s: float) -> float:
        """Adds an outcome; returns the seconds until its retry, at most about `cap_s`."""
        delay_s = min(cap_s, FIRST_S * 2.0 ** min(item.delays, 20))
        delay_s *= random.uniform(0.5, 1.0)  # noqa: S311 # nosec B311 # jitter, no secret
        item.delays += 1
        self.bytes += item.size
        now = anyio.current_time()
        at = math.ceil((now + delay_s) / TICK_S) * TICK_S
        heapq.heappush(self._heap, (at, next(self._number), item))
        return at - now

    @property
    def wait_s(self) -> float:
        """Seconds until the first retry. There must be one."""
        return self._heap[0][0] - anyio.current_time()

    def due(self) -> Ended | None:
        """The first outcome, if its retry is due."""
        return self._heap[0][2] if self._heap and self.wait_s <= 0 else None

    def pop(self) -> Ended:
        """Removes and returns the first outcome."""
        item = heapq.heappop(self._heap)[2]
        self.bytes -= item.size
        return item


_UNSTORABLE = "unstorable"
_KEPT = "27000"
"""The SQLSTATE for a row that a trigger keeps: the same would become of another run."""


def is_last_resort(outcome: Outcome) -> bool:
    """True if there is no simpler outcome to store: the job is dead, with a plain text."""
    return outcome.permanent and (outcome.error or {}).get("type") == _UNSTORABLE


def fallback(outcome: Outcome, code: str) -> Outcome:
    """A simpler outcome in place of one that the database rejects: a failure with a plain text, then a dead job."""
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
