"""An application whose handlers start processes in every way that Python has; its text is copied beside each test."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

import anyio

from pgworkd import App, Job

HERE = Path(__file__).parent
WAYS = ("fork", "spawn", "forkserver", "pool", "executor", "os.fork", "subprocess", "daemon")
STAY = "import plays; plays.stay()"
"""The module is this one, under the name of its copy."""
app = App()
_kept: list[Any] = []
_turn = threading.RLock()
"""For one process at a time: a fork inherits the pipe by which subprocess waits for an exec, and of two looks at a
child's exit code at once, one of which each start of a process takes at all children, multiprocessing takes one for
the loss of its fork server, or says None."""
Code = Callable[[], int | None]


class InTurn(ForkContext):
    """Forks in turn, also where a pool replaces a worker."""

    class Process(ForkProcess):
        def start(self) -> None:
            with _turn:
                super().start()


_forking = InTurn()


def stay() -> None:
    """Lives until the test lets it go, for a minute at most."""
    signal.alarm(60)
    try:
        while not (HERE / "go").exists():
            time.sleep(0.02)
    except KeyboardInterrupt:
        os._exit(130)


def begin(way: str) -> tuple[int, Code]:
    """Starts a process in that way: its id, and what returns its exit code, or None while it lives."""
    if way in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(way).Process(target=stay)
        process.start()
        return process.pid or 0, lambda: process.exitcode
    if way == "pool":
        pool = _forking.Pool(1)
        result = pool.apply_async(stay)
        _kept.append(pool)
        (worker,) = pool._pool  # type: ignore[attr-defined]
        return worker.pid, lambda: 0 if result.ready() else worker.exitcode
    if way == "executor":
        executor = ProcessPoolExecutor(1, _forking)
        future = executor.submit(stay)
        _kept.append(executor)
        ((pid, worker),) = executor._processes.items()
        return pid, lambda: 0 if future.done() and not future.exception() else worker.exitcode
    if way == "subprocess":
        child = subprocess.Popen([sys.executable, "-c", STAY])
        return child.pid, child.poll
    if way == "os.fork":
        return forked()
    return daemonised()


def forked() -> tuple[int, Code]:
    """By os.fork alone."""
    pid = os.fork()
    if pid == 0:
        stay()
        os._exit(0)

    def code() -> int | None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    return pid, code


def daemonised() -> tuple[int, Code]:
    """By two forks, with a session of its own between them; it is nobody's child, so its exit code is unknown: 0."""
    read, write = os.pipe()
    first = os.fork()
    if first == 0:
        os.setsid()
        if (second := os.fork()) == 0:
            stay()
            os._exit(0)
        os.write(write, str(second).encode())
        os._exit(0)
    os.waitpid(first, 0)
    pid = int(os.read(read, 20))
    os.close(read)
    os.close(write)

    def code() -> int | None:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return None
        return 0

    return pid, code


def start(payload: dict[str, Any], job: Job) -> Code:
    """Starts the process of the payload's way, and sends it a signal if there is one."""
    with _turn:
        pid, code = begin(payload["way"])
    (HERE / f"{job.queue}-{payload['way']}.pid").write_text(str(pid))
    if "signal" in payload:
        os.kill(pid, payload["signal"])

    def in_turn() -> int | None:
        with _turn:
            return code()

    return (lambda: 0) if payload.get("leaves") else in_turn


@app.handler("loop", concurrency=20)
async def loop(payload: dict[str, Any], job: Job) -> int | None:
    """From a coroutine."""
    if job.attempt > 1:
        return None
    code = start(payload, job)
    while (found := code()) is None:
        await anyio.sleep(0.02)
    return found


def _wait(payload: dict[str, Any], job: Job) -> int | None:
    if job.attempt > 1:
        return None
    code = start(payload, job)
    while (found := code()) is None:
        time.sleep(0.02)
    return found


@app.handler("thread", concurrency=20)
def thread(payload: dict[str, Any], job: Job) -> int | None:
    """From a thread."""
    return _wait(payload, job)


@app.handler("process", concurrency=20, run_in="process")
def process(payload: dict[str, Any], job: Job) -> int | None:
    """From a handler process."""
    return _wait(payload, job)


@app.handler("slow")
async def slow() -> None:
    """Takes long enough to be cut off by a stop that is not graceful."""
    (HERE / "slow.began").touch()
    await anyio.sleep(1.5)


@app.handler("writes")
async def writes(job: Job) -> None:
    """Holds a row in its transaction."""
    async with job.transaction() as connection:
        await connection.execute("UPDATE notes SET n = n + 1")
        if job.attempt == 1:
            (HERE / "writes.began").touch()
            await anyio.sleep_forever()


def come_back(how: str) -> None:
    """In a child: goes on where its parent does."""
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("in the child")


def _fork_and_come_back(payload: dict[str, Any]) -> int | None:
    if (pid := os.fork()) == 0:
        come_back(payload["how"])
        return None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@app.handler("back-loop")
async def back_loop(payload: dict[str, Any]) -> int | None:
    """Of a coroutine; `await` gives the child's copy of the loop its turn."""
    if (pid := os.fork()) == 0:
        while payload["how"] == "await":
            await asyncio.sleep(0)  # anyio's, and any that is longer, asks for the running loop, and finds none
        come_back(payload["how"])
        return None
    with anyio.fail_after(15):
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:  # noqa: ASYNC222 - it does not wait
            await anyio.sleep(0.02)
    return os.waitstatus_to_exitcode(found[1])


@app.handler("back-thread")
def back_thread(payload: dict[str, Any]) -> int | None:
    """Of a thread."""
    return _fork_and_come_back(payload)


@app.handler("back-process", run_in="process")
def back_process(payload: dict[str, Any]) -> int | None:
    """Of a handler process."""
    return _fork_and_come_back(payload)


@app.handler("quickly")
def quickly() -> list[int | None]:
    """Ends children that have hardly begun."""
    codes = []
    for _ in range(40):
        child = _forking.Process(target=stay)
        child.start()
        child.terminate()
        child.join(10)
        with _turn:
            codes.append(child.exitcode)
    return codes


@app.handler("counts", concurrency=5)
async def counts(job: Job) -> None:
    """Notes each run."""
    with (HERE / "counts").open("a") as file:
        file.write(f"{job.id}\n")
