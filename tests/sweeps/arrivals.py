"""Jobs arrive at every rate and in every pattern, and no due job waits beside an idle slot.

A situation is a rate, a pattern, handlers, daemons, and the preceding load. `python -m tests.sweeps` runs many.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import anyio
import asyncpg

from pgworkd import App
from pgworkd.engine.life.daemon import Daemon
from tests.kits.daemon import running, until

POLL_S = 1.0
WAIT_S_MAX = POLL_S + 1.0
"""The longest that a due job may wait beside an idle slot."""
SAMPLE_S = 0.05
RATES = (1, 5, 20, 60, 95, 110, 140, 190, 260, 380, 700, 1200, 2000)
MODES = ("loop", "thread", "process")
_OLDEST = """
    SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - min(run_at)), 0)::float8 FROM pgworkd.jobs
    WHERE queue = 'q' AND status IN ('pending', 'failed') AND run_at <= clock_timestamp()"""
_LEFT = "SELECT count(*) FROM pgworkd.jobs WHERE queue = 'q'"


@dataclass(frozen=True)
class Situation:
    """Jobs per second in a pattern (even, poisson, bursts), the duration, the handlers, and the preceding load."""

    rate: float
    rhythm: str = "even"
    seconds: float = 1.5
    took_ms: int = 0
    mode: str = "loop"
    slots: int = 10
    daemons: int = 1
    backlog: int = 0
    """Jobs present when the daemons start, which then start out busy."""
    pause_s: float = 0.0
    """A pause in the middle: polling pools become idle in it, and are notified again."""
    seed: int = 0


def pause_min_s() -> float:
    """The pause, long enough for a polling pool to be announced idle again."""
    return 2.5


def draw(rng: random.Random) -> Situation:
    """One situation, with no more work than the slots can do, so that any long wait is unjustified."""
    mode = rng.choices(MODES, (8, 2, 1))[0]
    rate = float(rng.choice((*RATES, round(rng.uniform(1, 2000)))))
    took_ms = rng.choice((0, 0, 1, 5, 20, 60))
    slots, daemons = rng.choice((1, 2, 10, 50)), rng.choice((1, 1, 2, 3))
    if mode == "process":
        rate, slots = min(rate, 40.0), min(slots, 4)
    if mode == "thread":
        rate = min(rate, 400.0)
    rate = min(rate, 0.5 * slots * daemons * 1000 / took_ms) if took_ms else rate
    return Situation(
        rate,
        rng.choice(("even", "poisson", "bursts")),
        rng.uniform(1.0, 4.0),
        took_ms,
        mode,
        slots,
        daemons,
        rng.choice((0, 0, 500, 3000)),
        rng.choice((0.0, 0.0, pause_min_s())),
        rng.randrange(1 << 30),
    )


def instants(s: Situation) -> Iterator[tuple[float, int]]:
    """When how many jobs arrive, in seconds from the start."""
    rng, at, until_s = random.Random(s.seed), 0.0, s.seconds + s.pause_s  # noqa: S311 - repeatable
    while at < until_s:
        many = max(1, round(s.rate * 0.025)) if s.rhythm == "bursts" else 1
        if not s.pause_s or not s.seconds / 2 < at < s.seconds / 2 + s.pause_s:
            yield at, many
        at += rng.expovariate(s.rate) if s.rhythm == "poisson" else many / s.rate


def sleep_for(payload: dict[str, Any]) -> None:
    """The body of thread and process handlers."""
    time.sleep(payload["s"])


def app_for(s: Situation) -> App:
    app = App()
    if s.mode == "loop":

        @app.handler("q", concurrency=s.slots)
        async def handle(payload: dict[str, Any]) -> None:
            if payload["s"]:
                await anyio.sleep(payload["s"])

    elif s.mode == "thread":
        app.handler("q", concurrency=s.slots)(sleep_for)
    else:
        app.handler("q", concurrency=s.slots, run_in="process")(sleep_for)
    return app


class Watch:
    """Samples the oldest due job, and whether a slot has been idle for as long."""

    def __init__(self, daemons: list[Daemon]) -> None:
        self.found: list[str] = []
        self.waited_s = 0.0
        """The longest wait of a due job while a slot was idle."""
        self._pools = [daemon.pools["q"] for daemon in daemons]
        self._idle_since: float | None = None

    async def run(self, db: asyncpg.Connection[Any]) -> None:
        """Runs until cancelled. A late sample is ignored: the machine stalled, not the engine."""
        sampled, begun = anyio.current_time(), 0
        while True:
            waiting, oldest_s = await db.fetchrow(_OLDEST)
            now, late = anyio.current_time(), anyio.current_time() - sampled > 0.5
            sampled = now
            idle = any(pool.running < pool.concurrency for pool in self._pools)
            begun, before = sum(pool._executor.begun for pool in self._pools), begun
            # A slot is idle for a moment between two claims: while a backlog makes progress, that is no violation.
            idle = idle and (begun == before or waiting <= sum(pool.concurrency for pool in self._pools))
            self._idle_since = None if not idle or late else self._idle_since or now
            waited_s = min(oldest_s, now - self._idle_since) if self._idle_since is not None else 0.0
            self.waited_s = max(self.waited_s, waited_s)
            if waited_s > WAIT_S_MAX:
                self.found.append(f"{waiting} due jobs wait, one for {oldest_s:.1f} s, beside an idle slot")
                return
            await anyio.sleep(SAMPLE_S)


async def play(s: Situation, dsn: str) -> list[str]:
    """Runs the situation on an empty database; returns the violations."""
    async with _connected(dsn) as db, _connected(dsn) as eyes, contextlib.AsyncExitStack() as stack:
        payload = json.dumps({"s": s.took_ms / 1000})
        if s.backlog:
            await db.execute(
                "INSERT INTO pgworkd.jobs (queue, payload) SELECT 'q', '{\"s\": 0}' FROM generate_series(1, $1)",
                s.backlog,
            )
        daemons = [
            (await stack.enter_async_context(running(app_for(s), dsn, poll_s=POLL_S)))[0] for _ in range(s.daemons)
        ]
        if not s.backlog:
            await until(lambda: all(d.pools["q"].is_idle for d in daemons))
        watch = Watch(daemons)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.run, eyes)
            began = anyio.current_time()
            for at, many in instants(s):
                await anyio.sleep_until(began + at)
                await db.execute(
                    "INSERT INTO pgworkd.jobs (queue, payload) SELECT 'q', $1 FROM generate_series(1, $2)",
                    payload,
                    many,
                )
                if watch.found:
                    break
            left = await _left(db, 5.0 + s.backlog / 500)
            tasks.cancel_scope.cancel()
        return watch.found + ([f"{left} jobs are left 5 s after the last arrived"] if left else [])


async def _left(db: asyncpg.Connection[Any], limit_s: float) -> int:
    """Jobs that are left when the time is up."""
    ends = anyio.current_time() + limit_s
    while (left := await db.fetchval(_LEFT)) and anyio.current_time() < ends:
        await anyio.sleep(0.02)
    return int(left)


@contextlib.asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    db = await asyncpg.connect(dsn)
    try:
        yield db
    finally:
        db.terminate()
