"""Jobs: a list by what they have in common, one of them whole, and what can be done to them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.jobs import PRIORITIES, JobSelection
from pgworkd.admin.listing import Listed, Page
from pgworkd.admin.operations import first_matching, operate
from pgworkd.admin.payload_filter import CHARS_MAX, payload_terms
from pgworkd.admin.queries import JobDetails
from pgworkd.admin.refusals import Refused
from pgworkd.core.job import ENDED, Status
from pgworkd.core.validation import ROWS_MAX, counted
from pgworkd.dashboard.app import dashboard_of
from pgworkd.dashboard.draw.attempts import timeline
from pgworkd.dashboard.draw.states import diagram
from pgworkd.dashboard.pages.batches import WAITING, connected
from pgworkd.dashboard.pages.fleet import told
from pgworkd.dashboard.reads import Questions
from pgworkd.dashboard.route import PageRoute, back, form_of, shown
from pgworkd.errors import DatabaseBusy
from pgworkd.gateway.api.models.jobs import Instant
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.routes.operate import Worker
from pgworkd.gateway.api.routes.visible import JobId, needed_any, reasons_for, unknown_job, visible

router = APIRouter(route_class=PageRoute, include_in_schema=False)
ROWS = 50
NAMES_MAX = 200
NONE_MATCHES = "no job matches to which this applies"
LISTED_ONLY = ("payload", "worker", "schedule", "since", "until")
"""Filters of the list that acts on all that match do not have."""
_PRIORITY = re.compile(r"[-+]?\d{1,10}", re.ASCII)
STATES = tuple(str(each) for each in Status)


@router.get("/jobs")
async def jobs(
    request: Request,
    *,
    queue: Annotated[str | None, Query(max_length=200)] = None,
    kind: Annotated[str | None, Query(max_length=200)] = None,
    status: Literal[STATES] | None = None,  # type: ignore[valid-type]
    key: Annotated[str | None, Query(max_length=512)] = None,
    batch: UUID | None = None,
    group: Annotated[int | None, Query(ge=1, lt=2**63)] = None,
    since: Instant | None = None,
    until: Instant | None = None,
    worker: Worker | None = None,
    schedule: Annotated[str | None, Query(max_length=200)] = None,
    payload: Annotated[str | None, Query(max_length=CHARS_MAX)] = None,
    before: UUID | None = None,
) -> Response:
    """Jobs that match, the newest first."""
    access = access_of(request)
    needed_any(request, "read")
    if queue is not None:
        need(request, "read", queue)
    if payload is not None:  # who may not see payloads must not learn of them by asking
        need(request, "payload", queue)
    may_read = access.allows("read", queue)
    terms = payload_terms(payload or "")
    for term in terms or ():
        if dashboard_of(request).masks.hides(f"payload.{term.path}"):
            raise Problem("invalid", f"payload: {term.path} is masked: no page shows it, nor finds jobs by it")
    wanted = Listed(queue, kind, status, key, batch, group, since, until, worker, schedule, terms)

    async def read(reads: Questions) -> dict[str, Any]:
        found = await reads.of("jobs", lambda admin: admin.jobs.page(wanted, before, ROWS)) if may_read else None
        queues = await reads.of("queues", lambda admin: admin.queues.find()) or []  # names() would read all live jobs
        seen = [each.queue for each in queues if access.allows("read", each.queue)]
        return {
            "page": found or Page([], None),
            "wanted": wanted,
            "names": seen[:NAMES_MAX],
            "states": STATES,
            "may_read": may_read,
            "before": before,
            "payload": payload or "",
            "rows_max": ROWS,
        }

    return await shown(request, "jobs.html", read)


@router.get("/jobs/{job_id}")
async def job(request: Request, job_id: JobId) -> Response:
    """One job, with why it does not run."""
    access = access_of(request)
    needed_any(request, "read")

    async def read(reads: Questions) -> dict[str, Any]:
        async def question(admin: Admin) -> dict[str, Any]:
            found = seen(request, await visible(request, admin, job_id, "read"))
            drawn = {"states": diagram(found.status), "timeline": timeline(found, datetime.now(UTC))}
            return {"job": found, "reasons": await reasons_for(access, admin, job_id), **drawn}

        found = await reads.of("the job", question) or {"job": None, "reasons": []}
        audit = await reads.of("audit", lambda admin: admin.audit(job_id, None, 20)) or []
        waiting = await reads.of(WAITING, lambda admin: admin.batches.connected(job_id=job_id))
        may_ask = found["job"] is not None and access.allows("operate", found["job"].queue)
        stack = await reads.of("the stack", lambda admin: admin.jobs.stack(job_id)) if may_ask else None
        more = {"audit": told(request, audit), "ended": ENDED, "stack": stack, **connected(access, waiting)}
        return {"job_id": job_id, **more, **found}

    return await shown(request, "job.html", read)


@router.post("/jobs/{operation}")
async def act(request: Request, operation: Literal["retry", "cancel", "discard", "undepend", "prioritize"]) -> Response:
    """Does something to the jobs that are selected in the form."""
    access = access_of(request)
    needed_any(request, "operate")
    form = await form_of(request)
    if not (ids := _ids(form.all("id"))):
        return back(request, form.one("back", "/jobs"), "nothing was selected")
    async with naming_holders(request, ids), gateway_of(request).admin(access.name) as admin:
        if not access.allows("operate"):
            queues = await admin.jobs.queues(ids)
            if wrong := [each for each in ids if each not in queues or not access.allows("operate", queues[each])]:
                raise unknown_job(wrong[0])
        if operation == "prioritize":
            priority = _priority(form.one("priority"))
            left = len(ids) - (waiting := len(await admin.jobs.prioritize(ids, priority)))
            rest = f"; {counted(left, 'job')} left: only those that wait have a place to change" * bool(left)
            return back(
                request, form.one("back", "/jobs"), f"{counted(waiting, 'job')} given priority {priority}{rest}"
            )
        if operation == "undepend":
            done = f"dependencies of {counted(len(await admin.jobs.undepend(ids)), 'job')} dropped"
            return back(request, form.one("back", "/jobs"), done)
        outcomes, refused = await operate(admin.jobs, operation, ids)
    return back(request, form.one("back", "/jobs"), _told(outcomes, refused))


@router.post("/jobs/{job_id}/stack")
async def ask_stack(request: Request, job_id: JobId) -> Response:
    """Asks the worker of a running job where in its code that is."""
    needed_any(request, "operate")
    form = await form_of(request)
    async with gateway_of(request).admin(access_of(request).name) as admin:
        await visible(request, admin, job_id, "operate")
        await admin.jobs.ask_stack(job_id)
    return back(request, form.one("back", f"/jobs/{job_id}"), "its worker is asked where it is")


@router.post("/jobs/{operation}/matching")
async def act_on_matching(request: Request, operation: Literal["retry", "cancel", "discard"]) -> Response:
    """Does something to the jobs that match the filter in the form; in the background if they are many."""
    form = await form_of(request)
    queue, kind, key, status = (form.one(name) or None for name in ("queue", "kind", "key", "status"))
    access = need(request, "operate", queue)
    if beyond := [name for name in LISTED_ONLY if form.one(name)]:
        said = f"what is done to all that match takes no filter by {beyond[0]}: select the jobs, or leave it out"
        raise Problem("invalid", said)
    try:
        batch = UUID(form.one("batch")) if form.one("batch") else None
        group = int(form.one("group")) if form.one("group") else None
    except ValueError:
        raise Problem("invalid", "batch is a UUID, and group the number of a group of errors") from None
    which = JobSelection(queue, kind, key, batch, status, all_queues=True, group=group)
    async with gateway_of(request).admin(access.name) as admin:
        return await done_to_all(request, admin, operation, which, form.one("back", "/jobs"))


async def done_to_all(
    request: Request, admin: Admin, operation: str, which: JobSelection, place: str, none: str = NONE_MATCHES
) -> Response:
    """Does something to all jobs that match: at once, or in the background if they are many."""
    ids, are_all = await first_matching(admin.jobs, operation, which, ROWS_MAX)
    if not ids:
        return back(request, place, none)
    if not are_all:
        number = await admin.background.start(operation, which)
        return back(request, "/operations", f"operation {number} is started: daemons {operation} all that match")
    async with naming_holders(request, ids):
        outcomes, refused = await operate(admin.jobs, operation, ids)
    return back(request, place, _told(outcomes, refused))


@contextlib.asynccontextmanager
async def naming_holders(request: Request, ids: Sequence[UUID]) -> AsyncIterator[None]:
    """Where jobs of these cannot be changed in time, the problem names the session that has locked them."""
    try:
        yield
    except DatabaseBusy as error:
        if not (error.locked or error.timed_out):
            raise
        async with gateway_of(request).admin() as admin:
            holders = await admin.jobs.holders(ids)
        if not holders:
            raise
        job_id, pid, who = holders[0]
        said = f"nothing was done: pid {pid} ({who}) has locked job {job_id}: end that transaction"
        raise Problem("timeout", f"{said}, or SELECT pg_terminate_backend({pid})") from error


def seen(request: Request, found: JobDetails) -> JobDetails:
    """A job as pages show it, with payload, result and metadata as `mask` has them."""
    masks = dashboard_of(request).masks
    texts: dict[str, Any] = {name: getattr(found, name) for name in ("payload", "result", "meta")}
    masked: dict[str, Any] = {name: text and masks.text(name, text) for name, text in texts.items()}
    return found._replace(**masked)


def _told(outcomes: Mapping[str, int], refused: Sequence[Refused]) -> str:
    said = [f"{counted(count, 'job')} {outcome}" for outcome, count in outcomes.items() if count]
    said += [f"{counted(len(refused), 'job')} left as they are: {refused[0].reason}"] if refused else []
    return "; ".join(said)


def _priority(given: str) -> int:
    if not _PRIORITY.fullmatch(given.strip()):
        raise Problem("invalid", f"priority: give a whole number from {PRIORITIES[0]} to {PRIORITIES[1]}")
    return int(given)


def _ids(given: Sequence[str]) -> list[UUID]:
    try:
        found = list(dict.fromkeys(map(UUID, given)))
    except ValueError:
        raise Problem("invalid", "id: a job is named by its UUID") from None
    if len(found) > ROWS_MAX:
        raise Problem("invalid", f"at most {ROWS_MAX:,} jobs at once")
    return found
