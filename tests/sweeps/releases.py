"""Two releases of one application side by side, as in a rolling deployment that is generated from a seed.

They differ in kinds, budgets, concurrency and the rule of a schedule. Daemons of both start and stop in any order, with
jobs under way; at the end only the new release is left. What the old one does not know it must not decide: how often a
job may run, whether it has begun, its place under its `serialize_key`, and the rule of a schedule.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import anyio
import asyncpg
from anyio.abc import TaskGroup, TaskStatus

from pgworkd import App, Job
from pgworkd.core import events
from tests.kits.daemon import Recorder, running, until

BUDGETS = {"both": 3, "once": 1, "often": 5, "old": 7}
"""By kind, the max_attempts in the release that knows it; `both` is known to both, `old` to the old one, too."""
OLD_KINDS, NEW_KINDS = ("both", "old"), tuple(BUDGETS)
FAILS_MAX = 9
LATE_S = 0.5
"""How long after its expires_at a handler may be called: it was found in time, and this process is busy."""
DONE_S = 40.0
RULES = {"old": 3600, "new": 7200}
LEFT = "SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE status <> 'dead' AND schedule IS NULL)"


@dataclass(frozen=True)
class Release:
    """One of the two."""

    name: str
    kinds: tuple[str, ...]
    concurrency: int


@dataclass(frozen=True)
class Row:
    """A job: `fails` of its runs raise; `expires_s`: after its insertion."""

    number: int
    kind: str
    key: str | None
    fails: int
    seconds: float
    expires_s: float | None


@dataclass
class Journal:
    """What began when: (number, attempt, release, wall clock), in order."""

    begun: list[tuple[int, int, str, float]] = field(default_factory=list)

    def app(self, release: Release) -> App:
        """The application of a release."""
        app = App()

        async def handle(payload: dict[str, Any], job: Job) -> None:
            self.begun.append((payload["number"], job.attempt, release.name, time.time()))
            await anyio.sleep(payload["seconds"])
            if job.failures < payload["fails"]:
                raise RuntimeError("as it is told")

        for kind in release.kinds:
            options: dict[str, Any] = {"queue": "q", "concurrency": release.concurrency, "backoff": 0.05}
            app.handler(kind, **options, **({} if BUDGETS[kind] == 3 else {"max_attempts": BUDGETS[kind]}))(handle)

        @app.handler("nightly", queue="q", every=RULES[release.name])
        async def nightly() -> None:
            """Is never due."""

        return app


@dataclass(frozen=True)
class Situation:
    """A deployment generated from a seed."""

    seed: int
    releases: tuple[Release, Release]
    rows: list[Row]
    steps: list[str]

    @classmethod
    def of(cls, seed: int) -> Situation:
        """The same for the same seed."""
        dice = random.Random(f"releases {seed}")  # noqa: S311 - to be repeatable
        slots = [dice.choice((1, 2, 5, 20)) for _ in range(2)]
        rows = [
            Row(
                number,
                dice.choice(NEW_KINDS),
                dice.choice((None, None, "x", "y", "z")),
                dice.choice((0, 0, 0, 1, 2, FAILS_MAX)),
                dice.choice((0, 0, 0.01, 0.2)),
                dice.choice((None, None, None, 0.05, 0.3, 1.0, 3.0)),
            )
            for number in range(dice.randint(60, 150))
        ]
        # Each step starts or stops a daemon; the new release starts at some time, and the old one more than once.
        steps = [dice.choice(("old", "new", "stop old", "stop new", "wait")) for _ in range(dice.randint(4, 10))]
        return cls(seed, (Release("old", OLD_KINDS, slots[0]), Release("new", NEW_KINDS, slots[1])), rows, steps)

    async def play(self, dsn: str, db: asyncpg.Connection[Any]) -> None:
        """Raises AssertionError for a decision that was not the old release's to make."""
        journal = Journal()
        async with anyio.create_task_group() as tasks:
            fleet = _Fleet(self, dsn, journal, tasks)
            await fleet.do("old")
            tasks.start_soon(self._insert, dsn)
            for step in self.steps:
                await fleet.do(step)
                await anyio.sleep(0.15)
            await fleet.do("new")
            await fleet.do("stop old")
            await until(lambda: db.fetchval(LEFT), limit_s=DONE_S)
            rule = "SELECT every_s FROM pgworkd.schedules WHERE name = 'nightly'"
            await until(lambda: _is(db, rule, RULES["new"]))
            await fleet.do("stop new")
        await self._check(db, journal)
        assert not [each for seen in fleet.seen for each in seen.all(events.JOB_LOST)]

    async def _insert(self, dsn: str) -> None:
        db = await asyncpg.connect(dsn)
        for at in range(0, len(self.rows), 5):
            await db.executemany(
                "INSERT INTO pgworkd.jobs (queue, kind, serialize_key, payload, expires_at)"
                " VALUES ('q', $1, $2, jsonb_build_object('number', $3::int, 'fails', $4::int, 'seconds', $5::float8),"
                " clock_timestamp() + make_interval(secs => $6))",
                [(r.kind, r.key, r.number, r.fails, r.seconds, r.expires_s) for r in self.rows[at : at + 5]],
            )
            await anyio.sleep(0.02)
        await db.close()

    async def _check(self, db: asyncpg.Connection[Any], journal: Journal) -> None:
        jobs = {
            row["number"]: row
            for row in await db.fetch(
                "SELECT (payload ->> 'number')::int AS number, status, failures, max_attempts, error,"
                " date_part('epoch', expires_at) AS expires FROM pgworkd.all_jobs WHERE schedule IS NULL"
            )
        }
        assert len(jobs) == len(self.rows)
        runs = defaultdict[int, list[float]](list)
        for number, _, _, at in journal.begun:
            runs[number].append(at)
        wrong = []
        for row in self.rows:
            job, begun = jobs[row.number], runs[row.number]
            if row.kind == "once" and len(begun) > 1:
                wrong.append(f"job {row.number} may run once, and ran {len(begun)} times")
            if row.kind != "once" and job["status"] == "dead" and job["failures"] != BUDGETS[row.kind]:
                wrong.append(f"job {row.number} ({row.kind}) died of {job['failures']} failures: {job}")
            if job["status"] not in ("completed", "dead", "expired"):
                wrong.append(f"job {row.number} is {job['status']}")
            if begun and job["expires"] is not None and begun[0] > job["expires"] + LATE_S:
                wrong.append(f"job {row.number} began {begun[0] - job['expires']:.2f} s after it had expired")
            if job["status"] == "expired" and (row.expires_s is None or begun):
                wrong.append(f"job {row.number} has expired, and began {len(begun)} times")
        keys = {row.number: row.key for row in self.rows}
        for key in {*keys.values()} - {None}:
            order = [(number, attempt, name) for number, attempt, name, _ in journal.begun if keys[number] == key]
            if [number for number, _, _ in order] != sorted(number for number, _, _ in order):
                wrong.append(f"the order of {key!r} is {order}")
        assert not wrong, wrong


class _Fleet:
    """At most one daemon of each release at a time, each in a task of its own."""

    def __init__(self, situation: Situation, dsn: str, journal: Journal, tasks: TaskGroup) -> None:
        self._releases = {release.name: release for release in situation.releases}
        self._dsn, self._journal, self._tasks = dsn, journal, tasks
        self._up: dict[str, tuple[anyio.Event, anyio.Event]] = {}
        self.seen: list[Recorder] = []

    async def do(self, step: str) -> None:
        """Starts the daemon of a release, or stops it at once, with what it runs."""
        verb, _, name = step.rpartition(" ")
        if verb == "stop" and name in self._up:
            stop, stopped = self._up.pop(name)
            stop.set()
            await stopped.wait()
        elif not verb and name in self._releases and name not in self._up:
            self._up[name] = await self._tasks.start(self._run, name)

    async def _run(self, name: str, *, task_status: TaskStatus[tuple[anyio.Event, anyio.Event]]) -> None:
        stop, stopped = anyio.Event(), anyio.Event()
        app = self._journal.app(self._releases[name])
        async with running(app, self._dsn, worker_name=name, shutdown_s=0.0) as (_, recorder):
            self.seen.append(recorder)
            task_status.started((stop, stopped))
            await stop.wait()
        stopped.set()


async def _is(db: asyncpg.Connection[Any], sql: str, wanted: object) -> bool:
    return bool(await db.fetchval(sql) == wanted)
