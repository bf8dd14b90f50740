"""Assignments: attempts in the hands of remote workers, completed, failed, given back, or kept for longer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Path, Request, Response

from pgworkd.client import enqueue_many
from pgworkd.core.access import Access
from pgworkd.core.error_report import MESSAGE_BYTES_MAX, TRACEBACK_BYTES_MAX, ErrorFacts
from pgworkd.core.fence import Fence
from pgworkd.core.job import Ending, Outcome
from pgworkd.core.json_reader import check_bounds
from pgworkd.core.payload import clean_text
from pgworkd.errors import DatabaseBusy, LeaseLost, PgworkdError
from pgworkd.gateway.api.models.workers import (
    ASSIGNMENT_CHARS_MAX,
    CompleteIn,
    Extended,
    ExtendIn,
    FailIn,
    Misfit,
    ReleaseIn,
    SettledOut,
    SettlementIn,
    SettlementsIn,
    SettlementsOut,
)
from pgworkd.gateway.api.request import problems
from pgworkd.gateway.api.request.access import need
from pgworkd.gateway.api.request.answers import BODY, Json, PlainJson, documented
from pgworkd.gateway.api.request.failures import misfit
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.route import BulkRoute, Route
from pgworkd.gateway.api.routes.visible import may_wait_for, needed_any
from pgworkd.gateway.workers.settles import SettleAnswer, Settled


class AssignmentRoute(Route):
    """A route that may also be called by the assignment alone, if that is of a job that was pushed."""

    async def _access(self, request: Request) -> Access:
        if "authorization" not in request.headers:
            text, workers = request.path_params["assignment"], gateway_of(request).remote.workers
            if len(text) <= ASSIGNMENT_CHARS_MAX and await workers.is_pushed(text):
                return Access("a receiver of pushed jobs", {"work": None})
        return await super()._access(request)


router = APIRouter(prefix="/v1", tags=["workers"], route_class=AssignmentRoute)
bulk_router = APIRouter(prefix="/v1", tags=["workers"], route_class=BulkRoute)
Text = Annotated[str, Path(max_length=ASSIGNMENT_CHARS_MAX, description="`assignment` of the claim, unchanged")]
STALE = documented(*BODY, "stale-assignment")
_PROBLEMS = (PgworkdError, problems.Problem)
LOCKED_MANY_S = 0.5
"""How long a call with many settles waits for a locked job: the answer waits for all."""


@router.post("/assignments/{assignment}/complete", response_model=SettledOut, responses=STALE)
async def complete(request: Request, assignment: Text, body: CompleteIn) -> Response:
    """Complete the job. Sending it again changes nothing, and is answered in the same way."""
    return PlainJson(_shown(await _complete(request, assignment, body)))


@router.post("/assignments/{assignment}/fail", response_model=SettledOut, responses=STALE)
async def fail(request: Request, assignment: Text, body: FailIn) -> Response:
    """Fail the attempt: the job is retried after a while, or dead if that was its last attempt."""
    needed_any(request, "work")
    return PlainJson(_shown(await _settle(request, assignment, await _failure(request, assignment, body))))


@router.post("/assignments/{assignment}/release", response_model=SettledOut, responses=STALE)
async def release(request: Request, assignment: Text, body: ReleaseIn) -> Response:
    """Give the attempt back, without counting a failure."""
    return PlainJson(_shown(await _settle(request, assignment, _released(body))))


@router.post("/assignments/{assignment}/extend", response_model=Extended, responses=STALE)
async def extend(request: Request, assignment: Text, body: ExtendIn) -> Response:
    """Renew the lease of an attempt that was claimed with one of its own."""
    needed_any(request, "work")
    remote = gateway_of(request).remote
    held = await remote.workers.held(assignment)
    found = await remote.remote.extend([held], [body.lease_s])
    if held.job_id not in found:
        if await remote.remote.running([held]):
            raise DatabaseBusy("the job is locked by another transaction", sqlstate="55P03")
        raise LeaseLost(f"attempt {held.attempt} of job {held.job_id} runs no more here")
    left_s, cancel = found[held.job_id]
    return Json({"left_s": left_s, "cancel": cancel})


@bulk_router.post("/settlements", response_model=SettlementsOut, responses=documented(*BODY))
async def settle_many(request: Request, body: SettlementsIn) -> Response:
    """Settle up to 1,000 attempts, each for itself: a bad settle does not harm the others."""
    needed_any(request, "work")
    prefix = request.scope.get("root_path", "")
    answers: list[dict[str, Any]] = [
        {"assignment": each.assignment, "status": None, "repeated": False, "problem": None} for each in body.settlements
    ]

    async def complete_apart(answer: dict[str, Any], each: SettlementIn) -> None:
        try:
            answer.update(_shown(await _complete(request, each.assignment, each)))
        except _PROBLEMS as error:
            answer["problem"] = problems.of(error).body(prefix)

    begun, settles = list[dict[str, Any]](), list[tuple[Fence, Outcome]]()
    async with anyio.create_task_group() as tasks:
        for answer, each in zip(answers, body.settlements, strict=True):
            if isinstance(each, Misfit):
                answer["problem"] = misfit(each.error).body(prefix)
                continue
            if each.outcome == "complete" and each.enqueue:  # a transaction of its own, which may meet a lock
                tasks.start_soon(complete_apart, answer, each)
                continue
            try:
                settles.append(await _settlement(request, each))
                begun.append(answer)
            except _PROBLEMS as error:
                answer["problem"] = problems.of(error).body(prefix)
        ends = await gateway_of(request).remote.settles.settle_many(settles, LOCKED_MANY_S)
        for answer, end in zip(begun, ends, strict=True):
            answer.update({"problem": problems.of(end).body(prefix)} if isinstance(end, PgworkdError) else _shown(end))
    return PlainJson({"settlements": answers})


async def _settlement(request: Request, each: SettlementIn) -> tuple[Fence, Outcome]:
    """The attempt, and what is to become of it."""
    held = await gateway_of(request).remote.workers.held(each.assignment)
    if each.outcome != "complete":
        failed = each.outcome == "fail"
        return held, await _failure(request, each.assignment, each) if failed else _released(each)
    if each.result is not None:
        check_bounds(each.result, "result")
    return held, Outcome(Ending.COMPLETED, result=each.result)


async def _complete(request: Request, assignment: str, body: CompleteIn) -> SettleAnswer:
    if body.result is not None:
        check_bounds(body.result, "result")
    if not body.enqueue:
        return await _settle(request, assignment, Outcome(Ending.COMPLETED, result=body.result))
    needed_any(request, "work")
    for each in body.enqueue:
        need(request, "enqueue", each.queue)
    gateway = gateway_of(request)
    held = await gateway.remote.workers.held(assignment)
    settles, committed = gateway.remote.settles, None
    try:
        async with gateway.database.transaction() as connection:
            if (committed := await settles.complete_on(connection, held, body.result)) is None:
                raise LeaseLost(f"attempt {held.attempt} of job {held.job_id} runs no more here")
            await may_wait_for(request, connection, (each for job in body.enqueue for each in job.after))
            await enqueue_many(connection, [each.job() for each in body.enqueue])
    except LeaseLost:  # it may have been completed before
        return await settles.settle(held, Outcome(Ending.COMPLETED))
    except PgworkdError as error:
        raise _of_enqueue(error) if committed else error from None
    return committed()


def _of_enqueue(error: PgworkdError) -> problems.Problem:
    """The problem for an error of the jobs of a result; it points to what is wrong."""
    problem = problems.of(error)
    if problem.status_code < 500:
        places = problem.errors or [{"pointer": "", "detail": problem.detail}]
        problem.errors = [{**each, "pointer": f"/enqueue{each['pointer'].removeprefix('/jobs')}"} for each in places]
    return problem


async def _settle(request: Request, assignment: str, outcome: Outcome) -> SettleAnswer:
    needed_any(request, "work")
    remote = gateway_of(request).remote
    return await remote.settles.settle(await remote.workers.held(assignment), outcome)


async def _failure(request: Request, assignment: str, body: FailIn) -> Outcome:
    remote = gateway_of(request).remote
    held = await remote.workers.held(assignment)
    worker = remote.workers.find(held.worker_id)
    facts = ErrorFacts(
        clean_text(body.type, 200),
        clean_text(body.message, MESSAGE_BYTES_MAX),
        clean_text(body.traceback, TRACEBACK_BYTES_MAX),
    ).redacted()
    return Outcome(
        Ending.FAILED,
        delay_s=body.retry_in_s,
        permanent=not body.retryable,
        message=facts.summary,
        error={**asdict(facts), "worker": "" if worker is None else worker.name},
    )


def _released(body: ReleaseIn) -> Outcome:
    said = None if body.reason is None else clean_text(body.reason, MESSAGE_BYTES_MAX)
    return Outcome(Ending.RELEASED, delay_s=body.delay_s, message=said, begun=said is None)


def _shown(answer: SettleAnswer) -> dict[str, Any]:
    return {"status": answer.status, "repeated": answer.settled is Settled.BEFORE}
