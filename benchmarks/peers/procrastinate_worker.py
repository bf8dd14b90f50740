"""procrastinate: python -m benchmarks.peers.procrastinate_worker install | enqueue COUNT | work. In its own venv."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from typing import Any

from benchmarks.tally import from_environment

CONCURRENCY, POOL = 20, 24


async def main(what: str, count: int = 0) -> None:
    """One of the three, on the database that PGWORKD_BENCH_DSN names."""
    procrastinate: Any = importlib.import_module("procrastinate")  # by name: see pgqueuer_worker.py
    connector = procrastinate.PsycopgConnector(conninfo=os.environ["PGWORKD_BENCH_DSN"], max_size=POOL)
    app = procrastinate.App(connector=connector)
    tally = from_environment()

    async def bench(number: int, text: str, inserted_ns: int | None = None) -> None:
        tally.called(inserted_ns)

    task = app.task(queue="bench", name="bench")(bench)
    async with app.open_async():
        if what == "install":
            await app.schema_manager.apply_schema_async()
        elif what == "enqueue":
            for begin in range(0, count, 5000):
                numbers = range(begin, min(begin + 5000, count))
                await task.batch_defer_async(*[{"number": 1000000 + number, "text": "x" * 70} for number in numbers])
        else:
            await app.run_worker_async(queues=["bench"], concurrency=CONCURRENCY, delete_jobs="always")


if __name__ == "__main__":
    uvloop: Any = importlib.import_module("uvloop")
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
