"""What the wake line says, handed to those it concerns."""

from __future__ import annotations

from collections.abc import Mapping

from pgworkd.engine.claim.pool import Pool
from pgworkd.engine.life.maintenance import Chores
from pgworkd.engine.life.worker import Membership


class Hearing:
    """Hears for the whole daemon, in its loop. See `wake.Hearer`."""

    def __init__(self, pools: Mapping[str, Pool], membership: Membership, chores: Chores) -> None:
        self._pools = pools
        self._membership = membership
        self._chores = chores

    def heard_queue(self, queue: str, run_at: float | None) -> None:
        """There may be work in this queue; `run_at`: some of it was due long ago, from then on."""
        if (pool := self._pools.get(queue)) is not None:
            pool.heard(run_at)

    def heard_schedules(self) -> None:
        """A schedule was entered, changed or deleted."""
        self._chores.schedules_changed()

    def heard_effects(self) -> None:
        """Something was put off because it was locked."""
        self._chores.effects_put_off()

    def heard_worker_ended(self) -> None:
        """The process of some worker has ended."""
        self._chores.worker_ended()

    def heard_settings(self) -> None:
        """A row of `queues` was entered, changed or deleted."""
        self._membership.poke()

    def heard_worker(self, worker_id: int) -> None:
        """This worker should ask what is wanted of it."""
        if worker_id == self._membership.worker_id:
            self._membership.poke()

    def heard_anything(self) -> None:
        """The line was down; the server may have been, too, and with it the unlogged table `pools`."""
        for pool in self._pools.values():
            pool.forget_announcement()
        self._chores.schedules_changed()
        self._chores.effects_put_off()
        self._membership.poke()
