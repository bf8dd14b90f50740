"""The fleet: workers, dead jobs by group of errors, the audit."""

from __future__ import annotations

import json
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from pgworkd.core.access import Access
from pgworkd.gateway.api.models.operators import AuditOut, DeadOut, Muted, MuteIn, WorkersOut
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.answers import BODY, Json, documented
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route

router = APIRouter(prefix="/v1", tags=["operators"], route_class=Route)
Limit = Annotated[int, Query(ge=1, le=1000)]
QueueQuery = Annotated[str | None, Query(max_length=200)]
Group = Annotated[int, Query(ge=1, lt=2**63)]


@router.get("/workers", response_model=WorkersOut, responses=documented())
async def list_workers(request: Request) -> Response:
    """Daemons, gateways and remote workers that have not signed off."""
    need(request, "read")
    async with gateway_of(request).admin() as admin:
        return Json({"workers": [row._asdict() for row in await admin.workers()]})


@router.get("/dead", response_model=DeadOut, responses=documented())
async def list_dead(
    request: Request,
    *,
    since_s: Annotated[float | None, Query(gt=0, le=366 * 86_400)] = None,
    queue: QueueQuery = None,
    limit: Limit = 100,
) -> Response:
    """Dead jobs by queue, kind and group of errors: new groups first, then the largest."""
    need(request, "read", queue)
    async with gateway_of(request).admin() as admin:
        found = await admin.dead.find(since_s, queue, limit)
    return Json(
        {"groups": [row._asdict() for row in found.rows], "groups_total": found.groups, "dead_total": found.dead}
    )


@router.post("/dead/mute", response_model=Muted, responses=documented(*BODY, "not-found"))
async def mute(request: Request, body: MuteIn) -> Response:
    """Send no alert about a group of errors for a time; `for_s` 0 ends that."""
    access = need(request, "operate")
    async with gateway_of(request).admin(access.name) as admin:
        found = await (admin.dead.mute(body.group, body.for_s) if body.for_s else admin.dead.unmute(body.group))
    if not found:
        raise Problem("not-found", f"there is no group of errors {body.group}")
    return Json({"group": body.group, "for_s": body.for_s})


@router.get("/audit", response_model=AuditOut, responses=documented())
async def audit(
    request: Request, *, job_id: UUID | None = None, queue: QueueQuery = None, limit: Limit = 100
) -> Response:
    """Who changed what: the newest entries, of all, one queue or one job. Payloads in them need scope `payload`."""
    need(request, "read", queue)
    async with gateway_of(request).admin() as admin:
        rows = await admin.audit(job_id, queue, limit)
    return Json({"entries": shown_entries(access_of(request), [row._asdict() for row in rows])})


def shown_entries(access: Access, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of the audit, with payloads where the caller may see those of the queue."""
    return [
        row | {name: _shown(row[name], payloads=access.allows("payload", row["queue"])) for name in ("before", "after")}
        for row in rows
    ]


def _shown(text: str, *, payloads: bool) -> object:
    found = json.loads(text)
    if not payloads and isinstance(found, dict):
        found = {name: value for name, value in found.items() if name not in ("payload", "meta")}
    return found
