"""Stream functions: they make jobs of a child batch from each job that completes in its parent batch.

The function runs as a job of the child batch, so its errors are visible and retried on their own. The jobs it makes
and its own completion commit together.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import anyio.to_thread

from pgworkd.client.batches import Batch
from pgworkd.core.decorated import is_async
from pgworkd.core.job import Job

StreamFunction = Callable[[Any, Any], Any]


def stream_kind(parent: str, child: str) -> str:
    """The kind of the jobs that run the stream function between batches of these names."""
    return f"{parent} -> {child}"


def stream_handler(function: StreamFunction) -> Callable[[dict[str, Any], Job], Awaitable[None]]:
    """A handler that adds the payloads that `function(input, result)` returns to its job's batch."""

    async def handle(payload: dict[str, Any], job: Job) -> None:
        payloads = await _made(function, payload["input"], payload["result"])
        async with job.transaction() as connection:
            if payloads:
                batch_id = await connection.fetchval("SELECT batch_id FROM pgworkd.jobs WHERE id = $1", job.id)
                await Batch(connection, batch_id).add(payloads)
            job.result = {"added": len(payloads)}

    return handle


async def _made(function: StreamFunction, given: Any, result: Any) -> list[object]:
    """The payloads that a stream function makes: of a generator, sync or async, of a list, a single one, or none."""
    if is_async(function) or inspect.isasyncgenfunction(function):
        made = function(given, result)
    else:
        made = await anyio.to_thread.run_sync(lambda: _listed(function(given, result)))
    if inspect.isawaitable(made):  # also of a plain decorator
        made = await made
    return [payload async for payload in made] if inspect.isasyncgen(made) else _listed(made)


def _listed(made: Any) -> Any:
    if made is None:
        return []
    if inspect.isawaitable(made) or inspect.isasyncgen(made):
        return made
    return list(made) if inspect.isgenerator(made) or isinstance(made, list | tuple) else [made]
