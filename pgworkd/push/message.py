"""The request for one attempt: its body, and what signs it (https://www.standardwebhooks.com)."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from uuid import UUID

from pydantic_core import to_json

from pgworkd.core.json_text import JsonText

TRACE_CHARS_MAX = 512
"""Characters of `tracestate` that a receiver must take, by W3C's text; more is not sent."""
RUN, TEST = "job.run", "endpoint.test"
"""The `type` of a message: run this job; or no job, it tests the way."""
AGENT = f"pgworkd/{version('pgworkd')}"
PASSED_ON = ("traceparent", "tracestate")
"""Members of a job's `meta` that are sent as headers, too: https://www.w3.org/TR/trace-context/."""


@dataclass(frozen=True, slots=True)
class PushedAttempt:
    """What is sent of one attempt: the facts of `job.FACTS`, and its payload and meta.

    The latter are JSON text, so that numbers keep their digits. `deadline_s`: within this many seconds it must be
    answered, or counts as failed.
    """

    facts: Mapping[str, Any]
    payload: JsonText
    meta: JsonText | None
    deadline_s: float


@dataclass(frozen=True, slots=True)
class CallbackOffer:
    """How the attempt may be ended later: `url` is followed by /complete, /fail, /release or /extend."""

    url: str
    timeout_s: float


def body(attempt: PushedAttempt, at: datetime, callback: CallbackOffer | None = None) -> bytes:
    """The JSON of a message. Its `id` is the job's, the same in each attempt."""
    data = {**attempt.facts, "deadline_s": attempt.deadline_s}
    # What is JSON text already is put in as it is: it must not go through a float.
    texts = f',"payload":{attempt.payload},"meta":{attempt.meta or "null"}}}'.encode()
    head = to_json({"type": RUN, "timestamp": at})[:-1] + b',"data":'
    tail = b"}" if callback is None else b',"callback":' + to_json(callback) + b"}"
    return head + to_json(data)[:-1] + texts + tail


def body_of_test(endpoint: str, at: datetime) -> bytes:
    """The JSON of a test message, which is no job."""
    return to_json({"type": TEST, "timestamp": at, "data": {"endpoint": endpoint}})


def headers(
    message_id: UUID,
    content: bytes,
    at: datetime,
    secrets: Sequence[bytes],
    given: Mapping[str, str],
    *,
    trace: object = None,
    attempt: int | None = None,
) -> dict[str, str]:
    """The headers of a message. `given`: those of its endpoint, which ours override. No secrets: it is not signed.

    `trace`: the job's `meta`, decoded, of which the trace context is passed on.
    """
    found = {name.lower(): value for name, value in given.items()}
    context = trace if isinstance(trace, Mapping) else {}
    for name in PASSED_ON:
        value = context.get(name)
        if isinstance(value, str) and len(value) <= TRACE_CHARS_MAX and value.isascii() and value.isprintable():
            found[name] = value
    found |= {
        "content-type": "application/json",
        "accept": "application/json",
        "accept-encoding": "identity",
        "user-agent": AGENT,
        "webhook-id": str(message_id),
        "webhook-timestamp": str(int(at.timestamp())),
    }
    if attempt is not None:
        found["pgworkd-attempt"] = str(attempt)
    if secrets:
        found["webhook-signature"] = signatures(secrets, f"{message_id}.{int(at.timestamp())}.".encode() + content)
    return found


def signatures(secrets: Sequence[bytes], signed: bytes) -> str:
    """A signature for each secret: a receiver that knows either accepts the message."""
    return " ".join(f"v1,{base64.b64encode(hmac.digest(each, signed, 'sha256')).decode()}" for each in secrets)


def now() -> datetime:
    """The instant that a message is signed with: receivers compare it with their own clocks."""
    return datetime.now(UTC)
