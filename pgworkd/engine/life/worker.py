"""This process as a worker of the fleet: its id, its lease, and what the database wants of it.

A worker that could not renew is *fenced*: everything it runs is ended, nothing new is claimed. When the
renewal comes through after all, it goes on under its id; when it was taken for lost, it registers anew, but
only after everything that ran under the old id has come out.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from importlib.metadata import version

import anyio

from pgworkd.database.heartbeat_store import Instructions
from pgworkd.database.reconnect import Outage
from pgworkd.database.schema import VERSION
from pgworkd.database.store import Store
from pgworkd.engine.attempts import InFlight
from pgworkd.engine.claim.pool import Pool
from pgworkd.engine.life.heartbeat import Heartbeat, boot_time_s
from pgworkd.engine.life.queue_overrides import QueueOverrides
from pgworkd.errors import DatabaseUnavailable, PgworkdError
from pgworkd.words import events
from pgworkd.words.events import Events
from pgworkd.words.job import Reason


class WorkerLife:
    """Written in the daemon's loop only; the lease's thread also reads `pools` and calls `still_running`."""

    def __init__(
        self,
        store: Store,
        in_flight: InFlight,
        events_: Events,
        *,
        name: str,
        kinds: Collection[str] = (),
        queues: Collection[str] = (),
        lease_s: float,
        heartbeat_s: float,
        end_process: Callable[[str], None],
    ) -> None:
        """`kinds` and `queues`: those that the code has handlers for. It may come to serve others."""
        self.worker_id = 0  # a Registration, once there is one
        self.lease: Heartbeat | None = None
        self.live = QueueOverrides(events_, self.renew_now)
        self.stopping = False
        self.outdated = False
        """The schema is newer than this program."""
        self._store = store
        self._in_flight = in_flight
        self._events = events_
        self._name = name
        self._kinds = kinds
        self._queues = queues
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._end_process = end_process
        self._fenced = False
        self._lost = anyio.Event()
        self._over = False
        self._outage = Outage("lease", events_)

    @property
    def may_claim(self) -> bool:
        """True while the lease is sound, the daemon is not stopping, and it is known what holds in its queues."""
        if self._fenced or self.stopping or self.outdated or not self.live.known:
            return False
        return self.lease is not None and self.lease.fresh

    @property
    def pools(self) -> Mapping[str, Pool]:
        """The daemon's, by queue."""
        return self.live.pools

    def still_running(self) -> int:
        """Handlers that have been called and have not come back."""
        return sum(pool.running for pool in list(self.pools.values()))

    def healthy(self) -> bool:
        """True while the heartbeat keeps trying; false when its thread is stuck."""
        return self.lease is not None and boot_time_s() - self.lease.tried_at_s < self._lease_s

    async def register(self) -> float:
        """Enters this worker under a new id; when its lease began, on the boot clock. Raises PgworkdError."""
        began_s = boot_time_s()
        who = (self._name, os.getpid(), version("pgworkd"))
        self.worker_id = await self._store.register(*who, self._lease_s, sorted(self._kinds))
        return began_s

    def start(self, began_s: float) -> None:
        """Begins to renew the lease that `register` began."""
        self.lease = Heartbeat(
            self._store.options,
            self.worker_id,
            self,
            lease_s=self._lease_s,
            heartbeat_s=self._heartbeat_s,
            end_process=self._end_process,
            queues=lambda: {*self._queues, *list(self.pools)},
        )
        self.lease.renewed_at_s = began_s
        self.lease.start()

    def renew_now(self) -> None:
        """Asks what the database wants of us: a heartbeat, now."""
        if self.lease is not None:
            self.lease.renew_now()

    async def stop(self) -> None:
        """Ends the heartbeat; what it still has to say counts no more."""
        self._over = True
        self.live.stop()
        if self.lease is not None:
            await self.lease.stop()

    async def sign_off(self, until: float, release_orphans: Callable[[float], Awaitable[None]]) -> str | None:
        """Leaves the fleet: None, or what is left of us in the database and why.

        Tries again until `until` (of `anyio.current_time()`) while the database does not answer.
        """
        outage = Outage("sign-off", self._events)
        while True:
            worker_id = self.worker_id
            try:
                await release_orphans(0.0)
                if not await self._store.sign_off(worker_id):
                    return "jobs run under its name until its lease is over, and are taken back then"
            except PgworkdError as error:
                if not isinstance(error, DatabaseUnavailable) or anyio.current_time() >= until:
                    return f"could not sign off: {error}"
                await outage.wait(error)
            else:
                if worker_id is self.worker_id:  # else a new one was being registered
                    return None

    async def run(self) -> None:
        """Replaces a lost worker id, whenever it happens, until cancelled; at a stop, there is no use for another."""
        outage = Outage("register", self._events)
        while True:
            await self._lost.wait()
            while self.still_running():
                await anyio.sleep(0.02)
            if self.stopping:
                return
            try:
                began_s = await self.register()
            except PgworkdError as error:
                await outage.wait(error)
                continue
            outage.passed()
            self._lost = anyio.Event()
            if self.lease is not None:
                self.lease.adopt(self.worker_id, began_s)
            self._unfence()

    # What the lease says.

    def lease_renewed(self) -> None:
        """Lifts a fence."""
        if self._fenced and not self._lost.is_set():
            self._unfence()

    def wanted(self, wanted: Instructions) -> None:
        """Ends what is to be cancelled, follows the rows of `queues`."""
        self._outage.passed()
        if self._lost.is_set():
            return
        for job_id, attempt in wanted.cancels:
            if (found := self._in_flight.find(job_id, attempt)) is not None:
                found.stop(Reason.CANCEL)
        self._compare(wanted.schema_version)
        self.live.follow(wanted)

    def _compare(self, found: int) -> None:
        """Under a newer schema nothing is claimed; what runs is settled, as a migration keeps what that needs."""
        was, self.outdated = self.outdated, found > VERSION
        if self.outdated and not was:
            self._events.emit(events.SCHEMA_NEWER, found=found, ours=VERSION, remedy="upgrade pgworkd and restart it")
            for pool in self.pools.values():
                pool.release_unstarted(Reason.ELSEWHERE)
        elif was and not self.outdated:
            for pool in self.pools.values():
                pool.claim_soon()

    def renewal_failed(self, error: Exception) -> None:
        """The heartbeat failed; the thread goes on trying."""
        self._outage.failed(error)

    def lease_fenced(self, since_s: float) -> None:
        """Ends everything that runs: others may soon take it over."""
        if not self._fenced:
            self._fenced = True
            self._events.emit(events.LEASE_FENCED, since_s=round(since_s, 3), running=self.still_running())
            self._in_flight.stop_all(Reason.FENCE)
            for pool in self.pools.values():
                pool.release_unstarted(Reason.FENCE)

    def worker_lost(self) -> None:
        """Our jobs belong to others: ends everything, then a new id."""
        if not self._lost.is_set() and not self._over:
            self._events.emit(events.LEASE_LOST, worker_id=self.worker_id)
            self.lease_fenced(0.0)
            self._lost.set()

    def _unfence(self) -> None:
        self._fenced = False
        self._events.emit(events.LEASE_RENEWED, worker_id=self.worker_id)
        for pool in self.pools.values():
            pool.forget_announcement()
