"""A pool whose claims wait in the gateway: it neither polls nor is notified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pgworkd.engine.claim.poll_mode import PollMode
from pgworkd.engine.claim.pool import Pool

QUICK_S, PAUSE_S = 1.0, 0.25
"""A claim that follows the last one within this time and finds nothing did not wait: a pause comes before the next."""


class LongPoll(PollMode):
    """The next claim follows at once: the gateway answers it when there is a job."""

    def __init__(self) -> None:
        super().__init__()
        self._claimed_at = -QUICK_S
        self._pause_s = 0.0

    def after_claim(self, claimed: int, now: float, *, full: bool) -> bool | None:
        """Announces nothing."""
        self._pause_s = PAUSE_S if not claimed and now - self._claimed_at < QUICK_S else 0.0
        self._claimed_at = now
        return None

    def next_claim_s(self, now: float) -> float:
        """Seconds until the next claim."""
        return self._pause_s


class LongPollPool(Pool):
    """`Pool` over HTTP."""

    def __init__(self, *parts: Any, on_change: Callable[[], None]) -> None:
        """`on_change`: it has been closed, or opened, or has other slots."""
        super().__init__(*parts)
        self._poll_mode = LongPoll()
        self._on_change = on_change

    def close(self) -> None:
        """Closes the pool, and has the gateway told."""
        super().close()
        self._on_change()

    def forget_announcement(self) -> None:
        """Has the gateway told of changed settings."""
        super().forget_announcement()
        self._on_change()
