"""pgworkd and its references, each as a worker that drains a table."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import asyncpg

from pgworkd.database import schema

from . import bare
from .bench import Bench, daemon
from .processes import BenchmarkError

PAYLOAD_SQL = "jsonb_build_object('number', 1000000 + i, 'text', repeat('x', 70))"
"""About 100 bytes of JSON."""
Load = Callable[[Bench, str, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class System:
    """A worker, its table, and how to check that it has lost or duplicated no job."""

    name: str
    template: str
    make: Callable[[str], Awaitable[None]]
    """Makes the template, given its DSN."""
    command: list[str]
    load: Load
    """Inserts that many due jobs into the database of a DSN."""
    table: str
    left_sql: str
    """True while a job waits or runs."""
    remaining_sql: str = ""
    """How many jobs are still there."""
    insert_sql: str = ""
    """Inserts one job, whose payload is $1; empty: only the system's own client can."""
    completed_sql: str | None = None
    """How many are in the history since the instant $1; None if it keeps none."""
    environ: Mapping[str, str] = field(default_factory=dict)
    share: float = 1.0
    """Share of the other systems' number of jobs, for slow ones: enough for a rate."""
    ours: bool = False
    version: str = ""


async def executed(dsn: str, *scripts: str) -> None:
    """Runs scripts on a connection of their own."""
    connection = await asyncpg.connect(dsn, command_timeout=3600)
    try:
        for script in filter(None, scripts):  # asyncpg fails on an empty one
            await connection.execute(script)
    finally:
        connection.terminate()


def filling(queue: str, table: str = "pgworkd.jobs", columns: str = "", values: str = "") -> str:
    """The statement that inserts $1 due jobs into a table.

    `queue` and `values` are SQL in terms of `i`, the job's number; `columns` and `values` begin with a comma.
    """
    return (
        f"INSERT INTO {table} (queue, payload{columns}) SELECT {queue}, {PAYLOAD_SQL}{values} "  # noqa: S608 - ours
        "FROM generate_series(1, $1::int) AS i"
    )


def ours(
    name: str = "pgworkd",
    *,
    queue: str = "bench",
    slots: int = 100,
    more: str = "",
    insert: str = "",
    keeps: bool = True,
) -> System:
    """Our worker. `more`: SQL after the schema; `insert`: what fills the table, in terms of `$1` jobs."""
    insert = insert or filling(f"'{queue}'")
    kept = (
        "SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed' AND finished_at >= $1 "  # noqa: S608
        f"AND queue = '{queue}'"
    )
    return System(
        name=name,
        template=f"ours_{crc32(more.encode())}",
        make=lambda dsn: executed(dsn, schema.text(), more),
        command=daemon(f"{queue}={slots}"),
        load=_by_sql(insert),
        table="pgworkd.jobs",
        left_sql="SELECT EXISTS (SELECT FROM pgworkd.jobs WHERE status IN ('pending', 'running', 'failed', 'blocked'))",
        remaining_sql="SELECT count(*) FROM pgworkd.jobs",
        insert_sql=f"INSERT INTO pgworkd.jobs (queue, payload) VALUES ('{queue}', $1::text::jsonb)",  # noqa: S608 - ours
        completed_sql=kept if keeps else None,
        ours=True,
    )


def without_history() -> System:
    """Our worker on a queue without history, comparable with a loop that deletes."""
    more = "INSERT INTO pgworkd.queues (name, keep_s) VALUES ('bench', 0)"
    return ours("pgworkd keep_s=0", more=more, keeps=False)


def bare_loop(mode: str = "drain") -> System:
    """The bare claim/delete loop."""
    return System(
        name="bare loop",
        template=f"narrow_{mode}",
        make=lambda dsn: executed(dsn, bare.SCHEMA, bare.NOTIFYING if mode == "latency" else ""),
        command=[sys.executable, "-m", "benchmarks.bare", mode],
        load=_by_sql(filling("'bench'", "narrow")),
        table="narrow",
        left_sql="SELECT EXISTS (SELECT FROM narrow)",
        remaining_sql="SELECT count(*) FROM narrow",
        insert_sql="INSERT INTO narrow (queue, payload) VALUES ('bench', $1::text::jsonb)",
    )


def named(system: System, name: str) -> System:
    """The same under another name."""
    return replace(system, name=name)


def _by_sql(statement: str) -> Load:
    async def load(bench: Bench, dsn: str, jobs: int) -> None:
        async with bench.server.connected(dsn) as connection:
            await connection.execute(statement, jobs)

    return load


async def verify(system: System, connection: asyncpg.Connection[Any], calls: int, loaded: int, since: Any) -> None:
    """Raises BenchmarkError if handlers ran more or fewer jobs than were removed, or than the history has."""
    remaining = await connection.fetchval(system.remaining_sql) if system.remaining_sql else loaded - calls
    if calls != loaded - remaining:
        raise BenchmarkError(
            f"{system.name}: {calls} handler calls for {loaded - remaining} of {loaded} jobs that are gone"
        )
    if system.completed_sql is not None:
        kept = await connection.fetchval(system.completed_sql, since)
        if kept != calls:
            raise BenchmarkError(f"{system.name}: {calls} handler calls, {kept} completed jobs in the history")
