"""The contract of each source of work: what a claim gives, what a settle does, and by what it is fenced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from pgworkd.core.claims import ClaimedJob
from pgworkd.core.fence import Fence
from pgworkd.core.job import Ending, Outcome
from pgworkd.errors import WorkerLost
from tests.kits import gateway
from tests.kits.server import Databases
from tests.kits.settles import failed, released, settle
from tests.sources.places import InSimulation, Place, behind_a_gateway, claim, hasten, in_postgres, register

DATABASES = ["postgres", "gateway"]
Settle = Callable[..., Awaitable[dict[UUID, str]]]


@pytest.fixture(scope="module")
def served(databases: Databases) -> Iterator[tuple[str, str, str]]:
    """A gateway in a process of its own: the DSN of its database, its address, and a token."""
    dsn = databases.take()
    with gateway.served(dsn, module=("tests.kits.quick_gateway",)) as (_, url):
        yield dsn, url, asyncio.run(gateway.token(dsn))
    databases.drop(dsn)


@pytest.fixture(params=[*DATABASES, "simulation"])
def source(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Which, and what it needs."""
    if request.param == "gateway":
        return (request.param, *request.getfixturevalue("served"))
    return (request.param, request.getfixturevalue("dsn")) if request.param == "postgres" else (request.param,)


@pytest.fixture
async def place(source: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    """Each source in turn."""
    hasten(monkeypatch)
    if source == ("simulation",):
        yield InSimulation()
        return
    db = await asyncpg.connect(source[1])
    place = in_postgres(db, source[1]) if source[0] == "postgres" else behind_a_gateway(db, *source[1:])
    yield place
    await place.source.close()
    db.terminate()


async def _settle(
    place: Place, worker: int, jobs: Sequence[ClaimedJob], outcome: Outcome, **how: bool
) -> dict[UUID, str]:
    return await settle(place.source, outcome, *(Fence.of(job.id, job.attempt, worker) for job in jobs), **how)


async def _complete(place: Place, worker: int, jobs: Sequence[ClaimedJob], **how: bool) -> dict[UUID, str]:
    return await _settle(place, worker, jobs, Outcome(Ending.COMPLETED, '{"ok": true}'), **how)


async def _fail(place: Place, worker: int, jobs: Sequence[ClaimedJob], **how: bool) -> dict[UUID, str]:
    return await _settle(place, worker, jobs, failed(60.0), **how)


async def _kill(place: Place, worker: int, jobs: Sequence[ClaimedJob], **how: bool) -> dict[UUID, str]:
    return await _settle(place, worker, jobs, failed(permanent=True), **how)


async def _release(
    place: Place, worker: int, jobs: Sequence[ClaimedJob], delay_s: float | None = 60.0, **how: bool
) -> dict[UUID, str]:
    return await _settle(place, worker, jobs, released(delay_s), **how)


ENDINGS: dict[str, Settle] = {"completed": _complete, "failed": _fail, "dead": _kill, "pending": _release}


async def test_a_claim_takes_what_is_due_in_order_and_up_to_its_limit(place: Place) -> None:
    later = await place.insert(2)
    first = await place.insert(1, priority=5)
    worker = await register(place)
    claims = await claim(place, worker, 2)
    assert [job.id for job in claims] == [*first, later[0]]
    assert [(job.attempt, job.failures, job.losses) for job in claims] == [(1, 0, 0)] * 2
    assert [job.priority for job in claims] == [5, 0]
    assert await place.statuses([*first, *later]) == ["running", "running", "pending"]


async def test_what_one_worker_runs_no_other_claims(place: Place) -> None:
    ids = await place.insert(3)
    one, other = await register(place), await register(place)
    assert one != other
    first, second = await claim(place, one, 2), await claim(place, other, 2)
    assert sorted(job.id for job in [*first, *second]) == sorted(ids)
    assert list(await claim(place, one)) == []


@pytest.mark.parametrize("status", ENDINGS)
async def test_each_settle_ends_its_attempts_and_answers_with_their_status(place: Place, status: str) -> None:
    ids = await place.insert(3)
    worker = await register(place)
    jobs = await claim(place, worker)
    assert await ENDINGS[status](place, worker, jobs[:2]) == dict.fromkeys(ids[:2], status)
    assert await place.statuses(ids) == [status, status, "running"]


@pytest.mark.parametrize("status", ENDINGS)
async def test_a_settle_whose_answer_was_lost_may_be_repeated(place: Place, status: str) -> None:
    ids = await place.insert(2)
    worker = await register(place)
    jobs = await claim(place, worker)
    place.lose_answers()
    await ENDINGS[status](place, worker, jobs[:1])
    again = await ENDINGS[status](place, worker, jobs)
    assert again[ids[1]] == status
    assert await place.statuses(ids) == [status] * 2
    (next_claim,) = await place.insert(1)
    assert [job.id for job in await claim(place, worker)] == [next_claim], "nothing went back twice"


@pytest.mark.parametrize("source", DATABASES, indirect=True)
@pytest.mark.parametrize("status", ENDINGS)
async def test_the_status_of_a_settle_whose_answer_was_lost_is_known(place: Place, status: str) -> None:
    (job_id,) = await place.insert()
    worker = await register(place)
    jobs = await claim(place, worker)
    place.lose_answers()
    await ENDINGS[status](place, worker, jobs)
    again = await ENDINGS[status](place, worker, jobs)
    settled = await place.source.settled([Fence.of(job_id, 1, worker)])
    assert settled | again == {job_id: status}


@pytest.mark.parametrize("status", ENDINGS)
async def test_no_settle_ends_an_attempt_that_another_has_followed(place: Place, status: str) -> None:
    (job_id,) = await place.insert()
    worker = await register(place)
    (old,) = await claim(place, worker)
    await _release(place, worker, [old], delay_s=None)
    (new,) = await claim(place, worker)
    assert (new.id, new.attempt) == (job_id, 2)
    assert job_id not in await ENDINGS[status](place, worker, [old]) or status == "pending"
    assert await place.statuses([job_id]) == ["running"]
    assert await _complete(place, worker, [new]) == {job_id: "completed"}


@pytest.mark.parametrize("status", ENDINGS)
async def test_a_locked_row_holds_up_no_other(place: Place, status: str) -> None:
    ids = await place.insert(3)
    worker = await register(place)
    jobs = await claim(place, worker)
    async with place.locked(ids[1]):
        won = await ENDINGS[status](place, worker, jobs, skip_locked=True)
        assert won == {ids[0]: status, ids[2]: status}
        assert await place.source.running([Fence.of(ids[1], 1, worker)]) == {ids[1]}
    assert await ENDINGS[status](place, worker, [jobs[1]], skip_locked=True) == {ids[1]: status}
    assert await place.source.running([Fence.of(ids[1], 1, worker)]) == set()


async def test_a_failure_counts_until_the_job_is_dead(place: Place) -> None:
    (job_id,) = await place.insert(1, max_attempts=2)
    worker = await register(place)
    assert await _fail(place, worker, await claim(place, worker)) == {job_id: "failed"}
    assert list(await claim(place, worker)) == [], "it waits for its retry"
    await place.make_due(job_id)
    (again,) = await claim(place, worker)
    assert (again.attempt, again.failures) == (2, 1)
    assert await _fail(place, worker, [again]) == {job_id: "dead"}


async def test_what_is_released_counts_no_failure_and_keeps_its_place_or_waits(place: Place) -> None:
    ids = await place.insert(2)
    worker = await register(place)
    first, second = await claim(place, worker)
    await _release(place, worker, [first], delay_s=None)
    await _release(place, worker, [second], delay_s=60.0)
    (again,) = await claim(place, worker)
    assert (again.id, again.attempt, again.failures) == (ids[0], 2, 0)
    assert await place.statuses(ids) == ["running", "pending"]


async def test_a_cancellation_is_in_the_instructions_and_ends_what_is_given_back(place: Place) -> None:
    ids = await place.insert(2)
    worker = await register(place)
    jobs = await claim(place, worker)
    await place.cancel(ids[0])
    beats = place.source.heartbeats(5.0)
    try:
        found: list[tuple[UUID, int]] = []
        while not found:  # a gateway looks at what has been announced
            assert await beats.heartbeat(worker, "running")
            found = list((await beats.instructions(worker, [place.queue])).cancels)
        assert found == [(ids[0], 1)]
    finally:
        await beats.close()
    await _release(place, worker, jobs)
    assert await place.statuses(ids) == ["cancelled", "pending"]


async def test_a_worker_that_was_presumed_dead_claims_and_settles_nothing(place: Place) -> None:
    ids = await place.insert(2)
    worker = await register(place)
    jobs = await claim(place, worker, 1)
    await place.lose(worker)
    beats = place.source.heartbeats(5.0)
    try:
        assert not await beats.heartbeat(worker, "running")
    finally:
        await beats.close()
    with pytest.raises(WorkerLost):
        await claim(place, worker)
    assert await _complete(place, worker, jobs) == {}
    assert await place.statuses(ids) == ["failed", "pending"]
    assert await place.source.sign_off(worker), "nothing of it is left"
    new = await register(place)
    assert [(job.id, job.attempt) for job in await claim(place, new)] == [(ids[0], 2), (ids[1], 1)]


async def test_a_worker_that_has_signed_off_has_no_lease(place: Place) -> None:
    await place.insert()
    worker = await register(place)
    assert await _complete(place, worker, await claim(place, worker)) != {}
    assert await place.source.sign_off(worker)
    assert await place.source.sign_off(worker), "its answer may have been lost"
    with pytest.raises(WorkerLost):
        await claim(place, worker)


@pytest.mark.parametrize("source", ["gateway"], indirect=True)
async def test_what_a_remote_daemon_never_knew_of_is_not_dead_after_its_sign_off(place: Any) -> None:
    begun = await place.insert()
    await place.db.execute("UPDATE pgworkd.jobs SET max_attempts = 1")
    worker = await register(place)
    assert len(await claim(place, worker)) == 1
    unknown = await place.insert()
    await place.db.execute("UPDATE pgworkd.jobs SET max_attempts = 1")
    place.source.held.add = lambda *_: None  # the answer is lost
    assert len(await claim(place, worker)) == 1
    assert await place.source.sign_off(worker)
    assert await place.statuses(begun + unknown) == ["dead", "pending"]


@pytest.mark.parametrize("source", DATABASES, indirect=True)
async def test_progress_is_stored_for_what_still_runs(place: Any) -> None:
    ids = await place.insert(2)
    worker = await register(place)
    first, _ = await claim(place, worker)
    await _complete(place, worker, [first])
    await place.source.report_progress([(ids[0], 1, 0.5, "late"), (ids[1], 1, 0.25, "a quarter")], worker)
    rows = await place.db.fetch("SELECT job_id, done, message FROM pgworkd.progress WHERE job_id = ANY ($1)", ids)
    assert [tuple(row) for row in rows] == [(ids[1], 0.25, "a quarter")]
