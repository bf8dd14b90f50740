"""Tasks that run one job after another: whatever a handler did to its task, the next jobs find a clean one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from tests.kits.apps import Handle, Ordinary, cancel_this_task, outlived, tenant, this_task

pytestmark = pytest.mark.slow("each way in which a handler can alter its task, in each mode")

# What a handler does to its task.


async def _sets_a_variable() -> None:
    tenant.set("me")


async def _sets_a_variable_and_raises() -> None:
    tenant.set("me")
    raise ValueError("no")


async def _sets_a_variable_and_resets_it() -> None:
    token = tenant.set("me")
    await anyio.lowlevel.checkpoint()
    tenant.reset(token)


_broken_out_of: list[AsyncIterator[int]] = []


async def _numbers() -> AsyncIterator[int]:
    with anyio.CancelScope(deadline=anyio.current_time() + 0.005):
        yield 1
        yield 2


async def _breaks_out_of_a_generator() -> None:
    numbers = _numbers()
    _broken_out_of.append(numbers)  # otherwise it would be closed in a task of its own and raise
    async for _ in numbers:
        break


async def _breaks_out_of_a_generator_and_raises() -> None:
    await _breaks_out_of_a_generator()
    raise ValueError("no")


async def _leaves_a_cancelled_scope_open() -> None:
    scope = anyio.CancelScope()
    scope.__enter__()
    scope.cancel()


async def _leaves_shields_open() -> None:
    for _ in range(3):
        anyio.CancelScope(shield=True).__enter__()


async def _cancels_itself_and_returns() -> None:
    cancel_this_task()


async def _cancels_itself_and_raises() -> None:
    cancel_this_task()
    raise ValueError("no")


async def _cancels_itself_and_swallows() -> None:
    cancel_this_task()
    with contextlib.suppress(asyncio.CancelledError):
        await anyio.sleep(1)


async def _cancels_itself_and_takes_it_back() -> None:
    cancel_this_task()
    with contextlib.suppress(asyncio.CancelledError):
        await anyio.sleep(1)
    this_task().uncancel()


async def _raises_a_group_around_a_cancellation() -> None:
    raise BaseExceptionGroup("both", [asyncio.CancelledError(), ValueError("no")])


async def _cancels_a_group() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, 10)
        tasks.cancel_scope.cancel()


async def _fails_in_a_group() -> None:
    async def fail() -> None:
        raise ValueError("in a child")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, 10)
        tasks.start_soon(fail)


async def _fails_in_a_group_of_asyncio() -> None:
    async def fail() -> None:
        raise ValueError("in a child")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(10))
        tasks.create_task(fail())


async def _limits_itself() -> None:
    with anyio.move_on_after(0.001):
        await anyio.sleep(10)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            await asyncio.sleep(10)


class Odd(NamedTuple):
    handle: Handle
    ending: str
    kept: bool | None  # None: depending on its version asyncio's group uncancels this task or does not
    error: str | None = None


DEEDS = [
    Odd(_sets_a_variable, "completed", kept=False),
    Odd(_sets_a_variable_and_raises, "dead", kept=False, error="ValueError: no"),
    Odd(_sets_a_variable_and_resets_it, "completed", kept=True),
    Odd(_breaks_out_of_a_generator, "completed", kept=False),
    Odd(_breaks_out_of_a_generator_and_raises, "dead", kept=False, error="ValueError: no"),
    Odd(_leaves_a_cancelled_scope_open, "completed", kept=False),
    Odd(_leaves_shields_open, "completed", kept=False),
    Odd(_cancels_itself_and_returns, "completed", kept=False),
    Odd(_cancels_itself_and_raises, "dead", kept=False, error="ValueError: no"),
    Odd(_cancels_itself_and_swallows, "completed", kept=False),
    Odd(_cancels_itself_and_takes_it_back, "completed", kept=True),
    Odd(_raises_a_group_around_a_cancellation, "dead", kept=True, error="BaseExceptionGroup: both (2 sub-exceptions)"),
    Odd(_cancels_a_group, "completed", kept=True),
    Odd(_fails_in_a_group, "dead", kept=True, error="ExceptionGroup: unhandled errors in a TaskGroup"),
    Odd(_fails_in_a_group_of_asyncio, "dead", kept=None, error="ExceptionGroup: unhandled errors in a TaskGroup"),
    Odd(_limits_itself, "completed", kept=True),
]


@pytest.mark.parametrize("odd", DEEDS, ids=lambda odd: odd.handle.__name__.strip("_").replace("_", " "))
async def test_a_handler_that_alters_its_task_harms_no_later_job(
    dsn: str, db: asyncpg.Connection[Any], odd: Odd
) -> None:
    """An unchanged task is reused; any other is replaced."""
    error = await outlived(dsn, db, Ordinary(odd.handle), odd.ending, kept=odd.kept)
    assert (error or "").startswith(odd.error or "")
    assert (error is None) is (odd.error is None)


# How it handles a cancellation from outside.


async def _swallows() -> str:
    with contextlib.suppress(asyncio.CancelledError):
        await anyio.sleep_forever()
    return "finished all the same"


async def _swallows_again_and_again() -> str:
    for _ in range(3):
        with contextlib.suppress(asyncio.CancelledError):
            await anyio.sleep_forever()
    return "finished all the same"


async def _raises_a_group() -> None:
    try:
        await anyio.sleep_forever()
    except asyncio.CancelledError as error:
        raise BaseExceptionGroup("both", [error, ValueError("in the clean-up")]) from None


async def _fails_in_a_child_while_cancelled() -> None:
    async def fail() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("in the clean-up of a child")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail)


async def _cancels_itself_too() -> None:
    try:
        await anyio.sleep_forever()
    finally:
        cancel_this_task()


async def _leaves_a_scope_open() -> None:
    anyio.CancelScope().__enter__()
    await anyio.sleep_forever()


@pytest.mark.parametrize("how", ["cancelled", "out of time"])
@pytest.mark.parametrize(
    ("handle", "completes"),
    [
        (_swallows, False),
        (_swallows_again_and_again, False),
        (_raises_a_group, False),
        (_fails_in_a_child_while_cancelled, False),
        (_cancels_itself_too, False),
        (_leaves_a_scope_open, False),
    ],
)
async def test_a_mishandled_cancellation_harms_no_later_job(
    dsn: str, db: asyncpg.Connection[Any], handle: Handle, completes: bool, how: str
) -> None:
    timed = {} if how == "cancelled" else {"timeout_s": 0.03}
    ending = "completed" if completes else "cancelled" if how == "cancelled" else "dead"
    error = await outlived(dsn, db, Ordinary(handle), ending, cancelled=not timed, kept=False, **timed)
    if not completes:
        assert error == ("cancelled on request" if how == "cancelled" else "Timeout: no result within 0.03 s")
