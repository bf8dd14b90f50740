"""The results of a run, and one sentence on what limits it, with the figures that it is drawn from and a remedy."""

from __future__ import annotations

from dataclasses import dataclass

from pgworkd.bench.measure import Drain, Times
from pgworkd.core.validation import counted
from pgworkd.process.redaction import escaped

BUSY = 0.75
"""A process that uses a core for this share of the time is limited by it: the rest goes to waiting for its turn."""
HOST_BUSY = 0.9
"""A host whose cores are busy for this share of the time, all together, limits a run."""
SLOW_MS = 0.5
"""Waiting for the disk or the network limits only from here on: below, both are about as fast as they can be."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one run."""

    round_trip: Times
    """Durations of a query that does nothing."""
    single: Times
    """One job per transaction, committed durably (synchronous_commit = on)."""
    unsynced: Times
    """One job per transaction, without waiting for the disk (synchronous_commit = off)."""
    bulk: Drain
    """Jobs that were enqueued many at once."""
    drain: Drain
    """A backlog that one worker process ran with a handler that does nothing."""
    complete: bool
    """False: the time limit of the drain came first."""
    busiest_s: float | None
    """CPU seconds of the session that used most during the drain, which can use one core."""
    host_share: float | None
    """How busy all cores of this host were during the drain; None: the server does not run on it."""
    latency: Times | None
    """From just before the INSERT to the first line of the handler, in an idle queue; None: the drain was cut."""
    held: tuple[str, float] | None
    """Who has held a transaction of this database open since before the run began, and for how many seconds."""
    cores: int
    """The CPU cores of this host."""

    @property
    def fsync_ms(self) -> float:
        """How long a commit waits for the disk, or for a synchronous standby."""
        return max(0.0, self.single.at(50) - self.unsynced.at(50))


def judge(figures: Figures) -> tuple[str, str]:
    """What limits draining (machine, worker, server, fsync, network, unknown), and the sentence."""
    limit, finding, remedy = _limit(figures)
    names = {"machine": "the CPU of this machine", "worker": "the CPU of the worker", "server": "the CPU of the server"}
    names |= {"network": "the network", "unknown": "none of CPU, network and fsync"}
    text = f"Draining ({figures.drain.rate:,.0f} jobs/s) is limited by {names.get(limit, limit)} ({finding}): {remedy}"
    if figures.held is not None:
        who, age_s = figures.held
        text += (
            f"; and {escaped(who)} has held a transaction open for {age_s:,.0f} s, longer than this run, which holds "
            "back vacuum and slows down every claim: end it"
        )
    return limit, text + "."


def _limit(figures: Figures) -> tuple[str, str, str]:
    """What limits, the finding, and the remedy."""
    drain, waits_ms, trip_ms = figures.drain, figures.fsync_ms, figures.round_trip.at(50)
    share, host = drain.worker_s / drain.seconds, figures.host_share
    worker = f"the worker used {share:.0%} of a core"
    if host is not None and host >= HOST_BUSY:
        own = (drain.worker_s + (drain.server_s or 0.0)) / drain.seconds / figures.cores
        busy = f"{counted(figures.cores, 'core')}, {host:.0%} busy, with this run {own:.0%}"
        return "machine", busy, "run Postgres, the workers or what else runs here on another one"
    if share >= BUSY:
        remedy = "add processes, as with pgworkd run --processes 2"
        return "worker", f"{worker}, {drain.worker_us:.0f} us per job", remedy
    known = f"{worker}, a round trip takes {trip_ms:.2f} ms, a commit waits {waits_ms:.2f} ms for the disk"
    if figures.busiest_s is not None:
        busiest = figures.busiest_s / drain.seconds
        known += f", the busiest session used {busiest:.0%} of a core, {drain.server_us or 0.0:.0f} us per job"
        if busiest >= BUSY:
            return "server", known, "give it faster cores; further workers use further sessions"
    if waits_ms >= SLOW_MS and waits_ms >= trip_ms:
        return "fsync", known, "use a faster disk for the WAL, or more processes"
    if trip_ms >= SLOW_MS:
        return "network", known, "run workers nearer to the database, or more processes"
    if figures.busiest_s is None:
        return "server", f"{known}, its CPU is not visible from here", "look there with top while this runs again"
    return "unknown", known, "look for locks in pg_stat_activity, or raise --concurrency, --jobs"
