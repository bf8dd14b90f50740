"""Dead jobs by group of errors; mute."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from pgworkd.admin.jobs import JobSelection
from pgworkd.dashboard.pages.jobs import done_to_all
from pgworkd.dashboard.reads import DEAD_MAX, Questions
from pgworkd.dashboard.route import PageRoute, back, form_of, shown
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.routes.visible import needed_any

router = APIRouter(route_class=PageRoute, include_in_schema=False)
GROUPS_MAX = 100
Group = Annotated[int, Path(ge=1, lt=2**63)]
MUTED_S = 86_400.0
SPANS = {"1h": 3600.0, "24h": 86_400.0, "7d": 7 * 86_400.0, "all": None}


@router.get("/dead")
async def dead(
    request: Request,
    *,
    queue: Annotated[str, Query(max_length=200)] = "",
    since: Annotated[str, Query(max_length=10)] = "all",
) -> Response:
    """The groups: new ones first, then the largest."""
    needed_any(request, "read")
    if not access_of(request).allows("read"):
        need(request, "read", queue)
    for_s = SPANS.get(since)

    async def read(reads: Questions) -> dict[str, Any]:
        found = await reads.of("dead", lambda admin: admin.dead.find(for_s, queue or None, GROUPS_MAX, most=DEAD_MAX))
        return {"dead": found, "queue": queue, "since": since, "spans": list(SPANS)}

    return await shown(request, "dead.html", read)


@router.post("/dead/{group}/{act}")
async def act(request: Request, group: Group, act: Literal["retry", "mute", "unmute"]) -> Response:
    """Retries the dead jobs of a group; or sends no alert about it for a day; or sends them again."""
    access = need(request, "operate")
    form = await form_of(request)
    async with gateway_of(request).admin(access.name) as admin:
        if act == "retry":
            which, none = JobSelection(group=group, all_queues=True), f"no dead job is left in group {group}"
            return await done_to_all(request, admin, "retry", which, form.one("back", "/dead"), none)
        found = await (admin.dead.mute(group, MUTED_S) if act == "mute" else admin.dead.unmute(group))
    if not found:
        raise Problem("not-found", f"there is no group of errors {group}")
    said = f"no alert about group {group} for 24 h" if act == "mute" else f"alerts about group {group} are sent again"
    return back(request, form.one("back", "/dead"), said)
