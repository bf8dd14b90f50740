"""Routes of producers for the sweep: the gateway's connection to the database breaks before any message of a request.

The answer has to say what is known: a success, that it was done; `unavailable` or `busy`, that it was not;
`outcome-unknown`, neither. The same request again then does what is left to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import Any, ClassVar
from uuid import UUID, uuid4

import httpx

from tests.chaos.wire_kit import Operation, Told, differs
from tests.kits.daemon import insert
from tests.kits.gateway import Caller, calling

_UNDONE = {"unavailable", "busy", "timeout"}


def slug_of(answer: httpx.Response) -> str:
    """Which problem a failure is, of those that a cut may cause."""
    assert answer.status_code in (503, 504), answer.text
    return str(answer.json()["type"].rpartition("/")[2])


def told_by_problem(slug: str) -> Told:
    """What a problem tells the caller."""
    return "not done" if slug in _UNDONE else "unknown"


class Route(Operation):
    """One request; `repeats`: the same again does no harm and says so, else only until it was done."""

    cuts_min: ClassVar[tuple[int, int]] = (6, 9)
    stride: ClassVar[int] = 3  # a new gateway for each
    method: ClassVar[str] = "POST"
    sql: ClassVar[str]
    """Whether it is done; $1 is `self.key`."""
    repeats: ClassVar[bool] = True
    headers: Mapping[str, str] = MappingProxyType({})
    serves: Mapping[str, Any] = MappingProxyType({"connections_max": 2})
    """Options of the gateway. Waiting for results has a connection of its own, made before the cut is armed."""

    async def prepare(self) -> None:
        self.stack = AsyncExitStack()
        self.key: Any = self.queue
        self.path, self.body = "", None  # type: tuple[str, Any]
        self.more: dict[str, Any] = {}
        await self.given()
        self.call: Caller = await self.stack.enter_async_context(calling(self.scene.proxy.dsn, **self.serves))

    async def given(self) -> None:
        """What is there before."""

    def path_of(self, **parameters: object) -> str:
        """The path of the route that the operation is named after."""
        return self.name.partition(" ")[2].partition(",")[0].format(**parameters)

    async def send(self) -> Told:
        self.answer = await self.call(self.method, self.path, self.body, headers=dict(self.headers), **self.more)
        return self.told_by_success() if self.answer.is_success else told_by_problem(slug_of(self.answer))

    def told_by_success(self) -> Told:
        """What `self.answer` says, which is a success."""
        return "done"

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
    headers = MappingProxyType({"If-Match": "*"})

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


class Workflow(Route):
    """Jobs that depend on each other: all, or none."""

    name, repeats = "POST /v1/workflows", False
    sql = "SELECT CASE count(*) WHEN 0 THEN false WHEN 2 THEN true END FROM pgworkd.jobs WHERE queue = $1"

    async def given(self) -> None:
        steps = [{"name": "a", "queue": self.queue}, {"name": "b", "queue": self.queue, "after": ["a"]}]
        self.path, self.body = "/v1/workflows", {"jobs": steps}


class Stream(Route):
    """Two steps of lines: all, or none."""

    name, repeats = "POST /v1/jobs/stream", False
    sql = "SELECT CASE count(*) WHEN 0 THEN false WHEN 2500 THEN true END FROM pgworkd.jobs WHERE queue = $1"
    headers = MappingProxyType({"Content-Type": "application/x-ndjson"})

    async def given(self) -> None:
        self.path = "/v1/jobs/stream"
        self.more = {"content": (json.dumps({"queue": self.queue}) + "\n") * 2500}


class _OfBatch(Route):
    """What is done to a batch; $1 is its id."""

    async def given(self) -> None:
        self.key = await self.db.fetchval("SELECT id FROM pgworkd.create_batch($1, $1)", self.queue)
        self.path = self.path_of(id=self.key)


class AddJobs(_OfBatch):
    """All, or none."""

    name, repeats = "POST /v1/batches/{id}/jobs", False
    sql = "SELECT CASE count(*) WHEN 0 THEN false WHEN 3 THEN true END FROM pgworkd.jobs WHERE batch_id = $1"

    async def given(self) -> None:
        await super().given()
        self.body = {"payloads": [{}, {}, {}]}


class AddChild(_OfBatch):
    """Its name makes a repetition harmless."""

    name = "POST /v1/batches/{id}/children"
    sql = "SELECT count(*) = 1 FROM pgworkd.batches WHERE parent_id = $1"

    async def given(self) -> None:
        await super().given()
        self.body = {"name": "child", "payloads": [{}]}


class CancelBatch(_OfBatch):
    """With its jobs."""

    name = "POST /v1/batches/{id}/cancel"
    sql = "SELECT cancelled_at IS NOT NULL FROM pgworkd.batches WHERE id = $1"

    async def given(self) -> None:
        await super().given()
        await self.db.fetch("SELECT pgworkd.add_jobs($1, ARRAY['{}'::jsonb])", self.key)


class DeleteBatch(_OfBatch):
    """A finished one."""

    name, method, repeats = "DELETE /v1/batches/{id}", "DELETE", False
    sql = "SELECT count(*) = 0 FROM pgworkd.batches WHERE id = $1"

    async def given(self) -> None:
        await super().given()
        await self.db.fetch("SELECT pgworkd.seal_batch($1)", self.key)


class Seal(_OfBatch):
    """A batch that is sealed already stays so."""

    name = "POST /v1/batches/{id}/seal"
    sql = "SELECT sealed_at IS NOT NULL FROM pgworkd.batches WHERE id = $1"


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
    CreateJob,
    PutJob,
    Bulk,
    Stream,
    Workflow,
    Cancel,
    Edit,
    Replay,
    Tree,
    AddChild,
    AddJobs,
    Seal,
    CancelBatch,
    DeleteBatch,
    Read,
]
