"""Push, for the sweep: what a daemon that pushes asks of the database, and callbacks, which have no token."""

from __future__ import annotations

from typing import ClassVar
from uuid import uuid4

from pgworkd.core.assignment import sealed
from pgworkd.core.claims import ClaimOrder
from pgworkd.core.fence import Fence
from pgworkd.database.endpoint_store import EndpointStore
from pgworkd.database.remote_store import ClaimWaiter, RemoteStore
from tests.chaos.wire_kit import Operation, Told, differs, rows_of, told_by
from tests.chaos.wire_routes import slug_of, told_by_problem
from tests.chaos.wire_workers import Complete, Extend, Fail, OfWorker, Release
from tests.kits.daemon import insert
from tests.kits.settles import complete


class HandOver(Operation):
    """It is repeated until there is an answer; the attempt is then ended by its callback."""

    name = "push: hand_over"
    cuts_min = (8, 15)

    async def prepare(self) -> None:
        self.store, self.remote = EndpointStore(self.scene.options), RemoteStore(self.scene.aside.options, lambda: 1)
        self.aside = EndpointStore(self.scene.aside.options)
        worker = await self.remote.register("a", "v", 30)
        job = await insert(self.db, self.queue)
        await self.remote.claim_for([ClaimWaiter(worker, 1, None)], ClaimOrder(0, self.queue, 0), worker, uuid4())
        self.standing = await self.aside.standing_worker()
        self.held, self.nonce = Fence(job, 1, int(worker)), uuid4()

    async def attempt(self) -> Told:
        return await told_by(self.store.hand_over(self.held, self.standing, 60.0, self.nonce))

    async def done(self) -> bool:
        sql = "SELECT worker_id = $2 AND assignment_id = $3 FROM pgworkd.jobs WHERE id = $1"
        return bool(await self.db.fetchval(sql, self.held.job_id, self.standing, self.nonce))

    async def carry_on(self) -> None:
        self.again = await self.store.hand_over(self.held, self.standing, 60.0, self.nonce)
        self.other = await self.store.hand_over(self.held, self.standing, 60.0, uuid4())
        ended = Fence(self.held.job_id, 1, self.standing, self.standing.token, self.nonce)
        self.settled = await complete(self.remote, ended)

    async def faults(self) -> list[str]:
        return [
            *differs("passed on by asking again", self.again, True),
            *differs("passed on for another request", self.other, False),
            *differs("settled by the callback", self.settled, {self.held.job_id}),
            *differs("rows of the job", await rows_of(self.db, self.held.job_id), [("completed", 1, 0)]),
        ]

    async def close(self) -> None:
        await self.store.close()
        await self.aside.close()
        await self.remote.close()


class Pause(Operation):
    """An endpoint with its queue, paused by a daemon; the next failure pauses it again."""

    name = "push: pause_endpoint"
    cuts_min = (8, 15)
    sql: ClassVar[str] = """SELECT e.paused_until > now() AND q.paused_until = e.paused_until
        FROM pgworkd.endpoints e JOIN pgworkd.queues q ON q.endpoint = e.name WHERE e.name = $1"""

    async def prepare(self) -> None:
        self.store = EndpointStore(self.scene.options)
        sql = "INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ($1, 'https://example.com/', true)"
        await self.db.execute(sql, self.queue)
        await self.db.execute("INSERT INTO pgworkd.queues (name, endpoint) VALUES ($1, $1)", self.queue)

    async def ask(self) -> bool:
        """Once."""
        return await self.store.pause(self.queue, 600, "it failed")

    async def attempt(self) -> Told:
        return await told_by(self.ask())

    async def done(self) -> bool:
        return bool(await self.db.fetchval(self.sql, self.queue))

    async def carry_on(self) -> None:
        before = await self.done()
        self.wrong = differs("asked again", await self.ask(), self.again(before))

    def again(self, before: bool) -> bool:
        """What it answers then."""
        return True

    async def faults(self) -> list[str]:
        return [*self.wrong, *differs("done", await self.done(), True)]

    async def close(self) -> None:
        await self.store.close()


class Disable(Pause):
    """Disabled once, with one line in the audit."""

    name = "push: disable_endpoint"
    sql = """SELECT e.disabled_at IS NOT NULL AND q.paused_until = 'infinity'
        AND (SELECT count(*) FROM pgworkd.audit a WHERE a.what = 'endpoint'
             AND a.after ->> 'endpoint' = $1) = 1
        FROM pgworkd.endpoints e JOIN pgworkd.queues q ON q.endpoint = e.name WHERE e.name = $1"""

    async def ask(self) -> bool:
        return await self.store.disable(self.queue, "it is gone")

    def again(self, before: bool) -> bool:
        return not before


class _Callback(OfWorker):
    """Its attempt was passed on by a daemon that pushes; who calls back has only the assignment."""

    async def _claim(self, store: RemoteStore) -> list[str]:
        endpoints = EndpointStore(self.scene.aside.options)
        standing, nonce = await endpoints.standing_worker(), uuid4()
        found = await store.claim_for(
            [ClaimWaiter(self.worker, 1, None)], ClaimOrder(0, self.queue, 0), self.worker, nonce
        )
        for each in found.claims:
            assert await endpoints.hand_over(Fence(each.id, 1, int(self.worker)), standing, 60.0, nonce)
        await endpoints.close()
        return [sealed(Fence(each.id, 1, standing, standing.token, nonce)) for each in found.claims]

    async def send(self) -> Told:
        self.answer = await self.call.client.request(self.method, self.path, json=self.body)  # without a token
        return self.told_by_success() if self.answer.is_success else told_by_problem(slug_of(self.answer))


class CallbackComplete(_Callback, Complete):
    """Of a callback that is sent again, the answer says so."""

    name = Complete.name + ", by a callback"


class CallbackFail(_Callback, Fail):
    """A failure is counted once."""

    name = Fail.name + ", by a callback"


class CallbackRelease(_Callback, Release):
    """A job that is given back counts nothing."""

    name = Release.name + ", by a callback"


class CallbackExtend(_Callback, Extend):
    """The time that a callback has."""

    name = Extend.name + ", by a callback"


OPERATIONS: list[type[Operation]] = [
    HandOver,
    Pause,
    Disable,
    CallbackComplete,
    CallbackFail,
    CallbackRelease,
    CallbackExtend,
]
