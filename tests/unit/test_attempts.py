"""The attempts in flight: found by (id, attempt), stopped once, replaced by a newer attempt of the same job."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from uuid import uuid4

import anyio
import pytest

from pgworkd import Job
from pgworkd.core.job import Reason
from pgworkd.core.registration import Registration
from pgworkd.database.transactions import CUT_AFTER_S
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.runner_task import RunnerTask, RunScope
from tests.kits.apps import attempt_of


def job_of(held: Attempt) -> Job:
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


def test_a_claimed_attempt_has_not_started() -> None:
    held = attempt_of()
    assert (held.started, held.reason, held.settled, held.reported_slow) == (None, None, False, False)
    assert held.facts() == {"job_id": str(held.claimed.id), "queue": "q", "kind": "k", "attempt": 1}


@pytest.mark.parametrize("reason", list(Reason))
def test_a_stop_requested_before_the_start_takes_effect(reason: Reason) -> None:
    held = attempt_of()
    held.stop(reason)
    assert held.reason is reason


def test_the_first_stop_reason_is_kept() -> None:
    held = attempt_of()
    held.stop(Reason.CANCEL)
    held.stop(Reason.SHUTDOWN)
    assert held.reason is Reason.CANCEL


async def test_a_stop_cancels_the_handler_and_sets_job_stopping() -> None:
    held = attempt_of()
    held.job = job_of(held)
    came_out: list[bool] = []
    async with anyio.create_task_group() as tasks, RunnerTask() as task:
        held.scope, held.grace_s = task.scope, lambda _: 1.0
        tasks.start_soon(_stop, held)
        assert not held.job.stopping.is_set()
        with pytest.raises(asyncio.CancelledError):
            await anyio.sleep(5)
        await anyio.sleep(0.01)  # cancelled only once: cleanup may await
        came_out.append(True)
    assert task.scope.stop_seen
    assert came_out == [True]
    assert held.job.stopping.is_set()


async def _stop(held: Attempt) -> None:
    held.stop(Reason.CANCEL)


async def test_a_stop_bounds_the_wait_for_a_commit_in_either_order() -> None:
    unlimited, before, during = attempt_of(), attempt_of(), attempt_of()
    before.stop(Reason.SHUTDOWN)
    scopes = [held.committing() for held in (unlimited, before, during)]
    during.stop(Reason.FENCE)
    assert all(scope.shield for scope in scopes)
    left_s = [scope.deadline - anyio.current_time() for scope in scopes]
    assert left_s[0] == math.inf
    assert 0 < left_s[1] <= left_s[2] <= CUT_AFTER_S


async def test_a_second_stop_does_not_cancel_the_cleanup_of_the_first() -> None:
    held = attempt_of()
    async with anyio.create_task_group() as tasks, RunnerTask() as task:
        held.scope, held.grace_s = task.scope, lambda _: 1.0
        tasks.start_soon(_stop, held)
        try:
            await anyio.sleep(5)
        except asyncio.CancelledError:
            held.stop(Reason.SHUTDOWN)
            await anyio.sleep(0.01)
    assert held.reason is Reason.CANCEL


async def test_a_fence_shortens_the_cleanup_of_an_earlier_stop() -> None:
    held, cuts = attempt_of(), 0
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


def test_an_added_attempt_is_found_until_it_is_removed() -> None:
    in_flight = InFlight()
    one, other = attempt_of(), attempt_of(2)
    assert (len(in_flight), list(in_flight)) == (0, [])
    in_flight.add([one])
    in_flight.add([other])
    assert len(in_flight) == 2
    assert list(in_flight) == [one, other]
    assert in_flight.find(one.claimed.id, 1) is one
    assert in_flight.find(other.claimed.id, 2) is other
    in_flight.remove([one])
    assert list(in_flight) == [other]
    assert in_flight.find(one.claimed.id, 1) is None
    in_flight.remove([one])
    assert len(in_flight) == 1


def test_another_attempt_of_the_job_is_not_found() -> None:
    in_flight, held = InFlight(), attempt_of(2)
    in_flight.add([held])
    assert in_flight.find(held.claimed.id, 1) is None
    assert in_flight.find(held.claimed.id, 3) is None
    assert in_flight.find(uuid4(), 2) is None


def test_a_newer_attempt_of_a_job_stops_the_older_one() -> None:
    in_flight, older = InFlight(), attempt_of(1)
    older.job = job_of(older)
    newer = attempt_of(2, older.claimed.id)
    in_flight.add([older])
    in_flight.add([newer])
    assert older.reason is Reason.FENCE
    assert older.job.stopping.is_set()
    assert newer.reason is None
    assert len(in_flight) == 1
    # Removing the older attempt when it is settled must not remove the newer one.
    in_flight.remove([older])
    assert in_flight.find(newer.claimed.id, 2) is newer


def test_an_attempt_in_flight_is_not_restarted_under_the_same_registration() -> None:
    in_flight, first = InFlight(), attempt_of(1)
    again = Attempt(first.claimed, "q", Registration.of(7, uuid4()))
    first.worker_id = again.worker_id
    assert in_flight.add([first])
    assert not in_flight.add([again])
    assert in_flight.find(first.claimed.id, 1) is first
    assert first.reason is None
    anew = Attempt(first.claimed, "q", Registration.of(7, uuid4()))  # the same worker id, but another token
    assert in_flight.add([anew])
    assert first.reason is Reason.FENCE
    assert in_flight.find(first.claimed.id, 1) is anew


async def test_running_lists_attempts_whose_handler_has_not_returned() -> None:
    in_flight = InFlight()
    waiting, runs, over = attempt_of(), attempt_of(), attempt_of()
    runs.started, runs.scope = 1.0, RunScope()
    over.started = 1.0
    for held in (waiting, runs, over):
        in_flight.add([held])
    assert in_flight.running() == [runs]


def test_stop_all_stops_every_attempt_even_if_some_are_removed_meanwhile() -> None:
    in_flight = InFlight()
    helds = [attempt_of() for _ in range(5)]
    for held in helds:
        in_flight.add([held])
    helds[2].stop(Reason.CANCEL)
    for held in in_flight:  # as a settle does meanwhile
        in_flight.remove([held])
        in_flight.add([held])
    in_flight.stop_all(Reason.SHUTDOWN)
    assert [held.reason for held in helds] == [Reason.SHUTDOWN] * 2 + [Reason.CANCEL] + [Reason.SHUTDOWN] * 2
