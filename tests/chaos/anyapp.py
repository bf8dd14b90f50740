"""A random application: queues, kinds, modes, limits, rates, keys, schedules and traffic generated from a seed.

CHAOS_APP passes the seed to the daemons and producers of a run. The handlers behave like those of `workload`, so
that all checks apply: a kind is named after its role there ("thread-2-0" behaves like "thread").
"""

from __future__ import annotations

import dataclasses
import os
import random
from dataclasses import dataclass
from typing import Any

import anyio
import asyncpg

from pgworkd import App
from pgworkd.client import NewJob, batch, enqueue, enqueue_many
from pgworkd.core.payload import encode
from tests.chaos import workload
from tests.chaos.producer import Producer

SEED, RELEASE = "CHAOS_APP", "CHAOS_RELEASE"
NEW_SHARE = 0.3
"""Of the kinds of a generated application, those that only its new release knows."""
ROLES = {"plain": 5, "transact": 2, "charge": 1, "thread": 2, "stubborn": 1, "forks": 1, "process": 1}
HOW: dict[str, dict[str, Any]] = {"process": {"run_in": "process", "timeout_s": 20}, "charge": {"max_attempts": 1}}
LONGEST_S_PER_SLOT = 0.1
"""Bounds of a job's duration, so that the daemons can keep up with the inserts."""
PAD_CHARS = (0, 0, 0, 100, 5_000, 60_000)


@dataclass(frozen=True)
class Queue:
    """One queue; `limits`: columns of its row in `queues`."""

    name: str
    concurrency: int
    roles: tuple[str, ...]
    longest_s: float
    every_s: int | None
    limits: tuple[tuple[str, Any], ...]

    def kinds(self) -> list[tuple[str, str]]:
        """Role and kind of each handler."""
        return [(role, f"{role}-{self.name}-{number}") for number, role in enumerate(self.roles)]


def _limits(dice: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if dice.random() < 0.3:
        found["max_running"] = dice.randint(1, 6)
    if dice.random() < 0.2:
        found["limit_per_key"] = dice.randint(1, 3)
    if dice.random() < 0.2:
        found |= {"rate": dice.randint(20, 100), "rate_period_s": 1.0, "rate_burst": dice.randint(1, 10)}
    if dice.random() < 0.3:
        found["fair"] = True
    return found


def application(seed: int) -> list[Queue]:
    """The queues of an application, the first without limits."""
    dice = random.Random(f"application {seed}")  # noqa: S311 - to be repeatable
    queues = []
    for number in range(dice.randint(2, 6)):
        roles = dice.choices(list(ROLES), list(ROLES.values()), k=dice.randint(1, 3))
        limits = {} if number == 0 else _limits(dice)
        if "process" in roles:  # a process that has died is slow to replace
            limits.pop("max_running", None)
        concurrency = dice.choice((2, 5) if "process" in roles else (1, 2, 5, 10, 40))
        at_once = min(2 * concurrency, limits.get("max_running", 80), 3 * limits.get("limit_per_key", 80))
        longest_s = min(dice.choice((0.0, 0.02, 0.2, 1.0)), LONGEST_S_PER_SLOT * at_once)
        roles = ["plain", *roles] if number == 0 else roles
        every_s = dice.choice((None, None, 1, 2, 5))
        queues.append(Queue(f"q{number}", concurrency, tuple(roles), longest_s, every_s, tuple(limits.items())))
    return queues


def register(app: App, queues: list[Queue]) -> App:
    """Adds these queues to the application of `workload`, whose own queues the faults and the probes need."""
    for queue in queues:
        more: dict[str, Any] = {"queue": queue.name, "concurrency": queue.concurrency, "backoff": 0.2}
        more["max_attempts"] = workload.ATTEMPTS_MAX
        for role, kind in queue.kinds():
            app.handler(kind, **more | HOW.get(role, {}))(getattr(workload, role))
        if queue.every_s is not None:
            app.handler(f"tick-{queue.name}", every=queue.every_s, **more)(workload.tick)
    return app


def app_of_run() -> App:
    """The application of CHAOS_APP (without it: that of `workload` alone), in the release of CHAOS_RELEASE."""
    seed = os.environ.get(SEED)
    app = workload.app if seed is None else register(workload.app, application(int(seed)))
    if os.environ.get(RELEASE) == "old":
        for kind in new_kinds(None if seed is None else int(seed)):
            del app.handlers[kind]
        for kind, handler in app.handlers.items():
            more = {"schedule_payload": {"release": "old"}} if handler.recurrence is not None else {}
            budget = handler.max_attempts if handler.max_attempts == 1 else handler.max_attempts + 1
            app.handlers[kind] = dataclasses.replace(handler, max_attempts=budget, **more)
    return app


def new_kinds(seed: int | None) -> list[str]:
    """The kinds that the old release does not know: what may run only once is among them."""
    kinds = ["charge", "stubborn"]
    if seed is not None:
        dice = random.Random(f"release {seed}")  # noqa: S311 - to be repeatable
        kinds += [kind for queue in application(seed) for _, kind in queue.kinds() if dice.random() < NEW_SHARE]
    return kinds


async def set_limits(db: asyncpg.Connection[Any], queues: list[Queue]) -> None:
    """Writes the rows of these queues in `queues`."""
    for queue in queues:
        if queue.limits:
            columns = ", ".join(name for name, _ in queue.limits)
            marks = ", ".join(f"${number}" for number in range(2, len(queue.limits) + 2))
            await db.execute(
                f"INSERT INTO pgworkd.queues (name, {columns}) VALUES ($1, {marks})",  # noqa: S608 - names of ours
                queue.name,
                *(value for _, value in queue.limits),
            )


class AnyProducer(Producer):
    """Random traffic for the queues of an application."""

    def __init__(self, name: str, seed: int, queues: list[Queue]) -> None:
        super().__init__(name, seed)
        self._queues = queues
        weights = {self.one: 30, self.many: 14, self.keyed: 12, self.once: 8, self.late: 6, self.flow: 6, self.tree: 3}
        self.plans = {plan: self._dice.randint(1, weight) for plan, weight in weights.items()}

    def make(self, queue: Queue | None = None, **options: Any) -> NewJob:
        """One job of any kind of a queue, of any size, due now or later."""
        dice, queue = self._dice, queue or self._dice.choice(self._queues)
        role, kind = dice.choice(queue.kinds())
        facts: dict[str, Any] = {"seconds": round(dice.uniform(0, queue.longest_s), 4)}
        if role == "plain":
            ending = dice.random()
            facts |= {"fails": 1} if ending < 0.1 else {"snoozes": True} if ending < 0.15 else {}
        if role in ("plain", "charge", "stubborn"):
            facts["key"] = options.get("serialize_key") and f"{queue.name} {options['serialize_key']}"
        if role == "process":
            facts["how"] = dice.choice([*workload.DEADLY, None, None])
        if role == "forks":
            facts["how"] = dice.choice(workload.FORKS)
        if pad := dice.choice(PAD_CHARS):
            facts["pad"] = "x" * pad
        if dice.random() < 0.3:
            options["limit_key"] = f"tenant {dice.randrange(3)}"
        return NewJob(
            queue.name,
            self.payload(**facts),
            kind=kind,
            priority=dice.choice((0, 0, 0, -1, 5)),
            delay=dice.choice((0, 0, 0, 0, dice.uniform(0, 2))),
            **options,
        )

    def one(self) -> list[NewJob]:
        """A plain INSERT."""
        return [self.make()]

    def many(self) -> list[NewJob]:
        """Many jobs in one call."""
        return [self.make() for _ in range(self._dice.randint(2, 60))]

    def keyed(self) -> list[NewJob]:
        """Several jobs with one key."""
        queue, key = self._dice.choice(self._queues), f"k{self._dice.randrange(4)}"
        return [self.make(queue, serialize_key=key) for _ in range(self._dice.randint(1, 5))]

    def once(self) -> list[NewJob]:
        """Repeats the call until it is acknowledged."""
        return [self.make()]

    def late(self) -> list[NewJob]:
        """Commits long after the jobs were due."""
        return self.many()[:5]

    def flow(self) -> list[NewJob]:
        """The last job depends on the others, in any queues."""
        return [self.make() for _ in range(3)]

    def tree(self) -> list[NewJob]:
        """A batch, and a child that streams from it."""
        return [NewJob("q0", self.payload(), kind="plain-q0-0") for _ in range(self._dice.randint(1, 20))]

    async def carry_out(self, plan: Any, jobs: list[NewJob], connection: asyncpg.Connection[Any]) -> None:
        if plan == self.one and self._dice.random() < 0.5:
            await _insert(jobs[0], connection)
        elif plan == self.once:
            options = {"dedupe_key": jobs[0].payload["token"], "dedupe_for": 3600}  # type: ignore[index]
            await enqueue(connection, jobs[0].queue, jobs[0].payload, kind=jobs[0].kind, on_duplicate="skip", **options)
        elif plan == self.late:
            async with connection.transaction():
                await enqueue_many(connection, jobs)
                await anyio.sleep(self._dice.uniform(0.2, 1.5))
        elif plan == self.flow:
            async with connection.transaction():
                first = await enqueue_many(connection, jobs[:-1])
                last = jobs[-1]
                await enqueue(
                    connection, last.queue, last.payload, kind=last.kind, after=first, on_failed_dependency="run"
                )
        elif plan == self.tree:
            async with (
                connection.transaction(),
                batch(connection, "tree", kind="plain-q0-0", queue="q0", on_complete={"queue": "probe"}) as root,
            ):
                await root.child("below", kind="plain-q0-0", queue="q0", stream=True)
                await root.add(job.payload for job in jobs)
        else:
            await enqueue_many(connection, jobs)


async def _insert(job: NewJob, connection: asyncpg.Connection[Any]) -> None:
    await connection.execute(
        "INSERT INTO pgworkd.jobs (queue, kind, payload, priority, limit_key) VALUES ($1, $2, $3, $4, $5)",
        job.queue,
        job.kind,
        encode(job.payload, "payload"),
        job.priority,
        job.limit_key,
    )
