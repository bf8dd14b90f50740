"""Routes of operators for the sweep: the connection of the gateway to the database breaks before any message."""

from __future__ import annotations

from pgworkd.admin import Admin
from pgworkd.admin.schedules import NewSchedule
from pgworkd.core.recurrence import Recurrence
from tests.chaos.wire_kit import Operation
from tests.chaos.wire_routes import Route
from tests.kits.daemon import insert
from tests.kits.verbs import claim, worker


class RetryMany(Route):
    """All dead jobs of a queue."""

    name = "POST /v1/jobs/{operation}, retry"
    sql = "SELECT count(*) = 0 FROM pgworkd.jobs WHERE queue = $1 AND status = 'dead'"

    async def given(self) -> None:
        for _ in range(3):
            await insert(self.db, self.queue)
        await self.db.execute("UPDATE pgworkd.jobs SET status = 'dead' WHERE queue = $1", self.queue)
        self.path, self.body = "/v1/jobs/retry", {"queue": self.queue, "status": "dead"}


class StartOperation(Route):
    """An operation in the background, which is not started twice."""

    name = "POST /v1/jobs/{operation}?background=true"
    sql = "SELECT count(*) = 1 FROM pgworkd.operations WHERE queue = $1"

    async def given(self) -> None:
        await self.db.execute("DELETE FROM pgworkd.operations")
        self.path, self.body = "/v1/jobs/retry?background=true", {"queue": self.queue}


class StopOperation(Route):
    """An operation in the background is stopped."""

    name = "POST /v1/operations/{operation_id}/stop"
    sql = "SELECT finished_at IS NOT NULL FROM pgworkd.operations WHERE queue = $1"

    async def given(self) -> None:
        number = await self.db.fetchval("SELECT pgworkd.start_operation('retry', $1)", self.queue)
        self.path, self.body = f"/v1/operations/{number}/stop", {}


class AskStack(Route):
    """A request for the stack of a running job; the same again replaces it."""

    name = "POST /v1/jobs/{id}/stack"
    sql = "SELECT count(*) = 1 FROM pgworkd.stack_requests WHERE job_id = $1"

    async def given(self) -> None:
        self.key, worker_id = await insert(self.db, self.queue), await worker(self.db, 3600)
        await claim(self.db, worker_id, queue=self.queue)
        self.path = self.path_of(id=self.key)


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
        self.path, self.body = "/v1/queues/one/pause?create=true", {"for_s": 3600}


class PutSchedule(Route):
    """A schedule."""

    name, method = "PUT /v1/schedules/{name}", "PUT"
    sql = "SELECT count(*) = 1 FROM pgworkd.schedules WHERE name = $1"

    async def given(self) -> None:
        self.key = "one"
        await self.db.execute("DELETE FROM pgworkd.schedules")
        self.path, self.body = "/v1/schedules/one", {"queue": "one", "every_s": 3600}


class Resume(Route):
    """The end of a pause."""

    name = "POST /v1/queues/{queue}/resume"
    sql = "SELECT paused_until IS NULL FROM pgworkd.queues WHERE name = $1"

    async def given(self) -> None:
        self.key = "one"
        await self.db.execute("DELETE FROM pgworkd.queues")
        await self.db.execute(
            "INSERT INTO pgworkd.queues (name, concurrency, paused_until) VALUES ('one', 3, 'infinity')"
        )
        self.path = "/v1/queues/one/resume"


class _OfSchedule(Route):
    """What is done to a schedule; $1 is its name."""

    async def given(self) -> None:
        self.key = "one"
        await self.db.execute("DELETE FROM pgworkd.schedules")
        async with Admin(self.scene.aside.options) as admin:
            await admin.schedules.put("one", NewSchedule(self.queue, Recurrence.parse(3600)))
        self.path = self.path_of(name="one")


class EnableSchedule(_OfSchedule):
    """Disabled."""

    name, method = "PATCH /v1/schedules/{name}", "PATCH"
    sql = "SELECT NOT enabled FROM pgworkd.schedules WHERE name = $1"

    async def given(self) -> None:
        await super().given()
        self.body = {"enabled": False}


class RemoveSchedule(_OfSchedule):
    """Removed once."""

    name, method, repeats = "DELETE /v1/schedules/{name}", "DELETE", False
    sql = "SELECT count(*) = 0 FROM pgworkd.schedules WHERE name = $1"


class RunSchedule(_OfSchedule):
    """One job."""

    name, repeats = "POST /v1/schedules/{name}/run", False
    sql = "SELECT CASE count(*) WHEN 0 THEN false WHEN 1 THEN true END FROM pgworkd.jobs WHERE queue = $1"

    async def given(self) -> None:
        await super().given()
        self.key = self.queue


class Mute(Route):
    """No alerts for an hour."""

    name = "POST /v1/dead/mute"
    sql = "SELECT muted_until > now() FROM pgworkd.error_groups WHERE id = $1"

    async def given(self) -> None:
        self.key = await self.db.fetchval(
            "INSERT INTO pgworkd.error_groups (queue, kind, error_group, error_type, pattern, sample_id, deaths,"
            " first_at, last_at) VALUES ($1, 'k', gen_random_uuid(), 'E', '', gen_random_uuid(), 1, now(), now())"
            " RETURNING id",
            self.queue,
        )
        self.path, self.body = "/v1/dead/mute", {"group": self.key, "for_s": 3600}


class _OfEndpoint(Route):
    """What is done to an endpoint; $1 is its name."""

    async def given(self) -> None:
        self.key = "one"
        await self.db.execute("DELETE FROM pgworkd.queues; DELETE FROM pgworkd.endpoints")
        await self.db.execute(
            "INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ('one', 'https://example.com/', true)"
        )
        self.path = self.path_of(name="one")


class PutEndpoint(_OfEndpoint):
    """Another URL."""

    name, method = "PUT /v1/endpoints/{name}", "PUT"
    sql = "SELECT url = 'https://example.org/' FROM pgworkd.endpoints WHERE name = $1"

    async def given(self) -> None:
        await super().given()
        self.body = {"url": "https://example.org/", "unsigned": True}


class DisableEndpoint(_OfEndpoint):
    """Disabled, and its queue paused."""

    name = "POST /v1/endpoints/{name}/disable"
    sql = """SELECT e.disabled_at IS NOT NULL AND q.paused_until = 'infinity'
        FROM pgworkd.endpoints e JOIN pgworkd.queues q ON q.endpoint = e.name WHERE e.name = $1"""

    async def given(self) -> None:
        await super().given()
        await self.db.execute("INSERT INTO pgworkd.queues (name, endpoint) VALUES ('q', 'one')")


class EnableEndpoint(_OfEndpoint):
    """Enabled, and its queue with it."""

    name = "POST /v1/endpoints/{name}/enable"
    sql = """SELECT e.disabled_at IS NULL AND q.paused_until IS NULL
        FROM pgworkd.endpoints e JOIN pgworkd.queues q ON q.endpoint = e.name WHERE e.name = $1"""

    async def given(self) -> None:
        await super().given()
        await self.db.execute("INSERT INTO pgworkd.queues (name, endpoint) VALUES ('q', 'one')")
        await self.db.execute("SELECT pgworkd.disable_endpoint('one', 'test')")


class RemoveEndpoint(_OfEndpoint):
    """Removed once."""

    name, method, repeats = "DELETE /v1/endpoints/{name}", "DELETE", False
    sql = "SELECT count(*) = 0 FROM pgworkd.endpoints WHERE name = $1"


class AddToken(Route):
    """A token, which is told once."""

    name, repeats = "POST /v1/tokens", False
    sql = "SELECT count(*) = 1 FROM pgworkd.tokens WHERE name = $1"

    async def given(self) -> None:
        self.path, self.body = "/v1/tokens", {"name": self.queue, "scopes": {"read": None}}


class RevokeToken(Route):
    """Revoked once."""

    name, method, repeats = "DELETE /v1/tokens/{token}", "DELETE", False
    sql = "SELECT revoked_at IS NOT NULL FROM pgworkd.tokens WHERE id = $1"

    async def given(self) -> None:
        async with Admin(self.scene.aside.options) as admin:
            self.key = str(await admin.tokens.add("x", {"read": None})).split("_")[1]
        self.path = f"/v1/tokens/{self.key}"


ROUTES: list[type[Operation]] = [
    RetryMany,
    StartOperation,
    StopOperation,
    AskStack,
    SetQueue,
    Pause,
    Resume,
    PutSchedule,
    EnableSchedule,
    RunSchedule,
    RemoveSchedule,
    Mute,
    AddToken,
    RevokeToken,
    PutEndpoint,
    DisableEndpoint,
    EnableEndpoint,
    RemoveEndpoint,
]
