"""How many jobs to claim beyond the free slots, so that no slot waits for a claim and no daemon hoards."""

from __future__ import annotations

import math
import time

AHEAD_MAX = 2_000
CLAIMS_AHEAD = 4
"""Claims' worth of jobs: with fewer, slots wait whenever a claim takes longer than usual."""
WORTHWHILE = 0.1
"""Of the time of a run: claims that take less are not worth holding jobs back from others for."""
WEIGHT = 0.2
"""Of the newest measurement in each moving average."""


class Prefetch:
    """Little's law: what is finished while a claim is under way has to be there before it is back.

    Several times that is claimed ahead, of the rate that was measured or that the slots can reach at all, whichever is
    lower. Jobs that take long come out at nothing: they would wait here while another daemon has slots. Slots that ran
    dry could have done more than was measured: then what is claimed doubles, up to what they can reach.
    """

    def __init__(self) -> None:
        self.ahead = 0
        """Jobs to claim beyond the free slots."""
        self._claim_s: float | None = None
        self._rate = 0.0
        self._run_s: float | None = None
        self._counted = 0
        self._counted_at = time.monotonic()

    def claimed(self, took_s: float, finished: int, run_s: float, concurrency: int, *, dry: bool) -> None:
        """After each claim: how long it took, how many jobs have finished so far and how long the last one ran.

        `dry`: no job was left here when it came back.
        """
        now = time.monotonic()
        count, elapsed_s = finished - self._counted, now - self._counted_at
        self._counted, self._counted_at = finished, now
        known_s = took_s if self._claim_s is None else self._claim_s
        # One that took very long, like the first, is an exception: it counts little, and not for long.
        self._claim_s = _average(known_s, min(took_s, 10 * known_s), WEIGHT if took_s > known_s else 0.5)
        if not count:
            return
        self._run_s = _average(self._run_s, run_s)
        self._rate += WEIGHT * (count / max(elapsed_s, 1e-6) - self._rate)
        reachable = CLAIMS_AHEAD * self._claim_s * concurrency / max(self._run_s, 1e-6)
        measured = CLAIMS_AHEAD * self._claim_s * self._rate
        ahead = min(reachable, max(measured, 2.0 * (self.ahead + concurrency)) if dry else measured)
        self.ahead = min(AHEAD_MAX, math.ceil(ahead)) if self._claim_s >= WORTHWHILE * self._run_s else 0

    def stalled(self, run_s: float) -> None:
        """What was claimed ahead hardly moves: these jobs take longer than we thought, about so long each."""
        self._run_s = max(self._run_s or 0.0, run_s)
        self.ahead = 0


def _average(known: float | None, new: float, weight: float = WEIGHT) -> float:
    return new if known is None else known + weight * (new - known)
