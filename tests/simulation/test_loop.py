"""The simulated loop: virtual time, a random order of callbacks, and what it rejects."""

from __future__ import annotations

import asyncio
import math
from inspect import iscoroutinefunction
from typing import Any

import anyio
import pytest

from pgworkd.database.signal_store import SignalStore
from tests.simulation.loop import Deadlock, Runaway, SimulationFailed, SimulationLoop, simulate
from tests.simulation.stand_ins import SimulatedSignals

pytestmark = pytest.mark.slow("whole days of a fleet in simulated time")

SEEDS = range(20)


@pytest.mark.fast
def test_the_stand_in_of_signals_has_all_that_a_daemon_calls() -> None:
    called = {name for name, value in vars(SignalStore).items() if iscoroutinefunction(value)} - {"close"}
    assert called <= set(dir(SimulatedSignals))


def order_of(seed: int) -> tuple[int, list[int]]:
    """The window of that seed, and the order in which ten ready tasks start."""
    begun: list[int] = []

    async def begin(number: int) -> None:
        begun.append(number)

    async def main(loop: SimulationLoop) -> int:
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(begin, number)
        return loop.window

    return simulate(seed, main), begun


def test_ready_callbacks_run_in_an_order_determined_by_the_seed() -> None:
    found = [order_of(seed) for seed in SEEDS]
    assert [order_of(seed) for seed in SEEDS] == found
    in_order = list(range(10))
    assert all((begun == in_order) is (window == 1) for window, begun in found)
    assert all(sorted(begun) == in_order for _, begun in found)
    assert len({tuple(begun) for _, begun in found}) > len(SEEDS) / 2


def test_cancellation_follows_the_order_of_tasks_and_not_of_addresses() -> None:
    async def main(loop: SimulationLoop) -> str:
        async def wait(number: int) -> None:
            try:
                with anyio.CancelScope():
                    await anyio.sleep(math.inf)
            finally:
                loop.note(f"cancelled {number}")

        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(wait, number)
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()
        return loop.trace_hash

    assert all(simulate(seed, main) == simulate(seed, main) for seed in SEEDS)


async def _wait_for_ever(_: SimulationLoop) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.Event().wait, name="a waiter")


async def _spin(_: SimulationLoop) -> None:
    while True:
        await asyncio.sleep(0)


async def _look_at_the_clock(loop: SimulationLoop) -> None:
    until = loop.time() + 1
    while loop.time() < until:
        pass


@pytest.mark.parametrize(
    ("main", "error", "says"),
    [
        (_wait_for_ever, Deadlock, "a waiter: Event.wait"),
        (_spin, Runaway, "more than 5000 steps; these are there:\n  task 0"),
        (_look_at_the_clock, Runaway, "a step that never ends"),
    ],
)
def test_a_deadlock_ends_the_simulation_and_lists_the_waiting_tasks(
    main: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        simulate(3, main, steps_max=5_000)


async def _executor(loop: SimulationLoop) -> None:
    await loop.run_in_executor(None, print)


async def _threadsafe(loop: SimulationLoop) -> None:
    loop.call_soon_threadsafe(print)


@pytest.mark.parametrize("main", [_executor, _threadsafe])
def test_threads_are_rejected(main: Any) -> None:
    with pytest.raises(SimulationFailed, match="thread"):
        simulate(3, main)
