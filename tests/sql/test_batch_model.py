"""Batches under any interleaving of sessions, with rollbacks, crashes and cancellations at every step."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server import create_database, drop_database

from .test_flow_model import QUICK
from .tree_world import Step, World

ADDS = ["add", "add", "insert", "insert", "child", "seal", "seal"]
RUNS = ["claim", "claim", "claim", "complete", "complete", "both", "both", "fail", "release", "end"]
ENDS = ["commit", "rollback", "rollback", "tick", "crash", "expire", "unblock"]
STOPS = ["cancel", "retry", "retry", "cancel_batch"]


def steps(whats: list[str]) -> st.SearchStrategy[list[Step]]:
    """Schedules."""
    step = st.builds(
        Step,
        session=st.integers(0, 2),
        what=st.sampled_from(whats),
        which=st.floats(0, 1, allow_nan=False),
        open=st.booleans(),
    )
    return st.lists(step, min_size=15, max_size=40)


@contextlib.contextmanager
def world_of(server_dsn: str) -> Iterator[tuple[asyncio.Runner, World]]:
    """A database for all examples of one test."""
    name = f"pgworkd_trees_{uuid.uuid4().hex[:12]}"
    with asyncio.Runner() as runner:
        dsn = runner.run(create_database(server_dsn, name))
        world = runner.run(World.open(dsn))
        try:
            yield runner, world
        finally:
            for db in [world.observer, *(session.db for session in world.sessions)]:
                db.terminate()
            runner.run(drop_database(server_dsn, name))


@pytest.mark.parametrize("more", [[], [*STOPS, *STOPS, "root"]], ids=["runs", "stops"])
def test_counters_are_exact_and_every_tree_is_finished_and_calls_back_once(server_dsn: str, more: list[str]) -> None:
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
