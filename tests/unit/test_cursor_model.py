"""A model of the cursor and claim(): whatever happens to the table, no due row waits for long."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from pgworkd.core.claims import ClaimedJob
from pgworkd.engine.claim.claim_cursor import COST_SHARE, LEVELS, PERIOD_FIRST_S, PRIORITIES_MAX, ClaimCursor, Start

pytestmark = pytest.mark.slow("a model of claims in simulated time")

HEAD_S = PERIOD_FIRST_S * 2 ** (LEVELS - 1)
EPOCH = 1_700_000_000.0
TOOK_S = 0.001
ROOM = 10_000


@dataclass(eq=False)
class Row:
    """One waiting row; `late_at`: from then on it waits too long (infinite while it is not due)."""

    priority: int
    run_at: float
    id: UUID
    late_at: float = math.inf


class World:
    """A table, its clock, and one pool that claims every few milliseconds."""

    def __init__(self, step_s: float, seed: int, *, busy: bool) -> None:
        self.now = 100.0
        self.limit = ROOM
        self.waiting: list[Row] = []
        self.held: list[Row] = []
        self.priorities = {0}
        self._busy = busy
        self._step_s = step_s
        self._behind_s = -EPOCH  # the database's clock behind the loop's
        self._cursor = ClaimCursor()
        self._rng = random.Random(seed)  # noqa: S311 - repeatable

    @property
    def db_now(self) -> float:
        return self.now - self._behind_s

    @property
    def slack_s(self) -> float:
        """Time until the second next claim returns; at first a sweep seems expensive, for lack of a normal claim."""
        return 2 * (self._step_s + 2 * TOOK_S) + TOOK_S / COST_SHARE

    # The table

    def insert(self, priority: int, run_at: float, count: int = 1) -> None:
        self.priorities.add(priority)
        self._put([Row(priority, run_at, UUID(int=self._rng.getrandbits(128))) for _ in range(count)])

    def _put(self, rows: list[Row]) -> None:
        for row in rows:
            row.late_at = math.inf
        self.waiting += rows
        self._watch()

    def _watch(self, *, anew: bool = False) -> None:
        """Starts the clock of due waiting rows; `anew`: also of those that have been waiting."""
        for row in self.waiting:
            if row.run_at > self.db_now:
                row.late_at = math.inf
            elif anew or row.late_at == math.inf:
                row.late_at = self.now + self.slack_s + self._bound_s(row)

    def _bound_s(self, row: Row) -> float:
        """Its run_at is at most now, unless the clock has jumped."""
        known = self._cursor._positions.get(row.priority)
        behind_s = max(self.db_now, known.run_at if known else 0.0) - row.run_at
        return min(HEAD_S, max(0.04, 4 * behind_s))

    def give_back(self, *, rewind: bool, soon: bool) -> None:
        """Returns half of the claimed rows with their old run_at; `soon`: no claim is in progress, a rewind applies."""
        back, self.held = self.held[::2], self.held[1::2]
        self._put(back)
        for row in back if rewind else ():
            self._cursor.rewind(row.run_at)
            if soon and row.run_at <= self.db_now:
                row.late_at = self.now + self.slack_s

    def retry(self, delay_s: float) -> None:
        back, self.held = self.held[::2], self.held[1::2]
        for row in back:
            row.run_at = self.db_now + delay_s
        self._put(back)

    def jump_back(self) -> None:
        self._behind_s += 3600.0
        self._watch(anew=True)

    def recheck_head(self) -> None:
        self._cursor.recheck_head(self.now)
        for row in self.waiting:
            row.late_at = min(row.late_at, self.now + 2 * TOOK_S / COST_SHARE + self.slack_s)
        self._watch()

    # The pool

    def claim(self, under_way: Callable[[], None] = lambda: None) -> None:
        """One claim, which does not see what happens meanwhile."""
        self.now += self._step_s
        if self._busy and len(self.waiting) < 100:
            for priority in tuple(self.priorities)[:4]:
                self.insert(priority, self.db_now)
        self._watch()
        start = self._cursor.start(self.now)
        taken = self._answer(start)
        answer = [ClaimedJob(r.id, "", "", 1, 0, 3, None, r.priority, 0, r.run_at, 0, None, None, None) for r in taken]
        sweeps = any(at.int == 0 for at in start.ids) or not start.ids
        took_s = TOOK_S * (1.4 if sweeps else 1.0)
        self.now += took_s / 2
        under_way()
        self.now += took_s / 2
        full = len(taken) == self.limit
        self._cursor.claimed(answer, self.now, took_s, full=full)
        if full:  # no capacity for the others: they wait from now on
            self._watch(anew=True)
        for row in self.waiting:
            assert self.now <= row.late_at, f"{row}: due for {self.db_now - row.run_at} s, and not claimed"

    def _answer(self, start: Start) -> list[Row]:
        """What claim() does."""
        known = {p: (run_at, at) for p, run_at, at in zip(*start, strict=True)}
        nothing = (-math.inf, UUID(int=0))
        seen = [
            r for r in self.waiting if r.run_at <= self.db_now and (r.run_at, r.id) > known.get(r.priority, nothing)
        ]
        taken = sorted(seen, key=lambda r: (-r.priority, r.run_at, r.id))[: self.limit]
        gone = set(taken)
        self.waiting = [r for r in self.waiting if r not in gone]
        self.held = (self.held + taken)[-20:]
        return taken

    def go_on(self, for_s: float) -> None:
        until = self.now + for_s
        while self.now < until:
            self.claim()

    @property
    def is_drained(self) -> bool:
        return all(row.run_at > self.db_now for row in self.waiting)


def apply(world: World, kind: str, priority: int, size: float, *, soon: bool) -> None:
    """One thing that happens; `size` from 0 to 1."""
    late_s = 0.001 * 20_000**size  # 1 ms to 20 s
    match kind:
        case "insert":
            world.insert(priority, world.db_now)
        case "late":
            world.insert(priority, world.db_now - late_s)
        case "hours":
            world.insert(priority, world.db_now - 3600 * (1 + 40 * size))
        case "many":
            world.insert(priority, world.db_now - (late_s if size > 0.5 else 0.0), count=30)
        case "priorities":
            for other in range(int(size * 1.5 * PRIORITIES_MAX)):
                world.insert(other - 10, world.db_now)
        case "retry":
            world.retry(size)
        case "back" | "rewind":
            world.give_back(rewind=kind == "rewind", soon=soon)
        case "limit":
            world.limit = 1 + int(size * 20)
        case "jump":
            world.jump_back()
        case _:
            world.recheck_head()


IN_BETWEEN = ["limit", "jump", "doubt"]
UNDER_WAY = ["insert", "late", "late", "hours", "many", "priorities", "retry", "back", "rewind"]
WHAT = st.tuples(st.sampled_from(UNDER_WAY + IN_BETWEEN), st.sampled_from([0, 0, 0, 1, 9, -3]), st.floats(0, 1))
QUICK = settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
"""Shrinking runs for minutes: a failing case is short enough as it is."""
PAUSES = st.sampled_from([0.0, 0.0, 0.015, 0.05, 0.3, 1.5])


RETRIED_UNHEARD = [
    (1.5, False, ("back", 0, 0.0)),
    (0.0, True, ("back", 0, 0.0)),
    (0.0, True, ("retry", 0, 0.6)),
    (1.5, False, ("insert", 0, 0.0)),
]
"""A row is retried before the pool has received the reply to the claim that took it."""


@pytest.mark.parametrize("busy", [False, True])
@QUICK
@given(
    events=st.lists(st.tuples(PAUSES, st.booleans(), WHAT), min_size=1, max_size=12),
    step_s=st.sampled_from([0.002, 0.005, 0.01]),
    seed=st.integers(0, 99),
)
@example(events=RETRIED_UNHEARD, step_s=0.01, seed=63)
def test_every_due_row_is_claimed_within_its_bound(
    *, busy: bool, events: list[tuple[float, bool, tuple[str, int, float]]], step_s: float, seed: int
) -> None:
    """At most about four times as late as its own transaction, or 40 ms if that is more; 10.24 s in any case."""
    world = World(step_s, seed, busy=busy)
    for pause_s, under_way, (kind, priority, size) in events:
        world.go_on(pause_s)
        if under_way and kind in UNDER_WAY:
            world.claim(lambda what=(kind, priority, size): apply(world, *what, soon=False))
        else:
            apply(world, kind, priority, size, soon=True)
            world.claim()
    world.limit = ROOM
    waits_until = world.now + HEAD_S + 1
    while not world.is_drained:
        world.claim()
        assert world.now < waits_until


@QUICK
@given(
    costs=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=30),
    step_s=st.sampled_from([0.01, 0.03, 0.05]),
)
def test_sweeps_of_any_cost_take_a_bounded_share_of_time(costs: list[float], step_s: float) -> None:
    """Each reach takes at most its share, except for its first sweep; and the head is still swept."""
    cursor, now, spent_s, sweeps, head_at = ClaimCursor(), 100.0, 0.0, 0, 100.0
    cursor.start(now)
    cursor.claimed(
        [ClaimedJob(UUID(int=7), "", "", 1, 0, 3, None, 0, 0, EPOCH, 0, None, None, None)], now, 0, full=False
    )
    while now < 200.0:
        start = cursor.start(now)
        took_s = TOOK_S
        if not start.ids or not start.ids[0].int:
            took_s += costs[sweeps % len(costs)]
            sweeps += 1
        if not start.ids:
            assert now - head_at <= max(HEAD_S, 1.1 * max(costs) / COST_SHARE) + 2 * (step_s + max(costs) + TOOK_S)
            head_at = now
        now += took_s
        spent_s += took_s - TOOK_S
        cursor.claimed([], now, took_s, full=False)
        now += step_s
    assert spent_s <= LEVELS * (0.05 * 100.0 + max(costs))
