"""A daemon whose handlers block it, each in its way: python -m tests.kits.blocking DSN QUEUE LEDGER KEY=VALUE...

A ledger has a line for each run that began and each that ended. A run that begins while an earlier one of its job goes
on, in a process that is alive, says so there.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pgworkd import App, Job, log
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.life.heartbeat import end_process
from pgworkd.engine.life.kill_timer import KillTimer
from tests.kits.commands import lives
from tests.kits.daemon import quick_options


class Line(NamedTuple):
    """Of a ledger. `beside`: pids of earlier runs of the job that go on."""

    what: str
    job: str
    attempt: int
    pid: int
    beside: list[int]


def lines(ledger: Path) -> list[Line]:
    """What has been recorded."""
    return [Line(*json.loads(line)) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def hold(seconds: float) -> None:
    """Sleeps without giving up the interpreter lock, as an extension that computes does."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


BLOCKS: dict[str, Callable[[float], Any]] = {
    "sleep": time.sleep,
    "lock": lambda seconds: threading.Lock().acquire() and threading.Event().wait(seconds),
    "gil": hold,
}
"""How to block."""


def record(ledger: Path, what: str, job: Job) -> None:
    """Adds a line, in one write."""
    before = [line for line in lines(ledger) if line.job == str(job.id)] if what == "began" else []
    over = {line.attempt for line in before if line.what == "ended"}
    beside = [line.pid for line in before if line.attempt not in over and lives(line.pid)]
    line = json.dumps(Line(what, str(job.id), job.attempt, os.getpid(), beside)) + "\n"
    with ledger.open("ab", buffering=0) as file:
        file.write(line.encode())


def run(payload: dict[str, Any], job: Job) -> None:
    """Blocks at the first attempt."""
    ledger = Path(payload["ledger"])
    record(ledger, "began", job)
    if job.attempt == 1:
        BLOCKS[payload["how"]](payload["seconds"])
    record(ledger, "ended", job)


async def loop(payload: dict[str, Any], job: Job) -> None:
    """In the event loop."""
    run(payload, job)


def thread(payload: dict[str, Any], job: Job) -> None:
    """In a thread."""
    run(payload, job)


def process(payload: dict[str, Any], job: Job) -> None:
    """In a process."""
    run(payload, job)


def app_of(*queues: str) -> App:
    """Handlers of each kind, for each of these queues: kinds are `loop QUEUE`, and so on."""
    app = App()
    for queue in queues:
        for function in (loop, thread, process):
            mode = {"run_in": "process"} if function is process else {}
            app.handler(f"{function.__name__} {queue}", queue=queue, concurrency=5, **mode)(function)
    return app


async def main(dsn: str, queue: str, changes: dict[str, float]) -> int:
    """Runs the daemon until SIGTERM."""
    options = quick_options(dsn, worker_name=queue, **changes)
    daemon = Daemon(app_of(queue), options, end_process=end_process, kill_timer=KillTimer.made())
    daemon.events.listen(log.listener())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.request_stop)
    return await daemon.run()


def started(dsn: str, queue: str, log_file: Path, **changes: float) -> subprocess.Popen[bytes]:
    """Starts such a daemon, which serves one queue."""
    arguments = [f"{key}={value}" for key, value in changes.items()]
    command = [sys.executable, "-m", "tests.kits.blocking", dsn, queue, *arguments]
    with log_file.open("ab") as file:
        return subprocess.Popen(command, stderr=file)


if __name__ == "__main__":
    blocking = importlib.import_module("tests.kits.blocking")  # by the name under which handler processes import it
    log.configure("info", "json")
    pairs = (argument.split("=") for argument in sys.argv[3:])
    sys.exit(asyncio.run(blocking.main(sys.argv[1], sys.argv[2], {key: float(value) for key, value in pairs})))
