"""What this process has counted since it started: the numbers behind `queue_minutes` and the metrics.

Plain integers, written in the daemon's loop, once per claim and once per flush of the settler; read from any thread.
A start is counted with the end of its run, or before, if the run still lasts when somebody looks (`begun`). Nothing is
decided by them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import anyio

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.histogram import Histogram, percentile
from pgworkd.core.job import OUTCOMES
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.refusals import Refusals

KINDS_MAX = 200
"""Kinds of the app, and others, that are counted apart: a program that makes a kind per job must not fill a metric."""
OTHER = "other"
"""The kind that stands for all further kinds."""


class KindCounters:
    """The attempts of one kind in one queue that were started, and those that have ended."""

    __slots__ = ("ended", "runs", "started", "waits")

    def __init__(self) -> None:
        self.started = 0
        """Attempts whose handler was called."""
        self.ended = dict.fromkeys(OUTCOMES, 0)
        self.waits = Histogram()
        """Times from due to started."""
        self.runs = Histogram()

    def begun(self, waits_s: list[float]) -> None:
        """Adds attempts that were started: how long each waited, in seconds."""
        self.started += len(waits_s)
        self.waits.observe_all(waits_s)


class Counters:
    """All counters of this process."""

    def __init__(self, events_: Events, declared: Collection[str] = ()) -> None:
        """`declared`: the kinds of the app, which have places of their own."""
        self.declared, self._known = declared, {True: 0, False: 0}
        self.kinds: dict[tuple[str, str], KindCounters] = {}
        """The counters of each queue and kind."""
        self.claims: Counter[tuple[str, str]] = Counter()
        """Claims by queue and result: jobs, empty, failed."""
        self.refusals = Refusals(events_)
        """The claims that fail now."""
        self.claim_s, self.settle_s, self.wake_s = Histogram(), Histogram(), Histogram()
        """Durations of claims and settles, answered or not; from a notification to the answer of its claim."""
        self.maintenance_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Durations of maintenance, by task."""
        self.rescued: Counter[str] = Counter()
        """Jobs taken back from lost workers, by queue."""
        self.fences = 0
        """How often the lease could not be renewed in time."""
        self.database_ahead_s = time.time() - time.monotonic()
        """The database's time, in seconds since the epoch, less this process' monotonic clock; at first the host's."""
        self.usual: Mapping[tuple[str, str], Sequence[int]] = {}
        """By queue and kind: the durations of runs of the last days, by any process, as the database has them."""
        self.died = anyio.Event()
        """Set when a job has died here, until `Signals` has counted it."""
        self.answers: Counter[tuple[str, str]] = Counter()
        """Answers of endpoints by endpoint and status; `none`: there was no answer."""
        self.answer_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        """From a request to the answer, by endpoint."""
        events_.listen(self._on_event, except_for=events.names() - {events.LEASE_FENCED, events.PUSH_ANSWERED})

    def of(self, queue: str, kind: str) -> KindCounters:
        """The counters of a kind; beyond KINDS_MAX that the app does not declare, those of OTHER."""
        found = self.kinds.get((queue, kind))
        if found is None:
            if kind != OTHER:
                ours = kind in self.declared
                if self._known[ours] >= KINDS_MAX:
                    return self.of(queue, OTHER)
                self._known[ours] += 1
            found = self.kinds[queue, kind] = KindCounters()
        return found

    def claim_failed(self, queue: str, took_s: float) -> None:
        """Counts a claim that was not answered, or with an error, after that time."""
        self.claims[queue, "failed"] += 1
        self.claim_s.observe(took_s)

    def claimed(self, queue: str, jobs: int, took_s: float, notified_ago_s: float | None) -> None:
        """Counts a claim that was answered; `notified_ago_s`: how long before it was sent a notification came."""
        self.claims[queue, "jobs" if jobs else "empty"] += 1
        self.claim_s.observe(took_s)
        if notified_ago_s is not None:
            self.wake_s.observe(notified_ago_s + took_s)

    def begun(self, attempts: Sequence[Attempt]) -> None:
        """Counts the starts of attempts whose handler has been called, each once."""
        for (queue, kind), of_kind in _by_kind([each for each in attempts if each.started is not None]).items():
            self.of(queue, kind).begun(self._waits_s(of_kind))
            for each in of_kind:
                each.start_counted = True

    def _waits_s(self, attempts: Sequence[Attempt]) -> list[float]:
        """How long each has waited whose start was not counted yet, in seconds."""
        ahead_s = self.database_ahead_s
        return [
            each.started + ahead_s - each.claimed.run_at
            for each in attempts
            if each.started is not None and not each.start_counted
        ]

    def ended(self, outcome: str, batch: Sequence[Attempt]) -> None:
        """Counts attempts that have ended in the same way."""
        for (queue, kind), attempts in _by_kind(batch).items():
            of_kind = self.of(queue, kind)
            of_kind.begun(self._waits_s(attempts))
            of_kind.ended[outcome] += len(attempts)
            of_kind.runs.observe_all([each.ended - each.started for each in attempts if each.started is not None])
        if outcome == "dead":
            self.died.set()

    def usual_s(self, queue: str, kind: str, least: int) -> float | None:
        """The median duration of runs, in seconds: those of the last days, and of this process; None: too few."""
        ours, stored = self.of(queue, kind).runs.counts, self.usual.get((queue, kind))
        counts = ours if stored is None else [a + b for a, b in zip(ours, stored, strict=True)]
        return percentile(counts, 0.5) if sum(counts) >= least else None

    @property
    def calls(self) -> int:
        """Settles, and claims that took jobs: a number that rises when anything changes here."""
        return sum(self.settle_s.counts) + sum(n for (_, result), n in self.claims.items() if result == "jobs")

    def taken_back(self, queue: str, kind: str, status: str) -> None:
        """Counts a job that was rescued from a lost worker; `status` is its new one."""
        self.rescued[queue] += 1
        if status == "dead":
            self.of(queue, kind).ended["dead"] += 1
            self.died.set()

    def expired(self, queue: str, kind: str, jobs: int) -> None:
        """Counts jobs that maintenance here has ended, as they had not begun by their `expires_at`."""
        self.of(queue, kind).ended["expired"] += jobs

    def failed_for(self, queue: str, kind: str, status: str) -> None:
        """Counts an attempt of a remote worker that maintenance has ended; `status` is the job's new one."""
        self.of(queue, kind).ended[status] += 1
        if status == "dead":
            self.died.set()

    def _on_event(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == events.LEASE_FENCED:
            self.fences += 1
            return
        endpoint, status = facts["endpoint"], facts["status"]
        self.answers[endpoint, "none" if status is None else str(status)] += 1
        self.answer_s[endpoint].observe(facts["took_s"])


def _by_kind(batch: Sequence[Attempt]) -> Mapping[tuple[str, str], Sequence[Attempt]]:
    """The attempts of each queue and kind: nearly always of one."""
    kinds = {(each.queue, each.claimed.kind) for each in batch}
    if len(kinds) == 1:
        return {kinds.pop(): batch}
    found = defaultdict[tuple[str, str], list[Attempt]](list)
    for each in batch:
        found[each.queue, each.claimed.kind].append(each)
    return found
