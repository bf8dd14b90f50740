"""Commands in processes of their own: `pgworkd run` and others, and the workers that `pgworkd autoscale` starts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import asyncpg
import psycopg
import pytest

from tests.kits.daemon import LIMIT_S, until

NOWHERE = "postgresql://nobody:c4n4ry@127.0.0.1:1/nothing"


APP = """
import threading, time
import anyio
from pgworkd import App

app = App()

@app.handler("mail", concurrency=3)
async def mail(): ...

@app.handler("hang")
async def hang():
    await anyio.sleep_forever()
"""


class Command:
    """A `pgworkd` process; its standard error is read continuously."""

    def __init__(
        self, directory: Path, args: tuple[str, ...], environ: dict[str, str], stdout: Any, program: tuple[str, ...]
    ) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PGWORKD_")}
        self.process = subprocess.Popen(
            [sys.executable, *program, *args],
            cwd=directory,
            env=clean | environ,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._ended = True
            self._said.notify_all()

    def says(self, text: str, after: int = 0) -> str:
        """The first line from the `after`-th on that contains the text; waits for it."""

        def found() -> list[str]:
            return [line for line in self.lines[after:] if text in line]

        with self._said:
            self._said.wait_for(lambda: found() or self._ended, LIMIT_S)
            assert found(), f"no {text!r} in {self.lines}"
            return found()[0]

    def event(self, name: str, after: int = 0) -> dict[str, Any]:
        """The facts of a log line."""
        facts: dict[str, Any] = json.loads(self.says(f'"event": "{name}"', after))
        return facts

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        """The exit code; waits for it."""
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        said = "\n".join(self.lines)
        assert not any(line.startswith("Traceback") for line in self.lines), said  # those of jobs are indented
        assert not any("c4n4ry" in line for line in self.lines), self.lines
        return code


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "notes.py").write_text(APP)
    with contextlib.ExitStack() as stack:

        def start_(*args: str, stdout: Any = subprocess.DEVNULL, script: Path | None = None, **environ: str) -> Command:
            program = ("-m", "pgworkd.cli") if script is None else (str(script),)
            command = Command(tmp_path, args, environ, stdout, program)
            stack.callback(_clear, command)
            return command

        yield start_


def _clear(command: Command) -> None:
    command.process.kill()
    command.process.wait()
    command._reader.join(LIMIT_S)
    for pipe in (command.process.stdout, command.process.stderr):
        if pipe is not None:
            pipe.close()


@contextlib.contextmanager
def database(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with contextlib.closing(psycopg.connect(dsn, autocommit=True)) as connection:
        yield connection


def waits_until(fact: Callable[[], Any]) -> None:
    """Like `until`, for tests that are not async."""
    deadline = time.monotonic() + LIMIT_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def catches(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """The process has a handler for the signal (proc(5), SigCgt)."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


# Tiny workers for `pgworkd autoscale`, which record what happens to them in the file `said`

KID = """
import json, os, signal, subprocess, sys
mode, name = sys.argv[1], os.environ["PGWORKD_WORKER_NAME"]

def say(what, more=None):
    with open("said", "a") as file:
        file.write(json.dumps([what, name, os.getpid(), more]) + "\\n")

def stop(number, _):
    number = signal.Signals(number)
    say(number.name)
    if mode != "deaf" and (mode != "slow" or number is signal.SIGINT):
        sys.exit(0)

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, stop)
signal.alarm(20)  # a test that failed leaves nobody behind
more = None
if mode == "deaf":
    more = subprocess.Popen(["sleep", "20"], stderr=subprocess.DEVNULL).pid
elif mode == "tells":
    more = [sys.argv[2:], os.read(0, 1).decode(), os.getsid(0), dict(os.environ)]
say("up", more)
if name == "w-2" and mode == "wrong":
    sys.exit(2)
while True:
    signal.pause()
"""


class Fact(NamedTuple):
    what: str
    name: str
    pid: int
    more: Any


class Play:
    """An autoscale under test, its database and its workers."""

    def __init__(self, start: Start, directory: Path, dsn: str, db: asyncpg.Connection[Any]) -> None:
        (directory / "kid.py").write_text(KID)
        self.directory = directory
        self.dsn = dsn
        self.db = db
        self._start = start

    def __call__(
        self, *args: str, mode: str = "good", command: tuple[str, ...] | None = None, **environ: str
    ) -> Command:
        """Scales queue q between 1 and 4, 2 at a time, up at 5, down at 1, without delay, by default."""
        flags = ["--queue=q", "--min=1", "--max=4", "--step=2", "--up-at=5", "--down-at=1"]
        flags += ["--cooldown-s=0", "--every-s=0.1", *args]
        environ = {"PGWORKD_DSN": self.dsn, "PGWORKD_LOG_FORMAT": "json", "PGWORKD_WORKER_NAME": "w", **environ}
        command = (sys.executable, "kid.py", mode) if command is None else command
        return self._start("autoscale", *flags, *(["--", *command] if command else []), **environ)

    async def depth(self, count: int) -> None:
        """Makes this number of jobs due in queue q."""
        await self.db.execute("DELETE FROM pgworkd.jobs")
        await self.db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, $1)", count)

    def facts(self, what: str) -> list[Fact]:
        """What workers have recorded about this."""
        file = self.directory / "said"
        lines = file.read_text().splitlines() if file.exists() else []
        return [fact for fact in (Fact(*json.loads(line)) for line in lines) if fact.what == what]

    async def says(self, what: str, count: int = 1) -> list[Fact]:
        """The first `count` facts of this kind; waits for them."""
        await until(lambda: len(self.facts(what)) >= count)
        return self.facts(what)


def events(run: Command, name: str) -> list[dict[str, Any]]:
    """The facts of all log lines of this name."""
    return [json.loads(line) for line in list(run.lines) if f'"event": "{name}"' in line]


async def logged(run: Command, name: str, count: int = 1) -> list[dict[str, Any]]:
    """The facts of the first `count` log lines of this name; waits for them."""
    try:
        await until(lambda: len(events(run, name)) >= count)
    except AssertionError:
        raise AssertionError(f"no {name} x{count} in {run.lines}") from None
    return events(run, name)


async def ended(run: Command) -> int:
    """The exit code; waits for it, and until nothing can write to its standard error any more."""
    return await anyio.to_thread.run_sync(run.ends)


def lives(pid: int) -> bool:
    """The process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# Systemd


class Systemd:
    """The notification socket, in the role of systemd."""

    def __init__(self, address: str) -> None:
        self.environ = {"NOTIFY_SOCKET": address}
        self.received: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    async def receives(self, wanted: str, after: int = 0) -> str:
        """The first line from the `after`-th on that starts with `wanted`; waits for it."""
        with anyio.move_on_after(LIMIT_S):
            while not (found := [line for line in self.received[after:] if line.startswith(wanted)]):
                await anyio.wait_readable(self._socket)
                self.received += self._socket.recv(4096).decode().splitlines()
            return found[0]
        raise AssertionError(f"no {wanted} within {LIMIT_S} s; received {self.received}")


@pytest.fixture
def systemd() -> Iterator[Systemd]:
    with tempfile.TemporaryDirectory() as directory:  # pytest's directory is too long for a socket's name
        line = Systemd(str(Path(directory) / "notify"))
        yield line
        line.close()
