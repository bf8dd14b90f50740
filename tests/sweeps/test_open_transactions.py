"""Everything an application or an operator may do is held open, and only what it has locked waits for it."""

from __future__ import annotations

import os

import anyio
import pytest

from tests.server import create_database, drop_database

from .open_transactions import ACTS, Act, play

HOLD_S = float(os.environ.get("PGWORKD_TEST_HOLD_S", "2.5"))
"""The release run holds for 10 s."""
TOGETHER = 5
"""Acts that are held at the same time, each in a database of its own."""


@pytest.mark.parametrize("first", range(0, len(ACTS), TOGETHER))
async def test_an_open_transaction_holds_up_nothing_but_what_it_has_locked(first: int, server_dsn: str) -> None:
    found: dict[str, list[str]] = {}

    async def one(number: int, act: Act) -> None:
        name = f"open_{number}"
        found[act.name] = await play(act, await create_database(server_dsn, name), HOLD_S)
        await drop_database(server_dsn, name)

    async with anyio.create_task_group() as tasks:
        for number, act in enumerate(ACTS[first : first + TOGETHER], start=first):
            tasks.start_soon(one, number, act)
    assert not {name: what for name, what in found.items() if what}
