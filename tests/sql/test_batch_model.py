"""Batches under any interleaving of sessions, with rollbacks, crashes and cancellations at every step."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given

from tests.kits.batches import LIVE, add, cancel_batch, counted, create
from tests.kits.models import ADDING, EMPTY, QUICK, RUNNING, WAITING, Step, World, playing, steps
from tests.kits.verbs import BATCH_CLOSED, Db, at, cancel, clock, complete, end, fail, release, retry

pytestmark = pytest.mark.slow("a model against the database")

BATCHES = "SELECT id, root_id, stream FROM pgworkd.batches ORDER BY created_at, id"
CALLED = """SELECT r.id, r.tree_finished_at IS NOT NULL AS finished, count(j.id) AS calls
    FROM pgworkd.batches r LEFT JOIN pgworkd.all_jobs j
      ON j.queue = 'done' AND j.payload -> 'batch' ->> 'id' = r.id::text
    WHERE r.parent_id IS NULL GROUP BY r.id"""
STREAMED = """SELECT c.id, count(j.id) AS jobs,
       (SELECT count(*) FROM pgworkd.finished_jobs f
        WHERE f.batch_id = c.parent_id AND f.status = 'completed') AS completed
    FROM pgworkd.batches c LEFT JOIN pgworkd.all_jobs j ON j.batch_id = c.id AND j.payload ? 'input'
    WHERE c.stream AND c.cancelled_at IS NULL GROUP BY c.id"""
OPEN = f"""SELECT b.id FROM pgworkd.batches b
    WHERE b.finished_at IS NULL AND b.sealed_at IS NOT NULL
      AND NOT EXISTS (SELECT FROM pgworkd.jobs j WHERE j.batch_id = b.id AND j.status IN {LIVE})
      AND (NOT b.stream OR EXISTS (SELECT FROM pgworkd.batches p
                                   WHERE p.id = b.parent_id AND p.finished_at IS NOT NULL))"""  # noqa: S608
UNIQUE_VIOLATION, TRY_AGAIN = "23505", "40001"
MAY_WAIT = ADDING | {"retry"}
"""Those that may wait: unique keys are waited for, as by any INSERT."""


class TreeWorld(World):
    """Trees, and for each a job that is inserted when it finishes."""

    empty, adding, may_wait = EMPTY, ADDING, MAY_WAIT
    refusals = (BATCH_CLOSED, UNIQUE_VIOLATION, TRY_AGAIN)

    async def plant(self, *how: Any) -> None:
        """Plants one tree."""
        self._finished: dict[uuid.UUID, Any] = {}
        await self._plant(self.observer)

    async def _plant(self, db: Db) -> None:
        """A tree: a root, one child that streams from it, one that does not, and one that streams from the first."""
        root = (await create(db, "root", on_complete={"queue": "done"}, max_failures=2))["id"]
        child = (await create(db, "streams", parent=root, stream=True))["id"]
        await create(db, "grand", parent=child, stream=True)
        await create(db, "plain", parent=root)
        await add(db, root, 2)

    async def call(self, step: Step, db: Db) -> Callable[[], Awaitable[Any]] | None:
        running, waiting = await self.observer.fetch(RUNNING), await self.observer.fetch(WAITING)
        batches = await self.observer.fetch(BATCHES)
        chosen = batches[int(step.which * (len(batches) - 1))]
        begin = int(step.which * max(len(running) - 1, 0))
        some = running[begin : begin + 1 + int(step.which * 3)]
        ids, attempts = [row["id"] for row in some], [row["attempts"] for row in some]
        everyone = [*running, *waiting]
        job_id = everyone[int(step.which * (len(everyone) - 1))]["id"] if everyone else uuid.uuid4()
        worker_id = self.workers[step.session % 2]
        on_batches: dict[str, Callable[[], Awaitable[Any]]] = {
            "add": lambda: add(db, chosen["id"], 1 + int(step.which * 3)),
            "insert": lambda: _insert(db, chosen["id"], int(step.which * 8) % 4),
            "child": lambda: create(db, f"child {len(batches)}", parent=chosen["id"], stream=step.which > 0.8),
            "root": lambda: self._plant(db),
            "seal": lambda: db.fetchval("SELECT pgworkd.seal_batch($1)", chosen["id"]),
            "cancel_batch": lambda: cancel_batch(db, chosen["id"], 1 + int(step.which * 4)),
            "claim": lambda: db.fetch("SELECT * FROM pgworkd.claim($1, 'q', $2)", worker_id, 1 + int(step.which * 4)),
            "unblock": lambda: db.execute("SELECT pgworkd.unblock()"),
            "expire": lambda: db.execute("SELECT pgworkd.expire()"),
        }
        on_jobs: dict[str, Callable[[], Awaitable[Any]]] = {
            "cancel": lambda: cancel(db, job_id),
            "retry": lambda: retry(db, job_id),
            "complete": lambda: complete(db, ids, attempts, [json.dumps(step.which)] * len(ids)),
            "fail": lambda: fail(db, ids, attempts, delay_s=step.which, permanent=step.which < 0.3),
            "release": lambda: release(db, ids, attempts),
            "end": lambda: end(db, ids, attempts, status="expired" if step.which > 0.5 else "cancelled"),
        }
        self.now += 0.01
        if step.what == "tick":
            self.now += 0.01 * 1000**step.which
        elif step.what == "crash" and self.calm:
            await self.crash(int(step.which > 0.5))
        elif step.what in on_batches:
            return on_batches[step.what]
        elif step.what in on_jobs and (ids or (step.what in {"cancel", "retry"} and everyone)):
            return on_jobs[step.what]
        return None

    # Invariants

    async def check(self) -> None:
        """Of committed data: counters are exact, trees call back once, streams are complete, finished is final."""
        db = self.observer
        async with db.transaction(isolation="repeatable_read"):
            await counted(db)
            for row in await db.fetch(CALLED):
                assert row["calls"] == int(row["finished"]), dict(row)
            for row in await db.fetch(STREAMED):
                assert row["jobs"] == row["completed"], dict(row)
            rows = await db.fetch("SELECT id, finished_at FROM pgworkd.batches")
        finished = {row["id"]: row["finished_at"] for row in rows}
        for batch_id, instant in self._finished.items():
            assert instant is None or finished[batch_id] == instant, "finished twice"
        self._finished = finished

    async def finish(self) -> None:
        """Seals everything and runs all jobs; then every tree must be finished."""
        db = self.observer
        await db.execute("SELECT pgworkd.unblock()")  # for what was rolled back
        assert await db.fetch(OPEN) == [], "left to nobody"
        for row in await db.fetch(BATCHES):
            await self.passes(db, partial(db.fetchval, "SELECT pgworkd.seal_batch($1)", row["id"]))
        for _ in range(500):
            self.now += 5.0
            await clock(self.now, db)
            await db.execute("SELECT pgworkd.expire()")
            await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 20)", self.workers[0])
            running = await db.fetch(RUNNING)
            await complete(db, [row["id"] for row in running], [row["attempts"] for row in running])
            await self.check()
            if not await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status <> 'dead' AND queue = 'q'"):
                break
        left = await db.fetch("SELECT name, sealed_at FROM pgworkd.batches WHERE finished_at IS NULL")
        assert left == [], "stuck"
        assert all(row["calls"] == 1 for row in await db.fetch(CALLED))


async def _insert(db: Db, batch_id: uuid.UUID, kind: int) -> None:
    """A plain INSERT: with a key, or with one that may be taken, or with a time to expire, or two rows."""
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, batch_id, serialize_key, dedupe_key, expires_at, max_attempts)"
        " SELECT 'q', $1, $2, $3, $4, 2 FROM generate_series(1, $5) ON CONFLICT DO NOTHING",
        batch_id,
        "k" if kind == 0 else None,
        "d" if kind == 1 else None,
        at(2) if kind == 2 else None,
        2 if kind == 3 else 1,
    )


# The tests

ADDS = ["add", "add", "insert", "insert", "child", "seal", "seal"]
RUNS = ["claim", "claim", "claim", "complete", "complete", "complete", "complete", "fail", "release", "end"]
ENDS = ["commit", "rollback", "rollback", "tick", "crash", "expire", "unblock"]
STOPS = ["cancel", "retry", "retry", "cancel_batch"]
MORE = [*STOPS, *STOPS, "root"]


@pytest.mark.parametrize("more", [[], pytest.param(MORE, marks=pytest.mark.fast)], ids=["runs", "stops"])
def test_counters_are_exact_and_every_tree_finishes_and_calls_back_once(server_dsn: str, more: list[str]) -> None:
    with playing(server_dsn, TreeWorld) as play:
        QUICK(given(steps=steps([*ADDS, *RUNS, *ENDS, *more]))(lambda steps: play(steps)))()  # noqa: PLW0108 - by name
