"""Dedupe keys against a model: after any operations in any order, a key is taken exactly when it should be.

Those of a queue, and the same keys in two batches: each has its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.kits import verbs as v
from tests.kits.batches import batch, counted
from tests.kits.verbs import Db

pytestmark = pytest.mark.slow("a model against the database")

EMPTY = "".join(
    f"DELETE FROM pgworkd.{table};"  # noqa: S608 - names are ours
    for table in ("jobs", "finished_jobs", "batch_additions", "batches", "workers")
)
WAITING = ("pending", "failed")
TAKEN = "taken"


@dataclass
class Job:
    """What the model knows of a job; `until`, `run_at`: seconds after T0."""

    key: str
    """As it is stored."""
    until: float | None
    run_at: float
    status: str = "pending"
    attempts: int = 0
    number: int = 0


@dataclass
class Step:
    """One operation; `pick` selects one of the eligible jobs, `undone`: its transaction is rolled back."""

    act: str
    batch: int
    key: str
    word: str
    seconds: float
    until_s: float | None
    pick: int
    undone: bool


OFTEN = ["enqueue", "claim", "claim", "settle", "settle", "replay", "turn"]
STEPS = st.lists(
    st.builds(
        Step,
        act=st.sampled_from(
            ["insert", "enqueue", "claim", "settle", "cancel", "replay", "free", "turn", "mend", *OFTEN]
        ),
        batch=st.sampled_from([0, 0, 0, 1, 1, 2]),
        key=st.sampled_from(["a", "a", "a", "b"]),
        word=st.sampled_from(["skip", "replace", "reschedule", "raise"]),
        seconds=st.sampled_from([0.0, 5.0, 30.0]),
        until_s=st.sampled_from([None, 5.0, 10.0, 60.0]),
        pick=st.integers(0, 5),
        undone=st.sampled_from([False, False, False, True]),
    ),
    min_size=10,
    max_size=60,
)


@dataclass
class World:
    """The table and its model, side by side."""

    db: Db
    worker_id: int
    batches: list[uuid.UUID | None]
    """The first: none."""
    now: float = 0.0
    jobs: dict[uuid.UUID, Job] = field(default_factory=dict)
    inserts: int = 0

    def holder(self, key: str) -> uuid.UUID | None:
        """The job that should have the key."""
        over = ("completed", "cancelled")
        found = [
            job_id
            for job_id, job in self.jobs.items()
            if job.key == key and job.status != "dead" and (job.status not in over or (job.until or 0) > self.now)
        ]
        assert len(found) <= 1, "two should have one key"
        return found[0] if found else None

    def stored(self, step: Step) -> str:
        """The key of this step, as its job would have it."""
        batch_id = self.batches[step.batch]
        return step.key if batch_id is None else f"{batch_id}/{step.key}"

    def of(self, step: Step, *wanted: str) -> uuid.UUID | None:
        """The job of this step."""
        found = [job_id for job_id, job in self.jobs.items() if job.status in wanted]
        return found[step.pick % len(found)] if found else None

    async def act(self, step: Step) -> Callable[[], None]:
        """Applies the step to the table; returns what it does to the model."""
        act: Callable[[Step], Awaitable[Callable[[], None]]] = getattr(self, step.act)
        return await act(step)

    # The operations. Each first checks the table's answer against the model.

    def created(self, job_id: uuid.UUID, step: Step) -> Callable[[], None]:
        assert job_id not in self.jobs
        until = None if step.until_s is None else self.now + step.until_s
        return lambda: self.jobs.update(
            {job_id: Job(self.stored(step), until, self.now + step.seconds, number=self.inserts)}
        )

    async def insert(self, step: Step) -> Callable[[], None]:
        self.inserts += 1
        sql = """INSERT INTO pgworkd.jobs (queue, dedupe_key, run_at, dedupe_until, payload, batch_id)
            VALUES ('q', $1, $2, $3, jsonb_build_object('n', $4::int), $5)"""
        if step.pick % 2:
            sql += " ON CONFLICT (queue, dedupe_key) WHERE dedupe_key IS NOT NULL AND status <> 'dead' DO NOTHING"
        until = None if step.until_s is None else v.at(self.now + step.until_s)
        values = (step.key, v.at(self.now + step.seconds), until, self.inserts, self.batches[step.batch])
        job_id = await refusable(self.db, self.db.fetchval(f"{sql} RETURNING id", *values))
        if self.holder(self.stored(step)) is not None:
            assert job_id == (None if step.pick % 2 else TAKEN)
            return nothing
        return self.created(job_id, step)

    async def enqueue(self, step: Step) -> Callable[[], None]:
        self.inserts += 1
        holder, number = self.holder(self.stored(step)), self.inserts
        answer = await refusable(
            self.db,
            v.enqueue(
                self.db,
                step.word,
                dedupe_key=step.key,
                payload=f'{{"n": {number}}}',
                delay_s=step.seconds,
                dedupe_for_s=step.until_s,
                batch=self.batches[step.batch],
            ),
        )
        if holder is None:
            assert answer[1:] == (True, False)
            return self.created(answer[0], step)
        if step.word == "raise":
            assert answer == TAKEN
            return nothing
        changes = step.word in ("replace", "reschedule") and self.jobs[holder].status in WAITING
        assert answer == (holder, False, changes)
        return (lambda: self.changed(self.jobs[holder], step, number)) if changes else nothing

    def changed(self, job: Job, step: Step, number: int) -> None:
        job.run_at = self.now + step.seconds
        if step.word == "replace":
            job.number = number
            job.until = job.until if step.until_s is None else self.now + step.until_s

    async def claim(self, step: Step) -> Callable[[], None]:
        due = {i for i, job in self.jobs.items() if job.status in WAITING and job.run_at <= self.now}
        claimed = await v.claim_ids(self.db, self.worker_id, 2)
        assert set(claimed) <= due
        assert len(claimed) == min(2, len(due))

        def take() -> None:
            for job_id in claimed:
                self.jobs[job_id].status = "running"
                self.jobs[job_id].attempts += 1

        return take

    async def settle(self, step: Step) -> Callable[[], None]:
        job_id = self.of(step, "running")
        if job_id is None:
            return nothing
        attempt = self.jobs[job_id].attempts
        status, run_at = "completed", self.jobs[job_id].run_at
        if step.word == "skip":
            assert await v.complete(self.db, [job_id], attempt) == {job_id}
        elif step.word == "raise" or self.jobs[job_id].attempts >= 3:
            status = "dead"
            assert await v.fail(self.db, [job_id], attempt, permanent=True) == {job_id: status}
        elif step.word == "replace" and step.pick % 2:
            status = "cancelled"
            assert await v.end(self.db, [job_id], attempt) == {job_id}
        elif step.word == "replace":
            status = "pending"
            assert await v.release(self.db, [job_id], attempt) == {job_id}
        else:
            status, run_at = "failed", self.now + step.seconds
            assert await v.fail(self.db, [job_id], attempt, delay_s=step.seconds) == {job_id: status}
        return lambda: self.become(job_id, status, run_at)

    def become(self, job_id: uuid.UUID, status: str, run_at: float) -> None:
        self.jobs[job_id].status, self.jobs[job_id].run_at = status, run_at

    async def cancel(self, step: Step) -> Callable[[], None]:
        job_id = self.of(step, *WAITING, "dead", "completed", "cancelled")
        if job_id is None:
            return nothing
        job = self.jobs[job_id]
        over = job.status in ("completed", "cancelled", "dead")
        assert await v.cancel(self.db, job_id) == ({} if over else {job_id: "cancelled"})
        return nothing if over else lambda: self.become(job_id, "cancelled", job.run_at)

    async def replay(self, step: Step) -> Callable[[], None]:
        job_id = self.of(step, "dead")
        if job_id is None:
            return nothing
        taken = self.holder(self.jobs[job_id].key) is not None
        assert await refusable(self.db, v.retry(self.db, job_id)) == (TAKEN if taken else {job_id})
        return nothing if taken else lambda: self.become(job_id, "pending", self.now)

    async def free(self, step: Step) -> Callable[[], None]:
        holder = self.holder(self.stored(step))
        kept = holder is not None and self.jobs[holder].status in ("completed", "cancelled")
        assert await self.db.fetchval("SELECT pgworkd.free_key('q', $1)", self.stored(step)) == kept
        return (lambda: setattr(self.jobs[holder], "until", None)) if holder and kept else nothing

    async def turn(self, step: Step) -> Callable[[], None]:
        self.now += step.seconds
        await v.clock(self.now, self.db)
        return nothing

    async def mend(self, step: Step) -> Callable[[], None]:
        await self.db.execute("SELECT pgworkd.expire()")
        return nothing

    async def check(self) -> None:
        """Checks that the table agrees with the model."""
        ids = list(self.jobs)
        assert await v.statuses(self.db, ids) == [job.status for job in self.jobs.values()]
        for job_id, job in self.jobs.items():
            if job.status in WAITING:
                row = await v.live(self.db, job_id)
                assert (row["payload"], row["run_at"]) == (f'{{"n": {job.number}}}', v.at(job.run_at))
        rows = await self.db.fetch(
            "SELECT dedupe_key, id FROM pgworkd.jobs WHERE status <> 'dead'"
            " AND (status <> 'completed' OR dedupe_until > pgworkd.clock())"
        )
        keys = {job.key for job in self.jobs.values()}
        assert {row["dedupe_key"]: row["id"] for row in rows} == {k: i for k in keys if (i := self.holder(k))}
        await counted(self.db)


def nothing() -> None:
    pass


async def refusable(db: Db, call: Awaitable[Any]) -> Any:
    """The answer, or that the key is taken."""
    try:
        async with db.transaction():  # that the refusal ends
            return await call
    except asyncpg.UniqueViolationError:
        return TAKEN


class Undone(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("part", [pytest.param(0, marks=pytest.mark.fast), 1, 2])  # each within the time of a test
@settings(
    max_examples=30,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # to shrink an example takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
async def test_a_key_is_taken_exactly_when_it_should_be(db: Db, part: int, steps: list[Step]) -> None:
    await db.execute(EMPTY)
    await v.clock(0, db)
    batches = [None, await batch(db, "one"), await batch(db, "two")]
    world = World(db, await v.worker(db, lease_s=3600), batches)
    for step in steps:
        try:
            async with db.transaction():
                apply = await world.act(step)
                if step.undone and step.act != "turn":
                    raise Undone
        except Undone:
            continue
        apply()
        await world.check()
