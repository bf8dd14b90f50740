"""One job: create it, see it, wait for it, end it."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Header, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.queries import JobDetails
from pgworkd.client import Enqueued, enqueue, enqueue_once
from pgworkd.core.access import Access
from pgworkd.core.job import ENDED
from pgworkd.core.json_text import JsonText
from pgworkd.errors import JobFailed, JobUnknown
from pgworkd.gateway.api.models.jobs import (
    Changed,
    Created,
    CreatedOnce,
    Edit,
    Ended,
    Explained,
    JobIn,
    JobOut,
    OnceJob,
    Result,
    StackOut,
    Waiting,
)
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.answers import BODY, Json, documented
from pgworkd.gateway.api.request.enqueues import may_share
from pgworkd.gateway.api.request.gateway import Gateway, gateway_of
from pgworkd.gateway.api.request.once import IdempotencyKey, once
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route
from pgworkd.gateway.api.routes.visible import JobId, WaitS, may_wait_for, needed_any, reasons_for, visible

router = APIRouter(prefix="/v1", tags=["jobs"], route_class=Route)
IfMatch = Annotated[str | None, Header(alias="If-Match", description="Edit only a job that has this ETag")]
KeepExpiresAt = Annotated[
    bool, Query(description="It expires when the ended job was to: at once, if that is over; else never")
]
_TEXTS = ("payload", "meta", "result", "errors")


@router.post(
    "/jobs",
    status_code=201,
    response_model=Created,
    responses=documented(*BODY, "duplicate-key", "key-reused", "key-in-use", "unknown-dependency")
    | {200: {"model": Created, "description": "The dedupe key is taken: the job that holds it"}},
)
async def create_job(request: Request, job: JobIn, key: IdempotencyKey = None) -> Response:
    """Create a job."""
    need(request, "enqueue", job.queue)
    options: Any = job.options()

    async def made(connection: Any) -> Enqueued:
        if job.on_duplicate is None:
            return Enqueued(await enqueue(connection, job.queue, job.payload, **options), created=True, changed=False)
        found: Enqueued = await enqueue(connection, job.queue, job.payload, on_duplicate=job.on_duplicate, **options)
        return found

    gateway = gateway_of(request)
    if key is None and not job.after:  # it is one statement, perhaps of many callers
        if may_share(job.model_fields_set):
            answer = Enqueued(await gateway.create(job.job()), created=True, changed=False)
        else:
            answer = await gateway.database.call(made)
        return Json(answer._asdict(), 201 if answer.created else 200, {"Location": _place(request, answer.id)})
    async with once(request, key) as call:
        if call.earlier is not None:
            return call.earlier
        await may_wait_for(request, call.connection, job.after)
        answer = await made(call.connection)
        return await call.answered(answer._asdict(), 201 if answer.created else 200, _place(request, answer.id))


@router.put(
    "/jobs/{job_id}",
    status_code=201,
    response_model=CreatedOnce,
    responses=documented(*BODY, "id-taken", "duplicate-key")
    | {200: {"model": CreatedOnce, "description": "The job is there already, perhaps finished"}},
)
async def create_job_once(request: Request, job_id: JobId, job: OnceJob) -> Response:
    """Create a job under an id of yours: sending it again never runs it twice.

    The id should be a UUID of version 7. Refused for a queue that keeps no history.
    """
    need(request, "enqueue", job.queue)
    options: Any = job.options()
    async with gateway_of(request).database.transaction() as connection:
        found = await enqueue_once(connection, job_id, job.queue, job.payload, **options)
        if found.keep_s == 0:
            said = f"queue {job.queue!r} keeps no history, so a repetition would not be recognised: use a dedupe_key"
            raise Problem("invalid", said)
    if not found.same:
        said = "its queue, kind or payload differs" if found.same is False else "only its dedupe key is left of it"
        raise Problem("id-taken", f"job {job_id} is there already, and {said}")
    keep_s = None if found.keep_s is None else float(found.keep_s)
    answer = {"id": job_id, "created": found.created, "status": found.status, "keep_s": keep_s}
    return Json(answer, 201 if found.created else 200)


@router.get("/jobs/{job_id}", response_model=JobOut, responses=documented("not-found", "too-many-waiters"))
async def get_job(request: Request, job_id: JobId, wait_s: WaitS = 0) -> Response:
    """One job, live or finished; with `wait_s` as soon as it has ended."""
    gateway, access = gateway_of(request), access_of(request)
    async with gateway.admin() as admin:
        job = await visible(request, admin, job_id, "read")
    if wait_s and job.status not in ENDED and await _ends(request, gateway, job, wait_s):
        async with gateway.admin() as admin:
            job = await visible(request, admin, job_id, "read")
    shown = {name: value for name, value in job._asdict().items() if name not in (*_TEXTS, "worker_id")}
    if access.allows("payload", job.queue):
        texts = {name: getattr(job, name) for name in _TEXTS}
        shown |= {name: None if text is None else JsonText(text) for name, text in texts.items()}
    return Json(shown, headers={"ETag": _etag(access, job)})


@router.get("/jobs/{job_id}/explain", response_model=Explained, responses=documented("not-found"))
async def explain_job(request: Request, job_id: JobId) -> Response:
    """Why a job does not run: each reason, which is enough by itself, and what ends it."""
    async with gateway_of(request).admin() as admin:
        await visible(request, admin, job_id, "read")
        reasons = await reasons_for(access_of(request), admin, job_id)
    return Json({"id": job_id, "reasons": [each._asdict() for each in reasons]})


@router.post(
    "/jobs/{job_id}/stack", status_code=202, response_model=StackOut, responses=documented("not-found", "conflict")
)
async def ask_stack(request: Request, job_id: JobId) -> Response:
    """Ask the worker of a running job where in its code that is; GET has the answer, within a heartbeat."""
    needed_any(request, "operate")
    async with gateway_of(request).admin_transaction(access_of(request).name) as admin:
        await visible(request, admin, job_id, "operate")
        await admin.jobs.ask_stack(job_id)
        return await _stack(admin, job_id, 202)


@router.get("/jobs/{job_id}/stack", response_model=StackOut, responses=documented("not-found"))
async def get_stack(request: Request, job_id: JobId) -> Response:
    """What was asked and answered last, within the last hour: files, lines and functions, never values."""
    needed_any(request, "operate")
    async with gateway_of(request).admin() as admin:
        await visible(request, admin, job_id, "operate")
        return await _stack(admin, job_id, 200)


@router.get(
    "/jobs/{job_id}/result",
    response_model=Result,
    responses=documented("not-found", "job-failed", "forgotten", "too-many-waiters")
    | {202: {"model": Waiting, "description": "The job has not ended"}},
)
async def get_result(request: Request, job_id: JobId, wait_s: WaitS = 0) -> Response:
    """What the job's handler returned."""
    gateway = gateway_of(request)
    needed_any(request, "payload")
    async with gateway.admin() as admin:
        job = await visible(request, admin, job_id, "payload")
    if job.status not in ENDED:
        if not (wait_s and await _ends(request, gateway, job, wait_s)):
            return Json({"id": job_id, "status": job.status}, 202)
        async with gateway.admin() as admin:
            job = await visible(request, admin, job_id, "payload")
    if job.status != "completed":
        raise Problem("job-failed", f"job {job_id} is {job.status}: {job.error or 'no error'}", job_status=job.status)
    return Json({"id": job_id, "result": None if job.result is None else JsonText(job.result)})


@router.patch(
    "/jobs/{job_id}",
    response_model=Changed,
    responses=documented(*BODY, "not-found", "not-waiting", "changed"),
)
async def edit_job(request: Request, job_id: JobId, edit: Edit, if_match: IfMatch = None) -> Response:
    """Change fields of a waiting job."""
    gateway, access = gateway_of(request), access_of(request)
    needed_any(request, "operate")
    async with gateway.admin_transaction(access.name) as admin:
        await admin.jobs.hold(job_id)
        job = await visible(request, admin, job_id, "operate")
        if if_match is not None and not _matches(if_match, _etag(access, job)):
            raise Problem("changed", f"job {job_id} has another ETag now")
        changed = await admin.jobs.edit(
            job_id, edit.payload, run_at=edit.run_at, delay_s=edit.delay_s, priority=edit.priority
        )
        job = await visible(request, admin, job_id, "operate")
    return Json({"id": job_id, "changed": changed}, headers={"ETag": _etag(access, job)})


@router.delete(
    "/jobs/{job_id}",
    response_model=Ended,
    responses=documented("not-found", "conflict"),
)
async def cancel_job(request: Request, job_id: JobId) -> Response:
    """Cancel a job: at once if it waits; a running one is asked to stop. The same again does no harm."""
    gateway, access = gateway_of(request), access_of(request)
    async with gateway.admin(access.name) as admin:
        job = await visible(request, admin, job_id, "enqueue", "operate")
        outcome = (await admin.jobs.cancel([job_id])).get(job_id)
        if outcome is None:
            refused = (await admin.jobs.refusals("cancel", [job_id])).get(job_id)
            if refused is None or refused.status != "cancelled":
                raise Problem("conflict", f"job {job_id} is {job.status}" if refused is None else refused.reason)
            outcome = "cancelled"
    return Json({"id": job_id, "outcome": outcome})


@router.post(
    "/jobs/{job_id}/replay",
    status_code=201,
    response_model=Created,
    responses=documented("not-found", "conflict", "key-reused", "key-in-use"),
)
async def replay_job(
    request: Request, job_id: JobId, keep_expires_at: KeepExpiresAt = False, key: IdempotencyKey = None
) -> Response:
    """Create a new job with the payload, kind and meta of one that has ended. It never expires, unless asked to."""
    gateway = gateway_of(request)
    async with once(request, key, access_of(request).name) as call:
        admin = gateway.admin_on(call.connection)
        from_ = await visible(request, admin, job_id, "operate")
        if call.earlier is not None:
            return call.earlier
        if from_.status not in ENDED:
            raise Problem("conflict", f"job {job_id} is {from_.status}: it has not ended")
        made = await admin.jobs.replay(from_, keep_expires_at=keep_expires_at)
        return await call.answered(made._asdict(), 201, _place(request, made.id))


async def _stack(admin: Admin, job_id: UUID, status: int) -> Response:
    if (found := await admin.jobs.stack(job_id)) is None:
        raise Problem("not-found", f"no stack of job {job_id} was asked for within the last hour: POST asks for one")
    return Json(found._asdict(), status)


def _place(request: Request, job_id: UUID) -> str:
    return f"{request.scope.get('root_path', '')}/v1/jobs/{job_id}"


async def _ends(request: Request, gateway: Gateway, job: JobDetails, wait_s: float) -> bool:
    """Waits for the end of the job; False if it has not ended."""
    ended = True

    async def end() -> None:
        nonlocal ended
        try:
            await gateway.results.result_text(job.id, wait_s)
        except (JobFailed, JobUnknown):
            pass
        except TimeoutError:
            ended = False

    return await gateway.waited(request, end, gateway.waits.place(access_of(request).name)) and ended


def _matches(if_match: str, etag: str) -> bool:
    """Whether one of the tags is this one; a weak one counts, too: proxies that compress answers make them weak."""
    return if_match.strip() == "*" or etag in (each.strip().removeprefix("W/") for each in if_match.split(","))


def _etag(access: Access, job: JobDetails) -> str:
    """A digest of what the caller may see: of a payload that it may not, it would tell which one it is."""
    facts: tuple[object, ...] = (job.status, job.attempts, job.failures, job.priority, job.run_at)
    if access.allows("payload", job.queue):
        facts += (job.payload, job.meta)
    return f'"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"'
