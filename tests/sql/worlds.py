"""Model tests: examples of what several sessions do, each played from an empty database on."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import Phase

from tests.kit import examples
from tests.server import create_database, drop_database

QUICK = examples(14, phases=[Phase.explicit, Phase.generate])
"""Shrinking runs for minutes: a failing case is short enough as it is."""


@contextlib.contextmanager
def playing(server_dsn: str, world_class: Any) -> Iterator[Callable[..., None]]:
    """A function that plays one example in a `world_class`, on a database that all examples of a test share."""
    name = f"pgworkd_world_{uuid.uuid4().hex[:12]}"
    with asyncio.Runner() as runner:
        world = runner.run(world_class.open(runner.run(create_database(server_dsn, name))))

        async def play(*example: Any) -> None:
            if any(session.is_open or session.busy for session in world.sessions):
                await world.renew()
            await world.play(*example)

        try:
            yield lambda *example: runner.run(play(*example))
        finally:
            for db in [world.observer, *(session.db for session in world.sessions)]:
                db.terminate()
            runner.run(drop_database(server_dsn, name))
