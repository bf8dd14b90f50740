"""The attempts in our hands: found by (id, attempt), stopped once, replaced by a newer attempt of the same job."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from uuid import UUID, uuid4

import anyio
import pytest

from pgworkd import Job
from pgworkd.database.connection import CUT_AFTER_S
from pgworkd.database.store import Claimed
from pgworkd.engine.attempts import Held, Holdings
from pgworkd.engine.runner_task import RunnerTask, RunScope
from pgworkd.words.job import Reason
from pgworkd.words.registration import Registration


def claimed(job_id: UUID, attempt: int = 1) -> Claimed:
    """A row as the claim returns it; only id and attempt matter here."""
    return Claimed(
        id=job_id,
        kind="k",
        payload="{}",
        attempt=attempt,
        failures=0,
        max_attempts=3,
        timeout_s=None,
        priority=0,
        losses=0,
        run_at=0.0,
        created_at=0.0,
        schedule=None,
        occurrence=None,
        meta=None,
    )


def held_of(attempt: int = 1, job_id: UUID | None = None) -> Held:
    return Held(claimed(job_id or uuid4(), attempt), "q")


def job_of(held: Held) -> Job:
    now = datetime.now(UTC)
    return Job(
        id=held.claimed.id,
        queue="q",
        kind="k",
        attempt=held.claimed.attempt,
        failures=0,
        max_attempts=3,
        payload={},
        created_at=now,
        run_at=now,
    )


def test_what_is_claimed_has_not_started() -> None:
    held = held_of()
    assert (held.started, held.reason, held.settled, held.flagged) == (None, None, False, False)
    assert held.facts() == {"job_id": str(held.claimed.id), "queue": "q", "kind": "k", "attempt": 1}


@pytest.mark.parametrize("reason", list(Reason))
def test_a_stop_before_the_start_is_remembered(reason: Reason) -> None:
    held = held_of()
    held.stop(reason)
    assert held.reason is reason


def test_the_first_reason_stands() -> None:
    held = held_of()
    held.stop(Reason.CANCEL)
    held.stop(Reason.SHUTDOWN)
    assert held.reason is Reason.CANCEL


async def test_a_stop_cancels_the_run_and_tells_the_job() -> None:
    held = held_of()
    held.job = job_of(held)
    came_out: list[bool] = []
    async with anyio.create_task_group() as tasks, RunnerTask() as task:
        held.scope, held.grace_s = task.scope, lambda _: 1.0
        tasks.start_soon(_stop, held)
        assert not held.job.stopping.is_set()
        with pytest.raises(asyncio.CancelledError):
            await anyio.sleep(5)
        await anyio.sleep(0.01)  # once is enough: what cleans up may wait
        came_out.append(True)
    assert task.scope.told
    assert came_out == [True]
    assert held.job.stopping.is_set()


async def _stop(held: Held) -> None:
    held.stop(Reason.CANCEL)


async def test_a_stop_limits_how_long_a_commit_is_awaited_whichever_comes_first() -> None:
    unlimited, before, during = held_of(), held_of(), held_of()
    before.stop(Reason.SHUTDOWN)
    scopes = [held.committing() for held in (unlimited, before, during)]
    during.stop(Reason.FENCE)
    assert all(scope.shield for scope in scopes)
    left_s = [scope.deadline - anyio.current_time() for scope in scopes]
    assert left_s[0] == math.inf
    assert 0 < left_s[1] <= left_s[2] <= CUT_AFTER_S


async def test_a_second_stop_does_not_cancel_the_clean_up_of_the_first() -> None:
    held = held_of()
    async with anyio.create_task_group() as tasks, RunnerTask() as task:
        held.scope, held.grace_s = task.scope, lambda _: 1.0
        tasks.start_soon(_stop, held)
        try:
            await anyio.sleep(5)
        except asyncio.CancelledError:
            held.stop(Reason.SHUTDOWN)
            await anyio.sleep(0.01)
    assert held.reason is Reason.CANCEL


async def test_a_fence_shortens_the_clean_up_of_another_stop() -> None:
    held, cuts = held_of(), 0
    async with anyio.create_task_group() as tasks, RunnerTask() as task:
        held.scope, held.grace_s = task.scope, lambda reason: 0.02 if reason is Reason.FENCE else 60.0
        tasks.start_soon(_stop, held)
        for _ in range(2):
            try:
                await anyio.sleep(5)
            except asyncio.CancelledError:
                cuts += 1
                held.stop(Reason.FENCE)
    assert cuts == 2


def test_holdings_know_what_was_added_until_it_is_removed() -> None:
    holdings = Holdings()
    one, other = held_of(), held_of(2)
    assert (len(holdings), list(holdings)) == (0, [])
    holdings.add(one)
    holdings.add(other)
    assert len(holdings) == 2
    assert list(holdings) == [one, other]
    assert holdings.find(one.claimed.id, 1) is one
    assert holdings.find(other.claimed.id, 2) is other
    holdings.remove(one)
    assert list(holdings) == [other]
    assert holdings.find(one.claimed.id, 1) is None
    holdings.remove(one)
    assert len(holdings) == 1


def test_another_attempt_is_another_matter() -> None:
    holdings, held = Holdings(), held_of(2)
    holdings.add(held)
    assert holdings.find(held.claimed.id, 1) is None
    assert holdings.find(held.claimed.id, 3) is None
    assert holdings.find(uuid4(), 2) is None


def test_a_newer_attempt_of_the_same_job_ends_the_older_one() -> None:
    holdings, older = Holdings(), held_of(1)
    older.job = job_of(older)
    newer = held_of(2, older.claimed.id)
    holdings.add(older)
    holdings.add(newer)
    assert older.reason is Reason.FENCE
    assert older.job.stopping.is_set()
    assert newer.reason is None
    assert len(holdings) == 1
    # The older one, when it is settled, must not take the newer one along.
    holdings.remove(older)
    assert holdings.find(newer.claimed.id, 2) is newer


def test_an_attempt_in_flight_is_not_started_again_unless_it_came_under_another_registration() -> None:
    holdings, first = Holdings(), held_of(1)
    again = Held(first.claimed, "q", Registration.of(7, uuid4()))
    first.worker_id = again.worker_id
    assert holdings.add(first)
    assert not holdings.add(again)
    assert holdings.find(first.claimed.id, 1) is first
    assert first.reason is None
    anew = Held(first.claimed, "q", Registration.of(7, uuid4()))  # the number came again, the token does not
    assert holdings.add(anew)
    assert first.reason is Reason.FENCE
    assert holdings.find(first.claimed.id, 1) is anew


async def test_running_are_those_whose_handler_was_called_and_has_not_come_back() -> None:
    holdings = Holdings()
    waiting, runs, over = held_of(), held_of(), held_of()
    runs.started, runs.scope = 1.0, RunScope()
    over.started = 1.0
    for held in (waiting, runs, over):
        holdings.add(held)
    assert holdings.running() == [runs]


def test_stop_all_stops_all_and_may_meet_changes_on_its_way() -> None:
    holdings = Holdings()
    helds = [held_of() for _ in range(5)]
    for held in helds:
        holdings.add(held)
    helds[2].stop(Reason.CANCEL)
    for held in holdings:  # what a settle does meanwhile
        holdings.remove(held)
        holdings.add(held)
    holdings.stop_all(Reason.SHUTDOWN)
    assert [held.reason for held in helds] == [Reason.SHUTDOWN] * 2 + [Reason.CANCEL] + [Reason.SHUTDOWN] * 2
