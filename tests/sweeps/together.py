"""Timing-sensitive cases of a sweep, run in parallel; a violation counts only if the case alone reproduces it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from tests.kits.server import create_database, drop_database

Case = TypeVar("Case")
Play = Callable[[Case, str], Awaitable[list[str]]]
"""Runs a case on the database of that DSN; returns timing violations, and raises for all others."""


async def play_together(play: Play[Case], cases: Sequence[Case], server_dsn: str, name: str) -> dict[str, list[str]]:
    """Violations by case that occurred in parallel and again alone, so that a busy machine causes none."""
    found: dict[str, list[str]] = {}

    async def one(case: Case, database: str) -> None:
        dsn = await create_database(server_dsn, database)
        if what := await play(case, dsn):
            found[repr(case)] = what
        await drop_database(server_dsn, database)

    async with anyio.create_task_group() as tasks:
        for number, case in enumerate(cases):
            tasks.start_soon(one, case, f"{name}_{number}")
    suspects, found = found, {}
    for case in cases:
        if repr(case) in suspects:
            await one(case, f"{name}_alone")
    return {case: [*suspects[case], "and alone:", *what] for case, what in found.items()}
