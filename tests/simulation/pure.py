"""Invariants without an event loop: where claims start, the delay before a retry, when a schedule is due."""

from __future__ import annotations

import hashlib
import math
import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from pgworkd import Backoff
from pgworkd.core.recurrence import Recurrence
from pgworkd.errors import DELAY_S_MAX
from tests.unit.test_cursor_model import HEAD_S, IN_BETWEEN, ROOM, UNDER_WAY, World, apply
from tests.unit.test_schedule_dst import due_minutes, offset_changes

from .world import Played

ZONES = """
    Europe/Berlin America/New_York Australia/Lord_Howe America/Santiago Asia/Kolkata UTC Europe/Dublin
    Pacific/Chatham Antarctica/Troll America/Havana Africa/Casablanca Asia/Beirut
""".split()
AROUND = timedelta(days=1)
"""A change of the clocks."""
FAILURES_MAX = 40
CHAIN_MAX = 30


class Said:
    """The trace of an invariant that has no loop."""

    def __init__(self, *, keeps: bool) -> None:
        self._hash = hashlib.sha256()
        self._lines: list[str] | None = [] if keeps else None
        self.steps = 0

    def __call__(self, *facts: object) -> None:
        line = " ".join(map(str, facts))
        self.steps += 1
        self._hash.update(line.encode())
        if self._lines is not None:
            self._lines.append(line)

    def played(self, virtual_s: float = 0.0) -> Played:
        return Played(self.steps, virtual_s, self._hash.hexdigest(), tuple(self._lines or ()))


def cursor(seed: int, *, keeps_trace: bool = False) -> Played:
    """Inserts, late commits, retries, rewinds and clock jumps, between claims and during one."""
    chance, say = _chance(f"cursor {seed}"), Said(keeps=keeps_trace)
    world = World(chance.choice((0.002, 0.005, 0.01)), seed, busy=chance.random() < 0.5)
    began = world.now
    for _ in range(chance.randint(1, 8)):
        world.go_on(chance.choice((0.0, 0.0, 0.015, 0.05, 0.3, 1.0)))
        kind, priority = chance.choice(UNDER_WAY + IN_BETWEEN), chance.choice((0, 0, 0, 1, 9, -3))
        what, size = (kind, priority, chance.random()), len(world.waiting)
        say(f"{world.now:.6f}", *what, size)
        if kind in UNDER_WAY and chance.random() < 0.5:
            world.claim(lambda what=what: apply(world, *what, soon=False))  # type: ignore[misc]
        else:
            apply(world, *what, soon=True)
            world.claim()
    world.limit = ROOM
    waits_until = world.now + HEAD_S + 1
    while not world.is_drained:
        world.claim()
        assert world.now < waits_until, f"{len(world.waiting)} rows were not found within a sweep of the head"
    say(f"{world.now:.6f}", "drained")
    return say.played(world.now - began)


def backoff(seed: int, *, keeps_trace: bool = False) -> Played:
    """Policies of any numbers, lists and functions, overridden by rows or not, after any number of failures."""
    chance, say = _chance(f"backoff {seed}"), Said(keeps=keeps_trace)
    base_s, cap_s = _size(chance, DELAY_S_MAX), _size(chance, DELAY_S_MAX)
    policy = Backoff(base_s, 1 + _size(chance, 999.0), cap_s, chance.choice((0.0, 0.1, 1.0, chance.random())))
    if chance.random() < 0.3:
        policy = policy.overridden_by({"backoff_s": base_s / 2, "backoff_cap_s": cap_s / 2})
    steps_s = tuple(_size(chance, DELAY_S_MAX) for _ in range(chance.randint(1, 5)))
    listed = Backoff(jitter=policy.jitter, steps_s=steps_s)
    before_s = 0.0
    for failures in [-3, *range(FAILURES_MAX), 10**3, 10**6, 10**12]:
        middle_s = policy.delay_s(failures, lambda: 0.5)
        assert before_s <= middle_s <= policy.cap_s, f"{policy}: {middle_s} s after {failures}, {before_s} s before"
        assert middle_s in (policy.cap_s, 0.0) or failures < 10**12 or policy.factor < 1.001, f"{policy}: never capped"
        before_s = middle_s
        drawn = chance.choice((0.0, 1 - 1e-16, chance.random()))
        for each, wanted_s in ((policy, middle_s), (listed, steps_s[min(max(failures, 1), len(steps_s)) - 1])):
            delay_s = each.delay_s(failures, lambda drawn=drawn: drawn)  # type: ignore[misc]
            low_s, high_s = wanted_s * (1 - each.jitter), min(wanted_s * (1 + each.jitter), DELAY_S_MAX)
            assert math.isfinite(delay_s), f"{each}: {delay_s} s"
            assert min(low_s, high_s) * (1 - 1e-12) <= delay_s <= high_s * (1 + 1e-12), f"{each}: {delay_s} s"
        say(failures, middle_s, delay_s)
        assert 0 <= Backoff.parse(lambda _: _odd_answer(chance)).delay_s(failures, lambda: 0.5) <= DELAY_S_MAX
    return say.played()


def _chance(seed: str) -> random.Random:
    return random.Random(seed)  # noqa: S311 - repeatable


def _size(chance: random.Random, most: float) -> float:
    """0, tiny, ordinary, or the maximum."""
    return min(most, chance.choice((0.0, 1e-300, 10 ** (chance.random() * 16 - 8), chance.random() * 100, most)))


def _odd_answer(chance: random.Random) -> object:
    odd = (math.nan, math.inf, -math.inf, -1, 10**400, True, "5", None, timedelta.max, timedelta.min, 1e308, 5)
    return chance.choice(odd)


def schedule(seed: int, *, keeps_trace: bool = False) -> Played:
    """A cron rule in some zone through a clock change, and the occurrences made up for after an outage."""
    chance, say = _chance(f"schedule {seed}"), Said(keeps=keeps_trace)
    zone, cron = chance.choice(ZONES), _cron(chance)
    change = chance.choice(offset_changes(zone)[:2])
    due = due_minutes(cron, zone, change, AROUND)
    say(cron, zone, change, len(due))
    first, last = change - AROUND, change + AROUND
    _check_chain(Recurrence.parse(cron, zone), chance, due, first, last)
    previous, now = sorted(first + (last - first) * chance.random() for _ in range(2))
    inside = [at for at in due if previous < at <= now]
    after = next((at for at in due if at > now), None)
    most = chance.choice((1, 2, 3, 20))
    for missed, wanted in (("skip", None), ("once", inside[-1:]), ("all", inside[-most:])):
        follows = wanted[0] if wanted else after
        if follows is not None:
            found = Recurrence.parse(cron, zone, missed).follow(previous, now, most)  # type: ignore[arg-type]
            assert found == follows, f"{cron!r} in {zone}, {missed}: {found} after {previous} at {now}, not {follows}"
            say(missed, found)
    return say.played((last - first).total_seconds())


def _check_chain(rule: Recurrence, chance: random.Random, due: list[datetime], first: datetime, last: datetime) -> None:
    """From some instant on, one occurrence after the other; every one is strictly later than that before."""
    instant = first + (last - first) * chance.random()
    wanted = [at for at in due if at > instant][:CHAIN_MAX]
    chain = [instant]
    for _ in wanted:
        chain.append(rule.next_after(chain[-1]))
    assert chain[1:] == wanted, f"{rule}: from {instant} on {chain[1:4]}, not {wanted[:3]}"
    assert all(earlier < later and later.tzinfo is UTC for earlier, later in pairwise(chain))


def _cron(chance: random.Random) -> str:
    """Five fields; the day of the month or that of the week is free, for both together mean either."""
    minute, hour = _field(chance, 0, 59), _field(chance, 0, 23)
    day, weekday = chance.choice((("*", "*"), (_field(chance, 1, 28), "*"), ("*", _field(chance, 0, 6))))
    return f"{minute} {hour} {day} * {weekday}"


def _field(chance: random.Random, low: int, high: int) -> str:
    one, other = sorted(chance.randint(low, high) for _ in range(2))
    return chance.choice(("*", f"*/{chance.randint(2, high)}", f"{one}", f"{one},{other}", f"{one}-{other}"))
