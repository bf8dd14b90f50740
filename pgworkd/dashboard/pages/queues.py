"""Queues: how they stand; pause and resume."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.explained import Explanation
from pgworkd.core.access import Access
from pgworkd.dashboard.names import PageName
from pgworkd.dashboard.pages.history import Span, charts, sparks
from pgworkd.dashboard.reads import DEAD_MAX, Questions
from pgworkd.dashboard.route import PageRoute, back, form_of, shown
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.routes.visible import needed_any, reasons_for
from pgworkd.settings.queue import effective_settings

router = APIRouter(route_class=PageRoute, include_in_schema=False)
PAUSE_S_MAX = 366 * 86_400.0
ROWS_MAX = 200


@router.get("/queues")
async def queues(request: Request, *, search: Annotated[str, Query(max_length=200)] = "") -> Response:
    """The queues with that in their names, at most ROWS_MAX."""
    needed_any(request, "read")

    async def read(reads: Questions) -> dict[str, Any]:
        rows = await reads.of("queues", lambda admin: admin.queues.find()) or []
        seen = [each for each in rows if search in each.queue and access_of(request).allows("read", each.queue)]
        last_hour = await sparks(reads, [each.queue for each in seen[:ROWS_MAX]])
        return {"queues": seen[:ROWS_MAX], "total": len(seen), "search": search, "sparks": last_hour}

    return await shown(request, "queues.html", read)


@router.get("/queues/{queue}")
async def queue(request: Request, queue: PageName, span: Span = "1h") -> Response:
    """One queue: its counts, charts and settings, why its first job waits, what died."""
    access = need(request, "read", queue)
    return await shown(request, "queue.html", lambda reads: _queue(access, reads, queue, span))


async def _queue(access: Access, reads: Questions, queue: str, span: Span) -> dict[str, Any]:
    async def first(admin: Admin) -> tuple[Any, list[Explanation]]:
        found = await admin.jobs.first_waiting(queue)
        return found, [] if found is None else await reasons_for(access, admin, found)

    rows = await reads.of("queue", lambda admin: admin.queues.find()) or []
    settings = await reads.of("settings", lambda admin: admin.queues.settings()) or {}
    job, reasons = await reads.of("why its first job waits", first) or (None, [])
    dead = await reads.of("dead", lambda admin: admin.dead.find(None, queue, 10, most=DEAD_MAX))
    return {
        "queue": queue,
        "row": next((each for each in rows if each.queue == queue), None),
        "settings": settings.get(queue) or effective_settings({}, []),
        "job": job,
        "reasons": reasons,
        "dead": dead,
        **await charts(reads, span, queue),
    }


@router.post("/queues/{queue}/pause")
async def pause(request: Request, queue: PageName) -> Response:
    """Starts no more jobs of a queue, for a time or until it is resumed."""
    access = need(request, "operate", queue)
    form = await form_of(request)
    for_s = _seconds(form.one("for_s"))
    async with gateway_of(request).admin(access.name) as admin:
        if not await admin.queues.exists(queue):
            raise Problem("not-found", f"queue {queue!r} has no live job, no worker and no settings")
        await admin.queues.pause(queue, for_s)
    return back(request, form.one("back", "/queues"), f"queue {queue} is paused")


@router.post("/queues/{queue}/resume")
async def resume(request: Request, queue: PageName) -> Response:
    """Ends the pause of a queue."""
    access = need(request, "operate", queue)
    form = await form_of(request)
    async with gateway_of(request).admin(access.name) as admin:
        count = await admin.queues.resume(queue)
    said = f"queue {queue} is resumed" if count else f"queue {queue} was not paused"
    return back(request, form.one("back", "/queues"), said)


def _seconds(text: str) -> float | None:
    """How long, of a form; None: it says nothing. Raises Problem."""
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found <= PAUSE_S_MAX:
        raise Problem("invalid", "for_s: give seconds, above 0 and at most a year")
    return found
