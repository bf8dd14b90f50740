"""What a check is, and how one is entered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.chaos.evidence import Evidence
from tests.chaos.fleet import TIMES


class Verdict(NamedTuple):
    """How many things a check has looked at, and what was wrong with some."""

    looked_at: int
    violations: list[str]


Check = Callable[[Evidence], Verdict]
CHECKS: dict[str, Check] = {}


def check(function: Callable[[Evidence], Iterable[str | None]]) -> Check:
    """Enters a check, which yields one value for each thing it looks at: None, or what is wrong with it."""

    def judge(evidence: Evidence) -> Verdict:
        said = list(function(evidence))
        return Verdict(len(said), [each for each in said if each is not None])

    CHECKS[str(function.__doc__).rstrip(".")] = judge
    judge.__name__ = function.__name__
    return judge


def kept_away_s(evidence: Evidence, name: str) -> float:
    """The longest time for which a daemon was kept from its work, spans close to each other taken as one."""
    longest_s = since_s = until_s = 0.0
    for span in sorted(evidence.spans.get(name, ()), key=lambda span: span.since_s):
        if span.since_s > until_s + 2 * TIMES["heartbeat_s"]:
            since_s = span.since_s
        until_s = max(until_s, span.until_s)
        longest_s = max(longest_s, until_s - since_s)
    return longest_s
