"""The first page: what needs a human, then the queues."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.dead import DeadGroups
from pgworkd.admin.examination import examine_jobs
from pgworkd.admin.findings import Finding
from pgworkd.dashboard.app import dashboard_of
from pgworkd.dashboard.pages.history import Span, charts, sparks
from pgworkd.dashboard.reads import DEAD_MAX, Questions
from pgworkd.dashboard.route import PageRoute, shown
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.routes.visible import needed_any

router = APIRouter(route_class=PageRoute, include_in_schema=False)
DEAD_S = 86_400.0
GROUPS_MAX = 5
QUEUES_MAX = 50


@router.get("/")
async def overview(request: Request, span: Span = "1h") -> Response:
    """What needs a human first: findings of doctor, what died in 24 h; and how the queues stand."""
    needed_any(request, "read")
    return await shown(request, "overview.html", lambda reads: _read(request, reads, span))


async def _findings(admin: Admin) -> list[Finding]:
    return await examine_jobs(admin, standby=(await admin.server()).standby)


async def _read(request: Request, reads: Questions, span: Span) -> dict[str, Any]:
    access, dashboard = access_of(request), dashboard_of(request)
    queues = await reads.of("queues", lambda admin: admin.queues.find()) or []
    findings = list[Finding]()
    dead: DeadGroups | None = None
    drawn: dict[str, Any] = {"charts": []}
    if access.allows("read"):  # they name any queue
        findings = [each for each in await reads.of("findings", _findings) or [] if each.level != "ok"]
        dead = await reads.of("dead", lambda admin: admin.dead.find(DEAD_S, None, GROUPS_MAX, most=DEAD_MAX))
        drawn = await charts(reads, span, None)
    seen = [each for each in queues if access.allows("read", each.queue)]
    seen.sort(key=lambda each: -(each.oldest_due_s or 0.0))  # of equal ones by name, as they are
    shown_queues = seen[:QUEUES_MAX]
    return drawn | {
        "frame": (dashboard.frame_url, dashboard.frame_origin) if dashboard.frame_url is not None else None,
        "queues": shown_queues,
        "queues_total": len(seen),
        "sparks": await sparks(reads, [each.queue for each in shown_queues]),
        "findings": findings,
        "dead": dead,
    }
