"""Operations of a daemon's components for the sweep, except settles."""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

import anyio

from pgworkd.core.claims import ClaimedJob, ClaimOrder
from pgworkd.core.events import Events
from pgworkd.core.fence import Fence
from pgworkd.core.source import Instructions
from pgworkd.database.store import Store
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.counters import Counters
from pgworkd.engine.life.heartbeat import Heartbeat, LeaseOptions
from pgworkd.engine.life.maintenance import Maintenance, Periods
from pgworkd.engine.life.recurring import Recurring
from pgworkd.engine.life.signals import Signals
from pgworkd.engine.shared import Shared
from tests.chaos.wire_kit import Operation, Scene, Told, differs, rows_of, told_by
from tests.kits.daemon import insert, until
from tests.kits.settles import complete


class Engine(Operation):
    """A worker with one due job, and its components, all behind the proxy."""

    may_claim = True  # read by maintenance

    def __init__(self, scene: Scene, number: int) -> None:
        super().__init__(scene, number)
        self.store = Store(scene.options)
        self.in_flight = InFlight()
        self.events = Events()
        self.worker_id = 0
        self.queues = [self.queue]  # read by maintenance

    async def prepare(self) -> None:
        self.worker_id = await self.scene.aside.register("w", 1, "v", 30)
        self.job = await insert(self.db, self.queue)

    def order(self, worker_id: int | None = None) -> ClaimOrder:
        return ClaimOrder(worker_id or self.worker_id, self.queue, 1)

    async def claim(self) -> Attempt:
        """Over a connection of its own, before the operation starts."""
        held = Attempt((await self.scene.aside.claim(self.order()))[0], self.queue)
        self.in_flight.add([held])
        return held

    async def claim_until_it_comes(self) -> ClaimedJob:
        """Claims like the pool, while maintenance releases orphaned attempts."""
        shared = Shared(self.in_flight, self.events, Counters(self.events))
        maintenance = Maintenance(
            self.store,
            Recurring(self.store, self.events),
            Signals(self.store.signals, shared, "", 30, clock_ahead_s=lambda: 0.0, statistics=False),
            self,
            shared,
            periods=Periods(),
            command_timeout_s=0.0,
            on_dead=lambda _: None,
        )
        while not (claims := await self.store.claim(self.order())):
            await maintenance._orphans()
        return claims[0]

    async def run_again(self) -> None:
        """Runs the job to its end, without cuts."""
        claimed = (await self.scene.aside.claim(self.order()))[0]
        await complete(self.scene.aside, Fence.of(claimed.id, claimed.attempt, self.worker_id))

    async def faults(self) -> list[str]:
        return differs("rows of the job", await rows_of(self.db, self.job), [("completed", 1, 0)])

    async def close(self) -> None:
        await self.store.close()


class Claim(Engine):
    """An attempt whose claim got no reply is released by its worker, and counts as an attempt."""

    name = "claim; its worker gives back what it missed"
    cuts_min: ClassVar[tuple[int, int]] = (8, 15)

    async def attempt(self) -> Told:
        self.missed = 0
        self.claimed: ClaimedJob | None = None

        async def claim() -> None:
            self.claimed = (await self.store.claim(self.order()))[0]

        return await told_by(claim())

    async def done(self) -> bool:
        return await rows_of(self.db, self.job) == [("running", 1, 0)]

    async def carry_on(self) -> None:
        if self.claimed is None:
            self.missed = await self.done()
            self.claimed = await self.claim_until_it_comes()
        await complete(self.store, Fence.of(self.claimed.id, self.claimed.attempt, self.worker_id))

    async def faults(self) -> list[str]:
        return differs("rows of the job", await rows_of(self.db, self.job), [("completed", 1 + self.missed, 0)])


class ClaimOfLost(Claim):
    """The worker that missed the reply to its claim dies before it can release the jobs."""

    name = "claim; its worker is lost, another rescues"

    async def carry_on(self) -> None:
        lost, self.worker_id = self.worker_id, await rescuer(self.scene)
        self.missed = await self.done()
        if self.missed:
            await lose(self.scene, lost)
            await rescue_until_it_is_taken(self.scene, self.worker_id, self.job)
        await self.run_again()

    async def faults(self) -> list[str]:
        wanted = [("completed", 1 + self.missed, int(self.missed))]
        return differs("rows of the job", await rows_of(self.db, self.job), wanted)


class Rescue(Engine):
    """The jobs of a lost worker are rescued once."""

    name = "rescue"
    cuts_min = (8, 15)

    async def prepare(self) -> None:
        await super().prepare()
        await self.claim()
        await lose(self.scene, self.worker_id)
        self.worker_id = await rescuer(self.scene)

    async def attempt(self) -> Told:
        return await told_by(self.store.rescue(self.worker_id))

    async def done(self) -> bool:
        return await rows_of(self.db, self.job) == [("failed", 1, 1)]

    async def carry_on(self) -> None:
        await rescue_until_it_is_taken(self.scene, self.worker_id, self.job)
        await self.run_again()

    async def faults(self) -> list[str]:
        return differs("rows of the job", await rows_of(self.db, self.job), [("completed", 2, 1)])


async def lose(scene: Scene, worker_id: int) -> None:
    """A worker whose lease has expired, and was no longer than the server is up: see `rescuer`."""
    sql = "UPDATE pgworkd.workers SET lease_s = 3, lease_until = pgworkd.clock() WHERE id = $1"
    await scene.db.execute(sql, worker_id)


async def rescuer(scene: Scene) -> int:
    """A worker that may rescue: an hour of uninterrupted heartbeats, on a server up for longer than a lease."""
    worker_id = await scene.aside.register("rescuer", 1, "v", 3)
    await until(lambda: scene.db.fetchval("SELECT now() > pg_postmaster_start_time() + interval '3 s'"))
    await _be_steady(scene, worker_id)
    return worker_id


async def _be_steady(scene: Scene, worker_id: int) -> None:
    sql = """UPDATE pgworkd.workers SET seen_at = pgworkd.clock(), lease_until = pgworkd.clock() + interval '3 s',
        steady_since = pgworkd.clock() - interval '1 hour' WHERE id = $1"""
    await scene.db.execute(sql, worker_id)


async def rescue_until_it_is_taken(scene: Scene, worker_id: int, job_id: UUID) -> None:
    """Like each daemon's maintenance, any number of times."""
    while (await rows_of(scene.db, job_id))[0][0] == "running":
        await _be_steady(scene, worker_id)
        await scene.aside.rescue(worker_id)


class RestoreSchedule(Engine):
    """A schedule without a live occurrence gets one."""

    name = "ensure_schedules: a chain is restored"
    cuts_min = (13, 20)

    async def prepare(self) -> None:
        await put_schedule(self.scene.aside, self.queue)

    async def attempt(self) -> Told:
        return await told_by(Recurring(self.store, self.events).refresh())

    async def done(self) -> bool:
        return await occurrences_differ(self) == []

    async def carry_on(self) -> None:
        await Recurring(self.store, self.events).refresh()

    async def faults(self) -> list[str]:
        return await occurrences_differ(self)

    async def close(self) -> None:
        await super().close()
        await drop_schedule(self)


async def put_schedule(store: Store, name: str) -> None:
    """Once a day, in the queue of that name."""
    rule = {"queue": name, "kind": name, "every_s": 86_400, "timezone": "UTC", "missed": "skip", "payload": {}}
    await store.declare_rules(None, {name: {**rule, "missed_grace_s": 60, "waits_for_retries": False}})


async def drop_schedule(operation: Operation) -> None:
    """Deletes the schedule; otherwise the next operation would read one more row."""
    await operation.db.execute("DELETE FROM pgworkd.schedules WHERE name = $1", operation.queue)


async def occurrences_differ(operation: Operation) -> list[str]:
    """A violation, unless the operation's schedule has exactly one live occurrence."""
    sql = "SELECT count(*) FROM pgworkd.jobs WHERE schedule = $1 AND status = 'pending'"
    return differs("live occurrences", await operation.db.fetchval(sql, operation.queue), 1)


class Renewals(Operation):
    """Renewing the lease, in its thread."""

    name = "heartbeat"
    cuts_min = (8, 15)

    async def prepare(self) -> None:
        self.worker_id = await self.scene.aside.register("w", 1, "v", 3)
        connect = Store(self.scene.options).heartbeats
        self.lease = Heartbeat(connect, self.worker_id, self, LeaseOptions(3, 0.05, self.ended))
        self.said: list[str] = []
        self.renewed = anyio.Event()

    async def attempt(self) -> Told:
        self.lease.start()
        await self.renewed.wait()
        return "done"

    async def done(self) -> bool:
        sql = "SELECT seen_at > started_at AND lost_at IS NULL FROM pgworkd.workers WHERE id = $1"
        return bool(await self.db.fetchval(sql, self.worker_id))

    async def faults(self) -> list[str]:
        wrong = differs("what was said of the lease", self.said, [])
        return wrong + differs("lease is fresh", (self.lease.fresh, await self.done()), (True, True))

    async def close(self) -> None:
        await self.lease.stop()

    # What the heartbeat reports.

    def lease_renewed(self) -> None:
        """Then it reads the settings."""

    def on_instructions(self, instructions: Instructions) -> None:
        self.renewed.set()

    def lease_fenced(self, since_s: float) -> None:
        self.said.append("fenced")

    def worker_lost(self) -> None:
        self.said.append("lost")

    def renewal_failed(self, error: Exception) -> None:
        """The thread keeps retrying."""

    def still_running(self) -> int:
        return 0

    def ended(self, reason: str) -> None:
        self.said.append(reason)
