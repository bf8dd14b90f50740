"""Push without the database: a handler that sends its jobs to a URL, and a receiver of alerts and digests."""

from __future__ import annotations

import functools
import logging
import re
import ssl
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from pgworkd.core.job import FACTS, Ending, Job
from pgworkd.core.json_text import JsonText
from pgworkd.errors import PermanentError, PgworkdError, RetryAfter, Snooze, UsageError
from pgworkd.push import message, secrets
from pgworkd.push.answer import EndpointAnswer, Verdict, described, verdict
from pgworkd.push.endpoint import Endpoint
from pgworkd.push.sender import NotDelivered, PerhapsDelivered, Sender

_log = logging.getLogger("pgworkd.push")
AGAIN_S = 30.0
"""Delay before a job that may run once, and could not be sent, is sent again."""
SLACK_CHARS_MAX = 10_000
_CHAT = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "```": "'''"}
_MARKUP = re.compile(r"[&<>]|```|@(?=(?:channel|here|all|everyone)\b)", re.IGNORECASE)


class PushFailed(PgworkdError):  # noqa: N818 - what happened
    """The error of a request that the service did not fulfil this time: the job is retried."""


@functools.cache
def _tls() -> ssl.SSLContext:
    """A context that trusts the system's certificates; to read them takes longer than many a request."""
    return ssl.create_default_context()


class _Url:
    """A URL to send to, with what signs the requests."""

    def __init__(
        self,
        url: str,
        *,
        secret: str | None = None,
        unsigned: bool = False,
        timeout_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
        allow_private: bool = False,
        strict_results: bool = False,
        secrets_dir: Path | None = None,
    ) -> None:
        """`secret`: its name, see `secrets`; `strict_results`: see `Push`. Raises UsageError for a wrong value."""
        self._endpoint = Endpoint(
            name="push",
            url=url,
            timeout_s=timeout_s,
            headers=dict(headers or {}),
            secret_name=secret,
            unsigned=unsigned,
            allow_private=allow_private,
            strict_results=strict_results,
        )
        self._secrets_dir = secrets_dir
        self._signing()  # is it there?

    def _signing(self) -> list[bytes]:
        name = self._endpoint.secret_name
        return [] if name is None else secrets.read(name, self._secrets_dir)

    async def post(self, content: bytes, facts: Mapping[str, Any] | None = None, **more: Any) -> EndpointAnswer:
        """Sends a message; `more`: arguments of `message.headers`. Raises NotDelivered or PerhapsDelivered.

        Each has a connection of its own: nobody tells a handler when its daemon ends, and to close those that it keeps.
        """
        endpoint, sender = self._endpoint, Sender(allow_private=self._endpoint.allow_private, tls=_tls())
        at, signing = more.pop("at"), self._signing()
        headers = message.headers(more.pop("message_id"), content, at, signing, endpoint.headers, **more)
        try:
            return await sender.post(endpoint.at(facts or {}), headers, content, endpoint.timeout_s)
        finally:
            sender.close()


class Push(_Url):
    """A handler that sends each job to a URL, and ends it by the answer, as the table in docs/push.md says.

    `app.handler("invoice.paid")(Push("https://billing.example.com/jobs", secret="billing"))`. As the payload has been
    decoded, its numbers are sent as Python has them. A job whose answer is 2xx with a result that cannot be stored
    completes without it; with `strict_results` it is dead.
    """

    async def __call__(self, job: Job) -> JsonText | None:
        """Sends a job; its result. Raises PushFailed, RetryAfter, Snooze or PermanentError, by the answer."""
        at = message.now()
        sent = _sent(job, self._endpoint.timeout_s)
        content = message.body(sent, at)
        try:
            answer = await self.post(content, sent.facts, at=at, message_id=job.id, attempt=job.attempt, trace=job.meta)
        except UsageError as error:
            raise PermanentError(str(error)) from error
        except NotDelivered as error:
            if job.max_attempts == 1:  # it was not begun, so its only attempt is still to come
                raise Snooze(AGAIN_S) from error
            raise PushFailed(f"NotDelivered: {error}") from error
        except PerhapsDelivered as error:
            raise PushFailed(f"NoAnswer: {error}") from error
        found = verdict(answer, may_accept=False, strict_results=self._endpoint.strict_results)
        if found.ending is not Ending.COMPLETED:
            raise _error(found)
        if found.message:
            _log.warning("job %s has completed without its result: %s", job.id, found.message)
        return found.result


class Webhook(_Url):
    """A recipient of alerts and digests: `app.alert(to=Webhook("https://...", secret="ops"))`.

    `slack`: in the form that Slack, Mattermost and others take ({"text": ...}), whose URL is the secret: not signed.
    """

    def __init__(
        self, url: str, *, slack: bool = False, secret: str | None = None, unsigned: bool = False, **more: Any
    ) -> None:
        """`more`: arguments of `Push`. Raises UsageError for a wrong value."""
        super().__init__(url, secret=secret, unsigned=unsigned or (slack and secret is None), **more)
        self._slack = slack

    async def __call__(self, alert: Any) -> None:
        """Sends an `Alert` or a `Digest`. Raises PushFailed unless it is answered with 2xx."""
        at, kind = message.now(), type(alert).__name__.lower()
        if self._slack:
            subject, text = _for_chat(alert.subject), _for_chat(alert.text()[:SLACK_CHARS_MAX])
            content = to_json({"text": f"*{subject}*\n```{text}```"})
        else:
            facts = (
                {each.name: _named(getattr(alert, each.name)) for each in fields(alert)} if is_dataclass(alert) else {}
            )
            data = {"subject": alert.subject, "text": alert.text(), **facts}
            content = to_json({"type": kind, "timestamp": at, "data": data})
        try:
            answer = await self.post(content, at=at, message_id=alert.id)
        except (NotDelivered, PerhapsDelivered) as error:
            raise PushFailed(str(error)) from error
        if not 200 <= answer.status < 300:
            raise PushFailed(": ".join(filter(None, described(answer))))


def _named(value: Any) -> Any:
    """A value whose rows are objects: each column has its name."""
    if hasattr(value, "_asdict"):
        return {name: _named(each) for name, each in value._asdict().items()}
    return [_named(each) for each in value] if isinstance(value, list | tuple) else value


def _for_chat(text: str) -> str:
    """Text that a chat shows as it is: no mention, no link, no end of a block of code."""
    return _MARKUP.sub(lambda found: _CHAT.get(found[0], "@\u200b"), text)


def _error(found: Verdict) -> Exception:
    if found.ending is Ending.RELEASED:
        return Snooze(AGAIN_S if found.delay_s is None else found.delay_s)
    if found.permanent:
        return PermanentError(found.summary)
    return PushFailed(found.summary) if found.delay_s is None else RetryAfter(found.delay_s, found.summary)


def _sent(job: Job, deadline_s: float) -> message.PushedAttempt:
    return message.PushedAttempt(
        {name: getattr(job, name) for name in FACTS},
        payload=JsonText(to_json(job.payload).decode()),
        meta=JsonText(to_json(job.meta).decode()) if job.meta else None,
        deadline_s=deadline_s,
    )
