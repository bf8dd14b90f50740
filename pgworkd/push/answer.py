"""What an answer means: one table for every status, and what the receiver may say instead."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from pgworkd.core.job import Ending
from pgworkd.core.json_text import JsonText
from pgworkd.core.payload import clean_text, encode
from pgworkd.errors import InvalidPayload

OUTCOME = "pgworkd-outcome"
"""The header by which a receiver says what is to become of the attempt, whatever the status."""
RETRY_AFTER_S_MAX = 86_400.0
"""A receiver may put a retry off by a day."""
SNIPPET_BYTES = 500
DEAD = frozenset({400, 413, 415, 422, 501})
"""Statuses after which the job is dead: the same request would be answered in the same way."""
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class Effect(enum.Enum):
    """The effects that an answer has on the endpoint."""

    NONE = "none"
    PAUSE = "pause"
    """The endpoint asks for less."""
    DISABLE = "disable"
    """The endpoint is gone, and says so."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The meaning of an answer. `ending`: Ending.HANDED_OVER leaves it to a callback.

    `delay_s`: until the retry, None: as the queue's backoff says; `permanent`: it has failed, and is not retried.
    `cause`, `message`: why it did not complete, as the type and the text of an error; or why without its result.
    """

    ending: Ending
    result: JsonText | None = None
    delay_s: float | None = None
    cause: str = ""
    message: str = ""
    effect: Effect = Effect.NONE
    permanent: bool = False

    @property
    def summary(self) -> str:
        """Cause and message in one line."""
        return ": ".join(filter(None, (self.cause, self.message)))


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """An endpoint's answer. `headers`: names in lower case; `is_whole` False: it is longer than what is read of one."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    is_whole: bool = True


def verdict(
    answer: EndpointAnswer, *, may_accept: bool, strict_results: bool = False, now: datetime | None = None
) -> Verdict:
    """The meaning of an answer; `may_accept`: 202 leaves the attempt to a callback.

    `strict_results`: who completes with a result that cannot be stored has failed for good.
    """
    said = answer.headers.get(OUTCOME, "").strip().lower()
    effect = {410: Effect.DISABLE, 429: Effect.PAUSE}.get(answer.status, Effect.NONE)
    ending, permanent = _SAID.get(said) or _of_status(answer.status, may_accept=may_accept)
    delay_s = retry_after_s(answer.headers.get("retry-after", ""), now or datetime.now(UTC))
    if said and said not in _SAID:
        message = f"its header {OUTCOME} is {clean_text(said, 40)!r}: {', '.join(_SAID)} are known"
        return Verdict(Ending.FAILED, cause="UnknownOutcome", message=message, effect=effect, permanent=True)
    if ending is Ending.COMPLETED:
        return _completed(answer, strict=strict_results)
    if ending is Ending.HANDED_OVER:
        return Verdict(ending)
    cause, message = described(answer)
    return Verdict(ending, None, None if permanent else delay_s, cause, message, effect, permanent)


_SAID = {
    "complete": (Ending.COMPLETED, False),
    "fail": (Ending.FAILED, False),
    "dead": (Ending.FAILED, True),
    "release": (Ending.RELEASED, False),
}
"""The ending that the header names, and whether it is permanent."""


def _of_status(status: int, *, may_accept: bool) -> tuple[Ending, bool]:
    if 200 <= status < 300:
        return Ending.HANDED_OVER if status == 202 and may_accept else Ending.COMPLETED, False
    return Ending.FAILED, status in DEAD


def _completed(answer: EndpointAnswer, *, strict: bool) -> Verdict:
    """The verdict on work that is done: an answer that cannot be stored must not have it done again."""
    if answer.status == 204 or not answer.content or not _is_json(answer.headers.get("content-type", "")):
        return Verdict(Ending.COMPLETED)
    try:
        result = _result(answer)
    except InvalidPayload as error:
        ending = Ending.FAILED if strict else Ending.COMPLETED
        return Verdict(ending, cause="BadResult", message=f"{error}; the work is done", permanent=strict)
    return Verdict(Ending.COMPLETED, None if result == "null" else result)


def _result(answer: EndpointAnswer) -> JsonText:
    """The result that an answer has. Raises InvalidPayload for one that cannot be stored."""
    if (coding := answer.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise InvalidPayload("result", f"is compressed ({clean_text(coding, 40)}), which was not asked for")
    if not answer.is_whole:
        said = f"has more than the {len(answer.content):,} bytes that are read: answer with a reference"
        raise InvalidPayload("result", said)
    try:
        result = JsonText(answer.content.decode().strip())
    except UnicodeDecodeError:
        raise InvalidPayload("result", "is not UTF-8") from None
    encode(result, "result", object_only=False)
    return result


def _is_json(content_type: str) -> bool:
    plain = content_type.partition(";")[0].strip().lower()
    return plain == "application/json" or (plain.startswith("application/") and plain.endswith("+json"))


def is_trouble(status: int) -> bool:
    """True for an answer that says more of the endpoint than of the job: it is overloaded, or broken."""
    return status in (408, 425, 429) or (status >= 500 and status not in DEAD)


def described(answer: EndpointAnswer) -> tuple[str, str]:
    """The status, and the beginning of the body, each in one line."""
    said = " ".join(clean_text(answer.content.decode(errors="replace"), SNIPPET_BYTES).split())
    if 300 <= answer.status < 400 and "location" in answer.headers:
        said = f"redirects to {clean_text(answer.headers.get('location', '')[:200], 200)!r}, which is not followed"
    return f"HTTP {answer.status}", said


def retry_after_s(text: str, now: datetime) -> float | None:
    """The seconds of a header Retry-After (RFC 9110, 10.2.3): a number, or a date; at most a day. None: it has none."""
    text = text.strip()
    if _SECONDS.fullmatch(text):
        return min(float(text), RETRY_AFTER_S_MAX)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    left_s = (at - now).total_seconds()
    return min(max(left_s, 0.0), RETRY_AFTER_S_MAX) if math.isfinite(left_s) else None
