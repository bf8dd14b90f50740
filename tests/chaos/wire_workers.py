"""Routes of remote workers for the sweep: the gateway's connection to the database breaks before any message of a call.

The worker was registered, and its job claimed, through another gateway, which is gone: this one knows neither.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar
from uuid import uuid4

from pgworkd.core.assignment import sealed
from pgworkd.core.claims import ClaimOrder
from pgworkd.core.fence import Fence
from pgworkd.database.remote_store import ClaimWaiter, RemoteStore
from tests.chaos.wire_kit import STUCK_S, Operation, Told, differs, rows_of
from tests.chaos.wire_routes import Route, slug_of, told_by_problem
from tests.kits.daemon import insert, until

_SILENT_S = 0.1
"""So long no message passes once a gateway has started."""


class Service(Route):
    """A gateway that serves workers; its own beats and maintenance, every few seconds, may be cut as well."""

    stride: ClassVar[int] = 17
    serves = MappingProxyType({"connections_max": 2, "workers": True})

    async def prepare(self) -> None:
        before = await self.db.fetchval(
            "SELECT coalesce(max(id), 0) FROM pgworkd.workers"
        )  # a gateway that was cut off
        await super().prepare()
        begun = "SELECT count(*) > 0 FROM pgworkd.workers WHERE kind = 'gateway' AND id > $1"
        await until(lambda: self.db.fetchval(begun, before))
        await self.scene.proxy.silence(_SILENT_S)


class Register(Service):
    """A second registration harms nobody: nobody renews its lease."""

    name = "POST /v1/workers"
    sql = "SELECT count(*) >= 1 FROM pgworkd.workers WHERE name = $1"

    async def given(self) -> None:
        self.path, self.body = "/v1/workers", {"name": self.queue, "queues": {self.queue: 1}}


class OfWorker(Service):
    """What one worker sends, which has one job or could have it; $1: the worker."""

    lease_s: ClassVar[float | None] = None
    """Of its attempt, if that has a lease of its own."""
    jobs: ClassVar[int] = 1
    claimed: ClassVar[bool] = True

    async def given(self) -> None:
        store = RemoteStore(self.scene.aside.options, lambda: 1)
        self.worker = self.key = await store.register("a", "v", 30)
        await store.set_slots(self.worker, {self.queue: 2})
        self.headers = {"Pgworkd-Secret": self.worker.token.hex}
        self.ids = [await insert(self.db, self.queue) for _ in range(self.jobs)]
        self.assignments = await self._claim(store) if self.claimed else []
        await store.close()
        self.path = self.path_of(worker=int(self.worker), assignment="".join(self.assignments[:1]))
        self.body = {}

    async def _claim(self, store: RemoteStore) -> list[str]:
        standing, nonce = await store.standing_worker(), uuid4()
        order = ClaimOrder(0, self.queue, 0)
        found = await store.claim_for([ClaimWaiter(self.worker, self.jobs, self.lease_s)], order, standing, nonce)
        under = self.worker if self.lease_s is None else standing
        own = None if self.lease_s is None else nonce
        return [sealed(Fence(each.id, 1, under, under.token, own)) for each in found.claims]

    async def rows(self) -> list[tuple[str, int, int]]:
        """Those of all its jobs."""
        return [row for job_id in self.ids for row in await rows_of(self.db, job_id)]


class Serve(OfWorker):
    """What it serves."""

    name, method, claimed = "PUT /v1/workers/{worker}/queues", "PUT", False
    sql = "SELECT count(*) = 1 FROM pgworkd.pools WHERE worker_id = $1 AND concurrency = 7"

    async def given(self) -> None:
        await super().given()
        self.body = {"queues": {self.queue: 7}}


class Beat(OfWorker):
    """Its lease."""

    name = "POST /v1/workers/{worker}/beat"
    sql = "SELECT lease_until > now() + interval '20 s' FROM pgworkd.workers WHERE id = $1"

    async def given(self) -> None:
        await super().given()
        await self.db.execute(
            "UPDATE pgworkd.workers SET lease_until = now() + interval '10 s' WHERE id = $1", self.key
        )
        self.body = {"assignments": self.assignments}


class Ask(OfWorker):
    """What an operator asks of it."""

    name, claimed = "POST /v1/workers/{worker}/ask", False
    sql = "SELECT requested = 'quiet' FROM pgworkd.workers WHERE id = $1"

    async def given(self) -> None:
        await super().given()
        self.body = {"state": "quiet"}


class SignOff(OfWorker):
    """Its job goes back once."""

    name, method, repeats = "DELETE /v1/workers/{worker}", "DELETE", False
    sql = "SELECT count(*) = 0 FROM pgworkd.workers WHERE id = $1"

    async def given(self) -> None:
        await super().given()
        self.body = None

    async def faults(self) -> list[str]:
        return [*await super().faults(), *differs("rows of the job", await self.rows(), [("pending", 1, 0)])]


class Claim(OfWorker):
    """A worker that never learns of its job signs off; another runs it."""

    name, claimed = "POST /v1/claims", False
    sql = "SELECT count(*) = 1 FROM pgworkd.jobs WHERE worker_id = $1 AND status = 'running'"

    async def given(self) -> None:
        await super().given()
        self.body = {"worker": int(self.worker), "queues": [self.queue]}

    async def attempt(self) -> Told:
        answer = await self.call("POST", self.path, self.body, headers=dict(self.headers))
        if not answer.is_success:
            return told_by_problem(slug_of(answer))
        self.assignments = [each["assignment"] for each in answer.json()["assignments"]]
        return "done" if self.assignments else "not done"

    async def carry_on(self) -> None:
        self.missed = not self.assignments and await self.done()
        self.wanted = [("pending", 1, 0)] if self.missed else [("completed", 1, 0)]
        if self.missed:
            await until(lambda: self._sent("DELETE", f"/v1/workers/{int(self.worker)}"), limit_s=STUCK_S)
            return
        await until(self._has_claimed, limit_s=STUCK_S)
        await until(lambda: self._sent("POST", f"/v1/assignments/{self.assignments[0]}/complete", {}), limit_s=STUCK_S)

    async def _has_claimed(self) -> bool:
        return bool(self.assignments) or await self.attempt() == "done"

    async def _sent(self, method: str, path: str, body: Any = None) -> bool:
        return (await self.call(method, path, body, headers=dict(self.headers))).is_success

    async def faults(self) -> list[str]:
        return differs("rows of the job", await self.rows(), self.wanted)


class ClaimOwn(Claim):
    """A job under a lease of its own comes back with that lease."""

    name = "POST /v1/claims, leased by the job"
    sql = "SELECT count(*) = 1 FROM pgworkd.jobs WHERE queue = $1 AND status = 'running'"

    async def given(self) -> None:
        await super().given()
        self.key = self.queue
        self.body |= {"lease": "job", "lease_s": 60}

    async def carry_on(self) -> None:
        await super().carry_on()
        if self.missed:
            self.wanted = [("running", 1, 0)]


class Complete(OfWorker):
    """A settle whose answer was lost is sent again: it changes nothing, and its answer says so."""

    name = "POST /v1/assignments/{assignment}/complete"
    sql = "SELECT EXISTS (SELECT FROM pgworkd.finished_jobs WHERE id = $1 AND status = 'completed')"
    becomes: ClassVar[tuple[str, int, int]] = ("completed", 1, 0)

    async def given(self) -> None:
        await super().given()
        self.key = self.ids[0]

    async def carry_on(self) -> None:
        before = await self.done()
        await super().carry_on()
        self.wrong = differs("repeated", self.answer.json().get("repeated"), before)

    async def faults(self) -> list[str]:
        wanted = [self.becomes] * self.jobs
        return [*await super().faults(), *self.wrong, *differs("rows of the jobs", await self.rows(), wanted)]


class CompleteOwn(Complete):
    """The same for an attempt with a lease of its own."""

    name = "POST /v1/assignments/{assignment}/complete, leased by the job"
    lease_s = 60.0


class CompleteWithJobs(Complete):
    """Its new jobs are there once, and only with its end."""

    name = "POST /v1/assignments/{assignment}/complete, with new jobs"

    async def given(self) -> None:
        await super().given()
        self.body = {"enqueue": [{"queue": f"{self.queue} next"}] * 2}

    async def faults(self) -> list[str]:
        made = await self.db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE queue = $1", f"{self.queue} next")
        return [*await super().faults(), *differs("new jobs", made, 2)]


class Fail(Complete):
    """A failure is counted once."""

    name = "POST /v1/assignments/{assignment}/fail"
    sql = "SELECT status = 'failed' FROM pgworkd.jobs WHERE id = $1"
    becomes = ("failed", 1, 1)

    async def given(self) -> None:
        await super().given()
        self.body = {"message": "no", "retry_in_s": 3600}


class Release(Complete):
    """A job that is given back counts nothing, however often it is."""

    name = "POST /v1/assignments/{assignment}/release"
    sql = "SELECT status = 'pending' FROM pgworkd.jobs WHERE id = $1"
    becomes = ("pending", 1, 0)

    async def given(self) -> None:
        await super().given()
        self.body = {"delay_s": 3600}


class Extend(OfWorker):
    """A lease of its own."""

    name, lease_s = "POST /v1/assignments/{assignment}/extend", 60.0
    sql = "SELECT lease_until > now() + interval '500 s' FROM pgworkd.jobs WHERE id = $1"

    async def given(self) -> None:
        await super().given()
        self.key, self.body = self.ids[0], {"lease_s": 600}


class Settlements(Complete):
    """Many in one call: the answer says of each what is known of it."""

    name, jobs = "POST /v1/settlements", 2
    sql = """SELECT count(*) = 2 FROM pgworkd.finished_jobs
             WHERE queue = (SELECT queue FROM pgworkd.all_jobs WHERE id = $1)"""

    async def given(self) -> None:
        await super().given()
        self.body = {"settlements": [{"assignment": each, "outcome": "complete"} for each in self.assignments]}

    def told_by_success(self) -> Told:
        found = {
            "done" if each["problem"] is None else told_by_problem(each["problem"]["type"].rpartition("/")[2])
            for each in self.answer.json()["settlements"]
        }
        return found.pop() if len(found) == 1 else "unknown"

    async def carry_on(self) -> None:
        before = await self.rows()
        await OfWorker.carry_on(self)
        repeated = [each["repeated"] for each in self.answer.json()["settlements"]]
        self.wrong = differs("repeated", repeated, [row[0] == "completed" for row in before])


ROUTES: list[type[Operation]] = [
    Register,
    Serve,
    Beat,
    Ask,
    Claim,
    ClaimOwn,
    SignOff,
    Complete,
    CompleteOwn,
    CompleteWithJobs,
    Fail,
    Release,
    Extend,
    Settlements,
]
