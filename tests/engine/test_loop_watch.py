"""The watch of the event loop by itself: what blocks the loop is named, once, and ends at the limit."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync

from pgworkd import log
from pgworkd.core import events
from pgworkd.core.error_report import TRACEBACK_BYTES_MAX
from pgworkd.core.events import Events
from pgworkd.engine.life.loop_watch import BLOCKED_S, LoopWatch
from pgworkd.process.redaction import hide_secret
from tests.kits.daemon import until

pytestmark = [
    pytest.mark.slow("loops that are blocked for more than a second"),
    pytest.mark.alone("a loop that is blocked, and no other, is to be named"),
]

FACTS = {"job_id": "1", "queue": "q", "kind": "k", "attempt": 1}


class Attempt:
    def facts(self) -> dict[str, object]:
        return dict(FACTS)


class Runner:
    """As the task that runs an attempt."""

    def __init__(self) -> None:
        self.attempt: log.LoggedAttempt | None = Attempt()


class Watched:
    def __init__(self, limit_s: float, end_process: Callable[[str], None] | None) -> None:
        self.seen: list[tuple[str, Mapping[str, Any]]] = []
        self.threads: set[int] = set()
        emitter = Events()
        emitter.listen(self._see)
        self.watch = LoopWatch(emitter, limit_s, end_process)

    def _see(self, name: str, facts: Mapping[str, Any]) -> None:
        self.threads.add(threading.get_ident())
        self.seen.append((name, facts))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


@contextlib.asynccontextmanager
async def watched(limit_s: float = 0.0, end_process: Callable[[str], None] | None = None) -> AsyncIterator[Watched]:
    found = Watched(limit_s, end_process)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(found.watch.run)
        await anyio.sleep(0.01)
        try:
            yield found
        finally:
            tasks.cancel_scope.cancel()


async def handler(block: Callable[[], Any]) -> None:
    """As a handler that a runner has called."""
    log.RUNNING.set(Runner())
    block()


async def in_a_task(function: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(function, *arguments)


def blocks() -> None:
    time.sleep(BLOCKED_S + 0.5)


async def in_its_own_task() -> None:
    await handler(blocks)


async def in_a_task_that_it_started() -> None:
    async def child() -> None:
        blocks()

    log.RUNNING.set(Runner())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child())


@pytest.mark.parametrize("how", [in_its_own_task, in_a_task_that_it_started])
async def test_a_blocked_loop_is_named_once_and_again_when_it_runs(how: Callable[[], Any]) -> None:
    async with watched() as found:
        for turn in (1, 2):
            await in_a_task(how)
            await until(lambda turn=turn: len(found.seen) == 2 * turn)  # type: ignore[misc]
        assert found.names == [events.LOOP_BLOCKED, events.LOOP_RESUMED] * 2
        blocked, resumed = found.seen[0][1], found.seen[1][1]
        assert blocked.items() >= FACTS.items()
        assert BLOCKED_S <= blocked["blocked_s"] < BLOCKED_S + 0.5
        assert resumed.items() >= FACTS.items()
        assert resumed["blocked_s"] > blocked["blocked_s"]
        assert found.watch.lag_s < BLOCKED_S
    assert threading.get_ident() not in found.threads


@pytest.mark.fast
async def test_its_stack_is_that_of_the_application() -> None:
    async with watched() as found:
        await in_a_task(handler, blocks)
        await until(lambda: found.seen)
    stack = found.seen[0][1]["stack"]
    assert stack.splitlines()[0].endswith(", in handler")
    assert "in blocks\n    time.sleep(" in stack


async def test_a_stack_has_bounds_and_no_secret() -> None:
    hide_secret("c4n4ry-of-a-test")

    def deep(left: int) -> None:
        blocks() if left == 0 else deep(left - 1)  # c4n4ry-of-a-test

    async with watched() as found:
        await in_a_task(handler, lambda: deep(400))
        await until(lambda: found.seen)
    stack = found.seen[0][1]["stack"]
    assert len(stack.encode()) <= TRACEBACK_BYTES_MAX
    assert "in blocks\n" in stack
    assert "c4n4ry" not in stack


async def test_code_of_nobody_s_handler_is_named_by_its_stack() -> None:
    async with watched() as found:
        blocks()
        await until(lambda: found.seen)
    assert "job_id" not in found.seen[0][1]
    assert "in blocks\n" in found.seen[0][1]["stack"]


@pytest.mark.fast
async def test_the_process_ends_at_the_limit_and_the_stack_is_logged() -> None:
    ended: list[str] = []
    async with watched(1.5, ended.append) as found:
        await in_a_task(handler, lambda: time.sleep(2.2))
    assert len(ended) == 1
    assert ended[0].endswith(" s by a job of kind 'k' in queue 'q'")
    assert found.names[:2] == [events.LOOP_BLOCKED, events.LOOP_STUCK]
    stuck = found.seen[1][1]
    assert stuck["process_ends"] is True
    assert "in <lambda>" in stuck["stack"]


async def test_the_process_of_a_host_goes_on() -> None:
    async with watched(1.5) as found:
        stuck = threading.Thread(target=lambda: (time.sleep(1.9), states.append(found.watch.stuck)))
        states: list[bool] = []
        stuck.start()
        await in_a_task(handler, lambda: time.sleep(2.2))
        await until(lambda: len(found.seen) == 3)
        assert found.names == [events.LOOP_BLOCKED, events.LOOP_STUCK, events.LOOP_RESUMED]
        assert found.seen[1][1]["process_ends"] is False
        assert states == [True]
        assert not found.watch.stuck


async def test_zero_is_no_limit() -> None:
    async with watched(0.0, pytest.fail) as found:
        await in_a_task(handler, blocks)
        assert not found.watch.sick
        await until(lambda: len(found.seen) == 2)
    assert events.LOOP_STUCK not in found.names


async def test_a_listener_that_never_returns_does_not_keep_the_process_alive() -> None:
    """Standard error is a pipe that nobody reads: the loop is blocked by it, and the listener would be, too."""
    ended, stuck = list[str](), threading.Event()
    emitter = Events()
    emitter.listen(lambda *_: stuck.wait(30) and None)
    watch = LoopWatch(emitter, 3.5, ended.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        await anyio.sleep(0.01)
        deadline = time.monotonic() + 10
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)  # noqa: ASYNC251 - blocks the loop on purpose
        tasks.cancel_scope.cancel()
    stuck.set()
    assert ended


async def test_a_process_in_which_no_thread_runs_says_so_and_names_no_innocent_code() -> None:
    """As a handler in a thread that holds the interpreter lock: the loop, too, could not run."""
    async with watched() as found:
        await run_sync(lambda: ctypes.PyDLL(None).usleep(1_800_000))
        await until(lambda: found.seen)
        await anyio.sleep(0.6)
    assert found.names == [events.PROCESS_STALLED]
    assert found.seen[0][1]["stalled_s"] >= BLOCKED_S
