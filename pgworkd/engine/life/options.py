"""What a daemon is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.maintenance import Periods
from pgworkd.words.job import Reason


class Part(Protocol):
    """An optional companion that lives as long as the daemon (metrics, HTTP, sd_notify)."""

    async def run(self, daemon: Any) -> None:
        """Runs from before the first contact with the database until cancelled; must not raise."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a daemon needs to know. Times in seconds."""

    connection: ConnectionOptions
    worker_name: str = "worker"
    lease_s: float = 30.0
    heartbeat_s: float = 10.0
    poll_s: float = 2.0
    shutdown_s: float = 30.0
    cancel_grace_s: float = 5.0
    """How long the clean-up of a cancelled handler may take; then it is cancelled again, and at a stop given up."""
    transactions_max: int = 20
    """The most connections for `job.transaction()`; they are made as slots need them. A run waits for a free one."""
    slow_min_s: float = 1.0
    slow_factor: float = 5.0
    periods: Periods = field(default_factory=Periods)

    def grace_s(self, reason: Reason) -> float:
        """How long the clean-up may take of a run that ends for this reason.

        A fence leaves half of the time until the process would be ended: see `Heartbeat`.
        """
        return min(self.cancel_grace_s, self.lease_s / 15) if reason is Reason.FENCE else self.cancel_grace_s
