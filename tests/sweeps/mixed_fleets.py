"""Two different daemons on one queue: they differ in kinds, in concurrency, in the length of their leases.

A seed generates both, the limits of the queue, the jobs with their keys, and whether the first daemon is restarted
on the way, with all kinds.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import anyio
import asyncpg

from pgworkd import App, Job
from pgworkd.core import events
from tests.kits.daemon import Recorder, running, until

KINDS = ("a", "b", "c")
LIMITS = (None, None, '{"max_running": 4}', '{"limit_per_key": 2}', '{"fair": true}', '{"concurrency": 5}')
DONE_S = 20.0
TWICE = 2
"""A daemon may release a job of an unknown kind, and once more for a claim already in progress."""
LEFT = "SELECT count(*) = 0 FROM pgworkd.jobs"
POOLS = "SELECT count(*) FROM pgworkd.pools"


@dataclass(frozen=True)
class Version:
    """One daemon's application and settings."""

    kinds: tuple[str, ...]
    concurrency: int
    lease_s: float


@dataclass
class Journal:
    """What ran where, and violations: overlapping runs of one job, or a kind run by a daemon without its handler."""

    running: Counter[Any] = field(default_factory=Counter)
    runs: Counter[Any] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def app(self, version: Version) -> App:
        """An app of that version."""
        app = App()
        for kind in version.kinds:

            @app.handler(kind, queue="q", concurrency=version.concurrency)
            async def handle(payload: dict[str, Any], job: Job) -> None:
                self.runs[job.id] += 1
                self.running[job.id] += 1
                if self.running[job.id] > 1:
                    self.wrong.append(f"job {job.id} runs twice at once")
                await anyio.sleep(payload["s"])
                self.running[job.id] -= 1

        return app


@dataclass(frozen=True)
class Situation:
    """A situation generated from a seed."""

    seed: int
    versions: tuple[Version, Version]
    limits: str | None
    jobs: list[tuple[str, str | None, str | None, str]]
    restarts: bool

    @classmethod
    def of(cls, seed: int) -> Situation:
        """The same for the same seed. At least one of the two daemons handles each kind."""
        dice = random.Random(f"mixed {seed}")  # noqa: S311 - to be repeatable
        known: list[set[str]] = [set(dice.sample(KINDS, dice.randint(1, 2))) for _ in range(2)]
        known[dice.randrange(2)] |= set(KINDS) - known[0] - known[1]
        leases = dice.sample((6.0, 60.0), 2)
        versions = [
            Version(tuple(sorted(kinds)), dice.choice((1, 3, 20)), s) for kinds, s in zip(known, leases, strict=True)
        ]
        jobs = [
            (
                dice.choice(KINDS),
                dice.choice((None, None, "x", "y")),
                dice.choice((None, None, None, "s", "t")),
                f'{{"s": {dice.choice((0, 0, 0.01, 0.05))}}}',
            )
            for _ in range(dice.randint(40, 120))
        ]
        return cls(seed, (versions[0], versions[1]), dice.choice(LIMITS), jobs, dice.random() < 0.5)

    async def play(self, dsn: str, db: asyncpg.Connection[Any]) -> None:
        """Raises AssertionError if a job does not finish in time, or runs more than once."""
        journal, seen = Journal(), list[Recorder]()
        if self.limits is not None:
            await db.execute("SELECT pgworkd.set_queue('q', $1)", self.limits)
        async with contextlib.AsyncExitStack() as second:
            seen.append((await self._start(second, self.versions[1], journal, dsn))[1])
            async with contextlib.AsyncExitStack() as first:
                seen.append((await self._start(first, self.versions[0], journal, dsn))[1])
                await until(lambda: db.fetchval(f"{POOLS} HAVING count(*) = 2"))
                await self._insert(db)
                if not self.restarts:
                    await until(lambda: db.fetchval(LEFT), limit_s=DONE_S)
            if self.restarts:
                whole = Version(KINDS, self.versions[0].concurrency, self.versions[0].lease_s)
                seen.append((await self._start(second, whole, journal, dsn))[1])
                await until(lambda: db.fetchval(LEFT), limit_s=DONE_S)
        self._check(journal, seen)

    async def _start(
        self, stack: contextlib.AsyncExitStack, version: Version, journal: Journal, dsn: str
    ) -> tuple[Any, Recorder]:
        options = {"lease_s": version.lease_s, "heartbeat_s": version.lease_s / 3}
        return await stack.enter_async_context(running(journal.app(version), dsn, **options))

    async def _insert(self, db: asyncpg.Connection[Any]) -> None:
        sql = "INSERT INTO pgworkd.jobs (queue, kind, limit_key, serialize_key, payload) VALUES ('q', $1, $2, $3, $4)"
        for at in range(0, len(self.jobs), 10):
            await db.executemany(sql, self.jobs[at : at + 10])

    def _check(self, journal: Journal, seen: list[Recorder]) -> None:
        assert journal.wrong == []
        assert len(journal.runs) == len(self.jobs)
        assert set(journal.runs.values()) == {1}
        warned = Counter((i, f["kind"]) for i, each in enumerate(seen) for f in each.all(events.KIND_UNKNOWN))
        assert set(warned.values()) <= {1}
        if not self.restarts:  # a restart may leave a kind without a handler for a while
            left = [
                Counter(f["job_id"] for f in each.all(events.JOB_RELEASED) if "another worker" in f["reason"])
                for each in seen
            ]
            assert all(count <= TWICE for each in left for count in each.values()), left
        lost = [each.all(name) for each in seen for name in (events.JOB_LOST, events.JOB_FAILED, events.JOB_DEAD)]
        assert not any(lost), lost
