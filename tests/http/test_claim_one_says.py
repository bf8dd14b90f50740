"""What is said of a job that cannot be claimed by its id: each text, in the state that it is for."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from pgworkd.gateway.api.routes.workers import NOT_CLAIMED, SAID
from tests.http.test_claim_one import Db, refused
from tests.http.test_workers import insert
from tests.kits import verbs as v
from tests.kits.gateway import calling
from tests.kits.workers import registered

pytestmark = pytest.mark.slow("claims in each state of a job")


class State(NamedTuple):
    """How a job comes into a state. `sql`: of $1; `first`: another job has been claimed before, in such a row."""

    why: str
    says: str
    sql: str = "SELECT $1::uuid"
    first: dict[str, Any] | None = None
    columns: dict[str, Any] = {}  # noqa: RUF012 - never changed
    slots: int = 2


STATES = {
    "expired": State(
        "expired", "has expired", "UPDATE pgworkd.jobs SET expires_at = pgworkd.clock() - interval '1 s' WHERE id = $1"
    ),
    "not due": State(
        "not_due", "is not due yet", "UPDATE pgworkd.jobs SET run_at = pgworkd.clock() + interval '1 h' WHERE id = $1"
    ),
    "paused": State(
        "paused",
        "has a queue that is paused",
        "INSERT INTO pgworkd.queues (name, paused_until) SELECT queue, 'infinity' FROM pgworkd.jobs WHERE id = $1",
    ),
    "limit": State(
        "limit",
        "has a queue whose limit is reached, or a limit_key whose",
        "INSERT INTO pgworkd.queues (name, max_running) SELECT queue, 1 FROM pgworkd.jobs WHERE id = $1",
        first={},
    ),
    "limit of a key": State(
        "limit",
        "has a queue whose limit is reached, or a limit_key whose",
        "INSERT INTO pgworkd.queues (name, limit_per_key) SELECT queue, 1 FROM pgworkd.jobs WHERE id = $1",
        first={"limit_key": "k"},
        columns={"limit_key": "k"},
    ),
    "slots": State("slots", "fits into no slot of the worker: all are taken", first={}, slots=1),
    "suspect": State(
        "suspect",
        "was lost with its workers: a worker runs one such job at a time",
        first={"losses": 2},
        columns={"losses": 2},
    ),
    "locked": State("locked", "is locked by another session", "SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE"),
    "running": State(
        "running",
        "is running, at worker other",
        "SELECT pgworkd.claim_one(id, NULL, 'q', $1) FROM pgworkd.workers WHERE name = 'other'",
    ),
    "key": State("key", "waits: ", first={"serialize_key": "k"}, columns={"serialize_key": "k"}),
    "cancelled": State("unknown", "is cancelled", "SELECT pgworkd.cancel(ARRAY[$1::uuid])"),
    "dead": State("dead", "is dead"),
}


def test_each_text_has_its_state() -> None:
    """A blocked job is one that waits for others, or for its key: both are answered in one way."""
    assert {each.why for each in STATES.values()} | {"blocked"} == {*NOT_CLAIMED, "unknown"}
    said = {each.why: each.says for each in STATES.values()}
    assert {why: said[why] for why in SAID} == SAID


@pytest.mark.parametrize("name", STATES)
async def test_a_refusal_says_what_the_job_is(dsn: str, db: Db, name: str) -> None:
    state = STATES[name]
    async with calling(dsn, workers=True) as call:
        worker = await registered(call, {"q": state.slots})
        await registered(call, name="other")
        if state.first is not None:
            first = await v.one(db, **state.first)
            await worker.claim(queues=None, job=str(first))
        if name == "dead":
            (job_id,) = await insert(db)
            await v.claim(db, await v.worker(db))
            await v.fail(db, [job_id], permanent=True)
        else:
            job_id = await v.one(db, **state.columns)
        async with db.transaction():
            await db.execute(state.sql.replace("$1", f"'{job_id}'::uuid"))
            if name != "locked":
                await db.execute("COMMIT; BEGIN")
            _, slug, found = await refused(worker, job_id)
        assert slug == NOT_CLAIMED.get(state.why, "job-ended"), found
        ending = found["detail"].removeprefix(f"job {job_id} ")
        assert ending.startswith(state.says) if name == "key" else ending == state.says
