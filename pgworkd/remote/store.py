"""What the engine calls of the database, over HTTP: claims, settles, progress, registration.

Each claim waits in the gateway until there is a job. The gateway does for remote workers what a daemon does for itself
beside that: maintenance, occurrences, statistics, large payloads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote
from uuid import UUID

from pgworkd.core.claims import ClaimedJob, ClaimOrder, Claims
from pgworkd.core.fence import Fence, Settling
from pgworkd.core.job import STATUSES_AFTER, Ending, Outcome
from pgworkd.core.registration import Registration
from pgworkd.core.source import Occurrence, Payload
from pgworkd.errors import AccessRefused, DatabaseBusy, DatabaseError, LeaseLost, PgworkdError, UsageError, WorkerLost
from pgworkd.remote.assignments import Assignments
from pgworkd.remote.client import CONFLICT, GatewayAddress, GatewayClient, problem
from pgworkd.remote.heartbeats import GatewayHeartbeats, beat

WAIT_S = 20.0
"""How long a claim waits for a job: shorter than proxies cut a silent request off."""
CLAIM_MAX = 100
"""Jobs per claim."""
PROGRESS_CHARS_MAX, REASON_CHARS_MAX = 500, 1000
_MESSAGE_MAX, _TRACEBACK_MAX, _TYPE_MAX = 100_000, 500_000, 200


class GatewayStore:
    """`WorkSource` over HTTP."""

    def __init__(
        self,
        gateway: GatewayAddress,
        slots: Callable[[], dict[str, int]],
        on_told: Callable[[str, Collection[tuple[UUID, int]]], None],
    ) -> None:
        """`slots` returns the queues that are served, and how many jobs of each at once.

        `on_told` gets what the answer to a claim says: the state (run, quiet, stop) and what to cancel.
        """
        self._gateway, self._slots, self._on_told = gateway, slots, on_told
        self._http = GatewayClient(gateway)
        self.held = Assignments()
        self._served: dict[str, int] = {}
        self._locked: set[UUID] = set()  # jobs that the last settle found locked
        self.transactions = _NoTransactions()

    def heartbeats(self, limit_s: float) -> GatewayHeartbeats:
        """Beats, on connections of their own."""
        return GatewayHeartbeats(self._gateway, min(limit_s, self._gateway.limit_s), self.held)

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.close()

    # Worker and queues.

    async def register(
        self, name: str, pid: int, version: str, lease_s: float, kinds: Sequence[str] | None = None, kind: str = ""
    ) -> Registration:
        """Registers this worker. AccessRefused for a token that does not allow it."""
        slots = self._slots()
        body = {"name": name, "version": version, "lease_s": lease_s, "queues": slots}
        made = await self._http.call("POST", "/v1/workers", body)
        self._served = slots
        return Registration.of(made["worker"], UUID(hex=made["secret"]))

    async def set_pool(
        self, worker_id: int, queue: str, slots: int, *, idle: bool, code: tuple[int | None, str | None] = (None, None)
    ) -> None:
        """Does nothing: `serve` tells the gateway, and a claim that waits does not hold that up."""

    async def drop_pool(self, worker_id: int, queue: str) -> None:
        """Does nothing: `serve` tells the gateway."""

    @property
    def is_served(self) -> bool:
        """True if the gateway knows the queues and slots, or there is none to serve."""
        slots = self._slots()
        return slots == self._served or not slots

    async def serve(self, worker_id: int) -> None:
        """Tells the gateway which queues are served, with how many slots; it answers claims that wait."""
        slots = self._slots()
        await self._http.call("PUT", f"/v1/workers/{worker_id:d}/queues", {"queues": slots}, worker_id=worker_id)
        self._served = slots

    async def sign_off(self, worker_id: int) -> bool:
        """Ends the registration; what is still running goes back."""
        with contextlib.suppress(WorkerLost):  # it has ended, by a call without an answer or because it lost its lease
            claim_id = self.held.claim_id  # before the list
            answer = await beat(self._http, self.held, worker_id, "stopping")
            # What we know nothing of has not begun; where the list could not be noted, more may have.
            known = f"?claim_id={claim_id}" if answer["listed"] else ""
            await self._http.call("DELETE", f"/v1/workers/{worker_id:d}{known}", worker_id=worker_id)
        return True

    async def kinds_elsewhere(self, worker_id: int, queue: str, kinds: Sequence[str]) -> set[str]:
        """None: a gateway does not know the kinds of workers."""
        return set()

    # Claim.

    async def claim(self, order: ClaimOrder) -> Claims:
        """Claims jobs; waits for the first up to WAIT_S seconds. Raises `WorkerLost` without a lease."""
        body = {
            "worker": int(order.worker_id),
            "queues": [order.queue],
            "max": max(1, min(order.limit, CLAIM_MAX)),
            "wait_s": WAIT_S,
            "max_attempts": dict(zip(order.kinds, order.budgets, strict=True)),
        }
        claim_id = body["claim_id"] = self.held.begin_claim()
        try:
            answer = await self._http.call("POST", "/v1/claims", body, worker_id=order.worker_id, wait_s=WAIT_S)
            claims = Claims(_claimed(each["job"], each["deadline_s"]) for each in answer["assignments"])
            for claimed, each in zip(claims, answer["assignments"], strict=True):
                self.held.add(claimed.id, claimed.attempt, order.worker_id, each["assignment"])
        finally:  # what it took without our knowledge is in none of our lists: the gateway takes it back
            self.held.end_claim(claim_id)
        if answer["cancel"] or answer["state"] != "run":
            self._on_told(answer["state"], self.held.attempts(answer["cancel"]))
        return claims

    async def refuse_claims(self, order: ClaimOrder, error: PgworkdError | None = None) -> int | None:
        """Sets aside nothing: the gateway does it."""
        return 0

    # Settle: as the methods of `SettleStore`; whose attempts they are is in the assignments.

    async def settle(
        self,
        ending: Ending,
        settles: Sequence[Settling],
        following: Sequence[Occurrence] = (),
        *,
        skip_locked: bool = False,
        deferred: bool = False,
    ) -> dict[UUID, str]:
        """The new status of each that was still ours. Raises an error that concerns one of them, if there is any.

        With `skip_locked` locked ones are missing (see `running`); without, they are such an error. The gateway adds
        the occurrences that follow. A job that was cancelled is given back, which cancels it in the database.
        """
        sent = [(each, text) for each in settles if (text := self.held.text(*each.fence[:2])) is not None]
        if not sent:
            return {}
        settlements = ",".join(f'{{"assignment":"{text}",{_BODIES[ending](each.outcome)}}}' for each, text in sent)
        body = f'{{"settlements":[{settlements}]}}'.encode()
        answers = (await self._http.call("POST", "/v1/settlements", body))["settlements"]
        statuses, locked, wrong = dict[UUID, str](), set[UUID](), list[PgworkdError]()
        ended = []
        for (each, _), answer in zip(sent, answers, strict=True):
            error = None if answer["problem"] is None else problem(answer["problem"]["status"], answer["problem"])
            if error is None:
                statuses[each.fence.job_id] = answer["status"] if ending is Ending.FAILED else STATUSES_AFTER[ending][0]
            elif skip_locked and isinstance(error, DatabaseBusy) and error.locked:
                locked.add(each.fence.job_id)
                continue
            elif not isinstance(error, LeaseLost | WorkerLost):
                wrong.append(error)
                continue
            ended.append((each.fence.job_id, each.fence.attempt))
        self._locked = locked
        if wrong:  # the others are repeated with it, and answered as before
            raise wrong[0]
        self.held.remove(ended)
        return statuses

    async def running(self, fences: Sequence[Fence]) -> set[UUID]:
        """Returns the jobs of these attempts that the last settle found locked."""
        return self._locked.intersection(fence.job_id for fence in fences)

    async def settled(self, fences: Sequence[Fence]) -> dict[UUID, str]:
        """Returns nothing: the gateway answers a repeated settle with the status that the first one has set."""
        return {}

    async def report_progress(self, rows: Sequence[tuple[UUID, int, float, str]], worker_id: int | None = None) -> None:
        """Stores the progress of attempts that still run: (id, attempt, 0 to 1, message) of each."""
        progress = [
            {"assignment": text, "done": done, "message": message[:PROGRESS_CHARS_MAX]}
            for job_id, attempt, done, message in rows
            if (text := self.held.text(job_id, attempt)) is not None
        ]
        if progress and worker_id is not None:
            path = f"/v1/workers/{worker_id:d}/beat"
            with contextlib.suppress(WorkerLost):  # the heartbeat learns it
                await self._http.call("POST", path, {"progress": progress}, worker_id=worker_id)

    async def payloads(self, *_: Any, **__: Any) -> list[Payload]:
        """None: claims leave out no payload."""
        return []

    async def complete_on(self, connection: Any, settling: Settling, following: Sequence[Occurrence] = ()) -> bool:
        """Returns False: there are no transactions, and this is never called."""
        return False

    async def declare(self, rules: Mapping[str, Mapping[str, Any]]) -> None:
        """Stores the schedules of the code, which stay when the code declares them no more.

        `rules`: by name, the columns of `schedules`. AccessRefused without the right.
        """
        for name, rule in rules.items():
            body = {**rule, "wait_for_retries": rule["waits_for_retries"]}
            del body["waits_for_retries"]
            try:
                await self._http.call("PUT", f"/v1/schedules/{quote(name, safe='')}", body)
            except AccessRefused as error:
                raise AccessRefused(f"schedule {name!r} needs a token with the scope operate: {error}") from None
            except DatabaseError as error:
                if error.sqlstate != CONFLICT:  # a daemon with a database declares it, too
                    raise


def _claimed(job: dict[str, Any], deadline_s: float | None) -> ClaimedJob:
    return ClaimedJob(
        UUID(job["id"]),
        job["kind"],
        str(job["payload"]),
        job["attempt"],
        job["failures"],
        job["max_attempts"],
        deadline_s,
        job["priority"],
        0,  # the gateway gives a worker one suspect at a time
        _epoch(job["run_at"]),
        _epoch(job["created_at"]),
        job["schedule"],
        None if job["occurrence"] is None else _epoch(job["occurrence"]),
        None if job["meta"] is None else str(job["meta"]),
    )


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _completed(outcome: Outcome) -> str:
    return f'"outcome":"complete","result":{outcome.result or "null"}'


def _failed(outcome: Outcome) -> str:
    error = outcome.error or {}
    facts = {
        "outcome": "fail",
        "type": (error.get("type") or "Error")[:_TYPE_MAX],
        "message": (error.get("message") or outcome.message or "")[:_MESSAGE_MAX],
        "traceback": (error.get("traceback") or "")[:_TRACEBACK_MAX],
        "retryable": not outcome.permanent,
        "retry_in_s": outcome.delay_s,
    }
    return _members(facts)


def _released(outcome: Outcome) -> str:
    reason = outcome.message and outcome.message[:REASON_CHARS_MAX]
    delay_s = outcome.delay_s if outcome.ending is Ending.RELEASED else None
    return _members({"outcome": "release", "delay_s": delay_s, "reason": reason})


def _members(values: dict[str, Any]) -> str:
    return json.dumps(values)[1:-1]


_BODIES: Mapping[Ending, Callable[[Outcome], str]] = {
    Ending.COMPLETED: _completed,
    Ending.FAILED: _failed,
    Ending.RELEASED: _released,
    Ending.CANCELLED: _released,
    Ending.EXPIRED: _released,
}


class _NoTransactions:
    """A pool without connections."""

    @contextlib.asynccontextmanager
    async def begin(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        """Raises UsageError."""
        raise UsageError(
            "job.transaction() needs the database, and this daemon works through a gateway: open a connection of your "
            "own, or run it with PGWORKD_DSN"
        )
        yield
