"""The trace of whoever calls: its context, in the headers of a request, goes with the jobs that the request creates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.http.test_once import CALLS, NDJSON, prepared
from tests.kits.gateway import calling
from tests.kits.verbs import Db

__all__ = ["prepared"]  # fixtures

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=x"}
OTHER = {"traceparent": "00-11111111111111111111111111111111-2222222222222222-00"}
COPIES = {"/v1/jobs/{job_id}/replay", "/v1/schedules/{name}/run"}
"""Routes whose job has the meta of another one."""
METAS = "SELECT meta::text FROM pgworkd.jobs ORDER BY id"


async def metas(db: Db) -> list[Any]:
    return [None if meta is None else json.loads(meta) for (meta,) in await db.fetch(METAS)]


@pytest.mark.parametrize("route", sorted(CALLS.keys() - COPIES))
async def test_jobs_take_the_context_of_the_request_with_them(
    dsn: str, db: Db, prepared: dict[str, str], route: str
) -> None:
    path, body = CALLS[route][0].format_map(prepared), CALLS[route][1]("")
    sent: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    more = NDJSON if isinstance(body, bytes) else {}
    await db.execute("DELETE FROM pgworkd.jobs")
    async with calling(dsn) as call:
        assert (await call("POST", path, headers=TRACE | more, **sent)).status_code == 201
        found = await metas(db)
        assert found
        assert all(each == TRACE for each in found)
        await db.execute("DELETE FROM pgworkd.jobs")
        await call("POST", path, headers={"traceparent": "00-nothing"} | more, **sent)
        assert not any(await metas(db)), "nor that of the request before"
        await db.execute("DELETE FROM pgworkd.jobs")
        doubled = [*TRACE.items(), *OTHER.items(), *more.items()]
        await call.client.request("POST", path, headers=[*doubled, ("Authorization", f"Bearer {call.token}")], **sent)
        assert not any(await metas(db)), "of two, none is believed"


async def test_a_context_that_a_job_has_of_its_own_is_kept(dsn: str, db: Db) -> None:
    number = "123456789012345678901234567890"
    job = f'{{"queue": "q", "meta": {{"tag": {number}}}}}'
    async with calling(dsn) as call:
        await call("POST", "/v1/jobs", {"queue": "q", "meta": OTHER}, headers=TRACE)
        await call("POST", "/v1/jobs", content=job, headers=TRACE | {"Content-Type": "application/json"})
        await call("PUT", "/v1/jobs/00000000-0000-4000-8000-000000000000", {"queue": "q"}, headers=TRACE)
        again = await call("PUT", "/v1/jobs/00000000-0000-4000-8000-000000000000", {"queue": "q"}, headers=OTHER)
        assert again.json()["created"] is False
        callback = {"name": "b", "sealed": True, "on_complete": {"queue": "done"}}
        await call("POST", "/v1/batches", callback, headers=TRACE)
    rows = [json.loads(row[0]) for row in await db.fetch("SELECT meta::text FROM pgworkd.jobs WHERE queue = 'q'")]
    assert OTHER in rows
    assert TRACE | {"tag": int(number)} in rows
    assert TRACE in rows
    (done,) = await db.fetch("SELECT meta::text FROM pgworkd.jobs WHERE queue = 'done'")
    assert json.loads(done[0]) == TRACE
