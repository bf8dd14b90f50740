"""Endpoints: where jobs are pushed to; enable and disable."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from pgworkd.dashboard.names import PageName
from pgworkd.dashboard.reads import Questions
from pgworkd.dashboard.route import PageRoute, back, form_of, shown
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/push")
async def push(request: Request) -> Response:
    """The endpoints; their addresses, in which secrets may stand, for those who may change them."""
    need(request, "read")

    async def read(reads: Questions) -> dict[str, Any]:
        found = await reads.of("endpoints", lambda admin: admin.endpoints.find()) or []
        is_admin = access_of(request).has("admin")
        return {"endpoints": [each if is_admin else each._replace(url="") for each in found]}

    return await shown(request, "push.html", read)


@router.post("/push/{name}/{act}")
async def act(request: Request, name: PageName, act: Literal["enable", "disable"]) -> Response:
    """Sends nothing more to an endpoint, whose queues are paused with it; or goes on."""
    access = need(request, "operate")
    form = await form_of(request)
    async with gateway_of(request).admin(access.name) as admin:
        if await admin.endpoints.get(name) is None:
            raise Problem("not-found", f"there is no endpoint {name!r}")
        await (admin.endpoints.enable(name) if act == "enable" else admin.endpoints.disable(name))
    return back(request, form.one("back", "/push"), f"endpoint {name} is {act}d")
