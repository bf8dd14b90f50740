"""Stacks and profiles of a gateway: what its process does, told to the scope admin alone, without values."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import anyio
import asyncpg
import pytest

from pgworkd.core import stacks
from tests.kits.gateway import calling

pytestmark = pytest.mark.slow("profiles take seconds")

Db: TypeAlias = "asyncpg.Connection[Any]"
SECRET = "hunter2-in-a-variable"


def keep_busy(over: threading.Event, secret: str) -> int:
    """Works in a thread until told to end."""
    found = 0
    while not over.is_set():
        found += len(secret)
    return found


def block(seconds: float) -> None:
    """Blocks the loop that calls it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


async def wait_inside(gate: anyio.Event, secret: str) -> int:
    """A coroutine that waits within another."""
    await gate.wait()
    return len(secret)


async def wait_outside(gate: anyio.Event) -> int:
    """A coroutine that awaits another."""
    return await wait_inside(gate, SECRET)


@pytest.fixture
def busy() -> Iterator[None]:
    """A thread that works."""
    over = threading.Event()
    thread = threading.Thread(target=keep_busy, args=(over, SECRET), name="busy; one")
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.usefixtures("busy")
async def test_stacks_show_each_thread_and_task_and_no_value(dsn: str, db: Db) -> None:
    gate = anyio.Event()
    async with calling(dsn) as call, asyncio.TaskGroup() as tasks:
        for number in range(3):
            tasks.create_task(wait_outside(gate), name=f"waits {number}")
        await asyncio.sleep(0)
        answer = await call("GET", "/v1/debug/stacks")
        gate.set()
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    parts = [each.splitlines() for each in answer.text.strip().split("\n\n")]
    (thread,) = [each for each in parts if each[0] == "thread busy; one"]
    assert any("keep_busy (" in line for line in thread)
    (waits,) = [each for each in parts if "among them waits " in each[0]]
    assert waits[0].startswith("3 tasks, among them waits ")
    assert [line.split()[0] for line in waits[1:]] == ["wait_outside", "wait_inside", "Event.wait", "Event.wait"]
    assert any("get_stacks (" in line for each in parts for line in each), "its own thread"
    assert SECRET not in answer.text
    assert "found +=" not in answer.text, "no line of source"
    row = await db.fetchrow("SELECT who, what, after::text FROM pgworkd.audit ORDER BY id DESC LIMIT 1")
    assert row is not None
    assert (row["what"], '"debug": "stacks"' in row["after"]) == ("worker", True)
    assert row["who"].startswith("tester (token ")


@pytest.mark.usefixtures("busy")
async def test_a_profile_shows_what_is_busy_also_a_loop_that_is_blocked(dsn: str) -> None:
    async with calling(dsn) as call, asyncio.TaskGroup() as tasks:
        profile = tasks.create_task(call("GET", "/v1/debug/profile?seconds=1"))
        while not stacks._sampling.locked():
            await asyncio.sleep(0.01)
        block(0.5)
        answer = await profile
    assert answer.status_code == 200, answer.text
    counts = {stack: int(count) for stack, _, count in (line.rpartition(" ") for line in answer.text.splitlines())}
    of_busy = {stack: count for stack, count in counts.items() if stack.startswith("busy: one;")}
    assert all("keep_busy (" in stack for stack in of_busy)
    assert sum(of_busy.values()) >= 10
    assert sum(count for stack, count in counts.items() if "block (" in stack) >= 5
    assert SECRET not in answer.text


async def test_one_profile_at_a_time_and_only_of_1_to_30_seconds(dsn: str) -> None:
    async with calling(dsn) as call, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(call("GET", "/v1/debug/profile?seconds=2"))
        while not stacks._sampling.locked():
            await asyncio.sleep(0.01)
        assert (await call.problem("GET", "/v1/debug/profile?seconds=1"))[:2] == (409, "conflict")
        assert (await call("GET", "/v1/debug/stacks")).status_code == 200
        assert (await first).status_code == 200
        assert (await call("GET", "/v1/debug/profile?seconds=1")).status_code == 200, "the next one"
        for seconds in ("0", "31", "-1", "x", "1.5", "nan"):
            assert (await call.problem("GET", f"/v1/debug/profile?seconds={seconds}"))[:2] == (422, "invalid")


async def test_another_scope_sees_neither_and_nothing_is_noted(dsn: str, db: Db) -> None:
    async with calling(dsn, {"operate": None, "read": None, "metrics": None}) as call:
        for path in ("stacks", "profile?seconds=30"):
            assert (await call.problem("GET", f"/v1/debug/{path}"))[:2] == (403, "forbidden")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.audit WHERE what = 'worker'") == 0


async def test_a_caller_that_goes_ends_its_profile() -> None:
    with anyio.move_on_after(0.1):
        await stacks.profile(30)
    assert await stacks.profile(0.05) is not None


@pytest.mark.usefixtures("busy")
async def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "CHARS_MAX", 300)
    text = stacks.all_stacks(asyncio.get_running_loop())
    assert len(text) < 400
    assert text.endswith("(other): the rest is cut\n")
    monkeypatch.setattr(stacks, "STACKS_MAX", 0)
    found = await stacks.profile(0.1)
    assert found is not None
    assert found.startswith("(other) ")
