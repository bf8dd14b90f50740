"""The autoscale policy, given polls, worker exits and time: how many workers it wants, and when."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.processes.autoscaler import Decision, Policy, Rules
from pgworkd.processes.process_keeper import STEADY_S, Restarts

RESTART_S_MAX = 30.0


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    least, down_at = draw(st.integers(1, 5)), draw(st.integers(0, 20))
    return Rules(
        least,
        draw(st.integers(least, 8)),
        draw(st.integers(down_at + 1, 40)),
        down_at,
        draw(st.integers(1, 4)),
        draw(st.sampled_from([0.0, 1.0, 30.0])),
    )


class Fleet:
    """Carries out the policy's decisions at once, and checks its invariants."""

    def __init__(self, rules: Rules, alive: Sequence[int]) -> None:
        self.rules = rules
        self.now_s = 0.0
        self.began_s = dict.fromkeys(alive, 0.0)
        self.policy = Policy(rules, self.began_s)
        self.restarts: defaultdict[int, Restarts] = defaultdict(Restarts)
        self.due_s: dict[int, float] = {}
        self.decided_s: float | None = None
        assert len(self.policy.wanted) == max(rules.least, len(alive))
        self.mend()

    def mend(self) -> None:
        for number in sorted(self.policy.wanted - set(self.began_s)):
            if self.now_s >= self.due_s.get(number, 0.0):
                self.began_s[number] = self.now_s
        assert self.rules.least <= len(self.policy.wanted) <= self.rules.most
        assert set(self.began_s) <= set(range(1, self.rules.most + 1)), "more than may be, the stopping ones included"

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.mend()

    def end(self, which: int) -> None:
        """A worker exits, because it was asked to or by itself."""
        if not self.began_s:
            return
        number = sorted(self.began_s)[which % len(self.began_s)]
        lived_s = self.now_s - self.began_s.pop(number)
        asked = number not in self.policy.wanted
        delay_s = 0.0 if asked else self.restarts[number].died(lived_s)
        assert 0 <= delay_s <= RESTART_S_MAX
        self.due_s[number] = self.now_s + delay_s
        self.mend()

    def look(self, depth: int | None) -> None:
        rules, before = self.rules, set(self.policy.wanted)
        decision = self.policy.decide(depth, self.now_s)
        after = self.policy.wanted
        may = self.decided_s is None or self.now_s >= self.decided_s + rules.cooldown_s
        goal = len(before)
        if may and depth is not None and depth >= rules.up_at:
            goal = min(rules.most, goal + rules.step)
        elif may and depth is not None and depth <= rules.down_at:
            goal = max(rules.least, goal - rules.step)
        assert len(after) == goal
        assert before <= after or after <= before
        if goal == len(before):
            assert decision is None
            return
        assert decision is not None
        assert decision[:3] == (depth, len(before), goal)
        assert str(rules.up_at if goal > len(before) else rules.down_at) in decision.reason
        self.decided_s = self.now_s
        kept, gone = (self.began_s.get(n, self.now_s + 1) for n in after), before - after
        oldest_gone = min((self.began_s.get(n, self.now_s + 1) for n in gone), default=self.now_s + 1)
        assert goal > len(before) or oldest_gone >= max(kept), "the newest go first"
        self.mend()


EVENTS = st.one_of(
    st.tuples(st.just("look"), st.one_of(st.sampled_from([None, 0, 60]), st.integers(0, 60))),
    st.tuples(st.just("pass_time"), st.sampled_from([0.1, 1.0, 29.0, 30.0, 100.0])),
    st.tuples(st.just("end"), st.integers(0, 7)),
)


@given(rules(), st.data(), st.lists(EVENTS, min_size=10, max_size=60))
def test_the_policys_invariants_hold_for_any_sequence_of_events(
    rules: Rules, data: st.DataObject, events: list[tuple[str, int]]
) -> None:
    fleet = Fleet(rules, data.draw(st.lists(st.integers(1, rules.most), unique=True)))
    for verb, argument in events:
        getattr(fleet, verb)(argument)
    fleet.pass_time(RESTART_S_MAX)
    assert fleet.policy.wanted <= set(fleet.began_s), "one that died was not replaced"


def test_a_crashing_worker_is_restarted_with_growing_delays_until_it_is_stable() -> None:
    restarts = Restarts()
    delays = [restarts.died(1) for _ in range(10)]
    assert delays[0] == 0
    assert 0.7 < delays[1] < 1.3
    assert 17 < min(delays[6:]) <= max(delays) <= RESTART_S_MAX
    assert restarts.died(STEADY_S) == 0


def test_scaling_down_stops_workers_awaiting_restart_first_then_the_newest() -> None:
    began_s = {5: -math.inf}
    policy = Policy(Rules(1, 5, 10, 0, 1, 0), began_s)
    for at_s, number in enumerate((3, 1, 2, 4)):
        policy.decide(10, 0)
        began_s[number] = at_s
    del began_s[3]
    gone = []
    while len(before := set(policy.wanted)) > 1:
        policy.decide(0, 5)
        gone += before - policy.wanted
    assert gone == [3, 4, 2, 1], "5 was there before us"


def test_scaling_up_reuses_a_stopping_worker_last() -> None:
    began_s = dict.fromkeys((1, 2), -math.inf)
    policy = Policy(Rules(1, 4, 10, 0, 1, 0), began_s)
    assert policy.decide(0, 0) == Decision(0, 2, 1, "depth 0 <= down-at 0")
    assert policy.wanted == {1}
    policy.decide(10, 0)
    assert policy.wanted == {1, 3}, "2 is still stopping"
    del began_s[2]
    policy.decide(10, 0)
    assert policy.wanted == {1, 2, 3}


@pytest.mark.parametrize(("depth", "after"), [(10, 3), (9, None), (4, None), (3, 1)])
def test_between_the_thresholds_the_worker_count_is_unchanged(depth: int, after: int | None) -> None:
    policy = Policy(Rules(1, 5, 10, 3, 1, 0), dict.fromkeys((1, 2), -math.inf))
    decision = policy.decide(depth, 0)
    assert (None if decision is None else decision.after) == after
