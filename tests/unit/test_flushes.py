"""Waiting outcomes: none is lost or flushed twice, flushes are bounded, and no queue waits for all of another's."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.core.job import Ending, Outcome
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.settle.flushes import BURST_ITERATIONS_MAX, FLUSH_BYTES, FLUSH_MAX, Flushes
from tests.kits.apps import attempt_of
from tests.kits.models import examples

SIZES = st.sampled_from((0, 10, 1_000, 100_000, FLUSH_BYTES // 2, FLUSH_BYTES, FLUSH_BYTES + 1))


def item(number: int, queue: str, size: int) -> Attempt:
    attempt = Attempt(attempt_of(number).claimed._replace(payload=""), queue)
    attempt.outcome, attempt.size = Outcome(Ending.COMPLETED, result="x" * size), size
    return attempt


@examples(200)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), SIZES, st.booleans(), st.sampled_from((1, 3, FLUSH_MAX))), max_size=60)
)
def test_each_outcome_is_flushed_once_in_flushes_of_bounded_size(steps: list[tuple[str, int, bool, int]]) -> None:
    flushes, put, taken = Flushes[Attempt](), list[Attempt](), list[Attempt]()
    for number, (queue, size, takes, most) in enumerate(steps):
        put.append(item(number, queue, size))
        flushes.put(put[-1])
        takes_left = 1 if takes else 0
        if number == len(steps) - 1:
            takes_left = len(put)
        while takes_left and flushes.count:
            flush, takes_left = flushes.take(most), takes_left - 1
            assert 0 < len(flush) <= most
            assert len(flush) == 1 or sum(each.size for each in flush) <= FLUSH_BYTES
            taken += flush
            assert (flushes.count, flushes.bytes) == (
                len(put) - len(taken),
                sum(each.size for each in put) - sum(each.size for each in taken),
            )
    assert sorted(map(id, taken)) == sorted(map(id, put))
    assert flushes.take(FLUSH_MAX) == []


def test_a_small_outcome_waits_for_at_most_one_flush_per_queue_of_large_ones() -> None:
    flushes = Flushes[Attempt]()
    for number in range(60):
        flushes.put(item(number, "ab"[number % 2], FLUSH_BYTES // 2))
    small = item(60, "small", 10)
    flushes.put(small)
    flushes.take(FLUSH_MAX)  # the outcomes that arrived while the backlog was small
    assert small in flushes.take(FLUSH_MAX) + flushes.take(FLUSH_MAX) + flushes.take(FLUSH_MAX)


def test_small_outcomes_of_all_queues_share_a_flush() -> None:
    flushes = Flushes[Attempt]()
    for number in range(FLUSH_MAX):
        flushes.put(item(number, f"q{number}", 100))
    assert len(flushes.take(FLUSH_MAX)) == FLUSH_MAX


@pytest.mark.parametrize(("each", "most", "gathered"), [(1, FLUSH_MAX, 4), (3, 6, 6), (1, 1, 1)])
async def test_a_flush_waits_during_a_burst_until_it_is_full(each: int, most: int, gathered: int) -> None:
    flushes = Flushes[Attempt]()

    async def burst() -> None:
        for _ in range(4):
            for _ in range(each):
                flushes.put(item(0, "q", 10))
            await asyncio.sleep(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(burst)
        await asyncio.sleep(0)
        await flushes.rest_of_burst(most)
        assert len(flushes.take(most)) == gathered


async def test_an_endless_burst_is_still_flushed() -> None:
    flushes = Flushes[Attempt]()

    async def endless() -> None:
        while True:
            flushes.put(item(0, "q", 10))
            await asyncio.sleep(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(endless)
        await asyncio.sleep(0)
        await flushes.rest_of_burst(FLUSH_MAX)
        assert flushes.count <= BURST_ITERATIONS_MAX + 2
        tasks.cancel_scope.cancel()
