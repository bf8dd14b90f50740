"""A request that waits is answered only as long as its token is good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException
from structlog.testing import capture_logs

from pgworkd.core.access import Access
from pgworkd.errors import DatabaseUnavailable
from tests.kits.daemon import until
from tests.kits.gateway import Caller, also, calling, token
from tests.kits.verbs import Db, insert
from tests.kits.workers import Worker, registered

CHECKS = {401: "unauthenticated", 403: "forbidden", 429: "too-many-requests", 503: "authorization-unavailable"}


@pytest.mark.parametrize("what", ["job", "result"])
async def test_a_token_that_is_revoked_ends_what_waits(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for place in ("access", "waiting"):
        monkeypatch.setattr(f"pgworkd.gateway.api.request.{place}.CHECKED_S", 0.2)
    async with calling(dsn, workers=True) as call:
        other = also(call, await token(dsn, {"work": None, "payload": None}))
        worker = await registered(other)
        (job_id,) = await insert(db, queue="elsewhere")

        async def wait() -> httpx.Response:
            if what == "result":
                return await other("GET", f"/v1/jobs/{job_id}/result?wait_s=20")
            claim = {"worker": worker.id, "queues": ["q"], "max": 1, "wait_s": 20}
            return await other("POST", "/v1/claims", claim, headers=worker.headers)

        gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(wait())
            await until(lambda: gateway.waiters == 1)
            await call.ok("DELETE", f"/v1/tokens/{other.token.split('_')[1]}")
            answer = await waiting
        assert (answer.status_code, gateway.waiters) == (401, 0)
        await insert(db)
        assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'") == 0


async def test_a_token_that_stays_good_waits_to_the_end(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("access", "waiting"):
        monkeypatch.setattr(f"pgworkd.gateway.api.request.{place}.CHECKED_S", 0.1)
    async with calling(dsn, workers=True) as call:
        worker, checks = await registered(call), 0
        gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        authorize = gateway._authorize

        async def counted(request: Any) -> Any:
            nonlocal checks
            checks += 1
            return await authorize(request)

        gateway._authorize = counted
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(worker.claim(wait_s=20))
            await until(lambda: checks >= 4)  # the first as it comes
            await insert(db)
            assert len(await waiting) == 1


async def claimed(
    call: Caller, worker: Worker, db: Db, authorize: Any, over: Callable[[asyncio.Task[httpx.Response]], bool]
) -> tuple[httpx.Response, Any]:
    """The answer to a claim during whose wait `authorize` decided until it was `over`; and the job inserted then."""
    gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
    before, body = gateway._authorize, {"worker": worker.id, "queues": ["q"], "max": 1, "wait_s": 20}
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(call("POST", "/v1/claims", body, headers=worker.headers))
        await until(lambda: gateway.waiters == 1)
        gateway._authorize = authorize
        await until(lambda: over(waiting))
        gateway._authorize = before
        (job_id,) = await insert(db)
        return await waiting, job_id


@pytest.mark.parametrize(
    ("work", "later", "ends"),
    [
        (None, {"work": ("z*",)}, True),
        (None, {"read": None}, True),
        (None, {"work": ("*",)}, True),
        (("q",), {"work": ("r",)}, True),
        (("q", "r"), {"work": ("q",)}, True),
        (("q*",), {"work": ("q?",)}, True),
        (("[a-z]*",), {"work": ("?",)}, True),
        (None, {"work": None}, False),
        (None, {"work": None, "read": ("x",)}, False),
        (("q",), {"work": None}, False),
        (("q",), {"work": ("q*",)}, False),
        (("q*",), {"work": ("*",)}, False),
        (("q", "r"), {"work": ("r", "q", "s")}, False),
    ],
)
async def test_who_may_do_less_while_one_waits_is_given_nothing(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch, work: Any, later: dict[str, Any], ends: bool
) -> None:
    """Who may do as much or more, in whatever words, is answered as before."""
    monkeypatch.setattr("pgworkd.gateway.api.request.waiting.CHECKED_S", 0.1)
    async with calling(dsn, workers=True) as call:
        worker, asked = await registered(call), 0
        gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        gateway._authorize = lambda _: Access("u", {"work": work})

        def narrowed(_: Any) -> Access:
            nonlocal asked
            asked += 1
            return Access("u", later)

        answer, job_id = await claimed(
            call, worker, db, narrowed, lambda waiting: waiting.done() if ends else asked >= 3
        )
        assert answer.status_code == (403 if ends else 200)
        running = await db.fetchval("SELECT status = 'running' FROM pgworkd.jobs WHERE id = $1", job_id)
        assert running is not ends


@pytest.mark.parametrize(
    ("check", "status", "says"),
    [
        *(((HTTPException(status, "not yours")), status, "not yours") for status in CHECKS),
        (HTTPException(402, "pay"), 500, "HTTPException(402)"),
        (HTTPException(500, "broken"), 500, "HTTPException(500)"),
        (ZeroDivisionError("by nought"), 500, "by nought"),
        ({"read": None}, 500, "authorize returned dict"),
        (None, 500, "authorize returned NoneType"),
        (lambda: Access("u", {"raed": None}), 500, "did you mean 'read'?"),
        (lambda: Access("u", {"read": "jobs-*"}), 500, "give a list"),
        (lambda: Access("", {}), 500, "the name"),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_what_an_applications_own_check_does_wrong_is_logged_without_the_request(
    dsn: str, check: Any, status: int, says: str, is_async: bool
) -> None:
    def checked(_: Any) -> Any:
        if isinstance(check, Exception):
            raise check
        return check() if callable(check) else check

    async def later(request: Any) -> Any:
        return checked(request)

    async with calling(dsn) as call:
        gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        gateway._authorize = later if is_async else checked
        with capture_logs() as logs:
            answer = await call("GET", "/v1/queues")
        assert answer.status_code == status
        assert call.token not in str(logs)
        if status in CHECKS:
            assert (answer.json()["detail"], logs) == (says, [])
        else:
            (entry,) = logs
            assert "exc_info" not in entry, "a log of the application's own may show the variables of a traceback"
            assert says in entry["exception"]
            assert says not in answer.text


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (KeyError("sub"), 500),
        *((HTTPException(status, "not yours"), status) for status in CHECKS),
        (DatabaseUnavailable("away"), None),
    ],
)
async def test_what_an_applications_own_check_raises_while_one_waits_is_of_that_request_alone(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int | None
) -> None:
    monkeypatch.setattr("pgworkd.gateway.api.request.waiting.CHECKED_S", 0.1)
    async with calling(dsn, workers=True) as call:
        worker, raised = await registered(call), 0

        async def fails(_: Any) -> Any:
            nonlocal raised
            raised += 1
            raise error

        answer, _ = await claimed(
            call, worker, db, fails, lambda waiting: raised >= 2 if status is None else waiting.done()
        )
        assert answer.status_code == (status or 200)
        if status in CHECKS:
            assert (answer.json()["type"].split("/")[-1], answer.json()["detail"]) == (CHECKS[status], "not yours")
        assert await call.ok("GET", "/v1/queues"), "the gateway goes on"
