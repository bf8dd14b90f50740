"""What a run measured. Times in milliseconds, rates per second, CPU in microseconds per job, shares from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of `count` samples, in ms."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    count: int

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Spread:
        """The percentiles (nearest rank) of samples in seconds, of which there must be one at least."""
        ordered = sorted(samples_s)
        at = [ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] * 1000 for percent in (50, 95, 99)]
        return cls(at[0], at[1], at[2], len(ordered))


@dataclass(frozen=True, slots=True)
class BulkFigures:
    """Jobs that were enqueued many at once."""

    jobs: int
    seconds: float

    @property
    def per_s(self) -> float:
        """Jobs per second."""
        return self.jobs / self.seconds


@dataclass(frozen=True, slots=True)
class Drain:
    """A backlog that one worker process ran with a handler that does nothing.

    None: not known, as the server, or its processes, are not visible from this host.
    """

    jobs: int
    seconds: float
    worker_s: float
    """CPU seconds of the worker's process."""
    server_s: float | None
    """CPU seconds of all of the worker's sessions on the server."""
    busiest_s: float | None
    """CPU seconds of the session that used most: a session can use one core."""
    host_share: float | None
    """How busy all cores of this host were, if the server runs on it."""
    complete: bool
    """False: the time limit came first."""

    @property
    def per_s(self) -> float:
        """Jobs per second."""
        return self.jobs / self.seconds

    @property
    def worker_us(self) -> float:
        """CPU of the worker per job."""
        return self.worker_s / max(1, self.jobs) * 1e6

    @property
    def server_us(self) -> float | None:
        """CPU of the server's sessions per job."""
        return None if self.server_s is None else self.server_s / max(1, self.jobs) * 1e6

    @property
    def worker_share(self) -> float:
        """The part of the time in which the worker's process used a core."""
        return self.worker_s / self.seconds

    def own_share(self, cores: int) -> float:
        """The part of all cores of a host that the worker and its sessions used."""
        return (self.worker_s + (self.server_s or 0.0)) / self.seconds / cores

    @property
    def busiest_share(self) -> float | None:
        """The part of the time in which the server's busiest session used a core."""
        return None if self.busiest_s is None else self.busiest_s / self.seconds


@dataclass(frozen=True, slots=True)
class Held:
    """A transaction of this database that was open before the run began and still is."""

    who: str
    age_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one run."""

    round_trip: Spread
    """Duration of a query that does nothing."""
    single: Spread
    """Duration of an enqueue in a transaction of its own, committed durably (synchronous_commit = on)."""
    single_unsynced: Spread
    """Duration of an enqueue that does not wait for the disk (synchronous_commit = off)."""
    bulk: BulkFigures
    drain: Drain
    latency: Spread | None
    """Time from just before the INSERT to the first line of the handler, in an idle queue; None: the drain was cut."""
    held: Held | None
    cores: int
    """Cores of this host."""
