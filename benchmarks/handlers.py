"""The application under measurement: handlers that do as little as their row needs.

`app` has one queue per row; `ten` has ten queues with nothing to do.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pgworkd import App

from .tally import from_environment

NAP_S = 0.001
SLOW_S = 1.0
TEN = tuple(f"ten{number}" for number in range(10))

app = App()
ten = App()
_tally = from_environment()


@app.handler("bench", concurrency=100)
async def bench(payload: dict[str, Any]) -> None:
    """Counts the call and does nothing else."""
    _tally.called()


@app.handler("own", concurrency=10, transaction=True)
async def own(payload: dict[str, Any]) -> None:
    """Counts the call, in the transaction that has claimed the job."""
    _tally.called()


@app.handler("nap", concurrency=10)
async def nap(payload: dict[str, Any]) -> None:
    """Awaits 1 ms, as a fast downstream would take."""
    _tally.called()
    await asyncio.sleep(NAP_S)


@app.handler("slow", concurrency=10)
async def slow(payload: dict[str, Any]) -> None:
    """Awaits 1 s and notes the monotonic ns of its start and end."""
    began_ns = time.monotonic_ns()
    _tally.called()
    await asyncio.sleep(payload.get("seconds", SLOW_S))
    _tally.note(began_ns, time.monotonic_ns())


@app.handler("latency", concurrency=10)
async def latency(payload: dict[str, Any]) -> None:
    """Notes the ns since the instant just before the INSERT, which the payload carries."""
    _tally.called(payload["inserted_ns"])


async def _nothing(payload: dict[str, Any]) -> None:
    _tally.called()


for _queue in TEN:
    ten.handler(_queue, concurrency=10)(_nothing)
