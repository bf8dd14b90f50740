"""A runner that gives every attempt, of whatever kind, to the delivery; payloads are passed on as they were written."""

from __future__ import annotations

from typing import Any

from pgworkd.core.error_report import ErrorFacts
from pgworkd.core.job import Ending, Outcome, Reason
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.registry import Handler
from pgworkd.engine.run.runner import Runner, RunnerParts
from pgworkd.push.daemon.delivery import Delivery, NotDone

RELEASED_S_MIN = 1.0
"""A job that is given back waits at least this long: nothing counts how often that happens."""


class PushRunner(Runner):
    """A runner whose attempts end as `NotDone` says."""

    def __init__(self, deliver: Delivery, parts: RunnerParts) -> None:
        super().__init__(parts)
        self._handlers = _EveryKind(Handler("", "", deliver, "loop", None, None, None))

    def _arguments(self, handler: Handler, attempt: Attempt) -> dict[str, Any]:
        if attempt.unreadable is not None:
            raise attempt.unreadable
        return {"attempt": attempt}

    def _ended(self, reason: Reason, attempt: Attempt, handler: Handler) -> Outcome:
        if attempt.handed_over and reason is not Reason.CANCEL:
            return Outcome(Ending.HANDED_OVER)  # the request may have been sent; a callback may end it
        return super()._ended(reason, attempt, handler)

    def _raised(self, error: BaseException, attempt: Attempt, handler: Handler) -> Outcome:
        if not isinstance(error, NotDone):
            return super()._raised(error, attempt, handler)
        ended = error.verdict
        if ended.ending is Ending.HANDED_OVER:
            return Outcome(Ending.HANDED_OVER)
        delay_s = self._backoff_s(attempt, handler) if ended.delay_s is None else ended.delay_s
        if ended.ending is Ending.RELEASED:
            delay_s = max(delay_s, RELEASED_S_MIN)
            return Outcome(Ending.RELEASED, delay_s=delay_s, message=ended.summary, reason=ended.summary)
        facts = ErrorFacts(ended.cause, ended.message, "").redacted()
        return self._failure(facts, delay_s, permanent=ended.permanent)


class _EveryKind(dict[str, Handler]):
    """A table of handlers that has one handler for all kinds."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def get(self, kind: str, default: Any = None) -> Handler:
        return self._handler
