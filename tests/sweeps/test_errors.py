"""Each statement that a daemon sends is answered with errors of every class, once and for a while."""

from __future__ import annotations

import os

import anyio
import asyncpg
import pytest

from tests.server import create_database, drop_database

from .errors import CODES, Fault, faults, play, statements

FAULTS = faults() if os.environ.get("PGWORKD_TEST_SWEEPS") == "all" else faults()[: 2 * len(statements())]
"""All of them in the release run: each statement with each code."""
TOGETHER = 5


def test_any_part_of_the_list_has_every_code() -> None:
    assert {(fault.code, fault.always) for fault in FAULTS} == {(code, always) for code in CODES for always in (0, 1)}
    assert {fault.function for fault in FAULTS} == set(statements())
    assert {"claim", "settle_completed", "settle_failed", "rescue", "ensure_schedules", "wanted"} <= set(statements())


@pytest.mark.parametrize("first", range(0, len(FAULTS), TOGETHER))
async def test_no_error_loses_jobs_stops_a_queue_or_is_met_again_at_once(first: int, server_dsn: str) -> None:
    found: dict[str, list[str]] = {}

    async def one(number: int, fault: Fault) -> None:
        name = f"errors_{number}"
        dsn = await create_database(server_dsn, name)
        db = await asyncpg.connect(dsn)
        found[repr(fault)] = await play(fault, db, dsn)
        await db.close()
        await drop_database(server_dsn, name)

    async with anyio.create_task_group() as tasks:
        for number, fault in enumerate(FAULTS[first : first + TOGETHER], start=first):
            tasks.start_soon(one, number, fault)
    assert not {name: what for name, what in found.items() if what}
