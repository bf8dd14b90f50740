"""Tiny workers for `pgworkd autoscale`, which record what happens to them in the file `said`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import asyncpg

from tests.engine.test_cli_run import Command, Start
from tests.kits.daemon import until

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
