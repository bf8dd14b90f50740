"""Routes of the gateway for the sweep: its connection to the database breaks before any message of a request.

The answer has to say what is known: a success, that it was done; `unavailable` or `busy`, that it was not;
`outcome-unknown`, neither. The same request again then does what is left to do.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any, ClassVar
from uuid import UUID, uuid4

from tests.chaos.wire_kit import Operation, Told, differs
from tests.kits.daemon import insert
from tests.kits.gateway import Caller, calling

_UNDONE = {"unavailable", "busy", "timeout"}


class Route(Operation):
    """One request; `repeats`: the same again does no harm and says so, else only until it was done."""

    cuts_min: ClassVar[tuple[int, int]] = (6, 9)
    stride: ClassVar[int] = 3  # a new gateway for each
    method: ClassVar[str] = "POST"
    sql: ClassVar[str]
    """Whether it is done; $1 is `self.key`."""
    repeats: ClassVar[bool] = True
    headers: ClassVar[dict[str, str]] = {}

    async def prepare(self) -> None:
        self.stack = AsyncExitStack()
        self.key: Any = self.queue
        self.path, self.body = "", None  # type: tuple[str, Any]
        await self.given()
        # Waiting for results has a connection of its own, which is made before the cut is armed.
        self.call: Caller = await self.stack.enter_async_context(calling(self.scene.proxy.dsn, connections_max=2))

    async def given(self) -> None:
        """What is there before."""

    async def send(self) -> Told:
        answer = await self.call(self.method, self.path, self.body, headers=dict(self.headers))
        if answer.is_success:
            return "done"
        slug = answer.json()["type"].rpartition("/")[2]
        assert answer.status_code in (503, 504), answer.text
        return "not done" if slug in _UNDONE else "unknown"

    async def attempt(self) -> Told:
        return await self.send()

    async def done(self) -> bool:
        return bool(await self.db.fetchval(self.sql, self.key))

    async def carry_on(self) -> None:
        self.told: Told | None = None
        if self.repeats or not await self.done():
            self.told = await self.send()
            if self.told != "done":
                self.told = await self.send()  # the pool had another connection that was dead

    async def faults(self) -> list[str]:
        wrong = differs("done", await self.done(), True)
        return wrong + (differs("told", self.told, "done") if self.told is not None else [])

    async def close(self) -> None:
        await self.stack.aclose()


class CreateJob(Route):
    """A dedupe key makes a repetition harmless."""

    name = "POST /v1/jobs"
    sql = "SELECT count(*) = 1 FROM pgworkd.jobs WHERE queue = $1"

    async def given(self) -> None:
        self.path = "/v1/jobs"
        self.body = {"queue": self.queue, "dedupe_key": "k", "on_duplicate": "skip"}


class PutJob(Route):
    """The caller's own id does so, too."""

    name, method = "PUT /v1/jobs/{id}", "PUT"
    sql = "SELECT count(*) = 1 FROM pgworkd.jobs WHERE queue = $1"

    async def given(self) -> None:
        self.path, self.body = f"/v1/jobs/{uuid4()}", {"queue": self.queue, "payload": {"n": 1}}


class Bulk(Route):
    """All of them, or none."""

    name, repeats = "POST /v1/jobs/bulk", False
    sql = "SELECT CASE count(*) WHEN 0 THEN false WHEN 50 THEN true END FROM pgworkd.jobs WHERE queue = $1"

    async def given(self) -> None:
        self.path, self.body = "/v1/jobs/bulk", {"jobs": [{"queue": self.queue}] * 50}


class Tree(Route):
    """A whole tree, or nothing of it."""

    name, repeats = "POST /v1/batches", False
    sql = """SELECT CASE count(*) WHEN 0 THEN false WHEN 3 THEN true END FROM pgworkd.batches WHERE name LIKE $1 || '%'
             AND (SELECT count(*) IN (0, 2) FROM pgworkd.jobs WHERE queue = $1)"""

    async def given(self) -> None:
        child = {"name": f"{self.queue} child", "payloads": [{"n": 1}]}
        self.path = "/v1/batches"
        self.body = {"name": self.queue, "queue": self.queue, "children": [child, {**child, "name": f"{self.queue} b"}]}


class Seal(Route):
    """A batch that is sealed already stays so."""

    name = "POST /v1/batches/{id}/seal"
    sql = "SELECT sealed_at IS NOT NULL FROM pgworkd.batches WHERE id = $1"

    async def given(self) -> None:
        made = "SELECT id FROM pgworkd.create_batch($1, $1)"
        self.key = await self.db.fetchval(made, self.queue)
        self.path = f"/v1/batches/{self.key}/seal"


class Cancel(Route):
    """Cancelled once."""

    name, method = "DELETE /v1/jobs/{id}", "DELETE"
    sql = "SELECT EXISTS (SELECT FROM pgworkd.finished_jobs WHERE id = $1 AND status = 'cancelled')"

    async def given(self) -> None:
        self.key = await insert(self.db, self.queue)
        self.path = f"/v1/jobs/{self.key}"


class Edit(Route):
    """A waiting job, as it was read."""

    name, method, repeats = "PATCH /v1/jobs/{id}", "PATCH", False
    sql = "SELECT priority = 7 FROM pgworkd.jobs WHERE id = $1"
    headers: ClassVar[dict[str, str]] = {"If-Match": "*"}

    async def given(self) -> None:
        self.key = await insert(self.db, self.queue)
        self.path, self.body = f"/v1/jobs/{self.key}", {"priority": 7}


class Replay(Route):
    """One new job."""

    name, repeats = "POST /v1/jobs/{id}/replay", False
    sql = "SELECT CASE count(*) WHEN 0 THEN false WHEN 1 THEN true END FROM pgworkd.jobs WHERE queue = $1"

    async def given(self) -> None:
        job_id: UUID = await insert(self.db, self.queue)
        await self.db.fetch("SELECT * FROM pgworkd.cancel($1)", [job_id])
        self.path, self.body = f"/v1/jobs/{job_id}/replay", {}


class RetryMany(Route):
    """All dead jobs of a queue."""

    name = "POST /v1/jobs/retry"
    sql = "SELECT count(*) = 0 FROM pgworkd.jobs WHERE queue = $1 AND status = 'dead'"

    async def given(self) -> None:
        for _ in range(3):
            await insert(self.db, self.queue)
        await self.db.execute("UPDATE pgworkd.jobs SET status = 'dead' WHERE queue = $1", self.queue)
        self.path, self.body = "/v1/jobs/retry", {"queue": self.queue, "status": "dead"}


class SetQueue(Route):
    """A setting."""

    name, method = "PATCH /v1/queues/{queue}", "PATCH"
    sql = "SELECT coalesce((SELECT concurrency = 3 FROM pgworkd.queues WHERE name = $1), false)"

    async def given(self) -> None:
        self.key = "one"  # the answer is made from a list of all: it must not grow from cut to cut
        await self.db.execute("DELETE FROM pgworkd.queues")
        self.path, self.body = "/v1/queues/one", {"concurrency": 3}


class Pause(Route):
    """A pause."""

    name = "POST /v1/queues/{queue}/pause"
    sql = "SELECT coalesce((SELECT paused_until > now() FROM pgworkd.queues WHERE name = $1), false)"

    async def given(self) -> None:
        self.key = "one"
        await self.db.execute("DELETE FROM pgworkd.queues")
        self.path, self.body = "/v1/queues/one/pause", {"for_s": 3600}


class PutSchedule(Route):
    """A schedule."""

    name, method = "PUT /v1/schedules/{name}", "PUT"
    sql = "SELECT count(*) = 1 FROM pgworkd.schedules WHERE name = $1"

    async def given(self) -> None:
        self.key = "one"
        await self.db.execute("DELETE FROM pgworkd.schedules")
        self.path, self.body = "/v1/schedules/one", {"queue": "one", "every_s": 3600}


class AddToken(Route):
    """A token, which is told once."""

    name, repeats = "POST /v1/tokens", False
    sql = "SELECT count(*) = 1 FROM pgworkd.tokens WHERE name = $1"

    async def given(self) -> None:
        self.path, self.body = "/v1/tokens", {"name": self.queue, "scopes": {"read": None}}


class Read(Route):
    """A list changes nothing."""

    name, method = "GET /v1/jobs", "GET"
    sql = "SELECT $1::text IS NOT NULL"

    async def given(self) -> None:
        self.path = f"/v1/jobs?queue={self.queue}"
        await insert(self.db, self.queue, json.dumps({"n": 1}))

    async def attempt(self) -> Told:
        return "done" if await self.send() == "done" else "unknown"


ROUTES: list[type[Operation]] = [
    *(CreateJob, PutJob, Bulk, Tree, Seal, Cancel, Edit, Replay, RetryMany, SetQueue, Pause, PutSchedule, AddToken),
    Read,
]
