"""The field that a worker is tried in: a database, a gateway that may be killed, and a network that may be cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import asyncpg

from tests.kits.gateway import token
from tests.kits.proxy import Proxy

LEASE_S = 10.0
"""The shortest that a gateway admits."""
BEATS_S = 7.0
"""Within this time a worker has beaten, and done what the answer says."""
START_S = 20.0


class Gateway:
    """`pgworkd serve` on a port of its own."""

    def __init__(self, dsn: str, **environ: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._environ = os.environ | {"PGWORKD_DSN": dsn, "PGWORKD_LOG_FORMAT": "json"} | environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, and returns when it answers."""
        command = [sys.executable, "-m", "pgworkd.cli", "serve", "--listen", f"127.0.0.1:{self.port}"]
        with tempfile.TemporaryFile("w+b") as log:
            self._process = subprocess.Popen(command, env=self._environ, stdout=log, stderr=log)
            said = b""
            while b"http.listening" not in said:
                assert self._process.poll() is None, said.decode()
                time.sleep(0.05)
                log.seek(0)
                said = log.read()

    def kill(self) -> None:
        """As a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Field:
    """One check's setting; the worker is started by `start`."""

    def __init__(self, command: Sequence[str], dsn: str, db: Any, gateway: Gateway, proxy: Proxy, text: str) -> None:
        self.db, self.gateway, self.proxy = db, gateway, proxy
        self.queue = f"q{uuid.uuid4().hex[:8]}"
        self.directory = Path(tempfile.mkdtemp(prefix="conformance-"))
        self._command, self._token = command, text
        self.workers: list[subprocess.Popen[bytes]] = []
        self.dsn = dsn

    async def start(self, **environ: str) -> subprocess.Popen[bytes]:
        """Starts one more worker, and returns when it has registered."""
        ours = {
            "PGWORKD_URL": f"http://127.0.0.1:{self.proxy.port}",
            "PGWORKD_TOKEN": self._token,
            "PGWORKD_QUEUE": self.queue,
            "PGWORKD_LEASE_S": f"{LEASE_S:g}",
        }
        before = set(await self.registered())
        with (self.directory / "log").open("ab") as log:
            worker = subprocess.Popen(
                self._command, env=os.environ | ours | environ, stdout=log, stderr=log, start_new_session=True
            )
        self.workers.append(worker)
        await self.until(lambda: self._new(before), START_S, "the worker registers")
        return worker

    async def _new(self, before: set[int]) -> bool:
        return bool(set(await self.registered()) - before)

    async def registered(self) -> list[int]:
        """The ids of the workers of this queue that have not signed off and are not lost."""
        sql = """SELECT w.id FROM pgworkd.workers w JOIN pgworkd.pools p ON p.worker_id = w.id
            WHERE w.kind = 'remote' AND w.lost_at IS NULL AND p.queue = $1"""
        return [row[0] for row in await self.db.fetch(sql, self.queue)]

    async def insert(self, kind: str, payload: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Inserts a job; its id."""
        sql = """INSERT INTO pgworkd.jobs (queue, kind, payload, max_attempts) VALUES ($1, $2, $3, $4) RETURNING id"""
        return await self.db.fetchval(sql, self.queue, kind, json.dumps(payload or {}), more.get("max_attempts", 3))

    def ticks(self, name: str = "ticks") -> int:
        """How many lines `tick` has written to the file of that name."""
        path = self.directory / name
        return path.read_text().count("\n") if path.exists() else 0

    async def tick(self, seconds: float, name: str = "ticks", **more: Any) -> Any:
        """Inserts a job that ticks, and returns its id when it runs."""
        job = await self.insert("tick", {"file": str(self.directory / name), "seconds": seconds}, **more)
        await self.until(lambda: self.ticks(name) > 0, 20, "the job ticks")
        return job

    async def quiet(self, within_s: float, name: str = "ticks") -> float:
        """Returns when nothing has ticked for 1.5 s, with how long that took; fails after `within_s`."""
        began = last = time.monotonic()
        seen = self.ticks(name)
        while time.monotonic() - last < 1.5:
            await asyncio.sleep(0.1)
            if (now := self.ticks(name)) != seen:
                seen, last = now, time.monotonic()
            assert last - began < within_s, f"it was to stop within {within_s:g} s, and goes on"
        return last - began

    async def job(self, job_id: Any) -> Any:
        """The row of a job, with its result."""
        sql = """SELECT a.status, a.attempts, a.failures, a.error, f.result,
            (SELECT count(*) FROM jsonb_array_elements(a.errors) e WHERE e ->> 'type' = 'lost') AS losses
            FROM pgworkd.all_jobs a LEFT JOIN pgworkd.finished_jobs f ON f.id = a.id WHERE a.id = $1"""
        return await self.db.fetchrow(sql, job_id)

    async def ends(self, job_id: Any, status: str = "completed", within_s: float = 20.0) -> Any:
        """The row of a job when it has that status."""

        async def ended() -> bool:
            return bool((await self.job(job_id))["status"] == status)

        await self.until(ended, within_s, f"the job is {status}")
        return await self.job(job_id)

    async def until(self, fact: Callable[[], Any], within_s: float, what: str) -> None:
        """Waits for a fact. Fails, naming it, after that time."""
        deadline = time.monotonic() + within_s
        while True:
            found = fact()
            if await found if asyncio.iscoroutine(found) else found:
                return
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
            await asyncio.sleep(0.05)

    async def exits(self, worker: subprocess.Popen[bytes], within_s: float) -> int:
        """Its exit code."""
        await self.until(lambda: worker.poll() is not None, within_s, "the worker exits")
        return int(worker.returncode)

    def reset(self) -> str:
        """Lets the network pass, and kills what is left of the workers; the end of what they have printed."""
        self.proxy.mode = "pass"
        self.proxy.pass_http()
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        log = self.directory / "log"
        said = log.read_text(errors="replace")[-1500:] if log.exists() else ""
        shutil.rmtree(self.directory, ignore_errors=True)
        return said


@contextlib.asynccontextmanager
async def fields(dsn: str, **environ: str) -> AsyncIterator[Callable[[Sequence[str]], Field]]:
    """A gateway for several checks one after the other; makes the field of each."""
    gateway, db = Gateway(dsn, **environ), await asyncpg.connect(dsn)
    text = await token(dsn, {"work": None})
    gateway.start()
    try:
        async with Proxy(f"http://x@127.0.0.1:{gateway.port}") as proxy:
            yield lambda command: Field(command, dsn, db, gateway, proxy, text)
    finally:
        gateway.kill()
        await db.close()
