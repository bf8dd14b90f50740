"""The daemon of `pgworkd push`: the queues that it serves follow the database, while it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import anyio

from pgworkd.core.error_report import ErrorFacts
from pgworkd.core.job import Ending, Outcome
from pgworkd.core.payload import encode_result
from pgworkd.database.endpoint_store import EndpointStore
from pgworkd.database.reconnect import Outage
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.life.daemon import Daemon, DaemonOptions, Part
from pgworkd.engine.registry import CONCURRENCY_DEFAULT, Handler, Registry
from pgworkd.errors import PgworkdError
from pgworkd.push.daemon.callbacks import Callbacks
from pgworkd.push.daemon.delivery import Delivery
from pgworkd.push.daemon.routes import Routes, Target
from pgworkd.push.traffic import Traffic

RELEASED_S_MIN = 1.0
"""A job that is given back waits at least this long: nothing counts how often that happens."""


class PushApp(Registry):
    """An app without handlers: its queues are those with an endpoint, as far as the daemon is to serve them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Collection[str] = ()

    def queues(self) -> dict[str, int]:
        """The queues with an endpoint, with their concurrency unless settings or the row of the queue say otherwise."""
        return dict.fromkeys(self.sent, CONCURRENCY_DEFAULT)

    def slots(self, queues: Mapping[str, int | None] | None) -> dict[str, int]:
        """The concurrency of those among these queues that have an endpoint; of all if none is named."""
        known = self.queues()
        return {queue: slots or known[queue] for queue, slots in (queues or known).items() if queue in known}


class PushDaemon(Daemon):
    """A daemon that sends the jobs of queues with an endpoint; it has no code of an application."""

    def __init__(
        self,
        app: PushApp,
        options: DaemonOptions,
        *,
        queues: Mapping[str, int | None] | None = None,
        secrets_dir: Path | None = None,
        callback_url: str = "",
        traffic: Traffic | None = None,
        parts: tuple[Part, ...] = (),
        **more: Any,
    ) -> None:
        """`queues`: serve at most these; `callback_url`: of the gateways; `traffic`: logs what is sent.

        `more`: as for `Daemon`.
        """
        self._push_app, self._wanted = app, queues
        self._endpoints = EndpointStore(options.connection)
        app.any_kind = self._handler = Handler("", "", self._deliver, "loop", None, None, None, takes_attempt=True)
        super().__init__(app, options, queues=queues, parts=(*parts, _Following()), **more)
        may_call_back = bool(callback_url)
        self._routes = Routes(self.events, secrets_dir, may_call_back=may_call_back, traffic=traffic)
        callbacks = Callbacks(self._endpoints, self.events, callback_url)
        self._delivery = Delivery(self._endpoints, self.events, self._target_of, callbacks)

    async def _deliver(self, attempt: Attempt) -> Outcome:
        """Sends an attempt: the handler of all kinds."""
        found, runner = await self._delivery.sent(attempt), self._runner
        delay_s = runner.backoff_s(attempt, self._handler) if found.delay_s is None else found.delay_s
        if found.ending is Ending.FAILED:
            facts = ErrorFacts(found.cause, found.message, "").redacted()
            return runner.failure(facts, delay_s, permanent=found.permanent)
        if found.ending is Ending.RELEASED:
            delay_s = max(delay_s, RELEASED_S_MIN)
            return Outcome(Ending.RELEASED, delay_s=delay_s, message=found.summary, reason=found.summary)
        return Outcome(found.ending, None if found.result is None else encode_result(found.result))

    def _target_of(self, queue: str) -> Target | None:
        return self._routes.targets.get(queue)

    def serve(self, queues: Mapping[str, int | None] | None) -> None:
        """Serves at most these queues from now on (None: all that have an endpoint)."""
        self._wanted = queues or None
        super().serve(self._wanted)

    async def run(self) -> int:
        """Works until asked to stop, and closes the connections to endpoints; the exit code, as of `Daemon.run`."""
        try:
            return await super().run()
        finally:
            with anyio.CancelScope(shield=True):
                self._routes.close()
                await self._endpoints.close()

    async def follow(self) -> None:
        """Reads endpoints and secrets every `poll_s` seconds, and serves what they say; until cancelled."""
        outage = Outage("endpoints", self.events)
        while True:
            try:
                routes = await self._endpoints.routes(None if self._wanted is None else list(self._wanted))
            except PgworkdError as error:
                await outage.wait(error)
                continue
            outage.passed()
            changed = self._routes.follow(routes)
            self._push_app.sent = self._routes.targets.keys()
            if changed and not self.stop_requested.is_set():
                self._queues.serve(self._wanted)
            await anyio.sleep(self.options.poll_s)


class _Following:
    """The part of the daemon that follows the endpoints."""

    async def run(self, daemon: PushDaemon) -> None:
        await daemon.follow()
