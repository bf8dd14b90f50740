"""Batches: trees with their progress; seal, cancel, delete."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.batches import ConnectedJobs
from pgworkd.client.batch_types import Progress
from pgworkd.core.access import Access
from pgworkd.core.validation import counted
from pgworkd.dashboard.draw.graph import Graph, graph
from pgworkd.dashboard.reads import Questions
from pgworkd.dashboard.route import PageRoute, back, form_of, shown
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.routes.visible import PathId, visible_batch

router = APIRouter(route_class=PageRoute, include_in_schema=False)
ROWS = 50
BELOW_MAX = 200
"""Batches below the root that a page shows."""

WAITING = "jobs that wait for each other"


def connected(access: Access, found: ConnectedJobs | None) -> dict[str, Any]:
    """The graph of jobs that wait for each other, of those that the caller may see: members of a page's template."""
    seen = [each for each in found.rows if access.allows("read", each.queue)] if found is not None else []
    drawn: Graph | None = graph(seen) if len(seen) > 1 else None
    return {
        "graph": drawn if drawn is not None and drawn.edges else None,
        "more_jobs": found is not None and found.more,
    }


@router.get("/batches")
async def batches(
    request: Request,
    *,
    name: Annotated[str | None, Query(max_length=200)] = None,
    queue: Annotated[str | None, Query(max_length=200)] = None,
    before: UUID | None = None,
) -> Response:
    """The newest trees."""
    need(request, "read", queue)

    async def read(reads: Questions) -> dict[str, Any]:
        question = lambda admin: admin.batches.find(name, ROWS, queue=queue, before=before)  # noqa: E731
        found = await reads.of("batches", question) or []
        more = found[-1].id if len(found) == ROWS else None
        return {"trees": found, "name": name or "", "queue": queue or "", "before": before, "more": more}

    return await shown(request, "batches.html", read)


@router.get("/batches/{batch_id}")
async def batch(request: Request, batch_id: PathId) -> Response:
    """One batch, and those below it."""

    async def question(admin: Admin) -> tuple[str, list[Progress]]:
        _, queue = await visible_batch(request, admin, batch_id, "read")
        return queue, await admin.batches.tree(batch_id)

    async def read(reads: Questions) -> dict[str, Any]:
        queue, tree = await reads.of("the batch", question) or ("", [])
        facts = {"batches": len(tree), "finished": all(each.finished for each in tree)}
        drawn = connected(access_of(request), await reads.of(WAITING, lambda admin: admin.batches.connected(batch_id)))
        return {"batch_id": batch_id, "queue": queue, "tree": tree[: BELOW_MAX + 1], **facts, **drawn}

    return await shown(request, "batch.html", read)


@router.post("/batches/{batch_id}/{act}")
async def act(request: Request, batch_id: PathId, act: Literal["seal", "cancel", "delete"]) -> Response:
    """Closes a batch to further jobs; or cancels it with all below; or deletes it, once it has finished."""
    form = await form_of(request)
    place = form.one("back", "/batches")
    async with gateway_of(request).admin(access_of(request).name) as admin:
        await visible_batch(request, admin, batch_id, *(["enqueue"] if act == "seal" else ["enqueue", "operate"]))
        if act == "seal":
            sealed = await admin.batches.seal(batch_id)
            return back(request, place, "the batch is sealed" if sealed else "it was sealed before")
        if act == "delete":
            return back(request, "/batches", f"{counted(await admin.batches.delete(batch_id), 'batch')} deleted")
        done = await admin.batches.cancel(batch_id)
    said = f"{counted(done.cancelled, 'job')} cancelled, {done.requested} asked to stop"
    return back(request, place, said + "; daemons cancel the rest" * done.more)
