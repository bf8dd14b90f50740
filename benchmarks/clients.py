"""An application: connections that insert single jobs, each its own transaction, as fast as they can.

    python -m benchmarks.clients QUEUE CONNECTIONS SECONDS     (the database is PGWORKD_BENCH_DSN's)

Prints the rows inserted and the seconds it took. A process of its own, so that the driver does not slow it down.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import asyncpg
import uvloop

from .bare import DSN

_INSERT = "INSERT INTO pgworkd.jobs (queue, payload) VALUES ($1, $2::text::jsonb)"


async def insert(queue: str, count: int, seconds: float) -> None:
    """Connects and prepares, then inserts until the time is up."""
    connections = [await asyncpg.connect(os.environ[DSN]) for _ in range(count)]
    statements = [await connection.prepare(_INSERT) for connection in connections]
    payload = json.dumps({"number": 1000000, "text": "x" * 70})
    rows, began = 0, time.monotonic()
    until = began + seconds

    async def keep(number: int) -> None:
        nonlocal rows
        while time.monotonic() < until:
            await statements[number].fetch(queue, payload)
            rows += 1

    await asyncio.gather(*map(keep, range(count)))
    print(rows, time.monotonic() - began)


if __name__ == "__main__":
    uvloop.run(insert(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
