"""This process as a worker of the fleet: its registration, its lease, and the instructions it gets.

A worker that cannot renew its lease is *fenced*: everything it runs is cancelled, nothing new is claimed. If a renewal
succeeds after all, it continues under its id; if it was presumed dead, it registers anew, but only after everything
that ran under the old id has ended.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol

import anyio

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.job import Reason
from pgworkd.core.source import Instructions, WorkSource
from pgworkd.database.reconnect import Outage
from pgworkd.database.schema import VERSION
from pgworkd.engine.attempts import InFlight
from pgworkd.engine.life.heartbeat import Heartbeat, LeaseOptions, boot_time_s
from pgworkd.engine.life.queue_overrides import QueueOverrides
from pgworkd.errors import DatabaseUnavailable, PgworkdError


class ServedQueues(Protocol):
    """The queues that a worker serves."""

    @property
    def overrides(self) -> QueueOverrides:
        """The settings in force in each queue."""

    @property
    def names(self) -> Collection[str]:
        """The names of the queues. May be called from any thread."""

    @property
    def running(self) -> int:
        """Handlers that have been called and have not returned. May be called from any thread."""

    def claim_soon(self) -> None:
        """Wakes all claim loops."""

    def release_unstarted(self, reason: Reason) -> None:
        """Releases everything that was claimed and has not begun."""

    def forget_announcements(self) -> None:
        """Announces all pools again: the database may have lost their rows."""


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """What a worker registers as."""

    name: str
    kinds: Collection[str] | None = ()
    """The kinds with a handler in the code; None: any."""
    handled_queues: Collection[str] = ()
    """The queues with a handler in the code; more may be added while the worker runs."""
    kind: str = "daemon"
    """The kind of worker: daemon or gateway."""


class WorkerLife:
    """The registration and the lease. Written in the daemon's loop only; the heartbeat thread calls `still_running`."""

    def __init__(
        self,
        store: WorkSource,
        queues: ServedQueues,
        in_flight: InFlight,
        events_: Events,
        profile: WorkerProfile,
        lease: LeaseOptions,
    ) -> None:
        self.worker_id = 0  # a Registration, once there is one
        self.heartbeat: Heartbeat | None = None
        self.stopping = False
        self.outdated = False
        """The schema is newer than this program."""
        self.clock_ahead_s = 0.0
        """By how many seconds the database's clock was ahead of ours at the last heartbeat; known before any claim."""
        self._store = store
        self._queues = queues
        self._in_flight = in_flight
        self._events = events_
        self._profile, self._lease = profile, lease
        self._fenced = False
        self._lost = anyio.Event()
        self._stopped = False
        self._outage = Outage("lease", events_)

    @property
    def may_claim(self) -> bool:
        """True while the lease is sound, the daemon is not stopping, and the settings of all its queues are known."""
        if self._fenced or self.stopping or self.outdated or not self._queues.overrides.known:
            return False
        return self.lease_holds

    @property
    def lease_holds(self) -> bool:
        """True while the lease protects our jobs, by the clock."""
        return self.heartbeat is not None and self.heartbeat.fresh

    def protects(self) -> bool:
        """Whether a handler may be called now: see `Heartbeat.protects`."""
        return self.heartbeat is not None and self.heartbeat.protects()

    @property
    def lease_left_s(self) -> float:
        """Seconds until the lease expires unless renewed; 0 without one. May be called from any thread."""
        return 0.0 if self.heartbeat is None else self.heartbeat.lease_left_s

    @property
    def database_answers(self) -> bool:
        """True if the last renewal of the lease was answered. May be called from any thread."""
        return self.heartbeat is not None and self.heartbeat.answered

    def still_running(self) -> int:
        """Handlers that have been called and have not returned."""
        return self._queues.running

    def healthy(self) -> bool:
        """True while the heartbeat keeps trying; False when its thread is stuck."""
        return self.heartbeat is not None and boot_time_s() - self.heartbeat.tried_at_s < self._lease.lease_s

    async def register(self) -> float:
        """Registers under a new id; returns when the lease began, on the boot clock. Raises PgworkdError."""
        began_s, profile = boot_time_s(), self._profile
        kinds = None if profile.kinds is None else sorted(profile.kinds)
        self.worker_id = await self._store.register(
            profile.name, os.getpid(), version("pgworkd"), self._lease.lease_s, kinds, profile.kind
        )
        return began_s

    def start(self, began_s: float) -> None:
        """Starts the heartbeat of the lease that `register` began."""
        self.heartbeat = Heartbeat(self._store.heartbeats, self.worker_id, self, self._lease, queues=self._known_queues)
        self.heartbeat.renewed_at_s = began_s
        self.heartbeat.start()

    def _known_queues(self) -> Collection[str]:
        return {*self._profile.handled_queues, *self._queues.names}

    @property
    def queues(self) -> Collection[str]:
        """The names of the queues that it serves."""
        return self._queues.names

    def renew_now(self) -> None:
        """Sends a heartbeat now: it renews the lease and fetches instructions."""
        if self.heartbeat is not None:
            self.heartbeat.renew_now()

    async def stop(self) -> None:
        """Stops the heartbeat; what it still reports is ignored."""
        self._stopped = True
        self._queues.overrides.stop()
        if self.heartbeat is not None:
            await self.heartbeat.stop()

    async def sign_off(
        self, until: float, release_orphans: Callable[[float], Awaitable[None]] | None = None
    ) -> str | None:
        """Ends the registration; returns None, or what is left of us in the database and why.

        Retries until `until` (of `anyio.current_time()`) while the database does not answer.
        """
        outage = Outage("sign-off", self._events)
        while True:
            worker_id = self.worker_id
            try:
                if release_orphans is not None:
                    await release_orphans(0.0)
                if not await self._store.sign_off(worker_id):
                    return "its jobs stay running in the database until its lease expires, and are rescued then"
            except PgworkdError as error:
                if not isinstance(error, DatabaseUnavailable) or anyio.current_time() >= until:
                    return f"could not sign off: {error}"
                await outage.wait(error)
            else:
                if worker_id is self.worker_id:  # else a new one was being registered
                    return None

    async def run(self) -> None:
        """Registers anew each time the worker id is lost, until cancelled; not during a stop."""
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
            if self.heartbeat is not None:
                self.heartbeat.adopt(self.worker_id, began_s)
            self._unfence()

    # Called by the heartbeat.

    def lease_renewed(self) -> None:
        """Lifts a fence: the lease was renewed."""
        if self._fenced and not self._lost.is_set():
            self._unfence()

    def on_instructions(self, instructions: Instructions) -> None:
        """Cancels attempts as requested, applies the rows of `queues`."""
        self._outage.passed()
        self.clock_ahead_s = instructions.clock_ahead_s
        if self._lost.is_set():
            return
        for job_id, attempt in instructions.cancels:
            if (found := self._in_flight.find(job_id, attempt)) is not None:
                found.stop(Reason.CANCEL)
        self._check_schema(instructions.schema_version)
        self._queues.overrides.follow(instructions)

    def _check_schema(self, found: int) -> None:
        """Claims nothing under a newer schema; what runs is settled: migrations keep what that needs."""
        was, self.outdated = self.outdated, found > VERSION
        if self.outdated and not was:
            self._events.emit(events.SCHEMA_NEWER, found=found, ours=VERSION, remedy="upgrade pgworkd and restart it")
            self._queues.release_unstarted(Reason.ELSEWHERE)
        elif was and not self.outdated:
            self._queues.claim_soon()

    def renewal_failed(self, error: Exception) -> None:
        """Notes that a heartbeat failed; the thread keeps trying."""
        self._outage.failed(error)

    def lease_fenced(self, since_s: float) -> None:
        """Cancels everything that runs: other workers may soon take it over."""
        if not self._fenced:
            self._fenced = True
            self._events.emit(events.LEASE_FENCED, since_s=round(since_s, 3), running=self.still_running())
            self._in_flight.stop_all(Reason.FENCE)
            self._queues.release_unstarted(Reason.FENCE)

    def worker_lost(self) -> None:
        """Cancels everything, then registers anew: we were presumed dead, and our jobs rescued."""
        if not self._lost.is_set() and not self._stopped:
            self._events.emit(events.LEASE_LOST, worker_id=self.worker_id)
            self.lease_fenced(0.0)
            self._lost.set()

    def _unfence(self) -> None:
        self._fenced = False
        self._events.emit(events.LEASE_RENEWED, worker_id=self.worker_id)
        self._queues.forget_announcements()
