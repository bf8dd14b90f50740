"""Every error that a caller can get, as a problem (RFC 9457): what happened, and what to do.

One table for all: PROBLEMS. `of` maps the exceptions of pgworkd to it, so that no route has to catch any.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import HTTPException

from pgworkd.errors import (
    BatchClosed,
    DatabaseBusy,
    DatabaseError,
    DatabaseUnavailable,
    InvalidPayload,
    JobFailed,
    JobUnknown,
    LeaseLost,
    NoStack,
    NotWaiting,
    OutcomeUnknown,
    PgworkdError,
    SchemaError,
    UsageError,
    WorkerLost,
)
from pgworkd.process.redaction import redact

CONTENT_TYPE = "application/problem+json"


class Kind(NamedTuple):
    """A kind of problem: the answer's status, a title, and what its page says to do."""

    status: int
    title: str
    remedy: str
    retry_after_s: int | None = None


PROBLEMS = {
    "not-json": Kind(400, "The body is not valid JSON", "Send one JSON object in UTF-8, each name in it once."),
    "unauthenticated": Kind(
        401, "A token is needed", "Send Authorization: Bearer pgw_..., as pgworkd token add has printed it."
    ),
    "forbidden": Kind(
        403,
        "The token does not allow this",
        "Use a token with the scope, and for the queue, that the answer names: pgworkd token add --scope SCOPE:QUEUE.",
    ),
    "cross-site": Kind(403, "A page of another site may not do this", "Call from a program, or from the same origin."),
    "not-found": Kind(404, "There is none of that name or id", "Check it: its history may also have been deleted."),
    "method-not-allowed": Kind(405, "This path has no such method", "See the header Allow, and /v1/openapi.json."),
    "body-too-slow": Kind(408, "The body did not arrive in time", "Send it again, faster or in several parts."),
    "duplicate-key": Kind(
        409,
        "The dedupe key is taken",
        "The job that holds it will run, or has just run. Send on_duplicate: skip to get its id.",
    ),
    "id-taken": Kind(
        409, "Another job has this id", "Its queue, kind or payload is a different one. Make a new UUID for a new job."
    ),
    "key-reused": Kind(
        409, "The Idempotency-Key belongs to another call", "Make a new key for each call, and keep it to repeat that."
    ),
    "not-waiting": Kind(409, "The job is not waiting", "Only waiting jobs can be edited: see the job's status."),
    "batch-closed": Kind(409, "The batch is closed", "It is sealed, finished, cancelled or unknown: see its state."),
    "conflict": Kind(409, "The state does not allow this", "The answer says why, and what to do instead."),
    "stale-assignment": Kind(
        409,
        "The attempt is not yours any more",
        "Stop this run, and do not settle it: another worker may have the job, or it has ended.",
    ),
    "not-due": Kind(409, "The job is not due yet", "Claim it at its run_at, in again_s seconds."),
    "job-running": Kind(409, "The job runs already", "Leave it to the worker that has it, which the answer names."),
    "job-blocked": Kind(409, "The job waits for another job", "Claim it when what the answer names has ended."),
    "job-ended": Kind(409, "The job has ended", "It is not run again, unless an operator has it retried."),
    "queue-paused": Kind(
        409, "The queue is paused", "Claim it when the queue is resumed, in again_s if that is known."
    ),
    "limit-reached": Kind(
        409, "A limit of the queue is reached", "Claim it when a job has ended, in again_s if a rate is what counts."
    ),
    "no-free-slot": Kind(409, "The worker has no slot for the job", "Settle what it runs, or let it have more slots."),
    "job-failed": Kind(409, "The job has no result", "It is dead, cancelled or expired: see its error."),
    "forgotten": Kind(410, "The result has been forgotten", "History is kept for keep_days, or the queue's keep_s."),
    "worker-lost": Kind(
        410,
        "The worker is presumed dead",
        "Stop everything that it runs, and settle none of it; then register again.",
    ),
    "changed": Kind(412, "It has changed meanwhile", "Read it again, and send its ETag as If-Match."),
    "body-too-large": Kind(413, "The body is too large", "Send fewer jobs at once, or store large data elsewhere."),
    "not-json-type": Kind(415, "The body is not declared as JSON", "Send Content-Type: application/json."),
    "wrong-host": Kind(
        421, "This host is not served here", "Call the gateway by a name in its setting http_hosts, or add this one."
    ),
    "invalid": Kind(422, "The request is invalid", "Correct what the answer names; errors[].pointer is its place."),
    "unknown-dependency": Kind(
        422, "A job to wait for can never complete", "Check the ids in after: one is unknown, or failed, or waits too."
    ),
    "too-many-requests": Kind(429, "Too many requests", "Wait as long as the header Retry-After says.", 1),
    "headers-too-large": Kind(431, "The headers are too large", "Send less than 32 KiB of headers."),
    "internal": Kind(500, "An error of the gateway", "Report it: its log has the details, under the request's id."),
    "unavailable": Kind(503, "The database is unavailable", "Nothing was done. Send the same again.", 2),
    "busy": Kind(503, "The database is busy", "Nothing was done. Send the same again.", 1),
    "outcome-unknown": Kind(
        503,
        "The database did not say whether it is done",
        "It may have been done. Send the same again with the same id, dedupe key or Idempotency-Key, or look first.",
        1,
    ),
    "authorization-unavailable": Kind(
        503, "The application cannot check callers now", "Nothing was done. Send the same again.", 2
    ),
    "too-many-streams": Kind(503, "Too many streams of jobs come in here", "Send one after the other.", 5),
    "too-many-waiters": Kind(503, "Too many requests wait here", "Ask without wait_s, or another gateway.", 5),
    "key-in-use": Kind(
        503,
        "A call with this Idempotency-Key is under way",
        "Send the same again: once that has ended, it is answered as that was.",
        2,
    ),
    "timeout": Kind(504, "The database took too long", "Nothing was done. Narrow the filter, or try again later."),
}
"""The kinds of problems by slug, which is stable: the last part of a problem's type."""
_BY_SQLSTATE = {
    "PW002": "not-waiting",
    "PW003": "batch-closed",
    "PW004": "unknown-dependency",
    "PW005": "conflict",
    "23505": "duplicate-key",
    "42501": "forbidden",
    "57014": "timeout",
}
_BY_STATUS = {401: "unauthenticated", 403: "forbidden", 404: "not-found", 405: "method-not-allowed"}
_BY_STATUS |= {413: "body-too-large"}
_BY_TYPE = {
    JobFailed: "job-failed",
    LeaseLost: "stale-assignment",
    WorkerLost: "worker-lost",
    JobUnknown: "forgotten",
    NotWaiting: "not-waiting",
    NoStack: "conflict",
    BatchClosed: "batch-closed",
    OutcomeUnknown: "outcome-unknown",
    DatabaseUnavailable: "unavailable",
    SchemaError: "unavailable",
    UsageError: "invalid",
}
_KEY_TAKEN = re.compile(r"\((queue|name), dedupe_key\)=\((.*), (.*)\)", re.DOTALL)
_STEP = re.compile(r'\.?([^.\[\]"]+)|\[(\d+)\]|\[("(?:[^"\\]|\\.)*")\]')


class Problem(HTTPException):
    """An error of a route or dependency: the answer is this problem."""

    def __init__(
        self,
        slug: str,
        detail: str = "",
        *,
        errors: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        **more: object,
    ) -> None:
        kind = PROBLEMS[slug]
        super().__init__(kind.status, detail or kind.title, dict(headers or {}))
        self.slug = slug
        self.errors = errors
        self.more = more
        """Further members of the answer."""
        if kind.retry_after_s is not None:
            self.headers = {"Retry-After": str(kind.retry_after_s), **(self.headers or {})}

    def body(self, prefix: str = "") -> dict[str, Any]:
        """The members of the answer; `prefix`: where the gateway is mounted."""
        kind = PROBLEMS[self.slug]
        found = {"type": f"{prefix}/v1/problems/{self.slug}", "title": kind.title, "status": kind.status}
        found |= {"detail": self.detail, **self.more}
        return found | ({"errors": list(self.errors)} if self.errors else {})


def of(error: Exception) -> Problem:
    """The problem for an exception of pgworkd or of the framework."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, HTTPException) or hasattr(error, "status_code"):
        slug = _BY_STATUS.get(error.status_code, "internal" if error.status_code >= 500 else "invalid")
        said = "there is no such path: see /v1/openapi.json" if slug == "not-found" else ""
        return Problem(slug, said, headers=getattr(error, "headers", None))
    if not isinstance(error, PgworkdError):
        return Problem("internal")
    said = redact(str(error))
    if isinstance(error, InvalidPayload):
        return Problem("invalid", said, errors=[{"pointer": pointer(error.path), "detail": error.reason}])
    if isinstance(error, UsageError) and (code := getattr(error.__cause__, "sqlstate", None)):
        # The database refuses the gateway's own login or role: not the caller's fault.
        return Problem("forbidden" if code == "42501" else "unavailable", said if code == "42501" else "")
    slug = _slug(error)
    if slug == "internal":
        return Problem(slug)
    if slug == "duplicate-key":
        return Problem(slug, _holder(error))
    return Problem(slug, PROBLEMS[slug].title if isinstance(error, DatabaseUnavailable) else said)


def _holder(error: Exception) -> str:
    """The key that is taken, from what the database says in its own words."""
    found = _KEY_TAKEN.search(str(getattr(error.__cause__, "detail", "")))
    if found is None:
        return ""
    what = "a job of queue" if found[1] == "queue" else "a batch named"
    return redact(f"{what} {found[2]!r} has the dedupe key {found[3]!r}")


def _slug(error: PgworkdError) -> str:
    if isinstance(error, DatabaseError | DatabaseBusy):
        if (slug := _BY_SQLSTATE.get(error.sqlstate)) is not None:
            return slug
        if isinstance(error, DatabaseBusy):
            return "busy"
        return "invalid" if error.sqlstate[:2] in ("22", "23") else "internal"
    return next((slug for kind, slug in _BY_TYPE.items() if isinstance(error, kind)), "internal")


def pointer(path: str) -> str:
    """The JSON pointer of a path: `payload.items[3]["a b"]` is /payload/items/3/a b; a path that was cut ends early."""
    names = []
    path = path.partition("…")[0]
    for plain, number, quoted in _STEP.findall(path):
        name = plain or number or json.loads(quoted)
        names.append(name.replace("~", "~0").replace("/", "~1"))
    return "".join(f"/{name}" for name in names)
