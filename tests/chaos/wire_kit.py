"""Cutting the connection before each single message of an operation, and judging what became of it.

An operation is run again and again through the proxy; the n-th time its connection is cut before the n-th message since
it began, in either direction, until it passes uncut. What the caller was told is compared with the database; then it is
carried on as a daemon or a caller would, and judged by what must hold in the end.
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
from tests.kit import until
from tests.proxy import Message, Proxy

Told = Literal["done", "not done", "unknown"]
"""What the caller knows after an attempt. The first two must be true."""

STUCK_S = 8.0
"""No attempt, and no carrying on, may take longer."""
CUTS_MAX = 500


class Cutter:
    """Cuts one connection before one message, counted over all connections since it was armed."""

    def __init__(self) -> None:
        self._left = 0
        self._cut: Message | None = None

    def arm(self, number: int) -> None:
        self._left, self._cut = number, None

    def disarm(self) -> Message | None:
        """The message that did not pass; None: all passed."""
        self._left = 0
        return self._cut

    def __call__(self, message: Message) -> bool:
        if self._left == 1:
            self._cut = message
        self._left -= self._left > 0
        return self._cut is not message


@dataclass
class Scene:
    """One database, the way through the proxy, and a way of the judge's own."""

    db: asyncpg.Connection[Any]
    aside: Store
    """The judge's, past the proxy: for what an operation needs before it, and who takes over after it."""
    proxy: Proxy
    cutter: Cutter
    stack: contextlib.AsyncExitStack
    """For what lasts the whole sweep."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What operations remember from one cut to the next."""

    @property
    def options(self) -> ConnectionOptions:
        """Of links through the proxy."""
        return ConnectionOptions(self.proxy.dsn, connect_timeout_s=2, command_timeout_s=2)

    async def quiet(self) -> None:
        """Waits until the server, too, has seen the end of what is over, and has rolled back what it must."""
        ended = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE client_port = ANY ($1::int[]))"
        await until(lambda: self.db.fetchval(ended, list(self.proxy.left)), limit_s=STUCK_S)


class Operation(ABC):
    """What is swept; a fresh one for each cut."""

    name: ClassVar[str]
    cuts_min: ClassVar[tuple[int, int]]
    """With fewer cut points, before the client's messages and before the server's, the sweep has missed something."""

    stride: ClassVar[int] = 1
    """Of the tests, where there are very many places; the command always takes each."""

    def __init__(self, scene: Scene, number: int) -> None:
        self.scene = scene
        self.db = scene.db
        self.number = number
        self.queue = f"q{number}"

    async def prepare(self) -> None:  # noqa: B027 - not all have to
        """Before the cut is armed."""

    @abstractmethod
    async def attempt(self) -> Told:
        """The operation, through the proxy: once if it is a bare call, until it is done if it repeats by itself."""

    @abstractmethod
    async def done(self) -> bool:
        """Whether the database has it."""

    async def carry_on(self) -> None:  # noqa: B027 - not all have to
        """What the caller does then."""

    @abstractmethod
    async def faults(self) -> list[str]:
        """What must hold in the end, and does not."""

    async def close(self) -> None:  # noqa: B027 - not all have to
        """Lets go of connections."""


@dataclass
class Figures:
    """What a sweep has found."""

    name: str
    cuts: Counter[str] = field(default_factory=Counter)
    """Cut points by side: before a message of the client, which never arrived; of the server, which nobody heard."""
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
        stack.enter_context(mock.patch.object(reconnect, "FIRST_S", 0.01))  # of a second: there are a thousand waits
        db = await asyncpg.connect(dsn)
        stack.callback(db.terminate)
        aside = Store(ConnectionOptions(dsn))
        stack.push_async_callback(aside.close)
        proxy = await stack.enter_async_context(Proxy(dsn))
        proxy.on_message = cutter = Cutter()
        lasting = await stack.enter_async_context(contextlib.AsyncExitStack())
        yield Scene(db, aside, proxy, cutter, lasting)


async def sweep(make: type[Operation], dsn: str, stride: int = 1) -> Figures:
    """Runs the operation with a cut at each `stride`-th place, until it passes uncut."""
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
    """One attempt with its cut and its end; the message before which it was cut."""
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
    """What a call of a Link tells."""
    try:
        await call
    except OutcomeUnknown:
        return "unknown"
    except DatabaseUnavailable:
        return "not done"
    return "done"


async def rows_of(db: asyncpg.Connection[Any], job_id: UUID) -> list[tuple[str, int, int]]:
    """Status, attempts, and failures with losses, of each row that there is of a job: in the end, one."""
    sql = """SELECT status::text, attempts, failures + jsonb_array_length(
        jsonb_path_query_array(coalesce(errors, '[]'), '$[*] ? (@.type == "lost")'))
        FROM pgworkd.all_jobs WHERE id = $1"""
    return [tuple(row) for row in await db.fetch(sql, job_id)]


def differs(what: str, found: object, wanted: object) -> list[str]:
    """A fault, if there is one."""
    return [] if found == wanted else [f"{what}: {found}, not {wanted}"]
