"""Remote workers: register, claim, beat, sign off. What becomes of their attempts is in `assignments`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Header, Path, Query, Request, Response

from pgworkd.core.assignment import sealed
from pgworkd.core.fence import Fence
from pgworkd.core.job import ENDED
from pgworkd.core.json_text import JsonText
from pgworkd.core.payload import clean_text
from pgworkd.core.validation import text
from pgworkd.database.remote_store import NotClaimed
from pgworkd.gateway.api.models.workers import (
    Asked,
    AskIn,
    BeatIn,
    BeatOut,
    Claimed,
    ClaimIn,
    QueuesIn,
    Served,
    SignedOff,
    WorkerIn,
    WorkerMade,
)
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.answers import BODY, Json, documented, to_json
from pgworkd.gateway.api.request.caller import is_gone
from pgworkd.gateway.api.request.gateway import Gateway, gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import BulkRoute, Route
from pgworkd.gateway.api.routes.visible import needed_any, unknown_job, visible
from pgworkd.gateway.workers.beats import Report
from pgworkd.gateway.workers.claims import Assigned
from pgworkd.gateway.workers.workers import RemoteWorker

router = APIRouter(prefix="/v1", tags=["workers"], route_class=Route)
bulk_router = APIRouter(prefix="/v1", tags=["workers"], route_class=BulkRoute)
BEATS_PER_LEASE = 3
NOT_CLAIMED = {
    "not_due": "not-due",
    "running": "job-running",
    "blocked": "job-blocked",
    "key": "job-blocked",
    "dead": "job-ended",
    "expired": "job-ended",
    "paused": "queue-paused",
    "limit": "limit-reached",
    "slots": "no-free-slot",
    "suspect": "no-free-slot",
    "locked": "busy",
}
"""By why a job was not claimed: the slug of the answer."""
SAID = {
    "expired": "has expired",
    "not_due": "is not due yet",
    "paused": "has a queue that is paused",
    "limit": "has a queue whose limit is reached, or a limit_key whose",
    "slots": "fits into no slot of the worker: all are taken",
    "locked": "is locked by another session",
    "suspect": "was lost with its workers: a worker runs one such job at a time",
}
"""What is said of a job that was not claimed, where its status does not."""
PROGRESS_BYTES_MAX = 2000
LastClaim = Annotated[
    int | None,
    Query(
        ge=0,
        le=2**31 - 1,
        description="The last claim: what those up to it have taken has been settled, was listed, or has not begun",
    ),
]
Secret = Annotated[
    str, Header(alias="Pgworkd-Secret", max_length=100, description="`secret` of the answer to the registration")
]
"""The header with the worker's secret, which is asked for after the scope: see `_worker`."""
WorkerPath = Annotated[int, Path(ge=1, le=10**9)]


@router.post("/workers", status_code=201, response_model=WorkerMade, responses=documented(*BODY))
async def register(request: Request, body: WorkerIn) -> Response:
    """Register a worker. It beats at least every `beat_every_s`, or is presumed dead after `lease_s`."""
    text(body.name, "name", 200)
    text(body.version or "-", "version", 100)
    for queue in body.queues:
        need(request, "work", text(queue, "a name in queues", 200))
    remote = gateway_of(request).remote
    remote.check()
    worker = await remote.workers.register(body.name, body.version, body.lease_s, body.queues)
    return Json(
        {
            "worker": int(worker.id),
            "secret": worker.id.token.hex,
            "lease_s": body.lease_s,
            "beat_every_s": body.lease_s / BEATS_PER_LEASE,
        },
        201,
    )


@router.post(
    "/claims",
    response_model=Claimed,
    responses=documented(*BODY, "worker-lost", "too-many-waiters", *dict.fromkeys(NOT_CLAIMED.values())),
)
async def claim(request: Request, body: ClaimIn, secret: Secret = "") -> Response:
    """Claim jobs, and wait for one if asked to; those that wait are served first come, first served. Or claim one job.

    Counts as a beat without a list. Answered early when the worker is to stop something.
    """
    gateway = gateway_of(request)
    queues = await _queues(request, body)
    if (body.lease == "job") != (body.lease_s is not None):
        raise Problem("invalid", errors=[{"pointer": "/lease_s", "detail": 'needed for lease "job", and only there'}])
    worker = await _worker(gateway, body.worker, secret)
    if any(queue not in worker.slots for queue in queues):
        await gateway.remote.workers.refresh(worker)
    if unknown := [queue for queue in queues if queue not in worker.slots]:
        said = f"worker {body.worker} does not serve {unknown[0]!r}: add it by PUT /v1/workers/{body.worker}/queues"
        raise Problem("invalid", errors=[{"pointer": "/queues" if body.job is None else "/job", "detail": said}])
    gateway.remote.beats.note(worker)
    assigned: Sequence[Assigned] = ()
    refused: NotClaimed | None = None

    async def wait() -> None:
        nonlocal assigned, refused
        how = (body.lease_s, tuple(sorted(body.max_attempts.items())), body.claim_id)
        if body.job is None:
            assigned = await gateway.remote.claims.claim(worker, queues, body.max, body.wait_s, *how)
            return
        found = await gateway.remote.claims.claim_one(worker, queues[0], body.job, *how)
        assigned, refused = ((), found) if isinstance(found, NotClaimed) else (found, None)
        if not found and worker.may_claim:
            refused = NotClaimed("ended")

    place = gateway.claims.place(None) if body.wait_s else contextlib.nullcontext()
    await gateway.waited(request, wait, place)
    if body.job is not None and refused is not None:
        raise await _refusal(request, body.job, refused)
    state, cancels = worker.tell()
    rest = f'"state":{_quoted(state)},"cancel":{to_json(_texts(worker, cancels))}}}'
    nothing = JsonText(f'{{"assignments":[],{rest}')
    if not assigned:
        return Json(nothing)
    answer = JsonText(f'{{"assignments":[{",".join(map(_shown, assigned))}],{rest}')
    return _Handover(answer, nothing, request, gateway, assigned)


async def _queues(request: Request, body: ClaimIn) -> list[str]:
    """The queues of a claim, for which the caller has the scope `work`; a job that it may not see is unknown."""
    if body.job is None:
        for queue in body.queues or ():
            need(request, "work", queue)
        return body.queues or []
    needed_any(request, "work")
    async with gateway_of(request).admin() as admin:
        found = (await admin.jobs.queues([body.job])).get(body.job)
    if found is None or not access_of(request).allows("work", found):
        raise unknown_job(body.job)
    return [found]


async def _refusal(request: Request, job_id: UUID, refused: NotClaimed) -> Problem:
    """Why the job was not claimed, with what is known of it."""
    async with gateway_of(request).admin() as admin:
        job = await visible(request, admin, job_id, "work")
    why = job.status if refused.why in ("unknown", "ended") else refused.why  # it has moved to the history
    slug = NOT_CLAIMED.get(why, "job-ended" if job.status in ENDED else "busy")
    more: dict[str, Any] = {"job_status": job.status}
    if refused.again_s is not None:
        more["again_s"] = refused.again_s
    said = f"job {job_id} " + SAID.get(why, f"is {job.status}")
    if slug == "not-due":
        more["run_at"] = job.run_at
    elif slug == "job-running":
        more["worker"] = job.worker
        said += f", at worker {job.worker}"
    elif slug == "job-blocked":
        more["waits_for"] = list(refused.waits_for or ())
        said = f"job {job_id} waits: {job.waits or 'for its serialize_key'}"
    return Problem(slug, said, **more)


class _Handover(Json):
    """An answer with assignments: they are given back if the client has hung up before.

    Whether it has arrived, only the worker knows: it says so in its beats.
    """

    def __init__(
        self, content: Any, nothing: JsonText, request: Request, gateway: Gateway, assigned: Sequence[Assigned]
    ) -> None:
        super().__init__(content)
        self._nothing = nothing
        self._request, self._claims, self._assigned = request, gateway.remote.claims, assigned

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Starlette's hook."""
        if await is_gone(self._request):
            self._claims.give_back([each.held for each in self._assigned])
            await Json(self._nothing)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


@bulk_router.post("/workers/{worker_id}/beat", response_model=BeatOut, responses=documented(*BODY, "worker-lost"))
async def beat(request: Request, worker_id: WorkerPath, body: BeatIn, secret: Secret = "") -> Response:
    """Renew the lease of a worker, which protects all that it runs; and learn what it is to do."""
    needed_any(request, "work")
    remote = gateway_of(request).remote
    worker = await _worker(gateway_of(request), worker_id, secret)
    named = list(dict.fromkeys([*(body.assignments or ()), *(each.assignment for each in body.progress)]))
    held = await remote.workers.listed(worker, named)
    progress = [
        (held[each.assignment], each.done, clean_text(each.message, PROGRESS_BYTES_MAX))
        for each in body.progress
        if each.assignment in held
    ]
    worker.says(body.state)
    gone, is_listed = await remote.beats.beat(worker, Report(list(held.values()), progress, body.state))
    if body.assignments is not None and body.claim_id is not None:
        worker.list_held(frozenset(held[text][:2] for text in body.assignments if text in held), body.claim_id)
    state, cancels = worker.tell()
    return Json(
        {
            "lease_s": worker.lease_s,
            "state": state,
            "backoffs": remote.backoffs(worker),
            "cancel": _texts(worker, cancels),
            "gone": [text for text in named if text not in held or held[text].job_id in gone],
            "listed": is_listed,
        }
    )


@router.put("/workers/{worker_id}/queues", response_model=Served, responses=documented(*BODY, "worker-lost"))
async def serve(request: Request, worker_id: WorkerPath, body: QueuesIn, secret: Secret = "") -> Response:
    """Change which queues a worker serves, and its slots for each. What it runs of others goes on."""
    needed_any(request, "work")
    for queue in body.queues:
        need(request, "work", text(queue, "a name in queues", 200))
    workers = gateway_of(request).remote.workers
    await workers.serve(await _worker(gateway_of(request), worker_id, secret), body.queues)
    return Json({"queues": body.queues})


@router.delete("/workers/{worker_id}", response_model=SignedOff, responses=documented("worker-lost"))
async def sign_off(
    request: Request, worker_id: WorkerPath, secret: Secret = "", claim_id: LastClaim = None
) -> Response:
    """End a registration. What the worker still has goes back, uncounted; a job that may run only once is dead.

    Unless it has not begun, as `claim_id` says.
    """
    needed_any(request, "work")
    remote = gateway_of(request).remote
    worker = await _worker(gateway_of(request), worker_id, secret)
    given_back = await remote.remote.abandon(worker.id, claim_id or worker.claim_id or None)
    remote.workers.lose(worker_id)
    if given_back is None:
        raise Problem("worker-lost", f"worker {worker_id} is presumed dead: its jobs have been taken back")
    return Json({"given_back": len(given_back)})


@router.post("/workers/{worker_id}/ask", response_model=Asked, responses=documented(*BODY, "not-found"))
async def ask(request: Request, worker_id: WorkerPath, body: AskIn) -> Response:
    """Ask a remote worker to claim nothing more, to end, or to go on."""
    access = need(request, "operate")
    async with gateway_of(request).admin(access.name) as admin:
        if not await admin.ask_worker(worker_id, body.state):
            raise Problem("not-found", f"worker {worker_id} is not remote, has signed off, or is presumed dead")
    return Json({"worker": worker_id, "state": body.state})


async def _worker(gateway: Gateway, worker_id: int, secret: str) -> RemoteWorker:
    if not secret:
        said = "is missing: send the `secret` of the answer to the registration"
        raise Problem("invalid", errors=[{"in": "header/Pgworkd-Secret", "detail": said}])
    return await gateway.remote.workers.authenticated(worker_id, secret)


def _shown(assigned: Assigned) -> str:
    """An assignment of an answer, written out: there may be a hundred of them."""
    job = assigned.claimed
    occurrence = "null" if job.occurrence is None else f'"{_instant(job.occurrence)}"'
    deadline_s = "null" if job.timeout_s is None else repr(float(job.timeout_s))
    return (
        f'{{"assignment":"{assigned.assignment}","job":{{"id":"{job.id}","queue":{_quoted(assigned.queue)},'
        f'"kind":{_quoted(job.kind)},"attempt":{job.attempt},"failures":{job.failures},'
        f'"max_attempts":{job.max_attempts},"priority":{job.priority},"run_at":"{_instant(job.run_at)}",'
        f'"created_at":"{_instant(job.created_at)}","schedule":{_quoted(job.schedule)},"occurrence":{occurrence},'
        f'"payload":{job.payload or "{}"},"meta":{job.meta or "null"}}},"deadline_s":{deadline_s}}}'
    )


_quoted = lru_cache(1000)(to_json)


@lru_cache(1000)
def _instant(at: float) -> str:
    """An instant as text, cached: jobs of one transaction have the same; and most are due when they are created."""
    return datetime.fromtimestamp(at, UTC).isoformat()


def _texts(worker: RemoteWorker, attempts: dict[UUID, int]) -> list[str]:
    return [sealed(Fence.of(job_id, attempt, worker.id)) for job_id, attempt in attempts.items()]
