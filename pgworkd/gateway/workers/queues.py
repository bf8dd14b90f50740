"""The queues of a gateway: those for whose jobs a remote worker waits here, each with its pool."""

from __future__ import annotations

from collections.abc import Collection

from pgworkd.core.events import Events
from pgworkd.core.job import Reason
from pgworkd.engine.life.queue_overrides import QueueOverrides
from pgworkd.engine.life.worker import WorkerLife
from pgworkd.gateway.workers.pool import RemotePool


class RemoteQueues:
    """The pools of all queues that somebody waits for: `ServedQueues`."""

    def __init__(self, events_: Events) -> None:
        self.pools: dict[str, RemotePool] = {}
        self.overrides = QueueOverrides(self.pools, events_, self._refresh)
        self.owner: WorkerLife | None = None
        self.running = 0

    @property
    def names(self) -> Collection[str]:
        """The queues."""
        return list(self.pools)

    def _refresh(self) -> None:
        if self.owner is not None:
            self.owner.renew_now()

    def claim_soon(self) -> None:
        """Wakes all pools."""
        for pool in self.pools.values():
            pool.claim_soon()

    def release_unstarted(self, reason: Reason) -> None:
        """Releases nothing: no job is claimed ahead."""

    def forget_announcements(self) -> None:
        """Announces all pools again."""
        for pool in self.pools.values():
            pool.forget_announcement()
