"""Schedules: recurring rules and their occurrences."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.queries import ListedSchedule
from pgworkd.admin.schedules import NewSchedule
from pgworkd.core.recurrence import Recurrence
from pgworkd.gateway.api.models.jobs import Created
from pgworkd.gateway.api.models.operators import EnableIn, NextOut, Removed, ScheduleIn, ScheduleOut, SchedulesOut
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.answers import BODY, Json, documented
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.once import IdempotencyKey, once
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route
from pgworkd.gateway.api.routes.visible import PathName, needed_any

router = APIRouter(prefix="/v1", tags=["schedules"], route_class=Route)
_MISSING = documented("not-found")
_RUN = documented("not-found", "key-reused", "key-in-use")


@router.get("/schedules", response_model=SchedulesOut, responses=documented())
async def list_schedules(request: Request) -> Response:
    """The schedules of the queues that the token may see."""
    needed_any(request, "read")
    async with gateway_of(request).admin() as admin:
        rows = await admin.schedules.find()
    allowed = access_of(request).allows
    return Json({"schedules": [row._asdict() for row in rows if allowed("read", row.queue)]})


@router.get("/schedules/{name}", response_model=ScheduleOut, responses=_MISSING)
async def get_schedule(request: Request, name: PathName) -> Response:
    """One schedule."""
    async with gateway_of(request).admin() as admin:
        return Json((await _visible(request, admin, name, "read"))._asdict())


@router.get("/schedules/{name}/next", response_model=NextOut, responses=_MISSING)
async def next_occurrences(request: Request, name: PathName, *, n: Annotated[int, Query(ge=1, le=100)] = 5) -> Response:
    """The next instants at which the schedule is due, by the clock of the gateway."""
    async with gateway_of(request).admin() as admin:
        row = await _visible(request, admin, name, "read")
    rule = Recurrence(row.cron, row.every_s, row.timezone)
    found = itertools.accumulate(range(n), lambda at, _: rule.next_after(at), initial=datetime.now(UTC))
    return Json({"next": list(found)[1:]})


@router.put(
    "/schedules/{name}",
    response_model=ScheduleOut,
    responses=documented(*BODY, "conflict") | {201: {"model": ScheduleOut, "description": "It is new"}},
)
async def put_schedule(request: Request, name: PathName, body: ScheduleIn) -> Response:
    """Create a schedule, or replace it; not one that an application's code declares."""
    async with gateway_of(request).admin(access_of(request).name) as admin:
        row, created = await stored(request, admin, name, body)
    return Json(row._asdict(), 201 if created else 200)


async def stored(request: Request, admin: Admin, name: str, body: ScheduleIn) -> tuple[ListedSchedule, bool]:
    """Stores a schedule; how it is listed, and whether it is new. Raises Problem."""
    access = need(request, "operate", body.queue)
    if body.cron is None and body.every_s is None:
        raise Problem("invalid", "the schedule has no rule: give cron or every_s")
    when = body.cron if body.cron is not None else body.every_s or 0
    rule = Recurrence.parse(when, body.timezone, body.missed, body.missed_grace_s)
    if body.cron is not None and body.every_s is not None:
        raise Problem("invalid", "cron and every_s are both given: give one of them")
    schedule = NewSchedule(
        body.queue,
        rule,
        kind=body.kind,
        payload_text=body.payload or "{}",
        priority=body.priority,
        max_attempts=body.max_attempts,
        timeout_s=body.timeout_s,
        enabled=body.enabled,
        wait_for_retries=body.wait_for_retries,
    )
    before = await _find(admin, name)
    if before is not None and not access.allows("operate", before.queue):
        raise Problem("conflict", f"there is a schedule {name!r} that you may not see: choose another name")
    created = await admin.schedules.put(name, schedule)
    if created is None:
        raise Problem("conflict", f"schedule {name!r} is declared in code: change it there, or disable it here")
    return await _visible(request, admin, name, "operate"), created


@router.patch("/schedules/{name}", response_model=ScheduleOut, responses=documented(*BODY, "not-found"))
async def enable_schedule(request: Request, name: PathName, body: EnableIn) -> Response:
    """Enable or disable a schedule."""
    async with gateway_of(request).admin(access_of(request).name) as admin:
        await _visible(request, admin, name, "operate")
        await (admin.schedules.enable(name) if body.enabled else admin.schedules.disable(name))
        return Json((await _visible(request, admin, name, "operate"))._asdict())


@router.delete("/schedules/{name}", response_model=Removed, responses=documented("not-found"))
async def remove_schedule(request: Request, name: PathName) -> Response:
    """Delete a schedule; not while a live worker has it in its code, which would insert it again."""
    async with gateway_of(request).admin(access_of(request).name) as admin:
        await _visible(request, admin, name, "operate")
        await admin.schedules.remove(name)
    return Json({"name": name, "removed": True})


@router.post("/schedules/{name}/run", status_code=201, response_model=Created, responses=_RUN)
async def run_schedule(request: Request, name: PathName, key: IdempotencyKey = None) -> Response:
    """Create a job of the schedule that is due now, beside its occurrences."""
    async with once(request, key, access_of(request).name) as call:
        admin = gateway_of(request).admin_on(call.connection)
        await _visible(request, admin, name, "operate")
        if call.earlier is not None:
            return call.earlier
        made = await admin.schedules.run_now(name)
        return await call.answered({"id": made, "created": True, "changed": False})


async def _find(admin: Admin, name: str) -> ListedSchedule | None:
    return next((row for row in await admin.schedules.find() if row.name == name), None)


async def _visible(request: Request, admin: Admin, name: str, scope: str) -> ListedSchedule:
    needed_any(request, scope)
    row = await _find(admin, name)
    if row is None or not access_of(request).allows(scope, row.queue):
        raise Problem("not-found", f"schedule {name!r} does not exist")
    return row
