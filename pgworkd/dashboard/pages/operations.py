"""Operations in the background: how far they are; stop."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from pgworkd.dashboard.reads import Questions
from pgworkd.dashboard.route import PageRoute, back, form_of, shown
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.routes.operations import OperationId, known_operation
from pgworkd.gateway.api.routes.visible import needed_any

router = APIRouter(route_class=PageRoute, include_in_schema=False)
ROWS = 100
PLACE = "/operations"


@router.get(PLACE)
async def operations(request: Request) -> Response:
    """Operations that go on, then the newest of the others."""
    needed_any(request, "read")
    access = access_of(request)

    async def read(reads: Questions) -> dict[str, Any]:
        found = await reads.of("operations", lambda admin: admin.background.find(ROWS)) or []
        workers = await reads.of("workers", lambda admin: admin.workers())
        is_alone = workers is not None and not any(each.kind == "daemon" and each.state != "lost" for each in workers)
        return {"operations": [each for each in found if access.allows("read", each.queue)], "is_alone": is_alone}

    return await shown(request, "operations.html", read)


@router.post(PLACE + "/{operation_id}/stop")
async def stop(request: Request, operation_id: OperationId) -> Response:
    """Stops one; what it has done stays done."""
    form = await form_of(request)
    async with gateway_of(request).admin(access_of(request).name) as admin:
        await known_operation(request, admin, operation_id, "operate")
        stopped = await admin.background.stop(operation_id)
    said = f"operation {operation_id} is stopped" if stopped else f"operation {operation_id} was over before"
    return back(request, form.one("back", PLACE), said)
