"""Collects what operators watch: samples of all queues, this process' statistics, deaths and their alerts.

Its methods are tasks of `Maintenance`, and as these they return the seconds until they are next due.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection

import anyio

from pgworkd.core import events
from pgworkd.database.signal_store import DEATHS_STEP, AlertRule, Minutes, SignalStore
from pgworkd.engine.counters import KINDS_MAX, KindCounters
from pgworkd.engine.shared import Shared
from pgworkd.errors import OutcomeUnknown

MINUTES_S = 10.0
"""A crash loses this much of the statistics at most, in seconds."""
DEATHS_S = 60.0
"""How often deaths are looked for that another process saw, and did not count because it was killed."""
ALERT_S_MIN = 2.0
"""An alert that waits, as one before it has not been sent yet, is looked at this often."""
DECLARE_S = 600.0
"""How often this program's alert rules are declared: those that nobody declares are deleted after a day."""
ROLL_UP_S = 600.0
USUAL_S = 3600.0
"""How often it is read how long the kinds of this program usually run."""
FIRST_S = {"sample": 2.0, "usual": 2.0, "deaths": 2.0, "minutes": MINUTES_S, "roll_up": 30.0}
"""How long after the start each task runs first, in seconds: when a fleet restarts, jobs come first."""
IDLE_SAMPLE_S = 60.0
"""Time between samples while this daemon claims and settles nothing: the fleet takes one every 5 s else."""
TICK_S = 0.25
LAST_S = 2.0
"""How long a stop waits for the last statistics to be written."""


class Signals:
    """The tasks of one daemon. `statistics` False: it adds nothing but deaths; what is old is deleted all the same."""

    def __init__(
        self,
        store: SignalStore,
        shared: Shared,
        worker_name: str,
        keep_dead_days: int,
        rules: Collection[AlertRule] = (),
        *,
        clock_ahead_s: Callable[[], float],
        statistics: bool,
        queues: Collection[str] = (),
    ) -> None:
        """`clock_ahead_s`: by how many seconds the database's clock is ahead of the host's.

        `queues`: those with handlers here, as they are served.
        """
        self._store = store
        self._counters, self._events = shared.counters, shared.events
        self._worker_name = worker_name
        self._keep_dead_days = keep_dead_days
        self._rules = rules
        self._declare_at = 0.0
        self._statistics, self._queues = statistics, queues
        self._written: dict[tuple[str, str], Minutes] = {}  # the totals up to the last append
        self._written_at = time.monotonic()
        self._clock_ahead_s = clock_ahead_s
        self._sample_at, self._sampled = time.monotonic() + FIRST_S["sample"], 0
        self.sample_due = anyio.Event()
        """Set when a sample is due because something was claimed or settled since the last one."""
        always = (self.deaths, self.roll_up)
        self.tasks = (self.sample, self.minutes, self.usual, *always) if statistics else always

    async def sample(self) -> float:
        """Counts the jobs of all queues, if that is due in the fleet."""
        self.sample_due = anyio.Event()
        self._sampled = self._counters.calls
        delay_s = await self._store.sample()
        self._sample_at = time.monotonic() + delay_s
        return max(delay_s, IDLE_SAMPLE_S)

    async def usual(self) -> float:
        """Reads how long the kinds of this program usually run: a new process knows it from the start."""
        if queues := list(self._queues):
            self._counters.usual = await self._store.usual(queues, list(self._counters.declared)[:KINDS_MAX])
        return USUAL_S

    async def roll_up(self) -> float:
        """Sums up old statistics, and deletes the oldest."""
        return 0.1 if await self._store.roll_up(self._keep_dead_days) else ROLL_UP_S

    async def begin(self) -> None:
        """Begins the first period and declares the alert rules, before anything runs here.

        A death makes the alerts of the rules that are stored.
        """
        self._written_at = time.monotonic()
        if self._rules:
            await self._declare()

    async def _declare(self) -> None:
        for name in await self._store.declare_alerts(self._rules):
            self._events.emit(events.ALERT_DIFFERS, rule=name)
        self._declare_at = anyio.current_time() + DECLARE_S

    async def deaths(self) -> float:
        """Counts deaths by their errors, and inserts the jobs of alerts."""
        self._counters.died = anyio.Event()
        if anyio.current_time() >= self._declare_at:
            await self._declare()
        counted = await self._store.count_deaths()
        if counted is None:
            return 1.0  # another daemon counts, maybe not those of the last moment
        if counted >= DEATHS_STEP:
            return 0.1
        due_in_s = await self._store.next_alert_s()  # of what has come within a rule's bundle_s
        return DEATHS_S if due_in_s is None else min(max(due_in_s, ALERT_S_MIN), DEATHS_S)

    async def minutes(self) -> float:
        """Writes what has ended since the last call."""
        now = time.monotonic()
        self._counters.database_ahead_s = time.time() - now + self._clock_ahead_s()
        totals = {key: _totals(key, of_kind) for key, of_kind in self._counters.kinds.items()}
        rows = [_less(total, self._written.get(key)) for key, total in totals.items()]
        changed = [row for row in rows if row.started or row[3:7] != (0, 0, 0, 0)]
        if changed:
            # If the answer is lost, it counts as written: better once too few than twice.
            with contextlib.suppress(OutcomeUnknown):
                await self._store.append(self._worker_name, max(now - self._written_at, 0.001), changed)
        self._written, self._written_at = totals, now
        return MINUTES_S

    async def write_last(self) -> None:
        """Writes the rest of the statistics at a stop, if the database is there. Raises PgworkdError."""
        if self._statistics:
            with anyio.move_on_after(LAST_S):
                await self.minutes()

    async def tick(self) -> None:
        """Notes when a sample is due, until cancelled."""
        while True:
            if time.monotonic() >= self._sample_at and self._counters.calls != self._sampled:
                self.sample_due.set()
            await anyio.sleep(TICK_S)


def _totals(key: tuple[str, str], of_kind: KindCounters) -> Minutes:
    ended, waits, runs = of_kind.ended, of_kind.waits, of_kind.runs
    counts = (of_kind.started, ended["completed"], ended["failed"], ended["dead"], ended["released"])
    return Minutes(*key, *counts, list(waits.counts), list(runs.counts), waits.sum_s, runs.sum_s)


def _less(total: Minutes, before: Minutes | None) -> Minutes:
    """The counts of a period: the totals at its end, less those at its beginning."""
    if before is None:
        return total
    waits = [a - b for a, b in zip(total.waits, before.waits, strict=True)]
    runs = [a - b for a, b in zip(total.runs, before.runs, strict=True)]
    return Minutes(
        total.queue,
        total.kind,
        total.started - before.started,
        total.completed - before.completed,
        total.failed - before.failed,
        total.dead - before.dead,
        total.released - before.released,
        waits,
        runs,
        total.wait_s - before.wait_s,
        total.run_s - before.run_s,
    )
