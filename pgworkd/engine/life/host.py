"""What a daemon owes to the program that it runs in, whether that waits for its end or cancels it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio


async def uncut(run: Callable[[], Awaitable[int]], stop: Callable[[], None]) -> int:
    """Returns what `run` does. If this is cancelled, `stop` is called, which ends `run` soon: it is not cut itself.

    A task of its own for `run` is out of reach of `asyncio.Task.cancel`, and its shield of the host's cancel scopes.
    """
    ended = anyio.Event()
    codes: list[int] = []
    problems: list[Exception] = []

    async def whole() -> None:
        try:
            with anyio.CancelScope(shield=True):
                codes.append(await run())
        except Exception as error:  # noqa: BLE001 - raised below: the task group would wrap it
            problems.append(error)
        finally:
            ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(whole, name="daemon")
        try:
            await ended.wait()
        except anyio.get_cancelled_exc_class():
            stop()
            with anyio.CancelScope(shield=True):
                await ended.wait()
            raise
    if problems:
        raise problems[0]
    return codes[0] if codes else 1  # a handler has cancelled all tasks of the process
