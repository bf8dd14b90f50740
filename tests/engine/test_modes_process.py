"""Handlers in processes: how they end, how they are stopped, and that they do not block the event loop."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest
from pydantic import BaseModel

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.errors import PermanentError, RetryAfter, Snooze
from tests.kits.daemon import insert, running, status, until, waits_for_status

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In production overdue runs are checked every 0.5 s."""
    monkeypatch.setattr("pgworkd.engine.settle.job_events.CHECK_S", 0.02)


# Their handlers are at the top level of a module: the child imports them from here.


class Sum(BaseModel):
    numbers: list[int]


def add(payload: Sum, job: Job) -> dict[str, Any]:
    print("what a handler prints goes nowhere near the answer")  # noqa: T201
    sys.stdout.buffer.write(b"\0\0\0\5")
    sys.stdout.flush()
    return {"sum": sum(payload.numbers), "pid": os.getpid(), "attempt": job.attempt, "kind": job.kind}


def add_nothing() -> None:
    """No parameters, no result."""


def snooze(job: Job) -> str:
    if job.attempt == 1:
        raise Snooze(0.02)
    return "awake"


def retry_after(job: Job) -> str:
    if job.attempt == 1:
        raise RetryAfter(0.02, "busy")
    return "done"


def permanent() -> None:
    raise PermanentError("no such user")


class Unpicklable(Exception):  # noqa: N818
    def __init__(self, what: str, how: str) -> None:
        super().__init__(what)
        self.lock = threading.Lock()


def raise_unpicklable() -> None:
    raise Unpicklable("cannot travel", "at all")


def raise_exit() -> None:
    sys.exit(7)


def exit_hard() -> None:
    os._exit(3)


def exit_zero() -> None:
    os._exit(0)


def crash() -> None:
    ctypes.string_at(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def return_an_object() -> object:
    return object()


def return_too_much() -> str:
    return "x" * (64 << 20)


def close_the_pipes() -> None:
    for fd in range(3, 64):
        try:
            os.close(fd)
        except OSError:
            continue


def spin(payload: dict[str, Any]) -> None:
    Path(payload["path"]).write_text(str(os.getpid()), encoding="ascii")
    while True:
        pass


def count_up(payload: dict[str, Any]) -> int:
    total = 0
    for n in range(payload["to"]):
        total += n
    return total


def process_app(*functions: Callable[..., Any], **options: Any) -> App:
    app = App()
    for function in functions:
        app.handler(function.__name__, queue="q", run_in="process", **({"concurrency": 2} | options))(function)
    return app


async def test_a_process_gets_payload_and_job_and_returns_its_result(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with running(process_app(add, add_nothing, concurrency=1), dsn):
        first = await insert(db, "q", '{"numbers": [1, 2, 3]}', kind="add")
        second = await insert(db, "q", '{"numbers": [4]}', kind="add")
        third = await insert(db, "q", kind="add_nothing")
        bad = await insert(db, "q", '{"numbers": "x"}', kind="add")
        for job_id in (first, second, third):
            await until(waits_for_status(db, job_id, "completed"))
        await until(waits_for_status(db, bad, "dead"))
    one, two, three = [row[0] for row in await db.fetch("SELECT result FROM pgworkd.finished_jobs ORDER BY id")]
    pid = json.loads(one)["pid"]
    assert json.loads(one) == {"sum": 6, "pid": pid, "attempt": 1, "kind": "add"}
    assert json.loads(two) == {"sum": 4, "pid": pid, "attempt": 1, "kind": "add"}, "processes are kept for more"
    assert pid != os.getpid()
    assert three == "null"
    assert not _lives(pid), "it ends with its daemon"


async def test_exceptions_of_a_process_keep_their_meaning(dsn: str, db: asyncpg.Connection[Any]) -> None:
    functions = (snooze, retry_after, permanent, raise_unpicklable, raise_exit, return_an_object, return_too_much)
    async with running(process_app(*functions, max_attempts=2, backoff=0.01), dsn):
        ids = {f.__name__: await insert(db, "q", kind=f.__name__) for f in functions}
        for name, job_id in ids.items():
            await until(waits_for_status(db, job_id, "completed" if name in ("snooze", "retry_after") else "dead"))
        await until(waits_for_status(db, await insert(db, "q", kind="snooze"), "completed"))
    facts = {r["id"]: r for r in await db.fetch("SELECT id, attempts, failures, error, errors FROM pgworkd.all_jobs")}
    found = {name: facts[job_id] for name, job_id in ids.items()}
    assert (found["snooze"]["attempts"], found["snooze"]["failures"]) == (2, 0)
    assert (found["retry_after"]["attempts"], found["retry_after"]["failures"]) == (2, 1)
    assert found["retry_after"]["error"].endswith("RetryAfter: busy")
    assert found["permanent"]["attempts"] == 1
    assert found["permanent"]["error"].endswith("PermanentError: no such user")
    assert found["raise_unpicklable"]["error"] == f"{__name__}.Unpicklable: cannot travel"
    assert "in raise_unpicklable" in json.loads(found["raise_unpicklable"]["errors"])[0]["traceback"]
    assert found["raise_exit"]["error"] == "SystemExit: 7"
    assert "result is of type object" in found["return_an_object"]["error"]
    assert "1,048,576 bytes are allowed" in found["return_too_much"]["error"]


@pytest.mark.parametrize(
    ("function", "fate"),
    [
        (exit_hard, "exit code 3"),
        (exit_zero, "exit code 0"),
        (crash, "SIGSEGV"),
        (killed, "SIGKILL"),
        (close_the_pipes, "process"),
    ],
)
async def test_a_process_that_dies_fails_its_attempt_and_is_replaced(
    dsn: str, db: asyncpg.Connection[Any], function: Callable[[], None], fate: str
) -> None:
    async with running(process_app(function, add_nothing, max_attempts=1, concurrency=1), dsn):
        dies, lives = await insert(db, "q", kind=function.__name__), await insert(db, "q", kind="add_nothing")
        await until(waits_for_status(db, lives, "completed"))
        await until(waits_for_status(db, dies, "dead"))
    error = await db.fetchval("SELECT error FROM pgworkd.jobs")
    assert fate in error


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _spins(path: Path) -> Callable[[], Awaitable[int]]:
    async def fact() -> int:
        return _number(path)

    return fact


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii") or 0) if path.exists() else 0


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


async def test_a_timeout_kills_the_process(dsn: str, db: asyncpg.Connection[Any], tmp_path: Path) -> None:
    path = tmp_path / "pid"
    async with running(process_app(spin, add_nothing, timeout_s=3, max_attempts=1, concurrency=1), dsn):
        # The timeout starts with the call, and the first call has to start a process and import modules.
        await until(waits_for_status(db, await insert(db, "q", kind="add_nothing"), "completed"))
        job_id = await insert(db, "q", json.dumps({"path": str(path)}), kind="spin")
        pid = await until(_spins(path))
        assert _lives(pid)
        await until(waits_for_status(db, job_id, "dead"))
        assert not _lives(pid), "killed before it was settled"
        await until(waits_for_status(db, await insert(db, "q", kind="add_nothing"), "completed"))
    assert await db.fetchval("SELECT error FROM pgworkd.jobs") == "Timeout: no result within 3 s"


async def test_a_cancellation_kills_the_process(dsn: str, db: asyncpg.Connection[Any], tmp_path: Path) -> None:
    path = tmp_path / "pid"
    async with running(process_app(spin), dsn):
        job_id = await insert(db, "q", json.dumps({"path": str(path)}), kind="spin")
        pid = await until(_spins(path))
        await db.execute("SELECT pgworkd.cancel(ARRAY[$1::uuid])", job_id)
        await until(waits_for_status(db, job_id, "cancelled"), limit_s=2)
        assert not _lives(pid)
    assert await db.fetchval("SELECT failures FROM pgworkd.finished_jobs") == 0


async def test_a_stop_kills_the_process_and_releases_the_job(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    path = tmp_path / "pid"
    async with running(process_app(spin), dsn, shutdown_s=0.05) as (daemon, seen):
        job_id = await insert(db, "q", json.dumps({"path": str(path)}), kind="spin")
        pid = await until(_spins(path))
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    assert not _lives(pid)
    assert await status(db, job_id) == "pending"


DAEMON = """
import asyncio, sys
from pgworkd.engine.life.daemon import Daemon
from tests.engine.test_modes_process import process_app, spin, add_nothing
from tests.kits.daemon import quick_options
asyncio.run(Daemon(process_app(spin, add_nothing), quick_options(sys.argv[1])).run())
"""


async def test_processes_die_with_a_killed_daemon(dsn: str, db: asyncpg.Connection[Any], tmp_path: Path) -> None:
    """A busy process and an idle one."""
    path = tmp_path / "pid"
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, dsn])  # noqa: ASYNC220 - returns at once
    try:
        await until(waits_for_status(db, await insert(db, "q", kind="add_nothing"), "completed"))
        await insert(db, "q", json.dumps({"path": str(path)}), kind="spin")
        await until(waits_for_status(db, await insert(db, "q", kind="add_nothing"), "completed"))
        pid = await until(_spins(path))
        children = _children(daemon.pid)
        assert pid in children
        assert len(children) == 2
    finally:
        daemon.kill()
        daemon.wait()
    await until(lambda: not any(_lives(child) for child in children), limit_s=2)


async def test_a_cpu_bound_process_handler_does_not_block_the_loop(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = process_app(count_up, concurrency=1)

    @app.handler("loop")
    async def in_loop() -> None:
        return None

    async with running(app, dsn):
        busy = await insert(db, "q", '{"to": 100000000}', kind="count_up")
        await until(waits_for_status(db, busy, "running"))
        longest = 0.0
        for _ in range(30):
            began = anyio.current_time()
            await anyio.sleep(0.005)
            longest = max(longest, anyio.current_time() - began)
        await until(waits_for_status(db, await insert(db, "loop"), "completed"), limit_s=2)
        assert await status(db, busy) == "running"
        assert longest < 0.5
        await db.execute("SELECT pgworkd.cancel(ARRAY[$1::uuid])", busy)
        await until(waits_for_status(db, busy, "cancelled"), limit_s=2)
