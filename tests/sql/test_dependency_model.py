"""Jobs that wait for others under any interleaving of sessions, with rollbacks, crashes, retries and old snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import given

from tests.server import create_database, drop_database

from .test_batch_model import steps
from .test_flow_model import QUICK
from .tree_world import Step
from .wait_world import WaitWorld

ADDS = ["insert", "after", "after", "after"]
RUNS = ["claim", "claim", "claim", "complete", "complete", "complete", "both", "fail", "release", "end"]
ENDS = ["commit", "rollback", "rollback", "tick", "crash", "expire"]
MORE = ["old", "old", "cancel", "retry", "retry", "undepend", "edit", "mend"]


@contextlib.contextmanager
def world_of(server_dsn: str) -> Iterator[tuple[asyncio.Runner, WaitWorld]]:
    """A database for all examples of one test."""
    name = f"pgworkd_waits_{uuid.uuid4().hex[:12]}"
    with asyncio.Runner() as runner:
        dsn = runner.run(create_database(server_dsn, name))
        world = runner.run(WaitWorld.open(dsn))
        try:
            yield runner, world
        finally:
            for db in [world.observer, *(session.db for session in world.sessions)]:
                db.terminate()
            runner.run(drop_database(server_dsn, name))


@pytest.mark.parametrize("more", [[], MORE], ids=["runs", "more"])
def test_nothing_runs_too_early_and_nothing_is_blocked_for_ever(server_dsn: str, more: list[str]) -> None:
    with world_of(server_dsn) as (runner, world):

        @QUICK
        @given(steps=steps([*ADDS, *RUNS, *ENDS, *more]))
        def play(steps: list[Step]) -> None:
            async def fresh() -> None:
                if any(session.is_open or session.busy for session in world.sessions):
                    await world.renew()
                await world.play(steps)

            runner.run(fresh())

        play()
