"""Queues: depths, settings, pauses."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.queries import QueueRow
from pgworkd.core.access import Access
from pgworkd.core.validation import closest
from pgworkd.gateway.api.models.operators import Depth, PauseIn, QueueOut, QueueSettings, QueuesOut
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.answers import BODY, Json, documented
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route
from pgworkd.gateway.api.routes.visible import PathName, needed_any
from pgworkd.settings.queue import EffectiveSetting, effective_settings

router = APIRouter(prefix="/v1", tags=["queues"], route_class=Route)
DEPTH_MAX = 100_000
Create = Annotated[bool, Query(description="Also a queue that does not exist yet")]


@router.get("/queues", response_model=QueuesOut, responses=documented())
async def list_queues(request: Request) -> Response:
    """The queues that the token may see, with their depths, and settings with their sources.

    Where counting takes long, depths are those of the last sample, whose age `sample_age_s` tells.
    """
    needed_any(request, "read")
    async with gateway_of(request).admin() as admin:
        found = await read_queues(admin)
    return Json({"queues": visible_queues(access_of(request), found)})


@router.get("/queues/{queue}", response_model=QueueOut, responses=documented("not-found"))
async def get_queue(request: Request, queue: PathName) -> Response:
    """One queue."""
    need(request, "read", queue)
    async with gateway_of(request).admin() as admin:
        return Json(await _queue(admin, queue))


@router.get("/queues/{queue}/depth", response_model=Depth, responses=documented())
async def get_depth(
    request: Request, queue: PathName, *, most: Annotated[int, Query(ge=1, le=1_000_000)] = DEPTH_MAX
) -> Response:
    """How many jobs could run now, counted up to `most`; 0 for an unknown queue. For autoscalers."""
    need(request, "metrics", queue)
    async with gateway_of(request).admin() as admin:
        return Json({"depth": await admin.queues.depth(queue, most)})


@router.patch("/queues/{queue}", response_model=QueueOut, responses=documented(*BODY, "not-found"))
async def set_queue(request: Request, queue: PathName, settings: QueueSettings) -> Response:
    """Override settings of a queue for all daemons; null restores what the code says."""
    access = need(request, "operate", queue)
    changes = settings.model_dump(exclude_unset=True)
    if not changes:
        raise Problem("invalid", "nothing to change: give a setting, such as concurrency")
    if "endpoint" in changes:  # it says where jobs are sent, signed with a secret that is not the caller's
        need(request, "admin")
    if settings.serialize_scope is not None:  # its jobs would wait for those of others, and these for them
        need(request, "operate", settings.serialize_scope)
    async with gateway_of(request).admin(access.name) as admin:
        await admin.queues.set(queue, changes)
        return Json(await _queue(admin, queue, is_known=True))


@router.post("/queues/{queue}/pause", response_model=QueueOut, responses=documented(*BODY, "not-found"))
async def pause_queue(
    request: Request, queue: PathName, pause: PauseIn | None = None, *, create: Create = False
) -> Response:
    """Start no more jobs of a queue, for a time or until resumed; running ones continue."""
    access = need(request, "operate", queue)
    wanted = pause or PauseIn()
    async with gateway_of(request).admin(access.name) as admin:
        if not create and not await admin.queues.exists(queue):
            visible = [name for name in await admin.queues.names() if access.allows("operate", name)]
            found = closest(queue, visible)
            hint = f"did you mean {found!r}?" if found else "send ?create=true for one that does not exist yet"
            raise Problem("not-found", f"queue {queue!r} has no live job, no worker and no settings: {hint}")
        await admin.queues.pause(queue, wanted.for_s, wanted.until)
        return Json(await _queue(admin, queue))


@router.post("/queues/{queue}/resume", response_model=QueueOut, responses=documented("not-found"))
async def resume_queue(request: Request, queue: PathName) -> Response:
    """End the pause of a queue."""
    access = need(request, "operate", queue)
    async with gateway_of(request).admin(access.name) as admin:
        await admin.queues.resume(queue)
        return Json(await _queue(admin, queue))


async def read_queues(admin: Admin) -> list[dict[str, Any]]:
    """All queues, each with its settings."""
    rows, settings = await admin.queues.find(), await admin.queues.settings()
    return [row._asdict() | {"settings": _plain(settings.get(row.queue))} for row in rows]


def visible_queues(access: Access, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the queues that the caller may see."""
    return [row for row in rows if access.allows("read", row["queue"])]


async def _queue(admin: Admin, queue: str, *, is_known: bool = False) -> dict[str, Any]:
    """One queue. Problem not-found if nothing is left of it, unless `is_known`."""
    for each in await read_queues(admin):
        if each["queue"] == queue:
            return each
    if is_known:  # its last setting is gone
        nothing = QueueRow(queue, 0, 0, 0, 0, 0, 0, None, 0, 0, paused=False, paused_until=None, sample_age_s=None)
        return nothing._asdict() | {"settings": _plain(None)}
    raise Problem("not-found", f"queue {queue!r} has no live job, no worker and no settings")


def _plain(found: list[EffectiveSetting] | None) -> dict[str, Any]:
    return {each.name: {"value": each.value, "from": each.source} for each in found or effective_settings({}, ())}
