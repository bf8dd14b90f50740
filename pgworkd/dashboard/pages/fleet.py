"""The fleet: workers, schedules, and who changed what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.queries import AuditRow
from pgworkd.dashboard.app import dashboard_of
from pgworkd.dashboard.changes import changes
from pgworkd.dashboard.names import PageName
from pgworkd.dashboard.once import made_once
from pgworkd.dashboard.reads import Questions
from pgworkd.dashboard.route import PageRoute, back, form_of, shown
from pgworkd.gateway.api.models.workers import AskIn
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.routes.fleet import shown_entries
from pgworkd.gateway.api.routes.visible import needed_any
from pgworkd.gateway.api.routes.workers import WorkerPath, ask

router = APIRouter(route_class=PageRoute, include_in_schema=False)
ENTRIES = 100


def told(request: Request, rows: Sequence[AuditRow]) -> list[dict[str, Any]]:
    """Entries of the audit as pages show them to who looks, with what has changed in each."""
    masks = dashboard_of(request).masks
    entries = shown_entries(access_of(request), [row._asdict() for row in rows])
    return [
        each | {"changes": changes(*(masks.members(each[side]) for side in ("before", "after")))} for each in entries
    ]


@router.get("/workers")
async def workers(request: Request) -> Response:
    """Every worker that has not signed off."""
    need(request, "read")

    async def read(reads: Questions) -> dict[str, Any]:
        return {"workers": await reads.of("workers", lambda admin: admin.workers()) or []}

    return await shown(request, "workers.html", read)


@router.post("/workers/{worker_id}/{act}")
async def ask_worker(request: Request, worker_id: WorkerPath, act: Literal["quiet", "stop", "run"]) -> Response:
    """Asks a remote worker to claim nothing more, to end, or to go on."""
    form = await form_of(request)
    await ask(request, worker_id, AskIn(state=None if act == "run" else act))
    said = {"quiet": "claims nothing more", "stop": "ends", "run": "goes on"}[act]
    return back(request, form.one("back", "/workers"), f"worker {worker_id} {said} from its next beat on")


@router.get("/schedules")
async def schedules(request: Request) -> Response:
    """The recurring rules."""
    needed_any(request, "read")

    async def read(reads: Questions) -> dict[str, Any]:
        found = await reads.of("schedules", lambda admin: admin.schedules.find()) or []
        seen = [each for each in found if access_of(request).allows("read", each.queue)]
        return {"schedules": seen, "may_make": access_of(request).has("operate")}

    return await shown(request, "schedules.html", read)


@router.post("/schedules/{name}/{act}")
async def schedule(request: Request, name: PageName, act: Literal["run", "enable", "disable", "remove"]) -> Response:
    """Runs a schedule now, or lets it make jobs, or none, or deletes it."""
    access = access_of(request)
    needed_any(request, "operate")
    form = await form_of(request)

    async def do(admin: Admin) -> dict[str, Any]:
        queue = next((each.queue for each in await admin.schedules.find() if each.name == name), None)
        if queue is None or not access.allows("operate", queue):
            raise Problem("not-found", f"there is no schedule {name!r}")
        acts = admin.schedules
        if act == "run":
            return {"said": f"job {await acts.run_now(name)} runs {name} now"}
        await {"enable": acts.enable, "disable": acts.disable, "remove": acts.remove}[act](name)
        return {"said": f"{name} is {act.removesuffix('e')}ed"}

    done, before = await made_once(request, form, do)
    said = f"{done['said']}, as this form has asked before" if before else done["said"]
    return back(request, form.one("back", "/schedules"), said)


@router.get("/audit")
async def audit(
    request: Request,
    *,
    queue: Annotated[str, Query(max_length=200)] = "",
    job: UUID | None = None,
    before: Annotated[int | None, Query(ge=1, lt=2**63)] = None,
) -> Response:
    """Who changed what: the newest entries."""
    needed_any(request, "read")
    if not access_of(request).allows("read"):
        need(request, "read", queue)

    async def read(reads: Questions) -> dict[str, Any]:
        question = lambda admin: admin.audit(job, queue or None, ENTRIES, before=before)  # noqa: E731
        rows = await reads.of("audit", question) or []
        entries = told(request, rows)
        more = rows[-1].id if len(rows) == ENTRIES else None
        return {"entries": entries, "queue": queue, "job": job, "before": before, "more": more}

    return await shown(request, "audit.html", read)
