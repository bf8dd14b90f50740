"""The driver of a run does not itself cause the failures that it checks for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from tests.chaos import workload
from tests.chaos.fleet import Fleet
from tests.chaos.history import load

pytestmark = pytest.mark.slow("daemons under faults")


async def test_a_daemon_terminated_during_python_startup_exits_with_0(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    """A run may end just after a daemon was restarted."""
    await db.execute(workload.AUDIT)
    server: Any = None  # not used here
    async with anyio.create_task_group() as tasks:
        fleet = Fleet(server, dsn, tmp_path, tasks, random.Random(1))  # noqa: S311 - repeatable
        try:
            await fleet.start_member()
            await fleet.stop()
        finally:
            fleet.end_all()
            tasks.cancel_scope.cancel()
    exits = [note.facts["code"] for note in load(tmp_path, "driver") if note.event == "exit"]
    assert exits == [0]
