"""The options of a daemon."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any, Protocol

from pgworkd.core.job import Reason
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.maintenance import Periods

LOOP_LIMIT_LEASES = 3


class Part(Protocol):
    """An optional task that runs as long as the daemon (metrics, HTTP, sd_notify)."""

    async def run(self, daemon: Any) -> None:
        """Runs from before the first connection to the database until cancelled; must not raise."""


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """Options of a daemon; all times in seconds."""

    connection: ConnectionOptions
    worker_name: str = field(default_factory=socket.gethostname)
    """The name of this daemon in logs and lists."""
    lease_s: float = 30.0
    heartbeat_s: float = 10.0
    poll_s: float = 2.0
    shutdown_s: float = 30.0
    cancel_grace_s: float = 5.0
    """Time for the clean-up of a cancelled handler; then it is cancelled again, and at a stop abandoned."""
    transactions_max: int = 20
    """Maximum connections for jobs' transactions, opened as needed; a run or an open claim waits for one."""
    slow_min_s: float = 1.0
    """No run is reported as slow before this many seconds."""
    slow_factor: float = 5.0
    """A run is reported as slow after this many times the average duration of its kind."""
    loop_limit_s: float | None = None
    """How long the event loop may be blocked; then the process ends, or an embedded daemon gives up its lease.

    None: three leases; 0: for ever.
    """
    statistics: bool = True
    """Collect samples of all queues, and what ended in each period."""
    stacks: bool = True
    """Tell operators who ask where a running attempt is: code, never values."""
    periods: Periods = field(default_factory=Periods)
    environment: str | None = None
    """The environment of this process: a database of another one is a copy, whose jobs do not run here."""

    @property
    def loop_limit(self) -> float:
        """`loop_limit_s`, in seconds, with its default."""
        return LOOP_LIMIT_LEASES * self.lease_s if self.loop_limit_s is None else self.loop_limit_s

    def grace_s(self, reason: Reason) -> float:
        """Time for the clean-up of a run that is cancelled for this reason.

        A fence leaves half of the time until the process would be ended: see `Heartbeat`.
        """
        soon = reason in (Reason.FENCE, Reason.LOST)
        return min(self.cancel_grace_s, self.lease_s / 15) if soon else self.cancel_grace_s
