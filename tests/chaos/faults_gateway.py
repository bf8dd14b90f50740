"""Faults of gateways, in runs that have some. What they cost is noted as the absence of the workers behind them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from tests.chaos.faults import LONG_S, SHORT_S, Fault, keep_busy
from tests.chaos.fleet import Fleet
from tests.chaos.gateway import POINTS
from tests.chaos.gateways import Gateway, Gateways

GATEWAY_FAULTS: dict[str, Fault] = {}


def gateway_fault(function: Callable[[Fleet, Gateways, Gateway], Awaitable[None]]) -> Fault:
    """Registers a fault of one gateway under its name."""

    async def fault(fleet: Fleet) -> None:
        assert fleet.gateways is not None
        await function(fleet, fleet.gateways, fleet.gateways.any(fleet.dice))

    GATEWAY_FAULTS[function.__name__] = fault
    return fault


@gateway_fault
async def kill_gateway(fleet: Fleet, gateways: Gateways, gateway: Gateway) -> None:
    """kill -9."""
    await keep_busy(fleet, 1.0)
    await gateways.kill(gateway)


@gateway_fault
async def kill_gateway_at_a_point(fleet: Fleet, gateways: Gateways, gateway: Gateway) -> None:
    """It kills itself just before, or just after, a database call: between a claim and its answer."""
    point = f"{fleet.dice.choice(['before', 'after'])} {fleet.dice.choice(POINTS)}"
    await gateways.kill_at(gateway, point)


@gateway_fault
async def kill_all_gateways(fleet: Fleet, gateways: Gateways, _: Gateway) -> None:
    """kill -9 of all at once: nobody is presumed dead for it."""
    await keep_busy(fleet, SHORT_S)
    async with anyio.create_task_group() as tasks:
        for gateway in gateways.all:
            tasks.start_soon(gateways.kill, gateway)


@gateway_fault
async def all_gateways_away(fleet: Fleet, gateways: Gateways, _: Gateway) -> None:
    """kill -9 of all at once, and none is there for longer than the leases of its workers."""
    await keep_busy(fleet, LONG_S)
    async with anyio.create_task_group() as tasks:
        for gateway in gateways.all:
            tasks.start_soon(gateways.kill, gateway, LONG_S)


@gateway_fault
async def terminate_gateway(fleet: Fleet, gateways: Gateways, gateway: Gateway) -> None:
    """SIGTERM, as in a rolling deploy."""
    await keep_busy(fleet, 1.0)
    await gateways.terminate(gateway)


@gateway_fault
async def freeze_gateway_briefly(fleet: Fleet, gateways: Gateways, gateway: Gateway) -> None:
    """SIGSTOP for less time than it takes a worker to lose its lease."""
    await gateways.freeze(gateway, SHORT_S)


@gateway_fault
async def freeze_gateway_long(fleet: Fleet, gateways: Gateways, gateway: Gateway) -> None:
    """SIGSTOP for longer than the leases of its workers."""
    await keep_busy(fleet, LONG_S)
    await gateways.freeze(gateway, LONG_S)


@gateway_fault
async def blackhole_gateway(fleet: Fleet, gateways: Gateways, gateway: Gateway) -> None:
    """Nothing passes between a gateway and Postgres, for longer than the leases of its workers."""
    await keep_busy(fleet, LONG_S)
    await gateways.isolate(gateway, "blackhole", LONG_S)


@gateway_fault
async def hold_gateway(fleet: Fleet, gateways: Gateways, gateway: Gateway) -> None:
    """What passes between a gateway and Postgres is delivered only after the leases of its workers."""
    await keep_busy(fleet, LONG_S)
    await gateways.isolate(gateway, "hold", LONG_S)


@gateway_fault
async def half_open_gateway(fleet: Fleet, gateways: Gateways, gateway: Gateway) -> None:
    """A gateway's statements reach Postgres, and the answers are lost."""
    await keep_busy(fleet, LONG_S)
    await gateways.isolate(gateway, "halfopen", LONG_S)


@gateway_fault
async def cut_gateway(fleet: Fleet, gateways: Gateways, gateway: Gateway) -> None:
    """All its connections to Postgres are reset."""
    gateways.cut(gateway)
