"""A run of `pgworkd bench --url`: jobs are created through a gateway, by several callers at once.

Nothing serves the queue of a run, and its jobs expire by themselves: so nothing is left of it, whatever ends it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio

from pgworkd.bench.measure import Times
from pgworkd.errors import AccessRefused, DatabaseUnavailable, PgworkdError
from pgworkd.process import stop_signals
from pgworkd.remote.client import GatewayAddress, GatewayClient

CALLERS_MAX = 20
"""Callers at once: each has a connection, which is kept."""
CHUNK_JOBS, CHUNK_BYTES = 500, 4 * 1024 * 1024
"""At most these in one call of many jobs."""
FORBIDDEN = 403
EXPIRE_S = 600.0
"""When the jobs expire, from the begin of the run: later than its end, by clocks that differ."""
AGAIN_S, REFUSALS_MAX = 0.5, 5
"""After a refused call, its caller pauses; after so many one after the other, the run ends."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """How much a run does: until `jobs` are created, or for `seconds`; `bulk`: many in one call."""

    jobs: int
    seconds: float
    payload_bytes: int
    callers: int
    bulk: bool

    @property
    def chunk(self) -> int:
        """Jobs of one call."""
        return max(1, min(CHUNK_JOBS, CHUNK_BYTES // self.payload_bytes)) if self.bulk else 1


@dataclass(frozen=True, slots=True)
class CallFigures:
    """What a run has found. `calls`: those that were answered, but for the first one of each caller."""

    calls: Times
    jobs: int
    seconds: float
    client_s: float
    """CPU seconds of this process."""
    refused: dict[str, int]
    """Calls that created nothing, by why."""
    keeps_history: bool
    """The token may not change queues: what has expired stays in the history for as long as that is kept."""

    @property
    def rate(self) -> float:
        """Jobs per second."""
        return self.jobs / self.seconds


class CallRun:
    """One run in a queue of its own; `say` prints a line."""

    def __init__(self, plan: CallPlan, address: GatewayAddress, queue: str, say: Callable[[str], None]) -> None:
        self._plan, self._queue, self._say = plan, queue, say
        self._gateway = GatewayClient(address)
        self._left = plan.jobs
        self._created = 0
        self._samples_ms: list[float] = []
        self._refused: Counter[str] = Counter()
        self._keeps_history = False

    async def run(self) -> CallFigures:
        """Measures. Raises PgworkdError, also after a signal."""
        figures: CallFigures | None = None
        problem: PgworkdError | None = None
        with stop_signals.received() as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._heed, signals, tasks.cancel_scope)
                try:
                    figures = await self._measured()
                except* PgworkdError as errors:
                    problem = _first(errors)
                tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._gateway.close()
        if problem is not None:
            raise problem
        if figures is None:
            raise PgworkdError(f"stopped; the jobs in {self._queue} expire within {EXPIRE_S / 60:g} min")
        return figures

    async def _heed(self, signals: Any, work: anyio.CancelScope) -> None:
        async for _ in signals:
            work.cancel()

    async def _measured(self) -> CallFigures:
        try:
            await self._gateway.call("PATCH", f"/v1/queues/{self._queue}", {"keep_s": 0})
        except AccessRefused as error:
            if error.status != FORBIDDEN:
                raise
            self._keeps_history = True
        self._say(f"measuring: {self._plan.callers} at a time, {self._plan.chunk} to a call")
        began_s, cpu_s = time.monotonic(), time.process_time()
        with anyio.move_on_after(self._plan.seconds):
            async with anyio.create_task_group() as callers:
                for _ in range(self._plan.callers):
                    callers.start_soon(self._call_on)
        seconds, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
        if not self._created:
            raise DatabaseUnavailable(f"no job was created within {self._plan.seconds:g} s")
        return CallFigures(
            Times(self._samples_ms), self._created, seconds, cpu_s, dict(self._refused), self._keeps_history
        )

    async def _call_on(self) -> None:
        """Creates jobs until all of the plan are given out."""
        is_first, refusals = True, 0
        while (count := min(self._plan.chunk, self._left)) > 0:
            self._left -= count
            began_s = time.monotonic()
            try:
                path = "/v1/jobs/bulk" if self._plan.bulk else "/v1/jobs"
                await self._gateway.call("POST", path, self._body(count))
            except DatabaseUnavailable as error:  # it is busy, or asks for a pause
                self._left += count
                refusals += 1
                self._refused[str(error)] += 1
                if refusals >= REFUSALS_MAX:
                    raise
                await anyio.sleep(AGAIN_S)
            else:
                self._created += count
                refusals = 0
                if not is_first:  # which connects
                    self._samples_ms.append((time.monotonic() - began_s) * 1e3)
                is_first = False

    def _body(self, count: int) -> bytes:
        payload = {"pad": "x" * max(0, self._plan.payload_bytes - len('{"pad":""}'))}
        at = datetime.now(UTC) + timedelta(seconds=EXPIRE_S)
        job = {"queue": self._queue, "payload": payload, "expires_at": at.isoformat()}
        return json.dumps({"jobs": [job] * count} if self._plan.bulk else job).encode()


def _first(errors: BaseExceptionGroup[PgworkdError]) -> PgworkdError:
    """One of the errors of several callers, which mostly have the same."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
