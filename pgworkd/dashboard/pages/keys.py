"""Keys: what runs under one, what waits behind that and in which order, its limits; kept dedupe keys; free."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.queries import JobRow
from pgworkd.dashboard.reads import Questions
from pgworkd.dashboard.route import PageRoute, back, form_of, shown
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.routes.visible import needed_any

router = APIRouter(route_class=PageRoute, include_in_schema=False)
ROWS = 50
"""The most jobs, or keys, that a list shows."""


@router.get("/keys")
async def keys(
    request: Request,
    *,
    queue: Annotated[str, Query(max_length=200)] = "",
    key: Annotated[str, Query(max_length=512)] = "",
) -> Response:
    """One key of a queue; without both, the keys that are in use, and those that are kept."""
    access = access_of(request)
    needed_any(request, "read")
    if queue:
        need(request, "read", queue)
    may_read = access.allows("read", queue or None)

    def seen(rows: list[JobRow]) -> list[JobRow]:
        return [each for each in rows if access.allows("read", each.queue)]  # those of a scope are in several queues

    async def one(admin: Admin) -> dict[str, Any]:
        found = await admin.keys.under(queue, key, ROWS)
        lists = {name: seen(getattr(found, name)) for name in ("holder", "line", "running", "waiting")}
        return lists | {"limits": found.limits, "dedupe": await admin.keys.holder(queue, key)}

    async def read(reads: Questions) -> dict[str, Any]:
        found: dict[str, Any] = {"in_use": [], "kept": [], "one": None}
        if queue and key:
            found["one"] = await reads.of("the key", one)
        elif may_read:
            found["in_use"] = await reads.of("keys in use", lambda admin: admin.keys.in_use(queue or None, ROWS)) or []
        if may_read:
            question = lambda admin: admin.keys.find(queue or None, key or None, ROWS)  # noqa: E731
            found["kept"] = await reads.of("kept keys", question) or []
        return {"queue": queue, "key": key, "may_read": may_read, "rows": ROWS, **found}

    return await shown(request, "keys.html", read)


@router.post("/keys/free")
async def free(request: Request) -> Response:
    """Frees a dedupe key that is kept after the end of its job; with `batch`, of a tree of batches of that name."""
    form = await form_of(request)
    queue, key, batch = form.one("queue"), form.one("key"), form.one("batch")
    access = need(request, "operate", None if batch else queue)
    async with gateway_of(request).admin(access.name) as admin:
        if batch:
            why_not = (
                "" if await admin.keys.free_of_batch(batch, key) else await admin.keys.refusal_of_batch(batch, key)
            )
        else:
            why_not = "" if await admin.keys.free(queue, key) else await admin.keys.refusal(queue, key)
    said = f"key {key} is not freed: {why_not}" if why_not else f"key {key} is free"
    return back(request, form.one("back", "/keys"), said)
