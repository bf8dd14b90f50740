"""What the routes have in common: names in paths, and who may do what to a job."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any
from uuid import UUID

from fastapi import Path, Query, Request
from pydantic import BeforeValidator

from pgworkd.admin.admin import Admin
from pgworkd.admin.explained import Explanation
from pgworkd.admin.queries import JobDetails
from pgworkd.core.access import SCOPES, Access
from pgworkd.core.validation import ROWS_MAX
from pgworkd.gateway.api.models.jobs import without_prefix
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.names import plain
from pgworkd.gateway.api.request.problems import Problem

PathName = Annotated[str, BeforeValidator(plain), Path(min_length=1, max_length=200)]
"""A name in a path; a `/` in it is sent as %2F."""
PathId = Annotated[UUID, Path()]
JobId = Annotated[UUID, BeforeValidator(without_prefix), Path(description="A UUID, or job_ and a UUID")]
WAIT_S_MAX = 60.0
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
WaitS = Annotated[float, Query(ge=0, le=WAIT_S_MAX, description="Seconds to wait for the end")]


async def visible(request: Request, admin: Admin, job_id: UUID, *scopes: str) -> JobDetails:
    """The job, if the caller has one of the scopes for its queue; else Problem not-found, as if there were none."""
    access = access_of(request)
    needed_any(request, *scopes)
    job = await admin.jobs.get(job_id)
    if job is None or not any(access.allows(scope, job.queue) for scope in scopes):
        raise unknown_job(job_id)
    return job


async def visible_batch(request: Request, admin: Admin, batch_id: UUID, *scopes: str) -> tuple[str, str]:
    """The queues of the batch's jobs and of its root; Problem not-found, as if there were none, unless a scope fits."""
    needed_any(request, *scopes)
    access = access_of(request)
    queues = await admin.batches.queues(batch_id)
    if queues is None or not any(access.allows(scope, queues[1]) for scope in scopes):
        raise Problem("not-found", f"batch {batch_id} is unknown: check the id; it may have been deleted")
    return queues


async def reasons_for(access: Access, admin: Admin, job_id: UUID) -> list[Explanation]:
    """Why a job does not run, without the ids of jobs in queues that the caller may not see."""
    found = await admin.jobs.explain(job_id)
    if access.allows("read"):
        return found
    named = {UUID(text) for each in found for text in _ID.findall(each.says)}
    named |= {other for each in found for other in each.jobs or ()}
    queues = await admin.jobs.queues(list(named)) if named else {}
    seen = {each for each in named if each in queues and access.allows("read", queues[each])}

    def cut(text: str) -> str:
        return _ID.sub(lambda id_: id_[0] if UUID(id_[0]) in seen | {job_id} else "of another queue", text)

    return [
        each._replace(says=cut(each.says), ends=cut(each.ends), jobs=each.jobs and [i for i in each.jobs if i in seen])
        for each in found
    ]


def unknown_job(job_id: UUID) -> Problem:
    """The answer for a job that is not there, or that the caller may not see."""
    return Problem("not-found", f"job {job_id} is unknown: check the id; its history may have been deleted")


async def may_wait_for(request: Request, connection: Any, ids: Iterable[UUID]) -> None:
    """Problem unknown-dependency, as if there were none, for a job that is in a queue which the token is not for."""
    access, wanted = access_of(request), list(dict.fromkeys(ids))
    if not wanted or access.allows("enqueue"):
        return
    jobs = gateway_of(request).admin_on(connection).jobs
    for begin in range(0, len(wanted), ROWS_MAX):
        some = wanted[begin : begin + ROWS_MAX]
        queues = await jobs.queues(some)
        for job_id in some:  # one that is nowhere is answered in the same words
            if job_id not in queues or not access.allows("enqueue", queues[job_id]):
                raise Problem("unknown-dependency", f"job {job_id} does not exist")


def needed_any(request: Request, *scopes: str) -> None:
    """Problem forbidden unless the caller has one of the scopes, for whatever queues."""
    access = access_of(request)
    if not any(access.has(scope) for scope in scopes):
        wanted = " or ".join(f"{scope} ({SCOPES[scope]})" for scope in scopes)
        raise Problem("forbidden", f"this needs the scope {wanted}", scope=scopes[0])
