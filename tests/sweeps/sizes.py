"""Payloads and results of any size, on any number of slots, over any connection: jobs always make progress.

A situation is a size of payloads and of results, a number of slots, and the bandwidth of the daemon's connection.
While its jobs run, another queue of the same daemon gets one small job after the other.

The rule: after GRACE_S, the finished jobs never fall behind a share of what the connection could carry; a small
job finishes within the time that a few replies of bounded size take on that connection; and the daemon's memory stays
within its bound. `python -m tests.sweeps --sizes` runs many; this module is the daemon, in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio
import asyncpg

from pgworkd import App
from pgworkd.engine.life.daemon import Daemon
from tests.kits.daemon import insert, quick_options, status, until
from tests.kits.proxy import Proxy

MIB = 1024 * 1024
LARGEST = MIB - 256
"""The longest text that is still allowed with its JSON braces."""
SIZES = (0, 100, 3_000, 10_000, 60_000, 130_000, 400_000, LARGEST)
SLOTS = (1, 10, 100, 1_000)
BYTES_PER_S = (1e6, 2.5e6, 1e7, 5e7, math.inf)

GRACE_S = 4.0
"""Time for the first claim and the first replies."""
SHARE = 0.2
"""Of the connection, that payloads or results of finished jobs have taken: heartbeats, claims, and the other queue
share it, and what goes one way often waits for what goes the other."""
MACHINE_BYTES_PER_S = 2.5e6
MACHINE_JOBS_PER_S = 40.0
"""Jobs per second that the machine achieves on any connection, even when busy."""
SMALL_S = 3.0
SMALL_BYTES = 6 * MIB
"""What may stand before a small job on the connection: an answer to a read and a flush, each of at most 2 MiB, and what
the proxy has on its way."""
BASE_MB = 110.0
MEMORY_MB = 180.0
"""Memory beyond an idle daemon's: waiting outcomes (32 MiB), reads, flushes and their copies in socket buffers."""
JOB_COPIES = 4
"""Copies per slot: the received text, the decoded payload, the result, its text."""


@dataclass(frozen=True)
class Situation:
    """Bytes of each payload and result; slots; bytes per second each way (0: unlimited); duration."""

    payload: int = 0
    result: int = 0
    slots: int = 10
    bytes_per_s: float = 0.0
    seconds: float = 6.0

    @property
    def jobs(self) -> int:
        """More jobs than can be done in the time, but at most 60 MB of payloads, which take long to insert."""
        return max(20, min(2 * self.slots, 60_000_000 // (self.payload + 1)))

    @property
    def size(self) -> int:
        """Bytes of a job on the connection, in the direction that carries more."""
        return max(self.payload, self.result) + 1_000

    @property
    def due_per_s(self) -> float:
        """Jobs that must finish per second."""
        carried = min(SHARE * (self.bytes_per_s or math.inf), MACHINE_BYTES_PER_S)
        return min(MACHINE_JOBS_PER_S, carried / self.size)

    @property
    def small_s_max(self) -> float:
        """Time within which a small job of another queue must finish."""
        return SMALL_S + SMALL_BYTES / (self.bytes_per_s or math.inf)

    @property
    def memory_mb_max(self) -> float:
        """Memory of all slots together, in addition to the bounded part."""
        at_once = min(self.slots, self.jobs) * (self.payload + self.result) * JOB_COPIES
        return BASE_MB + MEMORY_MB + at_once / MIB


def draw(dice: random.Random) -> Situation:
    """One situation."""
    rate = dice.choice(BYTES_PER_S)
    return Situation(
        dice.choice(SIZES),
        dice.choice(SIZES),
        dice.choice(SLOTS),
        0.0 if rate == math.inf else rate,
        dice.uniform(6, 12),
    )


def app_for(s: Situation) -> App:
    """Handlers that do nothing: all cost is the engine's."""
    app = App()
    result = {"text": random.Random(1).randbytes(s.result // 2).hex()} if s.result else None  # noqa: S311 - filler

    @app.handler("large", concurrency=s.slots)
    async def large(payload: dict[str, Any]) -> dict[str, Any] | None:
        assert len(payload["text"]) == s.payload
        return result

    @app.handler("small", concurrency=5)
    async def small() -> None: ...

    return app


async def play(s: Situation, dsn: str) -> list[str]:
    """Runs the situation on an empty database; returns the violations."""
    db = await asyncpg.connect(dsn)
    try:
        await db.execute(
            "INSERT INTO pgworkd.jobs (queue, payload) SELECT 'large', jsonb_build_object('text', $1::text)"
            " FROM generate_series(1, $2::int)",
            random.Random(0).randbytes(s.payload // 2).hex().ljust(s.payload, "x"),  # noqa: S311 - filler
            s.jobs,
        )
        async with Proxy(dsn) as proxy, _daemon(proxy.dsn, s) as process:
            await until(lambda: db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.pools)"))
            proxy.bytes_per_s = s.bytes_per_s or math.inf
            return await _Watch(s, db, process.pid).run()
    finally:
        db.terminate()


class _Watch:
    """Observes a daemon from outside."""

    def __init__(self, s: Situation, db: asyncpg.Connection[Any], pid: int) -> None:
        self._s, self._db, self._pid = s, db, pid
        self._found: list[str] = []
        self._small: tuple[Any, float] | None = None
        self.done, self.memory_mb, self.waited_s, self.smalls = 0, 0.0, 0.0, 0

    async def run(self) -> list[str]:
        """Runs until the time is up or all jobs are done; returns the violations."""
        began = anyio.current_time()
        while (passed_s := anyio.current_time() - began) < self._s.seconds and self.done < self._s.jobs:
            self.done = await self._db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE queue = 'large'")
            due = min(self._s.jobs, int((passed_s - GRACE_S) * self._s.due_per_s))
            if self.done < due:
                self._found.append(f"{self.done} jobs are done after {passed_s:.1f} s, and not {due}")
                break
            await self._look_at_small()
            self.memory_mb = max(self.memory_mb, _memory_mb(self._pid))
            await anyio.sleep(0.05)
        if self._small is not None:
            await until(self._look_at_small, self._s.small_s_max + 1)
        if self.memory_mb > self._s.memory_mb_max:
            self._found.append(f"{self.memory_mb:.0f} MB of memory, more than {self._s.memory_mb_max:.0f}")
        odd = await self._db.fetch("SELECT status, attempts, errors FROM pgworkd.all_jobs WHERE failures > 0 LIMIT 3")
        return self._found + [f"failed: {row}" for row in odd]

    async def _look_at_small(self) -> bool:
        """Inserts a small job, or checks on it; True once it has finished."""
        now = anyio.current_time()
        if self._small is None:
            self._small = await insert(self._db, "small"), now
            return False
        job, since = self._small
        done = await status(self._db, job) == "completed"
        self.waited_s = max(self.waited_s, now - since)
        if not done and now - since > self._s.small_s_max:
            self._found.append(f"a small job of another queue waits {now - since:.1f} s, of {self._s.small_s_max:.1f}")
            done = True
        if done:
            self._small, self.smalls = None, self.smalls + 1
        return done

    def __str__(self) -> str:
        return f"{self.done} done, {self.smalls} small, the slowest {self.waited_s:.2f} s, {self.memory_mb:.0f} MB"


def _memory_mb(pid: int) -> float:
    """Resident memory of a process; 0 if it has exited."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


@asynccontextmanager
async def _daemon(dsn: str, s: Situation) -> AsyncIterator[subprocess.Popen[bytes]]:
    """This module as a process; killed at the end, as other tests cover stopping."""
    command = [sys.executable, "-m", __name__, dsn, json.dumps(asdict(s))]
    process = await asyncio.to_thread(subprocess.Popen, command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def main(dsn: str, s: Situation) -> int:
    """Runs the daemon with the lease and the timeouts of production."""
    daemon = Daemon(app_for(s), quick_options(dsn, lease_s=30.0, heartbeat_s=1.0, poll_s=1.0))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.request_stop)
    return await daemon.run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], Situation(**json.loads(sys.argv[2])))))
