"""One trial of a worker: a database, a gateway that may be killed, and a network that may be cut."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess  # nosec B404 # the user's own command, and this program
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from anyio.abc import Process

from pgworkd.admin import Admin
from pgworkd.conformance.relay import Relay
from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.errors import PgworkdError

LEASE_S = 10.0
"""The shortest that a gateway admits."""
BEATS_S = 7.0
"""Within this time a worker has beaten, and done what the answer says."""
START_S = 20.0


class Unmet(Exception):  # noqa: N818 - what a check found, no error of this program
    """What a worker does not do; the message says it."""


def require(fact: object, says: str) -> None:
    """Raises Unmet unless it is so."""
    if not fact:
        raise Unmet(says)


def equal(found: object, due: object, of: str) -> None:
    """Raises Unmet, naming both, unless what was found is what was due."""
    require(found == due, f"{of}: {due!r} was due, and {found!r} came")


class ServeProcess:
    """`pgworkd serve`, in a process of its own, always on the same port."""

    def __init__(self, dsn: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PGWORKD_")}
        self._environ = kept | {"PGWORKD_DSN": dsn, "PGWORKD_LOG_FORMAT": "json"}
        self._process: Process | None = None

    async def start(self) -> None:
        """Starts it, and returns when it listens. Raises PgworkdError, with what it has printed, if it ends."""
        command = [sys.executable, "-m", "pgworkd.cli", "serve", "--listen", f"127.0.0.1:{self.port}"]
        with tempfile.TemporaryFile("a+b") as log:
            self._process = process = await anyio.open_process(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
            said = b""
            while b"http.listening" not in said:
                if process.returncode is not None:
                    raise PgworkdError(f"the gateway does not start: {said.decode(errors='replace').strip()}")
                await anyio.sleep(0.05)
                log.seek(0)
                said = log.read()

    async def kill(self) -> None:
        """Ends it as a crash does."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


class JobFacts(NamedTuple):
    """What a check looks at; `losses`: how many of its attempts ended because their worker was lost."""

    status: str
    attempts: int
    failures: int
    error: str | None
    result: str | None
    losses: int


class Trial:
    """One check's setting; the worker is started by `start`."""

    def __init__(
        self, command: Sequence[str], db: Connection, gateway: ServeProcess, network: Relay, token: str
    ) -> None:
        self.db, self.gateway, self.network = db, gateway, network
        self.queue = f"q{uuid.uuid4().hex[:8]}"
        self.directory = Path(tempfile.mkdtemp(prefix="conformance-"))
        self._command, self._token = command, token
        self._workers: list[Process] = []

    async def start(self) -> Process:
        """Starts one more worker, and returns when it has registered."""
        before = set(await self.registered())
        worker = await self.launch()
        await self.registers(worker, before)
        return worker

    async def registers(self, worker: Process, before: set[int]) -> None:
        """Returns when there is another registered worker than those before."""

        async def is_there() -> bool:
            if set(await self.registered()) - before:
                return True
            require(worker.returncode is None, f"it has exited with {worker.returncode}, and not registered")
            return False

        await self.until(is_there, START_S, "it registers")

    async def launch(self) -> Process:
        """Starts one more worker."""
        ours = {
            "PGWORKD_URL": f"http://127.0.0.1:{self.network.port}",
            "PGWORKD_TOKEN": self._token,
            "PGWORKD_QUEUE": self.queue,
            "PGWORKD_LEASE_S": f"{LEASE_S:g}",
        }
        with (self.directory / "log").open("ab") as log:
            worker = await anyio.open_process(
                self._command,
                env=os.environ | ours,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._workers.append(worker)
        return worker

    async def registered(self) -> list[int]:
        """The ids of the workers of this queue that have not signed off and are not lost."""
        sql = """SELECT w.id FROM pgworkd.workers w JOIN pgworkd.pools p ON p.worker_id = w.id
            WHERE w.kind = 'remote' AND w.lost_at IS NULL AND p.queue = $1"""
        return [row[0] for row in await self.db.fetch(sql, self.queue)]

    async def insert(self, kind: str, payload: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Inserts a job; its id."""
        sql = """INSERT INTO pgworkd.jobs (queue, kind, payload, max_attempts) VALUES ($1, $2, $3, $4) RETURNING id"""
        return await self.db.value(sql, self.queue, kind, json.dumps(payload or {}), more.get("max_attempts", 3))

    def ticks(self, name: str = "ticks") -> int:
        """How many lines `tick` has written to the file of that name."""
        path = self.directory / name
        return path.read_text().count("\n") if path.exists() else 0

    async def tick(self, seconds: float, name: str = "ticks", **more: Any) -> Any:
        """Inserts a job that ticks, and returns its id when it runs."""
        job = await self.insert("tick", {"file": str(self.directory / name), "seconds": seconds}, **more)
        await self.until(lambda: self.ticks(name) > 0, 20, "the job ticks")
        return job

    async def quiet(self, within_s: float, name: str = "ticks") -> None:
        """Returns when nothing has ticked for 1.5 s; fails if something ticks after `within_s`."""
        began = last = time.monotonic()
        seen = self.ticks(name)
        while time.monotonic() - last < 1.5:
            await anyio.sleep(0.1)
            if (now := self.ticks(name)) != seen:
                seen, last = now, time.monotonic()
            require(last - began < within_s, f"it was to stop within {within_s:g} s, and goes on")

    async def job(self, job_id: Any) -> JobFacts:
        """The row of a job, with its result."""
        sql = """SELECT a.status::text, a.attempts, a.failures, a.error, f.result::text,
            (SELECT count(*) FROM jsonb_array_elements(a.errors) e WHERE e ->> 'type' = 'lost')
            FROM pgworkd.all_jobs a LEFT JOIN pgworkd.finished_jobs f ON f.id = a.id WHERE a.id = $1"""
        (row,) = await self.db.fetch(sql, job_id)
        return JobFacts(*row)

    async def ends(self, job_id: Any, status: str = "completed", within_s: float = 20.0) -> JobFacts:
        """The row of a job when it has that status."""

        async def ended() -> bool:
            return (await self.job(job_id)).status == status

        await self.until(ended, within_s, f"the job is {status}")
        return await self.job(job_id)

    async def until(self, fact: Callable[[], Any], within_s: float, what: str) -> None:
        """Waits for a fact. Fails, naming it, after that time."""
        deadline = time.monotonic() + within_s
        while True:
            found = fact()
            if await found if inspect.isawaitable(found) else found:
                return
            require(time.monotonic() < deadline, f"this has not come true within {within_s:g} s: {what}")
            await anyio.sleep(0.05)

    async def exits(self, worker: Process, within_s: float) -> int:
        """The exit code of a worker that ends by itself."""
        await self.until(lambda: worker.returncode is not None, within_s, "it exits")
        return int(worker.returncode or 0)

    async def reset(self) -> str:
        """Lets the network pass, and kills what is left of the workers; the end of what they have printed."""
        self.network.mode = "pass"
        self.network.pass_http()
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            await worker.wait()
        log = self.directory / "log"
        said = log.read_text(errors="replace")[-1500:] if log.exists() else ""
        shutil.rmtree(self.directory, ignore_errors=True)
        return said


@contextlib.asynccontextmanager
async def trials(options: ConnectionOptions) -> AsyncIterator[Callable[[Sequence[str]], Trial]]:
    """A gateway for several checks one after the other; yields what makes the trial of each for a worker's command."""
    async with Admin(options) as admin:
        token = str(await admin.tokens.add("conformance", {"work": None}))
    db, gateway = Connection(options, "conformance"), ServeProcess(str(options.dsn))
    try:
        await gateway.start()
        async with Relay(("127.0.0.1", gateway.port)) as network:
            yield lambda command: Trial(command, db, gateway, network, token)
    finally:
        with anyio.CancelScope(shield=True):
            await gateway.kill()
            await db.close()
