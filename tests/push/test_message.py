"""What is sent: whole, signed as Standard Webhooks asks, and not to be altered or sent again later."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from pgworkd.core.json_text import JsonText
from pgworkd.push.message import CallbackOffer, PushedAttempt, body, headers

SECRETS = [bytes(range(24)), bytes(range(1, 65))]
JOB_ID = UUID("019a0000-0000-7000-8000-000000000001")
JOB = {
    "id": JOB_ID,
    "queue": "mail",
    "kind": "send",
    "attempt": 2,
    "failures": 1,
    "max_attempts": 3,
    "created_at": datetime(2026, 1, 1, tzinfo=UTC),
    "run_at": datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC),
    "schedule": None,
    "occurrence": None,
}
ATTEMPT = PushedAttempt(
    JOB,
    payload=JsonText('{"id": 123456789012345678901234567890, "price": 1.10, "text": "ö\\u2028"}'),
    meta=JsonText('{"traceparent": "00-1-2-01"}'),
    deadline_s=30.0,
)


def signed(content: bytes, at: datetime, *, secrets: list[bytes] = SECRETS[:1], **given: str) -> dict[str, str]:
    return headers(JOB_ID, content, at, secrets, given, trace=json.loads(ATTEMPT.meta or "null"), attempt=2)


def verifies(secret: bytes, content: bytes, found: dict[str, str]) -> Any:
    return Webhook(base64.b64encode(secret).decode()).verify(content, found)


def test_a_body_has_the_job_and_its_digits() -> None:
    at = datetime(2026, 1, 1, 0, 0, 2, tzinfo=UTC)
    content = body(ATTEMPT, at, CallbackOffer("https://jobs.example.com/v1/assignments/a1", 300.0))
    assert b'"payload":{"id": 123456789012345678901234567890, "price": 1.10,' in content
    value = json.loads(content)
    assert (value["type"], value["timestamp"]) == ("job.run", "2026-01-01T00:00:02Z")
    assert value["callback"] == {"url": "https://jobs.example.com/v1/assignments/a1", "timeout_s": 300.0}
    assert value["data"] == {
        "id": str(JOB_ID),
        "queue": "mail",
        "kind": "send",
        "attempt": 2,
        "failures": 1,
        "max_attempts": 3,
        "created_at": "2026-01-01T00:00:00Z",
        "run_at": "2026-01-01T00:00:01Z",
        "deadline_s": 30.0,
        "schedule": None,
        "occurrence": None,
        "meta": {"traceparent": "00-1-2-01"},
        "payload": {"id": 123456789012345678901234567890, "price": 1.1, "text": "ö\u2028"},
    }
    assert "callback" not in json.loads(body(ATTEMPT, at))


@pytest.mark.parametrize("secret", SECRETS)
def test_the_package_of_standard_webhooks_takes_our_signature(secret: bytes) -> None:
    at = datetime.now(UTC)
    content = body(ATTEMPT, at)
    assert verifies(secret, content, signed(content, at, secrets=SECRETS))["type"] == "job.run", "either of the two"
    assert verifies(secret, content, signed(content, at, secrets=[secret]))["type"] == "job.run"


def test_it_refuses_every_changed_byte_and_what_is_old() -> None:
    at = datetime.now(UTC)
    content = body(ATTEMPT, at)
    found = signed(content, at)
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1
        with pytest.raises(WebhookVerificationError):
            verifies(SECRETS[0], bytes(changed), found)
    with pytest.raises(WebhookVerificationError):
        verifies(SECRETS[1], content, found)
    for name, value in (("webhook-id", "another"), ("webhook-timestamp", str(int(at.timestamp()) + 1))):
        with pytest.raises(WebhookVerificationError):
            verifies(SECRETS[0], content, found | {name: value})
    for off in (timedelta(minutes=-6), timedelta(minutes=6)):
        content = body(ATTEMPT, at + off)
        with pytest.raises(WebhookVerificationError):
            verifies(SECRETS[0], content, signed(content, at + off))


def test_headers_of_the_endpoint_do_not_replace_ours() -> None:
    at = datetime.now(UTC)
    content = body(ATTEMPT, at)
    given = {"Authorization": "Bearer x", "Webhook-Id": "mine", "CONTENT-TYPE": "text/plain", "traceparent": "mine"}
    found = signed(content, at, **given)
    assert found["authorization"] == "Bearer x"
    assert found["webhook-id"] == str(JOB_ID)
    assert found["content-type"] == "application/json"
    assert found["traceparent"] == "00-1-2-01"
    assert found["pgworkd-attempt"] == "2"
    assert "webhook-signature" not in signed(content, at, secrets=[])


@pytest.mark.parametrize("trace", [None, [], "x", {"traceparent": 7}, {"traceparent": "ö"}, {"traceparent": "0" * 513}])
def test_a_trace_context_that_is_none_is_not_passed_on(trace: object) -> None:
    at = datetime.now(UTC)
    assert "traceparent" not in headers(JOB_ID, b"", at, [], {}, trace=trace)
