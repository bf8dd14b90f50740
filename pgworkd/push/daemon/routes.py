"""Which queues are sent where: follows the rows of `endpoints` and `queues.endpoint`, and the secrets."""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import SplitResult

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.database.endpoint_store import QUEUES_MAX, EndpointRoute
from pgworkd.errors import UsageError
from pgworkd.push import secrets
from pgworkd.push.answer import EndpointAnswer
from pgworkd.push.endpoint import Endpoint
from pgworkd.push.sender import Sender
from pgworkd.push.traffic import Traffic

FIRST_PAUSE_S, PAUSE_S_MAX = 10.0, 600.0
"""The first and the longest pause of an endpoint, which doubles each time until a request succeeds."""
BURST_S = 1.0
"""A pause is not made longer by less than this: answers of a burst ask each for a later instant."""
WARNED_EVERY_S = 60.0
"""Each answer of an endpoint may have a result that cannot be stored: it is told once in this time."""
FAILURES_MAX = 5
"""This many requests that fail one after the other pause an endpoint."""


class Target:
    """An endpoint in use: its secrets, its connections, and how it fares."""

    def __init__(
        self, endpoint: Endpoint, signing: Sequence[bytes], sender: Sender, traffic: Traffic | None = None
    ) -> None:
        """`traffic`: logs each request."""
        self.endpoint, self.signing = endpoint, signing
        self._sender, self._traffic = sender, traffic
        self._requests = 0
        self._retired = False
        self._failures = 0
        self._pauses = 0
        self._paused_until = 0.0
        self._warned_at = -WARNED_EVERY_S

    async def post(
        self, url: SplitResult, headers: Mapping[str, str], content: bytes, *, once: bool = False
    ) -> EndpointAnswer:
        """Sends a message to a URL of the endpoint, see `Sender.post`."""
        self._requests += 1
        try:
            answer = self._sender.post(url, headers, content, self.endpoint.timeout_s, once=once)
            if self._traffic is None:
                return await answer
            return await self._traffic.logged(self.endpoint, headers, content, answer)
        finally:
            self._requests -= 1
            self._close_if_retired()

    def sweep(self) -> None:
        """Closes connections that have been idle for too long."""
        self._sender.sweep()

    def retire(self) -> None:
        """Closes the connections, as soon as no request uses them."""
        self._retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self._retired and not self._requests:
            self._sender.close()

    def is_to_be_told(self) -> bool:
        """Whether a result that cannot be stored is to be told now; if so, none is for WARNED_EVERY_S."""
        now = time.monotonic()
        if now - self._warned_at < WARNED_EVERY_S:
            return False
        self._warned_at = now
        return True

    def succeeded(self) -> None:
        """Notes that the endpoint has answered as one that works."""
        self._failures = self._pauses = 0

    def failed(self, *, asks_for_less: bool, retry_after_s: float | None) -> float | None:
        """Notes a failure; for how many seconds to pause the endpoint; None: not at all, or no longer than it does."""
        now = time.monotonic()
        if now < self._paused_until and (retry_after_s or 0.0) <= self._paused_until - now + BURST_S:
            return None  # it was sent before the pause, as perhaps a hundred others
        self._failures += 1
        if not asks_for_less and self._failures % FAILURES_MAX:
            return None
        self._failures = 0
        pause_s = min(FIRST_PAUSE_S * 2**self._pauses, PAUSE_S_MAX)
        self._pauses = min(self._pauses + 1, 10)
        pause_s = pause_s if retry_after_s is None else max(retry_after_s, 1.0)
        self._paused_until = now + pause_s
        return pause_s


class Routes:
    """The target of each queue, to which its jobs are sent."""

    def __init__(
        self,
        events_: Events,
        secrets_dir: Path | None,
        *,
        may_call_back: bool,
        traffic: Traffic | None = None,
    ) -> None:
        """`may_call_back`: receivers can be told where to; `traffic` logs each request."""
        self._traffic = traffic
        self._may_call_back = may_call_back
        self.targets: dict[str, Target] = {}
        self._events, self._secrets_dir = events_, secrets_dir
        self._make = functools.partial(Sender, tls=ssl.create_default_context())
        self._by_name: dict[str, Target] = {}
        self._faults: dict[str, str] = {}

    def follow(self, routes: Sequence[EndpointRoute]) -> bool:
        """Takes over what the database says now. True if other queues are served than before."""
        if len(routes) > QUEUES_MAX:
            self._report("", f"more than {QUEUES_MAX:,} queues have an endpoint: give each daemon some, with --queue")
            routes = routes[:QUEUES_MAX]
        served, used = dict[str, Target](), dict[str, Target]()
        for queue, row in routes:
            if (target := used.get(row["name"]) or self._target(row)) is not None:
                served[queue] = used[row["name"]] = target
        was, self.targets = self.targets, served
        gone = [target for name, target in self._by_name.items() if used.get(name) is not target]
        self._by_name = used
        names = {row["name"] for _, row in routes}
        self._faults = {name: fault for name, fault in self._faults.items() if name in names or not name}
        for target in gone:
            target.retire()
        for target in used.values():
            target.sweep()
        return was.keys() != served.keys()

    def _target(self, row: Mapping[str, object]) -> Target | None:
        """The target in use if nothing has changed, or another; None, and reported, if it cannot be used."""
        name = str(row["name"])
        try:
            endpoint = Endpoint.of(row)
            if endpoint.mode == "callback" and not self._may_call_back:
                raise UsageError("its mode is callback, and callback_url is not set: receivers could not call back")
            signing = [] if endpoint.secret_name is None else secrets.read(endpoint.secret_name, self._secrets_dir)
        except UsageError as error:
            self._report(name, str(error))
            return None
        self._faults.pop(name, None)
        now = self._by_name.get(name)
        if now is not None and (now.endpoint, now.signing) == (endpoint, signing):
            return now
        return Target(endpoint, signing, self._make(allow_private=endpoint.allow_private), self._traffic)

    def _report(self, name: str, fault: str) -> None:
        if self._faults.get(name) != fault:
            self._faults[name] = fault
            self._events.emit(events.ENDPOINT_REFUSED, endpoint=name, error=fault)

    def close(self) -> None:
        """Closes all connections."""
        for target in self._by_name.values():
            target.retire()
