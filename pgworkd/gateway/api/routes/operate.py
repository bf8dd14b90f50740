"""Operations on many jobs: retry, cancel, discard, undepend; and lists of jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.jobs import MATCHED_MAX, JobSelection
from pgworkd.admin.listing import Listed
from pgworkd.admin.operations import first_matching
from pgworkd.admin.operations import operate as operate_all
from pgworkd.admin.payload_filter import CHARS_MAX, payload_terms
from pgworkd.gateway.api.models.jobs import Instant, JobPage
from pgworkd.gateway.api.models.operators import FilterIn, Matches, Operated, OperationOut
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.answers import BODY, Json, documented
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route
from pgworkd.gateway.api.routes.operations import shown
from pgworkd.gateway.api.routes.visible import needed_any

router = APIRouter(prefix="/v1", tags=["operators"], route_class=Route)
SAMPLE = 10
Worker = Annotated[int, Query(ge=1, le=1_000_000_000)]
Operation = Literal["retry", "cancel", "discard", "undepend"]
DryRun = Annotated[bool, Query(description="Only count what matches")]
Background = Annotated[bool, Query(description="Let daemons do it to all that match: see /v1/operations")]


@router.get("/jobs", response_model=JobPage, responses=documented())
async def list_jobs(
    request: Request,
    *,
    queue: Annotated[str | None, Query(max_length=200)] = None,
    kind: Annotated[str | None, Query(max_length=200)] = None,
    status: Annotated[str | None, Query(max_length=20)] = None,
    key: Annotated[str | None, Query(max_length=512, description="Any of a job's three keys")] = None,
    batch: UUID | None = None,
    error_group: Annotated[int | None, Query(ge=1, lt=2**63, description="`group` of /v1/dead")] = None,
    since: Annotated[Instant | None, Query(description="Created from this instant on")] = None,
    until: Annotated[Instant | None, Query(description="Created before this instant")] = None,
    worker: Annotated[Worker | None, Query(description="The id of the worker that runs it, or has ended it")] = None,
    schedule: Annotated[str | None, Query(max_length=200)] = None,
    payload: Annotated[
        str | None,
        Query(max_length=CHARS_MAX, description='Terms: order.id:7 paid:true to:"Ann Lee"; needs the scope payload'),
    ] = None,
    cursor: Annotated[UUID | None, Query(description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Jobs, live and finished, in descending order of their ids: the newest first, but for ids of callers' own.

    A call looks at a bounded number of jobs: a page may have few that match, or none, and still a `next`.
    """
    need(request, "read", queue)
    if payload is not None:
        need(request, "payload", queue)
    terms = payload_terms(payload or "")
    wanted = Listed(queue, kind, status, key, batch, error_group, since, until, worker, schedule, terms)
    async with gateway_of(request).admin() as admin:
        page = await admin.jobs.page(wanted, cursor, limit)
    return Json({"jobs": [row._asdict() for row in page.rows], "next": page.next})


@router.post(
    "/jobs/{operation}",
    response_model=Operated | Matches | OperationOut,
    responses=documented(*BODY, "not-found"),
)
async def operate(
    request: Request,
    operation: Operation,
    which: FilterIn,
    *,
    dry_run: DryRun = False,
    background: Background = False,
) -> Response:
    """Retry, cancel, discard or undepend jobs: those of `ids`, or up to `limit` of those that match the filter.

    Repeat the call while `more` is true; or have it done in the `background` to all that match now: the answer is an
    operation. With `dry_run` nothing is done.
    """
    access = access_of(request)
    needed_any(request, "operate")
    if which.ids is not None and (others := which.model_dump(exclude={"ids"}, exclude_defaults=True)):
        said = "give either ids or a filter, not both"
        raise Problem("invalid", said, errors=[{"pointer": f"/{name}", "detail": said} for name in others])
    if which.ids is None:
        need(request, "operate", which.queue)
    gateway = gateway_of(request)
    async with gateway.admin(access.name) as admin:
        if background and not dry_run:
            return Json(await _started(admin, operation, which))
        if which.ids is None:
            found, exact = await _matching(admin, operation, which, MATCHED_MAX if dry_run else which.limit)
        else:
            found, exact = list(which.ids), True
            await _own(request, admin, found)
        if dry_run:
            return Json({"matches": len(found), "exact": exact, "sample": found[:SAMPLE]})
        done = await _operate(admin, operation, found)
    return Json({"done": sum(done["outcomes"].values()), **done, "more": not exact})


async def _started(admin: Admin, operation: Operation, which: FilterIn) -> dict[str, object]:
    if which.ids is not None or "limit" in which.model_fields_set:
        name = "ids" if which.ids is not None else "limit"
        said = "is not for background, which is for all that match a filter"
        raise Problem("invalid", errors=[{"pointer": f"/{name}", "detail": said}])
    number = await admin.background.start(operation, _selection(operation, which))
    found = await admin.background.get(number)
    if found is None:
        raise Problem("not-found", f"operation {number} was deleted")
    return shown(found)


def _selection(operation: Operation, which: FilterIn) -> JobSelection:
    if operation == "undepend":
        raise Problem("invalid", "undepend takes ids: a filter would not say which dependencies to drop")
    if operation == "cancel" and which.group is not None:
        said = "is for retry and discard: the jobs of a group of errors are dead"
        raise Problem("invalid", errors=[{"pointer": "/group", "detail": said}])
    filters = (which.queue, which.kind, which.key, which.batch, which.status, which.all_queues, which.group)
    return JobSelection(*filters)


async def _matching(admin: Admin, operation: Operation, which: FilterIn, limit: int) -> tuple[list[UUID], bool]:
    """The jobs that match, and whether these are all."""
    return await first_matching(admin.jobs, operation, _selection(operation, which), limit)


async def _own(request: Request, admin: Admin, ids: list[UUID]) -> None:
    """Problem not-found, as if there were none, for a job whose queue the scope does not cover."""
    access = access_of(request)
    if access.allows("operate"):
        return
    queues = await admin.jobs.queues(ids)
    if wrong := [each for each in ids if each not in queues or not access.allows("operate", queues[each])]:
        raise Problem("not-found", f"job {wrong[0]} is unknown", ids=[str(each) for each in wrong[:100]])


async def _operate(admin: Admin, operation: Operation, ids: list[UUID]) -> dict[str, Any]:
    """What was done to how many jobs, and why others were left unchanged."""
    if not ids:
        return {"outcomes": {}, "refused": []}
    if operation == "undepend":
        changed = await admin.jobs.undepend(ids)
        left = [{"id": each, "reason": "it has no dependencies"} for each in ids if each not in changed]
        return {"outcomes": {"undepended": len(changed)}, "refused": left}
    outcomes, refused = await operate_all(admin.jobs, operation, ids)
    left = [{"id": each.id, "status": each.status, "reason": each.reason} for each in refused]
    return {"outcomes": outcomes, "refused": left}
