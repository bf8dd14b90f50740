"""Passes each notification to the part of the daemon that it concerns."""

from __future__ import annotations

from pgworkd.engine.life.maintenance import Maintenance
from pgworkd.engine.life.queues import QueueSet
from pgworkd.engine.life.worker import WorkerLife


class Notifications:
    """The daemon's `database.listener.NotificationHandler`, in its loop."""

    def __init__(self, queues: QueueSet, worker: WorkerLife, maintenance: Maintenance) -> None:
        self._queues = queues
        self._worker = worker
        self._maintenance = maintenance

    def on_queue(self, queue: str, run_at: float | None) -> None:
        """Jobs may be due in this queue; `run_at`: one of them, due long ago, can be claimed again."""
        if (pool := self._queues.pools.get(queue)) is not None:
            pool.notified(run_at)

    def on_schedules(self) -> None:
        """A schedule was inserted, changed or deleted."""
        self._maintenance.schedules_changed()

    def on_effects(self) -> None:
        """An effect was deferred, because a row was locked."""
        self._maintenance.effects_deferred()

    def on_worker_ended(self) -> None:
        """The process of some worker has ended."""
        self._maintenance.worker_ended()

    def on_settings(self) -> None:
        """A row of `queues` was inserted, changed or deleted."""
        self._worker.renew_now()

    def on_worker(self, worker_id: int) -> None:
        """The database has instructions for this worker."""
        if worker_id == self._worker.worker_id:
            self._worker.renew_now()

    def on_reconnect(self) -> None:
        """The connection was lost; the server may have crashed, and lost the unlogged table `pools`."""
        self._queues.forget_announcements()
        self._maintenance.schedules_changed()
        self._maintenance.effects_deferred()
        self._worker.renew_now()
