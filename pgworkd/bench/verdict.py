"""One sentence on what limits a run, with the figures that it is drawn from and a remedy. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

from pgworkd.bench.figures import Drain, Figures
from pgworkd.core.redaction import escaped
from pgworkd.core.validation import counted

BUSY = 0.75
"""A process that uses a core for this share of the time is limited by it: the rest goes to waiting for its turn."""
HOST_BUSY = 0.9
"""A host whose cores are busy for this share of the time, all together, limits a run."""
SLOW_MS = 0.5
"""Waiting for the disk or the network limits only from here on: below, both are about as fast as they can be."""


class BenchVerdict(NamedTuple):
    """What limits draining (machine, others, worker, server, fsync, network, unknown), and single enqueues."""

    drain: str
    enqueue: str
    """fsync, network, or none of these."""
    sentence: str


def judge(figures: Figures) -> BenchVerdict:
    """The verdict on these figures."""
    drain, text = _drain(figures)
    enqueue, more = _enqueue(figures, drain)
    parts = [text, *filter(None, [more])]
    if figures.held is not None:
        parts.append(
            f"and {escaped(figures.held.who)} has held a transaction open for {figures.held.age_s:,.0f} s, longer than "
            "this run, which holds back vacuum and slows down every claim: end it"
        )
    return BenchVerdict(drain, enqueue, "; ".join(parts) + ".")


def fsync_ms(figures: Figures) -> float:
    """How long a commit waits for the disk, or for a synchronous standby, in ms."""
    return max(0.0, figures.single.p50_ms - figures.single_unsynced.p50_ms)


def _drain(figures: Figures) -> tuple[str, str]:
    drain = figures.drain
    rate = f"Draining ({drain.per_s:,.0f} jobs/s) is limited by"
    waits_ms, trip_ms = fsync_ms(figures), figures.round_trip.p50_ms
    worker = f"the worker used {drain.worker_share:.0%} of a core"
    if drain.host_share is not None and drain.host_share >= HOST_BUSY:
        own = drain.own_share(figures.cores)
        if own < drain.host_share / 2:
            finding = f"it was {drain.host_share:.0%} busy, but with this run only {own:.0%}"
            return "others", f"{rate} the other processes on this machine ({finding}): measure again when they rest"
        finding = f"worker and server share {counted(figures.cores, 'core')}, {drain.host_share:.0%} busy"
        return "machine", f"{rate} the CPU of this machine ({finding}): run Postgres or the workers elsewhere"
    if drain.worker_share >= BUSY:
        finding = f"it used {drain.worker_share:.0%} of a core, {drain.worker_us:.0f} us per job"
        return "worker", f"{rate} the CPU of the worker ({finding}): add processes, as with pgworkd run --processes 2"
    if drain.busiest_share is not None and drain.busiest_share >= BUSY:
        remedy = "give it faster cores; further workers use further sessions"
        return "server", f"{rate} the CPU of the server ({_busy_session(drain)}; {worker}): {remedy}"
    if waits_ms >= SLOW_MS and waits_ms >= trip_ms:
        finding = f"a commit waits {waits_ms:.1f} ms for it, a round trip takes {trip_ms:.1f} ms; {worker}"
        return "fsync", f"{rate} fsync ({finding}): use a faster disk for the WAL, or more processes"
    if trip_ms >= SLOW_MS:
        finding = f"a round trip takes {trip_ms:.1f} ms, a commit waits {waits_ms:.1f} ms for the disk; {worker}"
        return "network", f"{rate} the network ({finding}): run workers nearer to the database, or more processes"
    known = f"{worker}, a round trip takes {trip_ms:.2f} ms, a commit waits {waits_ms:.2f} ms for the disk"
    if drain.busiest_share is None:
        remedy = "look there with top while it runs again"
        return "server", f"{rate} the server, by elimination ({known}; its CPU is not visible from here): {remedy}"
    finding = f"{known}, and {_busy_session(drain)}"
    remedy = "look for locks in pg_stat_activity, or raise --concurrency, --jobs"
    return "unknown", f"{rate} none of CPU, network and fsync ({finding}): {remedy}"


def _busy_session(drain: Drain) -> str:
    return (
        f"its busiest session used {drain.busiest_share or 0.0:.0%} of a core, {drain.server_us or 0.0:.0f} us per job"
    )


def _enqueue(figures: Figures, drain: str) -> tuple[str, str | None]:
    """What limits single enqueues, and the text, unless the same has been said already."""
    single_ms, waits_ms, trip_ms = figures.single.p50_ms, fsync_ms(figures), figures.round_trip.p50_ms
    each = f"enqueueing one job per transaction takes {single_ms:.1f} ms"
    remedy = "enqueue many at once, or in transactions that you commit anyway"
    if waits_ms >= SLOW_MS and waits_ms >= single_ms / 2:
        return "fsync", f"{each}, of which {waits_ms:.1f} ms are fsync: {remedy}"
    if trip_ms >= SLOW_MS and trip_ms >= single_ms / 2:
        told = drain == "network"
        return (
            "network",
            f"{each}, of which {trip_ms:.1f} ms are {'that' if told else 'a network'} round trip: {remedy}",
        )
    return "none", None
