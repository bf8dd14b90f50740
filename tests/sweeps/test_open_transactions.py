"""Every operation of an application or an operator is held open, and only what it has locked waits for it."""

from __future__ import annotations

import os

import pytest

from .open_transactions import ACTS, Act, play
from .together import play_together

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

HOLD_S = float(os.environ.get("PGWORKD_TEST_HOLD_S", "2.5"))
"""The release run holds for 10 s."""
TOGETHER = 5
"""Operations that are held at the same time, each in a database of its own."""


@pytest.mark.parametrize("first", range(0, len(ACTS), TOGETHER))
async def test_an_open_transaction_delays_only_what_it_has_locked(first: int, server_dsn: str) -> None:
    async def one(act: Act, dsn: str) -> list[str]:
        return await play(act, dsn, HOLD_S)

    assert not await play_together(one, ACTS[first : first + TOGETHER], server_dsn, f"open_{first}")
