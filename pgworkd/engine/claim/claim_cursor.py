"""Where a pool's next claim begins: behind what it has claimed, so that it need not scan what is finished.

While some transaction holds back vacuum, the index entries of finished jobs stay, and a claim that begins at the head
of the queue scans all of them. A pool therefore remembers, per priority, the last row it has claimed. Rows may still
appear before it: committed late, backdated, retried, released. They are found by sweeps whose reach doubles: every
20 ms a claim begins 40 ms (of `run_at`) further back, every 40 ms 80 ms, and so on up to 10 s, and every 10 s at the
head. A straggler thus waits about as long as its own transaction took, and each reach costs the same. Sweeps that
prove expensive are made more rarely: each reach takes a hundredth of the time at most.

Where jobs have keys, the database returns how far a claim has come, as a text that is passed to the next claim; how
far to reach back is decided here, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from pgworkd.core.claims import ClaimedJob

PERIOD_FIRST_S = 0.02
LEVELS = 10
"""Level k sweeps every 20 ms * 2**k; the last (every 10.24 s) begins at the head."""
REACH_PERIODS = 2
"""A sweep reaches this many of its periods back: by then the place may have moved on by one period since the straggler
was committed before it."""
COST_SHARE = 0.01
"""Maximum share of the time for the sweeps of one level."""
PRIORITIES_MAX = 180
"""Priorities remembered, the last used ones: each costs every claim an index probe, of which it makes 200 at most."""
RENEW_EVERY = 256
"""Jobs with keys: new places are requested once per this many jobs; until then a claim scans those finished since."""
_FIRST_ID = UUID(int=0)
_PRIORITY = re.compile(r"\([tf],(-?\d+),")  # of a `claim_place`


class Position(NamedTuple):
    """A place in the claim order of one priority; `run_at` is in seconds since the epoch."""

    run_at: float
    id: UUID


class Start(NamedTuple):
    """Where a claim begins: three parallel columns, by descending priority. A missing priority begins at its head."""

    priorities: list[int]
    run_ats: list[float]
    ids: list[UUID]


class Keyed(NamedTuple):
    """Where a claim of keyed jobs begins: behind `places`, or `reach_s` before (None: at the head), or from `since`."""

    places: str
    reach_s: float | None
    since: float | None
    renew: bool


class ClaimCursor:
    """One pool's places. Times are on the loop's clock, in seconds."""

    def __init__(self) -> None:
        self._positions: dict[int, Position] = {}  # by priority, the one used last comes last
        self._due_at = [0.0] * LEVELS
        self._cost_s = [0.0] * LEVELS
        self._usual_s: float | None = None  # duration of a claim that is no sweep
        self._level: int | None = None  # of the claim under way; None: no sweep
        self._rewound: float | None = None  # to which run_at, since that claim began
        self._places = "{}"  # of jobs with keys, as returned by the database
        self._passed = 0  # jobs claimed since then
        self._renews = True  # whether the claim under way asks for new places
        self._since: float | None = None  # the run_at at which the next claim of those begins at the latest

    def start(self, now: float) -> Start:
        """Where a claim made now begins."""
        self._rewound = None
        self._level = next((level for level in reversed(range(LEVELS)) if now >= self._due_at[level]), None)
        if self._level == LEVELS - 1:
            return Start([], [], [])
        places = sorted(self._positions.items(), reverse=True)
        if self._level is None:
            return Start([p for p, _ in places], [at.run_at for _, at in places], [at.id for _, at in places])
        reach_s = REACH_PERIODS * PERIOD_FIRST_S * 2**self._level
        return Start([p for p, _ in places], [at.run_at - reach_s for _, at in places], [_FIRST_ID] * len(places))

    def keyed(self) -> Keyed:
        """Where the claim of the last `start` begins among jobs with keys."""
        self._renews = self._places == "{}" or self._passed >= RENEW_EVERY or self._since is not None
        if self._level == LEVELS - 1:
            return Keyed(self._places, None, self._since, self._renews)
        reach_s = 0.0 if self._level is None else REACH_PERIODS * PERIOD_FIRST_S * 2**self._level
        return Keyed(self._places, reach_s, self._since, self._renews)

    def claimed(
        self, rows: Sequence[ClaimedJob], now: float, took_s: float, *, full: bool, places: str | None = None
    ) -> None:
        """Moves on after a claim: `rows` are its rows in order; `full`: there may be more, behind the last.

        `places`: how far it has come among jobs with keys; its rows then tell nothing about the others.
        """
        level, self._level = self._level, None
        last: dict[int, Position] = {}
        if places is not None:
            self._passed = len(rows) if self._renews else self._passed + len(rows)
            self._places, self._since = places, self._rewound
            rows = ()
        for row in reversed(rows):
            if row.priority not in last and not row.is_suspect:  # suspects have an order of their own
                last[row.priority] = Position(row.run_at, row.id)
        for priority, position in last.items():
            # A claim that was full, or began at the head, continues from there, even if that is further back.
            exact = level == LEVELS - 1 or (full and priority == min(last))
            known = self._positions.pop(priority, None)
            self._positions[priority] = position if exact or known is None else max(known, position)
        if self._rewound is not None:
            self.rewind(self._rewound)  # the claim may have been past it already
        self._forget_most()
        if level is None:
            self._usual_s = took_s if self._usual_s is None else self._usual_s + 0.2 * (took_s - self._usual_s)
            return
        cost_s = self._cost_s[level] = max(0.0, took_s - (self._usual_s or 0.0))
        self._due_at[level] = now
        for each in range(level + 1):  # it has covered the shorter reaches, which take no longer
            pause_s = max(PERIOD_FIRST_S * 2**each, min(cost_s, self._cost_s[each]) / COST_SHARE)
            self._due_at[each] = max(self._due_at[each], now + pause_s)

    def passed(self, places: Sequence[tuple[int, float]]) -> None:
        """Continues behind these run_at, up to which a claim found only kinds left to other workers."""
        for priority, run_at in places:
            known = self._positions.pop(priority, None)
            place = Position(run_at, _FIRST_ID)
            self._positions[priority] = place if known is None else max(known, place)
        self._forget_most()
        if self._rewound is not None:
            self.rewind(self._rewound)

    def _forget_most(self) -> None:
        while len(self._positions) > PRIORITIES_MAX:
            del self._positions[next(iter(self._positions))]

    def priorities(self) -> list[int]:
        """The priorities in which jobs have been claimed, and the default one, descending."""
        return sorted({0, *self._positions, *map(int, _PRIORITY.findall(self._places))}, reverse=True)

    def rewind(self, run_at: float) -> None:
        """Goes back for a row that was due then, and has become claimable again."""
        self._rewound = run_at if self._rewound is None else min(run_at, self._rewound)
        self._since = run_at if self._since is None else min(run_at, self._since)
        back = Position(run_at, _FIRST_ID)
        self._positions = {priority: min(known, back) for priority, known in self._positions.items()}

    def recheck_head(self, now: float) -> None:
        """Begins at the head as soon as that is not too expensive: a job is due that no claim found."""
        last = LEVELS - 1
        period_s = PERIOD_FIRST_S * 2**last
        made_at = self._due_at[last] - max(period_s, self._cost_s[last] / COST_SHARE)
        self._due_at[last] = min(self._due_at[last], max(now, made_at + self._cost_s[last] / COST_SHARE))
