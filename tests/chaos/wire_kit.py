"""Cuts the connection before each single message of an operation, and checks the outcome.

An operation is run repeatedly through the proxy; the n-th time its connection is cut before the n-th message since
its start, in either direction, until it passes uncut. What the caller learned is compared with the database; then it
is continued as a daemon or a caller would, and checked for what must hold in the end.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar, Literal
from unittest import mock
from uuid import UUID

import anyio
import asyncpg

from pgworkd.database import reconnect
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.store import Store
from pgworkd.errors import DatabaseUnavailable, OutcomeUnknown
from tests.kits.daemon import until
from tests.kits.proxy import Message, Proxy

Told = Literal["done", "not done", "unknown"]
"""What the caller knows after an attempt. The first two must match the database."""

STUCK_S = 8.0
"""Time limit of an attempt, and of its continuation."""
CUTS_MAX = 1000


class Cutter:
    """Cuts one connection before one message, counted over all connections since it was armed."""

    def __init__(self) -> None:
        self._left = 0
        self._cut: Message | None = None

    def arm(self, number: int) -> None:
        self._left, self._cut = number, None

    def disarm(self) -> Message | None:
        """The message that was cut off; None: all passed."""
        self._left = 0
        return self._cut

    def __call__(self, message: Message) -> bool:
        if self._left == 1:
            self._cut = message
        self._left -= self._left > 0
        return self._cut is not message


@dataclass
class Scene:
    """One database, a connection through the proxy, and a direct one for the checker."""

    db: asyncpg.Connection[Any]
    aside: Store
    """The checker's direct connection: for an operation's setup, and for the worker that takes over after it."""
    proxy: Proxy
    cutter: Cutter
    stack: contextlib.AsyncExitStack
    """Resources that last for the whole sweep."""
    memory: dict[str, Any] = field(default_factory=dict)
    """State that operations keep from one cut to the next."""

    @property
    def options(self) -> ConnectionOptions:
        """Options of connections through the proxy."""
        return ConnectionOptions(self.proxy.dsn, connect_timeout_s=2, command_timeout_s=2)

    async def quiet(self) -> None:
        """Waits until the server has noticed all closed connections, and has rolled back their transactions."""
        ended = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE client_port = ANY ($1::int[]))"
        ports = list(self.proxy.left)
        await until(lambda: self.db.fetchval(ended, ports), limit_s=STUCK_S)
        self.proxy.left.difference_update(ports)  # the next connection from such a port, whosever, is another one


class Operation(ABC):
    """An operation under test; a new instance for each cut."""

    name: ClassVar[str]
    cuts_min: ClassVar[tuple[int, int]]
    """With fewer cut points than this, by client and server, the sweep has missed something."""

    stride: ClassVar[int] = 1
    """Every n-th cut point in the tests, for operations with very many; the command always tries each."""

    def __init__(self, scene: Scene, number: int) -> None:
        self.scene = scene
        self.db = scene.db
        self.number = number
        self.queue = f"q{number}"

    async def prepare(self) -> None:  # noqa: B027 - not all have to
        """Setup, before the cut is armed."""

    @abstractmethod
    async def attempt(self) -> Told:
        """The operation, through the proxy: once for a bare call, until it is done if it retries by itself."""

    @abstractmethod
    async def done(self) -> bool:
        """Whether it took effect in the database."""

    async def carry_on(self) -> None:  # noqa: B027 - not all have to
        """What the caller does next."""

    @abstractmethod
    async def faults(self) -> list[str]:
        """Violations at the end."""

    async def close(self) -> None:  # noqa: B027 - not all have to
        """Releases connections."""


@dataclass
class Figures:
    """The result of a sweep."""

    name: str
    cuts: Counter[str] = field(default_factory=Counter)
    """Cut points by side: before a client message, which never arrived; before a server message, which was lost."""
    told: Counter[Told] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    @property
    def row(self) -> str:
        told = (self.told["done"], self.told["not done"], self.told["unknown"])
        return _row(self.name, self.cuts["client"], self.cuts["server"], *told, len(self.violations))


def _row(name: str, *cells: object) -> str:
    return f"{name:<50}" + "".join(f"{cell:>11}" for cell in cells)


HEAD = _row("operation, cut before each", "request", "reply", "known done", "known not", "unknown", "violations")


@contextlib.asynccontextmanager
async def scene_of(dsn: str) -> AsyncIterator[Scene]:
    """A scene in that database."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(mock.patch.object(reconnect, "FIRST_S", 0.01))  # seconds: there are a thousand waits
        db = await asyncpg.connect(dsn)
        stack.callback(db.terminate)
        aside = Store(ConnectionOptions(dsn))
        stack.push_async_callback(aside.close)
        proxy = await stack.enter_async_context(Proxy(dsn))
        proxy.on_message = cutter = Cutter()
        lasting = await stack.enter_async_context(contextlib.AsyncExitStack())
        yield Scene(db, aside, proxy, cutter, lasting)


async def sweep(make: type[Operation], dsn: str, stride: int = 1) -> Figures:
    """Runs the operation with a cut at each `stride`-th message, until it passes uncut."""
    figures = Figures(make.name)
    async with scene_of(dsn) as scene:
        for number in count(1, stride):
            operation = make(scene, number)
            try:
                cut = await _once(operation, figures)
            finally:
                await operation.close()
            if cut is None:
                break
            figures.cuts[cut.side] += 1
            assert number < CUTS_MAX, f"{make.name} never passes"
    least_client, least_server = make.cuts_min
    assert figures.cuts["client"] >= least_client // stride, f"{make.name}: {figures.cuts}"
    assert figures.cuts["server"] >= least_server // stride, f"{make.name}: {figures.cuts}"
    return figures


async def _once(operation: Operation, figures: Figures) -> Message | None:
    """One attempt with its cut and its outcome; returns the message before which it was cut."""
    wrong: list[str] = []
    await operation.prepare()
    operation.scene.cutter.arm(operation.number)
    told: Told | None = None
    with anyio.move_on_after(STUCK_S):
        told = await operation.attempt()
    cut = operation.scene.cutter.disarm()
    await operation.scene.quiet()
    done = await operation.done()
    if told is None:
        wrong.append("the attempt is stuck")
    elif told != "unknown" and (told == "done") != done:
        wrong.append(f"the caller was told that it is {told}, and it is {'done' if done else 'not done'}")
    elif cut is None and told != "done":
        wrong.append(f"not cut, and yet {told}")
    else:
        figures.told[told] += 1
    with anyio.move_on_after(STUCK_S) as limit:
        await operation.carry_on()
    if limit.cancelled_caught:
        wrong.append("carrying on is stuck")
    wrong += await operation.faults()
    figures.violations += [f"{operation.name}, cut no. {operation.number} before {cut}: {fault}" for fault in wrong]
    return cut


async def told_by(call: Awaitable[object]) -> Told:
    """What the outcome of a Connection's call tells its caller."""
    try:
        await call
    except OutcomeUnknown:
        return "unknown"
    except DatabaseUnavailable:
        return "not done"
    return "done"


async def rows_of(db: asyncpg.Connection[Any], job_id: UUID) -> list[tuple[str, int, int]]:
    """Status, attempts, and failures plus losses of each row of a job: at the end, exactly one."""
    sql = """SELECT status::text, attempts, failures + jsonb_array_length(
        jsonb_path_query_array(coalesce(errors, '[]'), '$[*] ? (@.type == "lost")'))
        FROM pgworkd.all_jobs WHERE id = $1"""
    return [tuple(row) for row in await db.fetch(sql, job_id)]


def differs(what: str, found: object, wanted: object) -> list[str]:
    """The violation, if there is one."""
    return [] if found == wanted else [f"{what}: {found}, not {wanted}"]
