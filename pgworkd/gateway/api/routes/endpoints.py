"""Endpoints: where the jobs of queues are pushed to."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.endpoints import EndpointRow
from pgworkd.gateway.api.models.endpoints import DisableIn, EndpointIn, EndpointOut, EndpointsOut
from pgworkd.gateway.api.models.operators import Removed
from pgworkd.gateway.api.request.access import need
from pgworkd.gateway.api.request.answers import BODY, Json, documented
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route
from pgworkd.gateway.api.routes.visible import PathName
from pgworkd.push.endpoint import Endpoint

router = APIRouter(prefix="/v1", tags=["endpoints"], route_class=Route)


@router.get("/endpoints", response_model=EndpointsOut, responses=documented())
async def list_endpoints(request: Request) -> Response:
    """The endpoints, with URLs and headers."""
    need(request, "admin")
    async with gateway_of(request).admin() as admin:
        rows = await admin.endpoints.find()
    return Json({"endpoints": [row._asdict() for row in rows]})


@router.get("/endpoints/{name}", response_model=EndpointOut, responses=documented("not-found"))
async def get_endpoint(request: Request, name: PathName) -> Response:
    """One endpoint, with its URL and headers."""
    need(request, "admin")
    async with gateway_of(request).admin() as admin:
        return Json((await _known(admin, name))._asdict())


@router.put("/endpoints/{name}", response_model=EndpointOut, responses=documented(*BODY))
async def put_endpoint(request: Request, name: PathName, body: EndpointIn) -> Response:
    """Make an endpoint, or change all that is said of it; how it fares stays."""
    access = need(request, "admin")
    columns = body.model_dump()
    Endpoint.of(columns | {"name": name})
    async with gateway_of(request).admin(access.name) as admin:
        await admin.endpoints.put(name, columns)
        return Json((await _known(admin, name))._asdict())


@router.post("/endpoints/{name}/disable", response_model=EndpointOut, responses=documented(*BODY, "not-found"))
async def disable_endpoint(request: Request, name: PathName, body: DisableIn | None = None) -> Response:
    """Send nothing more to an endpoint, and pause its queues, until it is enabled."""
    return await _changed(request, name, "disable", (body or DisableIn()).reason)


@router.post("/endpoints/{name}/enable", response_model=EndpointOut, responses=documented("not-found"))
async def enable_endpoint(request: Request, name: PathName) -> Response:
    """Enable an endpoint, or end its pause; queues that were paused because of it go on."""
    return await _changed(request, name, "enable")


@router.delete("/endpoints/{name}", response_model=Removed, responses=documented("not-found"))
async def remove_endpoint(request: Request, name: PathName) -> Response:
    """Remove an endpoint to which no queue is sent any more."""
    access = need(request, "admin")
    async with gateway_of(request).admin(access.name) as admin:
        if not await admin.endpoints.remove(name):
            raise _unknown(name)
    return Json({"name": name, "removed": True})


async def _changed(request: Request, name: str, how: str, *args: str) -> Response:
    access = need(request, "operate")
    async with gateway_of(request).admin(access.name) as admin:
        await getattr(admin.endpoints, how)(name, *args)
        found = (await _known(admin, name))._asdict()
    if not access.has("admin"):  # secrets may stand in these
        found |= {"url": None, "headers": None}
    return Json(found)


async def _known(admin: Admin, name: str) -> EndpointRow:
    found = await admin.endpoints.get(name)
    if found is None:
        raise _unknown(name)
    return found


def _unknown(name: str) -> Problem:
    return Problem("not-found", f"there is no endpoint {name!r}")
