"""Which claim gets which connection: in order on the first one, and past slow calls on another."""

from __future__ import annotations

import functools
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from pgworkd.database import claim_connections
from pgworkd.database.claim_connections import CONNECTIONS_MAX, ClaimConnections
from pgworkd.database.connection import Connection, ConnectionOptions
from tests.kits.daemon import until


class World:
    """Connections whose calls end when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, queues: int) -> None:
        self.connections = ClaimConnections(ConnectionOptions("postgresql://127.0.0.1:1/x"), lambda: queues)
        self.connected = anyio.Event()
        self.connected.set()
        self.under_way: dict[str, Any] = {}
        self.began: list[str] = []
        self.closed: list[Any] = []
        self.go_on: dict[str, anyio.Event] = {}
        world = self

        async def ready(_: Connection) -> None:
            await world.connected.wait()

        async def fetch(connection: Connection, name: str) -> list[Any]:
            world.began.append(name)
            world.under_way[name] = connection
            try:
                await connection._ready()
                await world.go_on[name].wait()
            finally:
                del world.under_way[name]
            return [name]

        async def close(connection: Connection) -> None:
            world.closed.append(connection)

        monkeypatch.setattr(Connection, "_ready", ready)
        monkeypatch.setattr(Connection, "fetch", fetch)
        monkeypatch.setattr(Connection, "close", close)

    def call(self, tasks: TaskGroup, *names: str) -> None:
        for name in names:
            self.go_on[name] = anyio.Event()
            tasks.start_soon(self.connections.fetch, name)

    def is_over(self, name: str) -> bool:
        return name not in self.under_way

    async def idle(self) -> None:
        await until(lambda: not self.under_way)


async def a_while() -> None:
    """Long enough for a call to become slow, and for another to overtake it."""
    await anyio.sleep(4 * claim_connections.SLOW_S)


async def test_fast_calls_are_sequential_on_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_connections, "SLOW_S", 10.0)
    world, names = World(monkeypatch, queues=9), [f"call {n}" for n in range(9)]
    async with anyio.create_task_group() as tasks:
        world.call(tasks, *names)
        first = None
        for count, name in enumerate(names, 1):
            await until(lambda: world.under_way)
            assert list(world.under_way) == [name]
            assert first in (None, world.under_way[name])
            first = world.under_way[name]
            world.go_on[name].set()
            await until(functools.partial(world.is_over, name))
            assert world.began == names[: len(world.began)], "in order"
            assert len(world.began) <= count + 1
    assert world.began == names


async def test_a_slow_call_is_overtaken_on_another_connection_and_the_first_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, queues=2)
    async with anyio.create_task_group() as tasks:
        world.call(tasks, "slow", "next")
        await until(lambda: "next" in world.under_way)
        first, second = world.under_way["slow"], world.under_way["next"]
        assert first is not second
        world.go_on["next"].set()
        world.go_on["slow"].set()
        await world.idle()
        world.call(tasks, "last")
        await until(lambda: "last" in world.under_way)
        assert world.under_way["last"] is first
        world.go_on["last"].set()


@pytest.mark.parametrize("queues", [0, 1, 2, CONNECTIONS_MAX, 99])
async def test_connections_are_limited_by_queues_and_by_the_maximum(
    monkeypatch: pytest.MonkeyPatch, queues: int
) -> None:
    world, most = World(monkeypatch, queues), max(1, min(queues, CONNECTIONS_MAX))
    names = [f"slow {n}" for n in range(CONNECTIONS_MAX + 2)]
    async with anyio.create_task_group() as tasks:
        world.call(tasks, *names)
        await until(lambda: len(world.under_way) == most)
        await a_while()
        assert len(world.under_way) == most
        assert len(set(world.under_way.values())) == most
        for name in names:
            world.go_on[name].set()
    assert world.began == names


async def test_a_call_that_is_still_connecting_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, queues=2)
    world.connected = anyio.Event()
    async with anyio.create_task_group() as tasks:
        world.call(tasks, "connects", "next")
        await a_while()
        assert world.began == ["connects"]
        world.connected.set()
        world.go_on["connects"].set()
        world.go_on["next"].set()
    assert world.began == ["connects", "next"]


async def test_a_call_cancelled_while_waiting_passes_its_turn_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, queues=1)
    async with anyio.create_task_group() as tasks:
        world.call(tasks, "first")
        await until(lambda: world.under_way)
        async with anyio.create_task_group() as given_up:
            world.call(given_up, "given up")
            await a_while()
            given_up.cancel_scope.cancel()
        world.call(tasks, "next")
        world.go_on["first"].set()
        world.go_on["next"].set()
    assert world.began == ["first", "next"]


async def test_only_additional_connections_are_closed_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_connections, "IDLE_S", 0.1)
    world = World(monkeypatch, queues=3)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.connections.close_idle)
        world.call(tasks, "slow", "slower", "next")
        await until(lambda: len(world.under_way) == 3)
        slower, last = world.under_way["slower"], world.under_way["next"]
        world.go_on["next"].set()
        world.go_on["slow"].set()
        await until(lambda: world.closed)
        assert world.closed == [last], "the first stays, and so does one that is in use"
        world.go_on["slower"].set()
        await until(lambda: len(world.closed) == 2)
        assert world.closed == [last, slower]
        tasks.cancel_scope.cancel()
