"""What an answer means, for each status and whatever the receiver says with it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from pgworkd.core.job import Ending
from pgworkd.push.answer import OUTCOME, Effect, EndpointAnswer, Verdict, retry_after_s, verdict

NOW = datetime(2026, 1, 1, tzinfo=UTC)
JSON = {"content-type": "application/json"}


def judged(
    status: int,
    content: bytes = b"",
    *,
    strict: bool = False,
    may_accept: bool = False,
    whole: bool = True,
    **headers: str,
) -> Verdict:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return verdict(EndpointAnswer(status, named, content, whole), may_accept=may_accept, strict_results=strict, now=NOW)


DEAD, FAILED = (400, 413, 415, 422, 501), (401, 403, 404, 405, 408, 409, 418, 425, 451, 499, 500, 502, 503, 504, 599)


def test_every_status_has_a_meaning() -> None:
    for status in range(200, 600):
        found, effect = judged(status), Effect.NONE
        if status < 300:
            wanted = (Ending.COMPLETED, False)
        elif status in DEAD:
            wanted = (Ending.FAILED, True)
        else:
            wanted = (Ending.FAILED, False)
            effect = {410: Effect.DISABLE, 429: Effect.PAUSE}.get(status, effect)
        assert (found.ending, found.permanent, found.effect) == (*wanted, effect), status
        assert (found.summary != "") == (found.ending is not Ending.COMPLETED), status
    assert not any(judged(status).permanent for status in FAILED)


def test_202_leaves_the_attempt_to_a_callback_only_where_there_is_one() -> None:
    assert judged(202).ending is Ending.COMPLETED
    assert judged(202, may_accept=True) == Verdict(Ending.HANDED_OVER)
    assert judged(202, may_accept=True, pgworkd_outcome="complete").ending is Ending.COMPLETED
    assert judged(200, may_accept=True).ending is Ending.COMPLETED


RESULTS = {
    b'{"price": 1.10, "id": 123456789012345678901234567890}': '{"price": 1.10, "id": 123456789012345678901234567890}',
    b" [1] \n": "[1]",
    b'"text"': '"text"',
    b"null": None,
    b"": None,
}


@pytest.mark.parametrize("content", RESULTS)
@pytest.mark.parametrize("declared", ["application/json", "Application/JSON; charset=utf-8", "application/hal+json"])
def test_a_result_is_kept_as_it_was_written(content: bytes, declared: str) -> None:
    for status in (200, 201):
        assert judged(status, content, content_type=declared) == Verdict(Ending.COMPLETED, RESULTS[content])


def test_what_is_not_declared_as_json_is_no_result() -> None:
    for declared in ("text/html", "", "application/jsonx", "text/json"):
        assert judged(200, b"<html>", content_type=declared) == Verdict(Ending.COMPLETED)
    assert judged(204, b"{}", content_type="application/json") == Verdict(Ending.COMPLETED)


UNSTORABLE = {
    b"{": "cannot be read",
    b'{"a": NaN}': "result",
    b'"\\u0000"': "NUL",
    b'"\\ud800"': "holds a lone surrogate",
    b"1e400": "inf",
    b"9" * 4301: "cannot be read",
    b"[" * 65 + b"]" * 65: "64 levels",
    b'"\xff"': "not UTF-8",
    b'"' + b"x" * 2**20 + b'"': "1,048,576 bytes",
}


@pytest.mark.parametrize("content", UNSTORABLE, ids=lambda content: ascii(content[:12]))
def test_a_result_that_cannot_be_stored_is_not_asked_for_again(content: bytes) -> None:
    found = judged(200, content, content_type="application/json")
    assert (found.ending, found.result, found.permanent) == (Ending.COMPLETED, None, False)
    assert UNSTORABLE[content] in found.message
    assert found.message.endswith("the work is done")
    strict = judged(200, content, content_type="application/json", strict=True)
    assert (strict.ending, strict.permanent, strict.message) == (Ending.FAILED, True, found.message)


def test_a_result_that_is_compressed_or_longer_than_what_is_read() -> None:
    assert "gzip" in judged(200, b"\x1f\x8b", content_type="application/json", content_encoding="gzip").message
    assert "1,024 bytes" in judged(200, b"x" * 1024, whole=False, content_type="application/json").message
    assert judged(200, b"x" * 1024, whole=False).ending is Ending.COMPLETED


@pytest.mark.parametrize("status", [200, 204, 202, 302, 400, 410, 429, 500, 503])
@pytest.mark.parametrize("said", ["complete", "fail", "dead", "release", " Complete ", "FAIL"])
def test_what_the_receiver_says_wins(status: int, said: str) -> None:
    wanted = {"complete": "completed", "fail": "failed", "dead": "failed", "release": "released"}[said.strip().lower()]
    found = judged(status, b"1", may_accept=True, pgworkd_outcome=said, content_type="application/json")
    assert (found.ending.value, found.permanent) == (wanted, said == "dead")
    assert found.result == ("1" if wanted == "completed" and status != 204 else None)


def test_what_it_says_and_we_do_not_know_is_dead() -> None:
    found = judged(200, pgworkd_outcome="succeed")
    assert found.permanent
    assert found.message == f"its header {OUTCOME} is 'succeed': complete, fail, dead, release are known"


AFTER = {
    "0": 0.0,
    "120": 120.0,
    " 7 ": 7.0,
    "1.5": 1.5,
    "315360000": 86_400.0,
    "-5": None,
    "": None,
    "soon": None,
    "1e3": None,
    "9" * 400: None,
    "inf": None,
    format_datetime(NOW + timedelta(seconds=90), usegmt=True): 90.0,
    format_datetime(NOW - timedelta(days=3), usegmt=True): 0.0,
    format_datetime(NOW + timedelta(days=3650), usegmt=True): 86_400.0,
    "Thu, 01 Jan 2026 00:00:30 +0000": 30.0,
    "Thursday, 01-Jan-26 00:00:30 GMT": 30.0,
    "Thu, 99 Jan 2026 00:00:30 GMT": None,
    "Thu, 01 Jan 99999 00:00:30 GMT": None,
}


@pytest.mark.parametrize("text", AFTER, ids=lambda text: text[:24] or "none")
def test_a_receiver_says_when_to_come_back(text: str) -> None:
    assert retry_after_s(text, NOW) == AFTER[text]
    found = judged(503, retry_after=text)
    assert (found.ending, found.permanent, found.delay_s) == (Ending.FAILED, False, AFTER[text])
    assert judged(429, retry_after=text).delay_s == AFTER[text]
    assert judged(400, retry_after=text).delay_s is None


def test_a_failure_is_told_in_one_line() -> None:
    assert judged(503, b"try\r\nlater\x00\x1b[31m \xff").summary == "HTTP 503: try later\\x00\x1b[31m \ufffd"
    assert judged(500).summary == "HTTP 500"
    assert len(judged(500, b"x" * 10**6).summary) < 600
    moved = judged(302, location="http://169.254.169.254/" + "x" * 1000).summary
    assert moved.startswith("HTTP 302: redirects to 'http://169.254.169.254/")
    assert moved.endswith("', which is not followed")
