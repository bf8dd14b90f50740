"""pgqueuer: python -m benchmarks.peers.pgqueuer_worker install | enqueue COUNT | work. In a venv of its own."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from typing import Any

from benchmarks.tally import from_environment

BATCH = 500


async def main(what: str, count: int = 0) -> None:
    """One of the three, on the database that PGWORKD_BENCH_DSN names."""
    # By name: this project does not depend on its peers, and its type checker does not know them.
    asyncpg: Any = importlib.import_module("asyncpg")
    pgqueuer: Any = importlib.import_module("pgqueuer")
    db: Any = importlib.import_module("pgqueuer.db")
    queries: Any = importlib.import_module("pgqueuer.queries")
    driver = db.AsyncpgDriver(await asyncpg.connect(os.environ["PGWORKD_BENCH_DSN"]))
    if what == "install":
        await queries.Queries(driver).install()
    elif what == "enqueue":
        for begin in range(0, count, 5000):
            numbers = range(begin, min(begin + 5000, count))
            payloads = [json.dumps({"number": 1000000 + number, "text": "x" * 70}).encode() for number in numbers]
            await queries.Queries(driver).enqueue(["bench"] * len(numbers), payloads, [0] * len(numbers))
    else:
        tally = from_environment()
        manager = pgqueuer.PgQueuer(driver)

        async def bench(job: Any) -> None:
            tally.called(json.loads(job.payload).get("inserted_ns"))

        manager.entrypoint("bench")(bench)
        await manager.run(batch_size=BATCH)


if __name__ == "__main__":
    uvloop: Any = importlib.import_module("uvloop")
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
