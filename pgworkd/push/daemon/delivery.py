"""Sends one attempt, and says how it ended."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import SplitResult

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.job import FACTS, Ending
from pgworkd.core.json_text import JsonText
from pgworkd.core.spans import OpenSpan, begin
from pgworkd.database.endpoint_store import EndpointStore
from pgworkd.engine.attempts import Attempt
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.push import message
from pgworkd.push.answer import Effect, EndpointAnswer, Verdict, is_trouble, retry_after_s, verdict
from pgworkd.push.daemon.callbacks import Callbacks
from pgworkd.push.daemon.routes import Target
from pgworkd.push.sender import NotDelivered, PerhapsDelivered

CLIENT_ERROR = 400
FROZEN_S = 2.0
"""A request that ends this much later than it may was held up here: this daemon was frozen, or had no CPU."""


class Delivery:
    """Sends attempts to the endpoints of their queues."""

    def __init__(
        self,
        store: EndpointStore,
        events_: Events,
        target_of: Callable[[str], Target | None],
        callbacks: Callbacks,
    ) -> None:
        """`target_of`: the target of a queue; None: it has none here."""
        self._store, self._events, self._target_of, self._callbacks = store, events_, target_of, callbacks

    async def sent(self, attempt: Attempt) -> Verdict:
        """Sends the attempt, and says how it ended."""
        target = self._target_of(attempt.queue)
        if target is None:  # it has lost its endpoint since the claim
            return Verdict(Ending.RELEASED, message="its queue has no endpoint that can be used")
        return await self._sent(target, attempt)

    async def _sent(self, target: Target, attempt: Attempt) -> Verdict:
        at, endpoint = message.now(), target.endpoint
        sent = message_of(attempt, min(endpoint.timeout_s, attempt.claimed.timeout_s or endpoint.timeout_s))
        waits = endpoint.mode == "callback"
        try:
            url = endpoint.at(sent.facts)
        except UsageError as error:
            return Verdict(Ending.FAILED, cause="UsageError", message=str(error), permanent=True)
        content = message.body(sent, at, await self._callbacks.prepare(attempt, endpoint) if waits else None)
        fixed = (attempt.claimed.id, content, at, target.signing, endpoint.headers)
        began_s, once, status = time.monotonic(), attempt.claimed.max_attempts == 1, None
        latest = began_s + endpoint.timeout_s + FROZEN_S
        try:
            with _sending(attempt, url) as span:
                trace = _trace_of(attempt) if span is None else span.carrier
                headers = message.headers(*fixed, trace=trace, attempt=attempt.claimed.attempt)
                answer = await target.post(url, headers, content, once=once)
                _note(span, answer)
        except NotDelivered as error:
            # It was not begun, so the only attempt of a job is still to come.
            ending = Ending.RELEASED if once else Ending.FAILED
            found = Verdict(ending, cause="NotDelivered", message=str(error))
            await self._unanswered(target, found.message, latest)
        except PerhapsDelivered as error:
            # With a callback it is not known to have failed: the callback, or its absence, will tell.
            found = Verdict(Ending.HANDED_OVER if waits else Ending.FAILED, cause="NoAnswer", message=str(error))
            await self._unanswered(target, found.message, latest)
        else:
            found, status = verdict(answer, may_accept=waits, strict_results=endpoint.strict_results), answer.status
            await self._judge(target, answer, found)
            if found.ending is Ending.COMPLETED and found.message and target.is_to_be_told():
                await self._tell(attempt, endpoint.name, found.message)
        if self._events.has_listener(events.PUSH_ANSWERED):
            facts = {"endpoint": endpoint.name, "host": url.netloc, "bytes": len(content)}
            took_s = round(time.monotonic() - began_s, 4)
            self._events.emit(events.PUSH_ANSWERED, **attempt.facts(), **facts, status=status, took_s=took_s)
        return found

    async def _tell(self, attempt: Attempt, endpoint: str, why: str) -> None:
        self._events.emit(events.RESULT_DROPPED, **attempt.facts(), endpoint=endpoint, reason=why)
        with contextlib.suppress(PgworkdError):  # the log has it
            await self._store.warn(endpoint, why)

    async def _judge(self, target: Target, answer: EndpointAnswer, found: Verdict) -> None:
        if found.effect is Effect.DISABLE:
            await self._disable(target, found)
        elif is_trouble(answer.status):
            after_s = retry_after_s(answer.headers.get("retry-after", ""), datetime.now(UTC))
            await self._failed(target, found.summary, asks_for_less=found.effect is Effect.PAUSE, after_s=after_s)
        else:
            target.succeeded()

    async def _unanswered(self, target: Target, why: str, latest: float) -> None:
        """Counts a failure without an answer, unless it was ours: it is past `latest`, by time.monotonic()."""
        if time.monotonic() <= latest:
            await self._failed(target, why)

    async def _failed(
        self, target: Target, why: str, *, asks_for_less: bool = False, after_s: float | None = None
    ) -> None:
        """Counts a failure of the endpoint itself, and pauses it when there have been too many."""
        pause_s = target.failed(asks_for_less=asks_for_less, retry_after_s=after_s if asks_for_less else None)
        if pause_s is None:
            return
        name = target.endpoint.name
        with contextlib.suppress(PgworkdError):  # the next failure pauses it; this one must still be settled
            if await self._store.pause(name, pause_s, why):
                self._events.emit(events.ENDPOINT_PAUSED, endpoint=name, for_s=pause_s, reason=why)

    async def _disable(self, target: Target, found: Verdict) -> None:
        name = target.endpoint.name
        with contextlib.suppress(PgworkdError):  # as above
            if await self._store.disable(name, found.summary):
                self._events.emit(events.ENDPOINT_DISABLED, endpoint=name, reason=found.summary)


@contextlib.contextmanager
def _sending(attempt: Attempt, url: SplitResult) -> Iterator[OpenSpan | None]:
    """The span of a request below that of its attempt; None where attempts are not traced."""
    facts: dict[str, str | int] = {
        "http.request.method": "POST",
        "url.full": f"{url.scheme}://{url.netloc}",  # the rest may have a secret in it, as a chat's hook has
        "server.address": url.hostname or "",
        "server.port": url.port or (443 if url.scheme == "https" else 80),
    }
    if attempt.trace is None or (span := begin("POST", "CLIENT", facts)) is None:
        yield None
        return
    try:
        with span.current():
            yield span
    except Exception as error:
        span.fail(type(error).__name__, str(error))
        raise
    finally:
        span.end()


def _note(span: OpenSpan | None, answer: EndpointAnswer) -> None:
    if span is not None:
        span.note({"http.response.status_code": answer.status})
        if answer.status >= CLIENT_ERROR:
            span.fail(str(answer.status))


def message_of(attempt: Attempt, deadline_s: float) -> message.PushedAttempt:
    """The message that is sent for an attempt."""
    job = attempt.claimed
    facts: dict[str, Any] = {name: attempt.queue if name == "queue" else getattr(job, name) for name in FACTS}
    for name in ("created_at", "run_at", "occurrence"):
        facts[name] = None if facts[name] is None else datetime.fromtimestamp(facts[name], UTC)
    return message.PushedAttempt(
        facts,
        payload=JsonText(job.payload or "{}"),  # the executor has read large ones
        meta=None if job.meta is None else JsonText(job.meta),
        deadline_s=deadline_s,
    )


def _trace_of(attempt: Attempt) -> object:
    """The members with the trace context: the attempt's own where attempts are traced, else the job's `meta`."""
    if attempt.trace is not None:
        return attempt.trace.carrier
    with contextlib.suppress(ValueError, RecursionError):  # numbers of many digits, written by other clients
        return json.loads(attempt.claimed.meta or "null")
    return None
