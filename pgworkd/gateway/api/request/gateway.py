"""What the routes of one gateway share: connections to the database, those who wait, and limits."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import anyio
from anyio.abc import TaskGroup
from fastapi import Request
from starlette.requests import ClientDisconnect

from pgworkd.admin.admin import Admin
from pgworkd.client import NewJob
from pgworkd.client.results import Results
from pgworkd.core.access import Access
from pgworkd.core.events import Events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.requests import RequestPool
from pgworkd.engine.life.loop_watch import LoopWatch
from pgworkd.engine.life.maintenance import Periods
from pgworkd.engine.life.options import LOOP_LIMIT_LEASES, DaemonOptions
from pgworkd.gateway.api.request.access import Authorize, Rate, Tokens, authorized
from pgworkd.gateway.api.request.batch_waits import BatchWaits
from pgworkd.gateway.api.request.caller import CALLER
from pgworkd.gateway.api.request.enqueues import Enqueues
from pgworkd.gateway.api.request.live_lists import LiveList
from pgworkd.gateway.api.request.numbers import GatewaySource, RequestCounters
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.shares import Shares, Turns
from pgworkd.gateway.api.request.waiting import RequestWait
from pgworkd.gateway.workers.service import LEASE_S, RemoteService
from pgworkd.metrics.exporter import DatabaseReader
from pgworkd.metrics.page import MetricsPage
from pgworkd.metrics.samples import Check, Samples

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
START_S = 5.0
"""How long a start waits for the database; without it, requests are answered with an error until it is there."""
WATCHED_AFTER_S = 0.1
"""A request that waits for longer than this ends when its caller goes; most are answered before."""
RATED_MAX = 10_000
"""Callers whose requests are metered apart."""


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The options of a gateway.

    hosts: names that the header Host may have, without a port; None: any. waiters_max: requests that wait at once.
    requests_per_s: per caller, with as many at once. dashboard: serve pages, read from `dashboard_database` (None:
    `database`). user_header: in it a trusted proxy names who looks, to do what `user_scopes` say.
    mask: members of payloads, results and metadata that no page shows, such as payload.*.email.
    frame_url: of a page that the overview embeds.
    api: serve producers and operators. workers: serve remote workers, and take part in maintenance, whose `periods` are
    these: the shortest `keep_days` of all gateways and daemons decides what is deleted. name: of this gateway. poll_s:
    seconds between polls for remote workers that wait. statistics: collect samples of all queues, and what ended.
    environment: of this process; jobs of a database that belongs to another one are given to no worker. loop_limit_s:
    how long the event loop may be blocked, in seconds; None: three of its own leases, 30 s; 0: for ever. Then
    end_process is called, with a reason, and ends the process; None: it is the host's, and the lease is given up.
    """

    database: ConnectionOptions
    connections_max: int = 20
    waiters_max: int = 2000
    hosts: tuple[str, ...] | None = LOOPBACK
    requests_per_s: float = 1000.0
    api: bool = True
    workers: bool = True
    dashboard: bool = False
    dashboard_database: ConnectionOptions | None = None
    user_header: str | None = None
    user_scopes: Mapping[str, Sequence[str] | None] = field(default_factory=lambda: {"read": None})
    mask: Sequence[str] = ()
    frame_url: str | None = None
    name: str = field(default_factory=socket.gethostname)
    poll_s: float = 2.0
    statistics: bool = True
    periods: Periods = field(default_factory=Periods)
    environment: str | None = None
    loop_limit_s: float | None = None
    end_process: Callable[[str], None] | None = None


class Gateway:
    """A gateway; it works within `running()`."""

    def __init__(
        self, options: GatewayOptions, authorize: Authorize | None = None, events_: Events | None = None
    ) -> None:
        """`authorize`: says what a caller may do; None: the tokens in the database. `events_`: for the log."""
        self.options = options
        turns = Turns(options.connections_max, options.database.connect_timeout_s)
        self.database = RequestPool(options.database, options.connections_max, lambda: turns.turn(CALLER.get()))
        self._enqueues = Enqueues(self.database)
        self._lookups = RequestPool(options.database, 1)
        self.batch_waits = BatchWaits(self.database.lookups())
        self._authorize = authorize or Tokens(self._lookups)
        self._rate = Rate(options.requests_per_s, max(1, math.ceil(options.requests_per_s)), RATED_MAX)
        self._results: Results | None = None
        events_ = events_ or Events()
        self._reader = DatabaseReader(options.database, events_)
        limit_s = LOOP_LIMIT_LEASES * LEASE_S if options.loop_limit_s is None else options.loop_limit_s
        self._loop_watch = LoopWatch(events_, limit_s, options.end_process)
        member = DaemonOptions(
            options.database,
            worker_name=options.name,
            poll_s=options.poll_s,
            statistics=options.statistics,
            periods=options.periods,
            environment=options.environment,
        )
        self.remote = RemoteService(member, events_, self._loop_watch)
        self.requests = RequestCounters()
        self._source = GatewaySource(self)
        self.page = MetricsPage()
        self.lists: dict[str, LiveList] = {}
        """The lists that callers follow, by name."""
        self.claims = Shares(options.waiters_max, "too-many-waiters")
        """Claims that wait, whoever makes them: one token may be that of a whole fleet."""
        self.waits = Shares(options.waiters_max, "too-many-waiters")
        """Other requests that wait."""
        self.streams = Shares(max(2, options.connections_max // 5), "too-many-streams")
        """Streams of jobs that come in."""
        self._waits: set[anyio.CancelScope] = set()
        self._stopping = False
        self._readers: TaskGroup | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the gateway while the block lasts; waiters are answered at its end, and connections closed."""
        try:
            async with (
                Results(self.options.database) as self._results,
                anyio.create_task_group() as tasks,
                anyio.create_task_group() as readers,
            ):
                self._readers = readers
                readers.start_soon(self._loop_watch.run)
                readers.start_soon(self.batch_waits.run)
                readers.start_soon(self._reader.read)  # the log says at once if the database does not answer
                for each in self.lists.values():
                    readers.start_soon(each.run)
                if self.options.workers:
                    tasks.start_soon(self.remote.run, name="remote workers")
                    with anyio.move_on_after(START_S):
                        await self.remote.ready.wait()
                try:
                    yield
                finally:
                    self.remote.request_stop()
                    readers.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None  # of the block, or of the one task that may fail
        finally:
            self._results = self._readers = None
            await self.database.close()
            await self._lookups.close()
            await self._reader.close()

    async def access(self, request: Request) -> Access:
        """What the caller of a request may do. Raises Problem unauthenticated or too-many-requests."""
        access = await authorized(self._authorize, request)
        if (wait_s := self._rate.wait_s(access.name)) > 0:
            said = f"more than {self.options.requests_per_s:g} requests per second"
            raise Problem("too-many-requests", said, headers={"Retry-After": str(math.ceil(wait_s))})
        self._rate.count(access.name)
        CALLER.set(access.name)
        return access

    async def still_allowed(self, request: Request) -> None:
        """Raises Problem if the caller may not call any more, or may do less than before; to be asked now and then."""
        if not (await authorized(self._authorize, request)).covers(request.state.access):
            raise Problem("forbidden", "what you may do has changed meanwhile: send the request again")

    async def create(self, job: NewJob) -> UUID:
        """Creates a job that `may_share` a statement with others; its id. Raises PgworkdError."""
        if self._readers is None:
            raise _not_running()
        return await self._enqueues.add(job, self._readers)

    @contextlib.asynccontextmanager
    async def admin(self, by: str = "") -> AsyncIterator[Admin]:
        """The operators' verbs, each a transaction of its own; `by`: who, for the audit."""
        async with self.database.session(by) as connection:
            yield Admin(connection)

    @contextlib.asynccontextmanager
    async def admin_transaction(self, by: str) -> AsyncIterator[Admin]:
        """The operators' verbs, all of them in one transaction."""
        async with self.database.transaction(by) as connection:
            yield self.admin_on(connection)

    def admin_on(self, connection: Any) -> Admin:
        """The operators' verbs in a transaction of `database`."""
        return Admin(self.database.lent(connection))

    @property
    def by_tokens(self) -> bool:
        """Whether the tokens in the database say who may call."""
        return isinstance(self._authorize, Tokens)

    @property
    def results(self) -> Results:
        """The connection that waits for the ends of jobs."""
        if self._results is None:
            raise _not_running()
        return self._results

    @property
    def source(self) -> GatewaySource:
        """What this process counts, and its health, for a port of their own."""
        return self._source

    async def metrics(self) -> tuple[Samples, list[Check]]:
        """What this process counts, with the `database` families of the last seconds; and whether that answers."""
        samples, checks = await self._reader.read()
        refused = self.remote.counters.refusals.text()
        return {**samples, **self._source.samples()}, [
            *checks,
            Check("claims", not refused, refused or "none is refused"),
        ]

    def stop_waiting(self) -> None:
        """Answers all that wait, and those to come, at once: the gateway is about to stop."""
        self._stopping = True
        for scope in list(self._waits):
            scope.cancel()

    @property
    def waiters(self) -> int:
        """Requests that wait now."""
        return self.claims.taken + self.waits.taken

    async def waited(
        self,
        request: Request,
        call: Callable[[], Awaitable[None]],
        place: contextlib.AbstractContextManager[None],
        *,
        checked: bool = True,
    ) -> bool:
        """Waits, in a place of `claims` or `waits`, until the call returns.

        False if the caller has gone before, or the gateway stops. Raises Problem if there is no place; what `authorize`
        raises by then, or forbidden if the caller may do less than when the request came. `checked` False: the call
        looks after that itself.
        """
        if self._stopping:
            return False
        waits, done = RequestWait(request, checked=checked), False
        with place, waits.scope:
            self._waits.add(waits.scope)
            watch = asyncio.get_running_loop().call_later(WATCHED_AFTER_S, self._watch, waits)
            try:
                await call()
                done = True
            finally:
                watch.cancel()
                waits.unwatch()
                self._waits.discard(waits.scope)
        if waits.refused is not None:
            raise waits.refused
        return done

    @contextlib.asynccontextmanager
    async def while_allowed(self, request: Request) -> AsyncIterator[None]:
        """Ends the block, which reads the body, with a Problem once the caller may not call any more."""
        waits = RequestWait(request, has_arrived=False)
        with waits.scope:
            self._watch(waits)
            try:
                yield
            finally:
                waits.unwatch()
        if waits.refused is not None:
            raise waits.refused
        if waits.scope.cancelled_caught:  # the block was cut short: it must not seem to be done
            raise ClientDisconnect

    def _watch(self, waits: RequestWait) -> None:
        if self._readers is not None:
            self._readers.start_soon(waits.watch, self.still_allowed)


def _not_running() -> RuntimeError:
    return RuntimeError("the gateway is not running: enter gateway.running() in your application's lifespan")


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def gateway_of(request: Request) -> Gateway:
    """The gateway of this application."""
    found: Gateway = request.scope["pgworkd.gateway"]
    return found
