"""The App of a program: the engine's registry, with what needs more than the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from datetime import timedelta
from typing import Any

from pgworkd.alerts import digest as digests
from pgworkd.alerts import recipient
from pgworkd.alerts.alert import QUEUE, Alert, alert_handler, alert_rule
from pgworkd.alerts.digest import Digest
from pgworkd.engine import registry
from pgworkd.errors import UsageError

PUSH_OPTIONS = ("headers", "allow_private", "strict_results")
"""The options of `App.push` that are those of `pgworkd.push.Push`, and of no handler."""


class App(registry.Registry):
    """A set of handlers. `pgworkd run --app module:attribute` names one of these."""

    def alert(
        self,
        *,
        to: Callable[[Alert], Awaitable[None] | None] | str,
        name: str = "default",
        on_new: bool = True,
        deaths: int | None = None,
        within_s: int = 600,
        cooldown_s: int = 3600,
        bundle_s: int = 300,
        queues: Collection[str] | None = None,
        queue: str = QUEUE,
    ) -> None:
        """Sends an alert when jobs die, of any application in the database: at the first death of a group of errors
        (`on_new`), and when `deaths` jobs (1 to 1,000,000) of a group died within `within_s` seconds (up to a day).
        A group that goes on dying is told of again at ten times the deaths, and at the end of each cool-down.

        to: a function, sync or async, that is called with an `Alert`, or a mail address (setting `smtp_url`).
        name: of the rule; two applications in one database give their rules different names.
        cooldown_s: seconds between two alerts about one group, 0 to 30 days, unless its deaths have grown tenfold.
        bundle_s: least time between two messages, in seconds, up to a day: what comes meanwhile is in one message.
        queues: deaths in these only.
        queue: that of the jobs which send, of kind `pgworkd.alert.NAME`: a daemon must serve it.

        Raises UsageError for a value out of bounds, or a second alert of a name.
        """
        recipient.checked(to)
        limits = {"deaths": deaths, "within_s": within_s, "cooldown_s": cooldown_s, "bundle_s": bundle_s}
        rule = alert_rule(name, queue, queues, on_new=on_new, **limits)
        if rule.name in self.alert_rules:
            raise UsageError(f"two alerts are named {name!r}: give each a name of its own")
        self.handler(rule.kind, queue=rule.queue, **recipient.OPTIONS)(alert_handler(rule, to))
        self.alert_rules[rule.name] = rule
        self.mails |= isinstance(to, str)

    def push(
        self,
        kind: str,
        url: str,
        *,
        secret: str | None = None,
        unsigned: bool = False,
        timeout_s: float = 30.0,
        **options: Any,
    ) -> None:
        """Sends each job of a kind to a URL by HTTP, and ends it by the answer: see `pgworkd.push.Push` (extra http).

        secret: the name of the secret that signs the requests, in PGWORKD_SECRET_NAME. timeout_s: for an answer.
        options: headers, allow_private and strict_results, as of `Push`, and others of `handler`. Raises UsageError for
        what is wrong with any of them.
        """
        try:
            from pgworkd.push import Push
        except ModuleNotFoundError as error:
            raise UsageError(f"{error.name} is not installed: pip install 'pgworkd[http]'") from None
        own = {name: options.pop(name) for name in PUSH_OPTIONS if name in options}
        send = Push(url, secret=secret, unsigned=unsigned, timeout_s=timeout_s, **own)
        self.handler(kind, **options)(send)

    def digest(
        self,
        *,
        every: str | float | timedelta,
        to: Callable[[Digest], Awaitable[None] | None] | str,
        timezone: str = "UTC",
        name: str | None = None,
        queue: str = QUEUE,
    ) -> None:
        """Sends a summary of the whole database at the times of a schedule, `pgworkd.digest[.NAME]`.

        every, timezone: as for `handler`. to: a function, sync or async, that is called with a `Digest`, or a mail
        address (setting `smtp_url`). One that was due while no daemon ran is sent as soon as one runs.
        queue: that of the jobs which send: a daemon must serve it.

        Raises UsageError for a value out of bounds, or a second digest of a name.
        """
        recipient.checked(to)
        if every is None:
            raise UsageError('every=None: a digest needs a schedule, such as every="0 8 * * 1-5" or every=86400')
        kind = digests.KIND if name is None else f"{digests.KIND}.{name}"
        options = {"queue": queue, "every": every, "timezone": timezone, "missed": "once", **recipient.OPTIONS}
        self.handler(kind, **options)(digests.digest_handler(lambda: self.handlers[kind].recurrence, to))
        self.mails |= isinstance(to, str)
