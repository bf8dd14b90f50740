"""Many jobs in one call: as a list, as a stream of lines, or as a workflow. All of them are created, or none."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any
from uuid import UUID

import anyio
import anyio.lowlevel
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from pgworkd.client import NewJob, Workflow, enqueue_many
from pgworkd.client.new_job import row
from pgworkd.core.validation import counted
from pgworkd.errors import InvalidPayload, UsageError
from pgworkd.gateway.api.models.jobs import Counted, DependentJob, Ids, JobsIn, Names, Step, WorkflowIn
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.answers import BODY, documented
from pgworkd.gateway.api.request.bodies import BODY_S, CLOSE, apart, parse
from pgworkd.gateway.api.request.failures import clearer
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.once import IdempotencyKey, once
from pgworkd.gateway.api.request.problems import Problem, pointer
from pgworkd.gateway.api.request.route import BulkRoute, StreamRoute
from pgworkd.gateway.api.routes.visible import may_wait_for

router = APIRouter(prefix="/v1", tags=["jobs"], route_class=BulkRoute)
stream_router = APIRouter(prefix="/v1", tags=["jobs"], route_class=StreamRoute)
_DOCUMENTED = documented(*BODY, "duplicate-key", "key-reused", "key-in-use", "unknown-dependency")
LINES_MAX = 1_000_000
LINE_BYTES_MAX = 2 * 1024 * 1024
STREAM_BYTES_MAX = 1024**3
STREAM_S = 600.0
"""Time limit for the arrival of a stream, in seconds."""
STREAM_BYTES_PER_S = 1024
"""A stream that is slower than this after BODY_S is cut off: others need its place."""
LINES_STEP = 500
"""Jobs inserted at a time: further lines are read when these are stored."""
LINES_SLICE = 20
"""Lines read, in half a millisecond or so, before all other requests have their turn."""
STEP_BYTES = 8 * 1024 * 1024
ERRORS_MAX = 100
EDGES_MAX = 100_000
"""Dependencies of one workflow."""


@router.post("/jobs/bulk", status_code=201, response_model=Ids, responses=_DOCUMENTED)
async def create_jobs(request: Request, body: JobsIn, key: IdempotencyKey = None) -> Response:
    """Create up to 10,000 jobs, all or none. A fault names each bad one by pointer."""
    for queue in {job.queue for job in body.jobs}:
        need(request, "enqueue", queue)
    jobs = await apart(lambda: _checked([each.job() for each in body.jobs]), request)
    async with once(request, key) as call:
        if call.earlier is not None:
            return call.earlier
        await may_wait_for(request, call.connection, (each for job in body.jobs for each in job.after))
        return await call.answered({"ids": await enqueue_many(call.connection, jobs)})


@router.post("/workflows", status_code=201, response_model=Names, responses=_DOCUMENTED)
async def create_workflow(request: Request, body: WorkflowIn, key: IdempotencyKey = None) -> Response:
    """Create jobs that depend on each other, by name; `after` may also name existing jobs, by id."""
    if (edges := sum(len(step.after) for step in body.jobs)) > EDGES_MAX:
        said = (
            f"they wait for {edges:,} others in all, {EDGES_MAX:,} are allowed: let one wait for many, and many for it"
        )
        raise Problem("invalid", errors=[{"pointer": "/jobs", "detail": said}])
    for queue in {step.queue for step in body.jobs}:
        need(request, "enqueue", queue)
    names = {step.name for step in body.jobs}
    flow = await apart(lambda: _flow(body.jobs, names), request)
    async with once(request, key) as call:
        if call.earlier is not None:
            return call.earlier
        named = [_id(each) for step in body.jobs for each in step.after if each not in names]
        await may_wait_for(request, call.connection, [each for each in named if isinstance(each, UUID)])
        return await call.answered({"ids": await flow.enqueue(call.connection)})


@stream_router.post(
    "/jobs/stream",
    status_code=201,
    response_model=Counted,
    responses=_DOCUMENTED,
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/x-ndjson": {"schema": {"type": "string"}}}}
    },
)
async def stream_jobs(request: Request, key: IdempotencyKey = None) -> Response:
    """Create up to a million jobs, all or none: one JSON object per line (application/x-ndjson), up to 1 GiB.

    Lines have the members of POST /v1/jobs but `on_duplicate`. A fault names the first bad line.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/x-ndjson":
        raise Problem("not-json-type", "send Content-Type: application/x-ndjson")
    gateway, count, digest = gateway_of(request), 0, hashlib.sha256()
    with gateway.streams.place(access_of(request).name):
        async with gateway.while_allowed(request), aclosing(_steps(request, digest)) as steps:
            jobs = await anext(steps, None)  # nothing is held of the database before there are jobs
            async with once(request, key) as call:
                while jobs is not None:
                    if call.earlier is None:  # else what is repeated is read, and no more
                        await may_wait_for(request, call.connection, (each for job in jobs for each in job.after))
                        await enqueue_many(call.connection, jobs)
                    count += len(jobs)
                    jobs = await anext(steps, None)
                return await call.answered({"created": count}, streamed=digest.hexdigest())


async def _steps(request: Request, digest: Any) -> AsyncGenerator[list[NewJob]]:
    jobs: list[NewJob] = []
    size = number = 0
    async for line in _lines(request):
        number += 1
        digest.update(line + b"\n")
        if not line.strip():
            continue
        if number > LINES_MAX:
            raise Problem("body-too-large", f"there are more than {LINES_MAX:,} lines")
        jobs.append(_job(request, line, number))
        size += len(line)
        if len(jobs) == LINES_STEP or size > STEP_BYTES:
            yield jobs
            jobs, size = [], 0
    if jobs:
        yield jobs


def _job(request: Request, line: bytes, number: int) -> NewJob:
    where = f"line {number:,}"
    try:
        job = DependentJob.model_validate(parse(line)).job()
        need(request, "enqueue", job.queue)
        row(job)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"/{step}" for step in first["loc"])
        said = clearer(first["type"], str(first["msg"]))
        raise Problem("invalid", f"{where}: {place}: {said}", errors=[{"pointer": place, "detail": said}]) from None
    except UsageError as error:
        raise Problem("invalid", f"{where}: {error}", errors=[_fault(error, "")]) from None
    except Problem as problem:
        raise Problem(problem.slug, f"{where}: {problem.detail}") from None
    return job


async def _lines(request: Request) -> AsyncIterator[bytes]:
    """The lines of the body. Problem for one that is too large, and for a body that is, or that stops coming."""
    rest, total = b"", 0
    parts = request.stream().__aiter__()
    began = anyio.current_time()
    until = began + STREAM_S  # the transaction is open meanwhile
    while True:
        with anyio.CancelScope(deadline=min(until, anyio.current_time() + BODY_S)) as limit:
            part = await anext(parts, None)
        if limit.cancelled_caught or total < STREAM_BYTES_PER_S * (anyio.current_time() - began - BODY_S):
            said = f"nothing arrived for {BODY_S:g} s, less than {STREAM_BYTES_PER_S:,} bytes a second"
            raise Problem("body-too-slow", f"{said}, or not all of it within {STREAM_S:g} s", headers=CLOSE)
        if part is None:
            break
        total += len(part)
        *whole, rest = (rest + part).split(b"\n")
        for place, line in enumerate(whole, 1):
            yield line
            if place % LINES_SLICE == 0:
                await anyio.lowlevel.checkpoint()
        if len(rest) > LINE_BYTES_MAX or total > STREAM_BYTES_MAX:
            raise Problem(
                "body-too-large", f"a line may have {LINE_BYTES_MAX:,} bytes, all of them {STREAM_BYTES_MAX:,}"
            )
    if rest:
        yield rest


def _checked(jobs: list[NewJob]) -> list[NewJob]:
    """The jobs. Raises Problem if any of them cannot be created."""
    if faults := list(_faults(jobs)):
        raise Problem("invalid", f"invalid: {len(faults)} of {counted(len(jobs), 'job')}", errors=faults[:ERRORS_MAX])
    return jobs


def _faults(jobs: list[NewJob]) -> Iterator[dict[str, str]]:
    for index, job in enumerate(jobs):
        try:
            row(job)
        except UsageError as error:
            yield _fault(error, f"/jobs/{index}")


def _fault(error: UsageError, at: str) -> dict[str, str]:
    if isinstance(error, InvalidPayload):
        return {"pointer": at + pointer(error.path), "detail": error.reason}
    return {"pointer": at, "detail": str(error)}


def _flow(steps: list[Step], names: set[str]) -> Workflow:
    flow = Workflow()
    for step in steps:
        options: Any = step.options() | {"after": [each if each in names else _id(each) for each in step.after]}
        flow.add(step.name, step.queue, step.payload, **options)
    return flow


def _id(text: str) -> str | UUID:
    try:
        return UUID(text)
    except ValueError:
        return text  # Workflow says that it is unknown
