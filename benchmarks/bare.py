"""What bare Postgres and asyncpg can do: loops without attempts, retries, leases, timeouts or error paths.

    python -m benchmarks.bare drain | latency     (the database is PGWORKD_BENCH_DSN's)
    python -m benchmarks.bare naps COUNT TASKS

They are upper bounds to measure against, not job systems. One process each, uvloop, with decoded payloads and a
task per job, as in any Python worker. `naps` uses no database: tasks that await 1 ms repeatedly, which
is the limit of the event loop's timer itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import asyncpg
import uvloop

from .handlers import NAP_S
from .tally import Tally, from_environment

DSN = "PGWORKD_BENCH_DSN"
BATCH = 1000
EMPTY_S = 0.02

SCHEMA = """
    CREATE TABLE narrow (
        id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        queue    text NOT NULL,
        priority integer NOT NULL DEFAULT 0,
        run_at   timestamptz NOT NULL DEFAULT now(),
        payload  jsonb NOT NULL,
        status   text NOT NULL DEFAULT 'pending'
    );
    CREATE INDEX narrow_claimable ON narrow (queue, priority, id) WHERE status = 'pending';
"""
NOTIFYING = """
    CREATE FUNCTION narrow_inserted() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_notify('narrow', ''); RETURN NULL; END $$;
    CREATE TRIGGER narrow_inserted AFTER INSERT ON narrow FOR EACH STATEMENT EXECUTE FUNCTION narrow_inserted();
"""
_CLAIM = """
    UPDATE narrow SET status = 'running' WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM narrow WHERE queue = 'bench' AND status = 'pending' AND run_at <= now()
        ORDER BY priority, id LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING id, payload::text"""
_COMPLETE = "DELETE FROM narrow n USING unnest($1::bigint[]) AS done (id) WHERE n.id = done.id"


async def _no_op(payload: dict[str, Any], tally: Tally) -> None:
    tally.called()


async def _note(payload: dict[str, Any], tally: Tally) -> None:
    tally.called(payload["inserted_ns"])


async def _run(rows: list[Any], handler: Any, tally: Tally) -> list[int]:
    await asyncio.gather(*[handler(json.loads(row[1]), tally) for row in rows])
    return [row[0] for row in rows]


async def drain(dsn: str, tally: Tally) -> None:
    """Claims and runs no-op jobs until killed: the next claim is in progress while these run and are completed."""
    claims, completions = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    claim, complete = await claims.prepare(_CLAIM), await completions.prepare(_COMPLETE)
    rows = await claim.fetch(BATCH)
    while True:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(claim.fetch(BATCH))
            if rows:
                await complete.fetch(await _run(rows, _no_op, tally))
        rows = following.result()
        if not rows:
            await asyncio.sleep(EMPTY_S)


async def latency(dsn: str, tally: Tally) -> None:
    """Waits for a notification, claims, runs and completes the due jobs; until killed."""
    heard = asyncio.Event()
    listener, work = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    claim, complete = await work.prepare(_CLAIM), await work.prepare(_COMPLETE)
    await listener.add_listener("narrow", lambda *_: heard.set())
    while True:
        heard.clear()
        while rows := await claim.fetch(BATCH):
            await complete.fetch(await _run(list(rows), _note, tally))
        await heard.wait()


async def naps(count: int, tasks: int) -> None:
    """Prints how many awaits of 1 ms `tasks` tasks complete per second."""

    async def keep(number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(NAP_S)

    began = time.monotonic()
    await asyncio.gather(*[keep(count // tasks) for _ in range(tasks)])
    print(count // tasks * tasks / (time.monotonic() - began))


def main(arguments: list[str]) -> None:
    """Runs the named loop."""
    match arguments:
        case ["drain"]:
            uvloop.run(drain(os.environ[DSN], from_environment()))
        case ["latency"]:
            uvloop.run(latency(os.environ[DSN], from_environment()))
        case ["naps", count, tasks]:
            uvloop.run(naps(int(count), int(tasks)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
