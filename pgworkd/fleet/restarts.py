"""Restarting processes that died: the delay before each restart, and how an end is logged.

Shared by the supervisor (`--processes`) and the autoscaler.
"""

from __future__ import annotations

import signal

from pgworkd.words.backoff import Backoff

STEADY_S = 60.0
"""A process that ran this long is restarted at once; one that died sooner with a growing delay."""
_BACKOFF = Backoff(base_s=1, factor=2, cap_s=24, jitter=0.25)  # at most 30 s


def restart_delay_s(deaths: int) -> float:
    """Seconds to wait after this many deaths in a row: 0 after the first, then up to 30."""
    return 0.0 if deaths == 1 else _BACKOFF.delay_s(deaths - 1)


def ended_by(code: int) -> dict[str, object]:
    """The exit code, or the signal that ended the process (a negative code), as facts for the log."""
    return {"signal": signal.Signals(-code).name} if -code in set(signal.Signals) else {"exit_code": code}


class Restarts:
    """Counts the deaths in a row of each process, by its number. Pure."""

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}

    def died(self, number: int, lived_s: float) -> float:
        """Records a death after `lived_s` seconds; seconds to wait before the restart."""
        self._deaths[number] = deaths = 1 if lived_s >= STEADY_S else self._deaths.get(number, 0) + 1
        return restart_delay_s(deaths)

    def stopped(self, number: int) -> None:
        """Records an end on request, which resets the count."""
        self._deaths.pop(number, None)
