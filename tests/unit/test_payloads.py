"""Reading large payloads, on a stand-in of the store."""

from __future__ import annotations

from collections import deque
from typing import Any
from uuid import UUID

import anyio
import anyio.lowlevel

from pgworkd.core.events import Events
from pgworkd.core.job import Reason
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.run.large_payloads import Payloads
from pgworkd.errors import DatabaseError, DatabaseUnavailable
from tests.kits.apps import attempt_of

DAMAGED, GONE, LATE = UUID(int=3), UUID(int=4), UUID(int=7)


class Store:
    """Raises the given errors first, then returns its rows."""

    def __init__(self, *fails: Exception) -> None:
        self.fails, self.asked, self.begun = deque(fails), list[int](), list[UUID]()

    async def payloads(
        self, ids: Any, attempts: Any, bytes_max: int, worker_id: int | None = None, begin: int | None = None
    ) -> list[tuple[UUID, str | None, str | None, bool]]:
        self.asked.append(len(ids))
        self.begun += ids[:begin]
        await anyio.lowlevel.checkpoint()
        if self.fails:
            raise self.fails.popleft()
        if DAMAGED in ids:
            raise DatabaseError("missing chunk number 0 for toast value")
        return [(each, None if each in (GONE, LATE) else "{}", '{"trace": 1}', each == LATE) for each in ids]


def unread(count: int) -> list[Attempt]:
    found = [attempt_of(1, UUID(int=number)) for number in range(count)]
    for held in found:
        held.claimed = held.claimed._replace(payload=None)
    return found


async def read_all(store: Store, jobs: list[Attempt], slots: int) -> None:
    """Reads for all slots at once, in order."""
    payloads, work = Payloads(store, "q", Events()), deque(jobs)

    async def slot() -> None:
        while work:
            held = work.popleft()
            if held.claimed.payload is None:
                await payloads.read(held, work)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(slots):
                tasks.start_soon(slot)


async def test_one_read_serves_all_slots_and_the_next_jobs() -> None:
    store, jobs = Store(), unread(3)
    await read_all(store, jobs, slots=2)
    assert [(held.claimed.payload, held.claimed.meta) for held in jobs] == [("{}", '{"trace": 1}')] * 3
    assert len(store.asked) == 1
    assert store.begun == [jobs[0].claimed.id], "the one that a slot waits for"


async def test_a_damaged_row_fails_alone_and_a_rescued_one_does_not_run() -> None:
    store, jobs = Store(), unread(9)
    await read_all(store, jobs, slots=2)
    for held in jobs:
        assert (held.unreadable is not None) == (held.claimed.id == DAMAGED)
        assert (held.reason is Reason.FENCE) == (held.claimed.id == GONE)
        assert (held.reason is Reason.EXPIRED) == (held.claimed.id == LATE)
        assert (held.claimed.payload is None) == (held.claimed.id in (DAMAGED, GONE, LATE))


async def test_a_read_is_retried_until_the_outage_ends() -> None:
    store, jobs = Store(DatabaseUnavailable("away"), DatabaseUnavailable("away")), unread(2)
    await read_all(store, jobs, slots=1)
    assert [held.claimed.payload for held in jobs] == ["{}"] * 2


async def test_a_stop_ends_the_wait_for_the_database() -> None:
    store, jobs = Store(), unread(5)
    payloads = Payloads(store, "q", Events())
    async with anyio.create_task_group() as tasks:
        for held in jobs:
            tasks.start_soon(payloads.read, held, [])
        await anyio.lowlevel.checkpoint()
        payloads.stop(Reason.SHUTDOWN)
    assert all(held.reason is Reason.SHUTDOWN for held in jobs)
    assert len(store.asked) == 1
