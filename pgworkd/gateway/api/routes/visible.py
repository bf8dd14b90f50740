"""What the routes have in common: names in paths, and who may do what to a job."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Path, Request
from pydantic import BeforeValidator

from pgworkd.admin.admin import Admin
from pgworkd.admin.queries import JobDetails
from pgworkd.core.access import SCOPES
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.request.names import plain
from pgworkd.gateway.api.request.problems import Problem

PathName = Annotated[str, BeforeValidator(plain), Path(min_length=1, max_length=200)]
"""A name in a path; a `/` in it is sent as %2F."""
PathId = Annotated[UUID, Path()]


async def visible(request: Request, admin: Admin, job_id: UUID, *scopes: str) -> JobDetails:
    """The job, if the caller has one of the scopes for its queue; else Problem not-found, as if there were none."""
    access = access_of(request)
    needed_any(request, *scopes)
    job = await admin.jobs.get(job_id)
    if job is None or not any(access.allows(scope, job.queue) for scope in scopes):
        raise Problem("not-found", f"job {job_id} is unknown: check the id; its history may have been deleted")
    return job


def needed_any(request: Request, *scopes: str) -> None:
    """Problem forbidden unless the caller has one of the scopes, for whatever queues."""
    access = access_of(request)
    if not any(access.has(scope) for scope in scopes):
        wanted = " or ".join(f"{scope} ({SCOPES[scope]})" for scope in scopes)
        raise Problem("forbidden", f"this needs the scope {wanted}", scope=scopes[0])
