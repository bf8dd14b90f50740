"""Batches: trees of jobs, created, filled, sealed and watched."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.client import Batch, Progress, batch
from pgworkd.client.batch_types import Cancelled
from pgworkd.core.access import Access
from pgworkd.core.json_text import JsonText
from pgworkd.gateway.api.models.batches import (
    Added,
    AddIn,
    BatchCancelled,
    BatchIn,
    BatchMade,
    BatchOut,
    ChildIn,
    Deleted,
    ResultsPage,
    Sealed,
    TreePage,
    TreeState,
)
from pgworkd.gateway.api.models.jobs import with_trace
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.answers import BODY, Json, documented
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.once import IdempotencyKey, once
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import BulkRoute
from pgworkd.gateway.api.routes.visible import PathId, WaitS, visible_batch

router = APIRouter(prefix="/v1", tags=["batches"], route_class=BulkRoute)
PAGE = 500


@router.post(
    "/batches",
    status_code=201,
    response_model=BatchMade,
    responses=documented(*BODY, "key-reused", "key-in-use", "batch-closed", "duplicate-key")
    | {200: {"model": BatchMade, "description": "The dedupe key is taken: the batch that has it, unchanged"}},
)
async def create_batch(request: Request, body: BatchIn, key: IdempotencyKey = None) -> Response:
    """Create a batch, with its children, their jobs, and sealed if asked: all in one transaction."""
    for queue in _queues(body):
        need(request, "enqueue", queue)
    ids: dict[str, UUID] = {}
    async with once(request, key) as call:
        if call.earlier is not None:
            return call.earlier
        root = await batch(call.connection, body.name, **body.options())
        ids[body.name] = root.id
        if root.created:
            await _fill(root, body, ids, body.name)
            if body.sealed:
                await root.seal()
        answer = {"id": root.id, "created": root.created, "ids": ids}
        return await call.answered(answer, 201 if root.created else 200)


async def _fill(at: Batch[Any], body: BatchIn | ChildIn, ids: dict[str, UUID], path: str) -> None:
    """Fills a batch, children first: a batch that streams into one must have it before its jobs."""
    for child in body.children:
        made = await at.child(child.name, **child.options())
        ids[f"{path}/{child.name}"] = made.id
        await _fill(made, child, ids, f"{path}/{child.name}")
        if child.sealed and made.seals:
            await made.seal()
    if body.payloads:
        await at.add(body.payloads, **with_trace({}))
    for some in body.jobs:
        await at.add(some.payloads, **some.options())


def _queue_of(body: BatchIn | ChildIn, above: str | None = None) -> str:
    return body.queue or body.kind or above or body.name


def _queues(body: BatchIn | ChildIn, above: str | None = None) -> set[str]:
    own = _queue_of(body, above)
    found = {own, *(some.queue or own for some in body.jobs)}.union(*(_queues(child, own) for child in body.children))
    for job in (getattr(body, "on_complete", None), getattr(body, "on_failure", None)):
        found |= set() if job is None else {job.queue}
    return found


@router.post(
    "/batches/{batch_id}/children",
    status_code=201,
    response_model=BatchMade,
    responses=documented(*BODY, "not-found", "batch-closed", "duplicate-key", "key-reused", "key-in-use")
    | {200: {"model": BatchMade, "description": "There is a child of that name"}},
)
async def add_child(request: Request, batch_id: PathId, body: ChildIn, key: IdempotencyKey = None) -> Response:
    """Create a batch below another."""
    ids: dict[str, UUID] = {}
    async with once(request, key) as call:
        queue, _ = await visible_batch(request, gateway_of(request).admin_on(call.connection), batch_id, "enqueue")
        for each in _queues(body, queue):
            need(request, "enqueue", each)
        if call.earlier is not None:
            return call.earlier
        made = await Batch(call.connection, batch_id).child(body.name, **body.options())
        ids[body.name] = made.id
        if made.created:
            await _fill(made, body, ids, body.name)
            if body.sealed and made.seals:
                await made.seal()
        answer = {"id": made.id, "created": made.created, "ids": ids}
        return await call.answered(answer, 201 if made.created else 200)


@router.post(
    "/batches/{batch_id}/jobs",
    status_code=201,
    response_model=Added,
    responses=documented(*BODY, "not-found", "batch-closed", "duplicate-key", "key-reused", "key-in-use"),
)
async def add_jobs(request: Request, batch_id: PathId, body: AddIn, key: IdempotencyKey = None) -> Response:
    """Add a job for each payload, all or none; with `on_duplicate` not where an unfinished one has the dedupe key."""
    async with once(request, key) as call:
        queue, _ = await visible_batch(request, gateway_of(request).admin_on(call.connection), batch_id, "enqueue")
        need(request, "enqueue", body.queue or queue)
        if call.earlier is not None:
            return call.earlier
        added = await Batch(call.connection, batch_id).add(body.payloads, **body.options())
        if body.on_duplicate is None:
            return await call.answered({"ids": added})
        columns = zip(*added, strict=True) if added else ((), (), ())
        return await call.answered(dict(zip(("ids", "created", "changed"), columns, strict=True)))


@router.post("/batches/{batch_id}/seal", response_model=Sealed, responses=documented("not-found", "batch-closed"))
async def seal_batch(request: Request, batch_id: PathId) -> Response:
    """Close a batch to further jobs. Again: nothing changes."""
    gateway = gateway_of(request)
    async with gateway.database.transaction(access_of(request).name) as connection:
        await visible_batch(request, gateway.admin_on(connection), batch_id, "enqueue")
        return Json({"id": batch_id, "sealed": await gateway.admin_on(connection).batches.seal(batch_id)})


@router.get("/batches", response_model=TreePage, responses=documented())
async def list_batches(
    request: Request,
    *,
    name: Annotated[str | None, Query(max_length=200, description="Of the root")] = None,
    dedupe_key: Annotated[str | None, Query(max_length=512)] = None,
    queue: Annotated[str | None, Query(max_length=200, description="Of the root")] = None,
    state: Annotated[TreeState | None, Query(description="Of the whole tree")] = None,
    cursor: Annotated[UUID | None, Query(description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
) -> Response:
    """Trees of batches, the newest first."""
    need(request, "read", queue)
    async with gateway_of(request).admin() as admin:
        found = await admin.batches.find(name, limit, key=dedupe_key, queue=queue, state=state, before=cursor)
    more = found[-1].id if len(found) == limit else None
    access = access_of(request)
    shown = [each._asdict() | {"meta": _meta(access, each.queue, each.meta)} for each in found]
    return Json({"batches": shown, "next": more})


@router.get("/batches/{batch_id}", response_model=BatchOut, responses=documented("not-found", "too-many-waiters"))
async def get_batch(request: Request, batch_id: PathId, wait_s: WaitS = 0) -> Response:
    """The progress of a batch and of all below it, parents first.

    With `wait_s` as soon as all of them have finished, to within a second.
    """
    gateway = gateway_of(request)
    tree, queue = await _tree(request, batch_id)
    if wait_s and not _finished(tree):
        end = partial(gateway.batch_waits.end, batch_id, wait_s)
        await gateway.waited(request, end, gateway.waits.place(access_of(request).name))
        tree, queue = await _tree(request, batch_id)
    access = access_of(request)
    top, *below = [each._asdict() | {"meta": _meta(access, queue, each.meta)} for each in tree]
    return Json(top | {"finished": _finished(tree), "below": below})


def _meta(access: Access, queue: str, text: str | None) -> JsonText | None:
    """What is shown of a batch's meta; `queue`: of its root."""
    return JsonText(text) if text is not None and access.allows("payload", queue) else None


def _finished(tree: list[Progress]) -> bool:
    return all(each.finished for each in tree)


async def _tree(request: Request, batch_id: UUID) -> tuple[list[Progress], str]:
    """The tree, and the queue of its root."""
    gateway = gateway_of(request)
    async with gateway.database.transaction() as connection:
        _, queue = await visible_batch(request, gateway.admin_on(connection), batch_id, "read")
        return await gateway.admin_on(connection).batches.tree(batch_id), queue


@router.get("/batches/{batch_id}/results", response_model=ResultsPage, responses=documented("not-found"))
async def get_results(
    request: Request,
    batch_id: PathId,
    *,
    every: Annotated[bool, Query(description="Of all batches of the tree, not only of the final ones")] = False,
    cursor: Annotated[str | None, Query(max_length=100, description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE,
) -> Response:
    """The results of the jobs that have completed, by page, with their payloads.

    Without those of queues that the token is not for.
    """
    gateway = gateway_of(request)
    after = _cursor(cursor)
    async with gateway.database.transaction() as connection:
        await visible_batch(request, gateway.admin_on(connection), batch_id, "payload")
        admin = gateway.admin_on(connection)
        found = await admin.batches.results(batch_id, after, limit, every=every)
        hidden = await _hidden(request, admin, [each.id for each in found])
    rows = [
        {"batch": each.batch, "id": each.id, "payload": JsonText(each.payload), "result": _text(each.result)}
        for each in found
        if each.id not in hidden
    ]
    more = f"{found[-1].batch_id}.{found[-1].id}" if len(found) == limit else None
    return Json({"results": rows, "next": more})


@router.post(
    "/batches/{batch_id}/cancel", response_model=BatchCancelled, responses=documented("not-found", "batch-closed")
)
async def cancel_batch(request: Request, batch_id: PathId) -> Response:
    """Cancel a batch and all below it, up to 1,000 waiting jobs at once; `more`: call again, or leave it to daemons."""
    gateway = gateway_of(request)
    async with gateway.database.transaction(access_of(request).name) as connection:
        await visible_batch(request, gateway.admin_on(connection), batch_id, "enqueue", "operate")
        done: Cancelled = await gateway.admin_on(connection).batches.cancel(batch_id)
    return Json({"id": batch_id, **done._asdict()})


@router.delete("/batches/{batch_id}", response_model=Deleted, responses=documented("not-found", "batch-closed"))
async def delete_batch(
    request: Request,
    batch_id: PathId,
    *,
    items: Annotated[bool, Query(description="Its jobs, too, from the history; for the scope operate")] = False,
    cancel: Annotated[bool, Query(description="Cancel a tree that has not finished")] = False,
) -> Response:
    """Delete a batch and all below it, once their tree has finished. Jobs stay in the history, unless `items`.

    Up to 1,000 jobs at once; `more`: call again, also while jobs still run of a tree that is cancelled.
    """
    gateway = gateway_of(request)
    async with gateway.database.transaction(access_of(request).name) as connection:
        await visible_batch(
            request, gateway.admin_on(connection), batch_id, *(["operate"] if items else ["enqueue", "operate"])
        )
        done = await gateway.admin_on(connection).batches.delete_some(batch_id, items=items, cancel=cancel)
        return Json(done._asdict())


async def _hidden(request: Request, admin: Admin, ids: list[UUID]) -> set[UUID]:
    """Which of these jobs are in queues whose payloads the caller may not see."""
    access = access_of(request)
    if access.allows("payload"):
        return set()
    queues = await admin.jobs.queues(ids)
    return {each for each in ids if each not in queues or not access.allows("payload", queues[each])}


def _cursor(text: str | None) -> tuple[UUID, UUID] | None:
    if text is None:
        return None
    try:
        batch, job = map(UUID, text.split("."))
        return batch, job
    except ValueError:
        raise Problem("invalid", "cursor is not one of a page before: pass `next` unchanged") from None


def _text(text: str | None) -> JsonText | None:
    return None if text is None else JsonText(text)
