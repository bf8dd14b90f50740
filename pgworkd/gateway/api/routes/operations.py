"""Operations in the background: how far they are; stop one. POST /v1/jobs/retry?background=true starts one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.background import BackgroundOperation
from pgworkd.gateway.api.models.operators import OperationOut, OperationsOut
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.request.answers import Json, documented
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route
from pgworkd.gateway.api.routes.visible import needed_any

router = APIRouter(prefix="/v1", tags=["operators"], route_class=Route)
OperationId = Annotated[int, Path(ge=1, lt=2**63)]


@router.get("/operations", response_model=OperationsOut, responses=documented())
async def list_operations(request: Request, *, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    """Operations in the background: those that go on, then the newest of the others."""
    needed_any(request, "read")
    access = access_of(request)
    async with gateway_of(request).admin() as admin:
        rows = await admin.background.find(limit)
    return Json({"operations": [shown(each) for each in rows if access.allows("read", each.queue)]})


@router.get("/operations/{operation_id}", response_model=OperationOut, responses=documented("not-found"))
async def get_operation(request: Request, operation_id: OperationId) -> Response:
    """One operation."""
    async with gateway_of(request).admin() as admin:
        return Json(shown(await known_operation(request, admin, operation_id, "read")))


@router.post("/operations/{operation_id}/stop", response_model=OperationOut, responses=documented("not-found"))
async def stop_operation(request: Request, operation_id: OperationId) -> Response:
    """Stop an operation; what it has done stays done. One that is over stays as it is."""
    async with gateway_of(request).admin(access_of(request).name) as admin:
        await known_operation(request, admin, operation_id, "operate")
        await admin.background.stop(operation_id)
        return Json(shown(await known_operation(request, admin, operation_id, "operate")))


def shown(each: BackgroundOperation) -> dict[str, object]:
    """The members of an operation in answers."""
    return each._asdict() | {"state": each.state}


async def known_operation(request: Request, admin: Admin, operation_id: int, scope: str) -> BackgroundOperation:
    """The operation, if the caller has the scope for its queue; else Problem not-found, as if there were none."""
    needed_any(request, scope)
    found = await admin.background.get(operation_id)
    if found is None or not access_of(request).allows(scope, found.queue):
        raise Problem("not-found", f"operation {operation_id} is unknown, or was deleted a week after its end")
    return found
