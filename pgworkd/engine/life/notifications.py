"""What the wake line says, handed to those it concerns."""

from __future__ import annotations

from collections.abc import Mapping

from pgworkd.engine.claim.pool import Pool
from pgworkd.engine.life.maintenance import Maintenance
from pgworkd.engine.life.worker import WorkerLife


class Notifications:
    """Hears for the whole daemon, in its loop. See `wake.NotificationHandler`."""

    def __init__(self, pools: Mapping[str, Pool], worker: WorkerLife, maintenance: Maintenance) -> None:
        self._pools = pools
        self._worker = worker
        self._maintenance = maintenance

    def on_queue(self, queue: str, run_at: float | None) -> None:
        """There may be work in this queue; `run_at`: some of it was due long ago, from then on."""
        if (pool := self._pools.get(queue)) is not None:
            pool.notified(run_at)

    def on_schedules(self) -> None:
        """A schedule was entered, changed or deleted."""
        self._maintenance.schedules_changed()

    def on_effects(self) -> None:
        """Something was put off because it was locked."""
        self._maintenance.effects_deferred()

    def on_worker_ended(self) -> None:
        """The process of some worker has ended."""
        self._maintenance.worker_ended()

    def on_settings(self) -> None:
        """A row of `queues` was entered, changed or deleted."""
        self._worker.renew_now()

    def on_worker(self, worker_id: int) -> None:
        """This worker should ask what is wanted of it."""
        if worker_id == self._worker.worker_id:
            self._worker.renew_now()

    def on_reconnect(self) -> None:
        """The line was down; the server may have been, too, and with it the unlogged table `pools`."""
        for pool in self._pools.values():
            pool.forget_announcement()
        self._maintenance.schedules_changed()
        self._maintenance.effects_deferred()
        self._worker.renew_now()
