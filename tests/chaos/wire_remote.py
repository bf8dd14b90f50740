"""What a gateway does on behalf of remote workers, for the sweep."""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID, uuid4

from pgworkd.core.claims import ClaimOrder
from pgworkd.core.fence import Fence
from pgworkd.core.registration import Registration
from pgworkd.database.remote_store import RENEWED, ClaimWaiter, RemoteStore
from tests.chaos.wire_kit import Operation, Told, differs, rows_of, told_by
from tests.kits.daemon import insert
from tests.kits.settles import complete, failed, released, settle

_RUNNING = "SELECT attempts FROM pgworkd.jobs WHERE id = $1 AND worker_id = $2"
_LEASE = "SELECT extract(epoch FROM lease_until - now())::float8 FROM pgworkd.workers WHERE id = $1"
_OWN_LEASE = "SELECT extract(epoch FROM lease_until - now())::float8 FROM pgworkd.jobs WHERE id = $1"


class Remote(Operation):
    """Two remote workers, one with the only due job, and a gateway behind the proxy."""

    cuts_min: ClassVar[tuple[int, int]] = (8, 15)
    lease_s: ClassVar[float | None] = None
    """Of the attempt, if it has a lease of its own."""

    async def prepare(self) -> None:
        self.store = RemoteStore(self.scene.options, lambda: 1)
        self.aside = RemoteStore(self.scene.aside.options, lambda: 1)
        self.worker = await self.aside.register("a", "v", 30)
        self.other = await self.aside.register("b", "v", 30)
        self.job: UUID = await insert(self.db, self.queue)

    async def claim(self, store: RemoteStore, worker: Registration) -> Fence:
        """The job, for that worker."""
        standing, nonce = await self.aside.standing_worker(), uuid4()
        waiter = ClaimWaiter(worker, 1, self.lease_s)
        found = await store.claim_for([waiter], ClaimOrder(0, self.queue, 0), standing, nonce)
        runs_under = worker if self.lease_s is None else standing
        own = None if self.lease_s is None else nonce
        return Fence(self.job, found.claims[0].attempt, runs_under, runs_under.token, own)

    async def complete(self) -> None:
        """The other worker claims it, and completes it, without cuts."""
        await complete(self.aside, await self.claim(self.aside, self.other))

    async def close(self) -> None:
        await self.store.close()
        await self.aside.close()


class RemoteClaim(Remote):
    """A claim whose answer was lost is given back, for the worker does not name it in its beats."""

    name = "remote: claim_for"

    async def attempt(self) -> Told:
        self.held: Fence | None = None

        async def claim() -> None:
            self.held = await self.claim(self.store, self.worker)

        return await told_by(claim())

    async def done(self) -> bool:
        return await self.db.fetchval(_RUNNING, self.job, self.worker) == 1

    async def carry_on(self) -> None:
        self.missed = self.held is None and await self.done()
        if self.held is not None:
            await complete(self.store, self.held)
            return
        if self.missed:
            orphan = Fence(self.job, 1, self.worker, self.worker.token)
            assert await settle(self.store, released(), orphan) == {self.job: "pending"}
        await self.complete()

    async def faults(self) -> list[str]:
        wanted = [("completed", 1 + self.missed, 0)]
        return differs("rows of the job", await rows_of(self.db, self.job), wanted)


class RemoteComplete(Remote):
    """A settle whose answer was lost is sent again: it changes nothing, and is known to have been done."""

    name = "remote: complete"
    becomes: ClassVar[str] = "completed"
    failures: ClassVar[int] = 0

    async def prepare(self) -> None:
        await super().prepare()
        self.held = await self.claim(self.aside, self.worker)

    async def settle(self) -> set[UUID]:
        """Sends it once."""
        return await complete(self.store, self.held)

    async def attempt(self) -> Told:
        return await told_by(self.settle())

    async def done(self) -> bool:
        return await rows_of(self.db, self.job) == [(self.becomes, 1, self.failures)]

    async def carry_on(self) -> None:
        before = await self.done()
        self.again = await self.settle()
        self.known = await self.store.settled([self.held])
        self.wanted = set() if before else {self.job}

    async def faults(self) -> list[str]:
        return [
            *differs("settled by sending it again", self.again, self.wanted),
            *differs("what is known of it", self.known, {self.job: self.becomes}),
            *differs("rows of the job", await rows_of(self.db, self.job), [(self.becomes, 1, self.failures)]),
        ]


class RemoteCompleteOwn(RemoteComplete):
    """The same for an attempt with a lease of its own."""

    name = "remote: complete, with a lease of its own"
    lease_s = 600.0


class RemoteFail(RemoteComplete):
    """A failure is counted once."""

    name = "remote: fail"
    becomes = "failed"
    failures = 1

    async def settle(self) -> set[UUID]:
        return set(await settle(self.store, failed(3600.0), self.held))


class RemoteRelease(RemoteComplete):
    """A job that is given back counts nothing, however often it is."""

    name = "remote: release"
    becomes = "pending"

    async def settle(self) -> set[UUID]:
        return set(await settle(self.store, released(3600.0), self.held))


class RemoteBeat(Remote):
    """A beat that is sent again renews the lease again."""

    name = "remote: heartbeats"

    async def prepare(self) -> None:
        await super().prepare()
        await self.db.execute("UPDATE pgworkd.workers SET lease_until = now() + interval '1 s'")

    async def attempt(self) -> Told:
        return await told_by(self.store.heartbeats({self.worker: "running", self.other: "running"}))

    async def done(self) -> bool:
        return all([await self.db.fetchval(_LEASE, each) > 20 for each in (self.worker, self.other)])

    async def carry_on(self) -> None:
        beats = await self.store.heartbeats({self.worker: "running", self.other: "running"})
        self.outcomes = {each.outcome for each in beats}

    async def faults(self) -> list[str]:
        return [*differs("outcomes", self.outcomes, {RENEWED}), *differs("leases renewed", await self.done(), True)]


class RemoteExtend(RemoteComplete):
    """A lease of its own is extended, and the attempt still settles."""

    name = "remote: extend"
    lease_s = 60.0

    async def attempt(self) -> Told:
        return await told_by(self.store.extend([self.held], [600.0]))

    async def done(self) -> bool:
        return (await self.db.fetchval(_OWN_LEASE, self.job) or 0) > 500

    async def carry_on(self) -> None:
        await self.store.extend([self.held], [600.0])
        self.extended = await self.done()
        await super().carry_on()
        self.wanted = {self.job}

    async def faults(self) -> list[str]:
        return [*differs("extended", self.extended, True), *await super().faults()]


class RemoteAbandon(RemoteComplete):
    """A worker signs off once; what it held goes back once, and another runs it."""

    name = "remote: abandon"

    async def attempt(self) -> Told:
        return await told_by(self.store.abandon(self.worker))

    async def done(self) -> bool:
        return await rows_of(self.db, self.job) == [("pending", 1, 0)]

    async def carry_on(self) -> None:
        before = await self.done()
        self.again = await self.store.abandon(self.worker)
        self.wanted_again = None if before else [self.job]
        await self.complete()

    async def faults(self) -> list[str]:
        left = await self.db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE id = $1", self.worker)
        return [
            *differs("given back by signing off again", self.again, self.wanted_again),
            *differs("rows of the worker", left, 0),
            *differs("rows of the job", await rows_of(self.db, self.job), [("completed", 2, 0)]),
        ]
