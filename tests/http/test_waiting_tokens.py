"""A request that waits is answered only as long as its token is good."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.exceptions import HTTPException

from pgworkd.errors import DatabaseUnavailable
from tests.kits.daemon import until
from tests.kits.gateway import also, calling, token
from tests.kits.verbs import Db, insert
from tests.kits.workers import registered

CHECKS = {401: "unauthenticated", 403: "forbidden", 429: "too-many-requests", 503: "authorization-unavailable"}


@pytest.mark.parametrize("what", ["job", "result"])
async def test_a_token_that_is_revoked_ends_what_waits(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for place in ("access", "gateway"):
        monkeypatch.setattr(f"pgworkd.http.request.{place}.CHECKED_S", 0.2)
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
    for place in ("access", "gateway"):
        monkeypatch.setattr(f"pgworkd.http.request.{place}.CHECKED_S", 0.1)
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
    monkeypatch.setattr("pgworkd.http.request.gateway.CHECKED_S", 0.1)
    async with calling(dsn, workers=True) as call:
        worker, raised = await registered(call), 0
        gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        authorize = gateway._authorize

        async def fails(_: Any) -> Any:
            nonlocal raised
            raised += 1
            raise error

        claim = {"worker": worker.id, "queues": ["q"], "max": 1, "wait_s": 20}
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(call("POST", "/v1/claims", claim, headers=worker.headers))
            await until(lambda: gateway.waiters == 1)
            gateway._authorize = fails
            await until(lambda: raised >= 2 if status is None else waiting.done())
            gateway._authorize = authorize
            await insert(db)
            answer = await waiting
            assert answer.status_code == (status or 200)
            if status in CHECKS:
                assert (answer.json()["type"].split("/")[-1], answer.json()["detail"]) == (CHECKS[status], "not yours")
        assert await call.ok("GET", "/v1/queues"), "the gateway goes on"
