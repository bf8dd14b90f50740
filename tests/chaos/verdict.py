"""What a check is, and how one is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.chaos.evidence import Evidence
from tests.chaos.fleet import TIMES
from tests.chaos.history import Note


class Verdict(NamedTuple):
    """How many items a check has examined, and the violations that it found."""

    looked_at: int
    violations: list[str]


Check = Callable[[Evidence], Verdict]
CHECKS: dict[str, Check] = {}


def check(function: Callable[[Evidence], Iterable[str | None]]) -> Check:
    """Registers a check, which yields one value per item that it examines: None, or the violation."""

    def judge(evidence: Evidence) -> Verdict:
        said = list(function(evidence))
        return Verdict(len(said), [each for each in said if each is not None])

    CHECKS[str(function.__doc__).splitlines()[0].rstrip(".")] = judge
    judge.__name__ = function.__name__
    return judge


def kept_away_s(evidence: Evidence, name: str) -> float:
    """The longest time for which a daemon was blocked, with adjacent spans merged into one."""
    longest_s = since_s = until_s = 0.0
    for span in sorted(evidence.spans.get(name, ()), key=lambda span: span.since_s):
        if span.since_s > until_s + 2 * TIMES["heartbeat_s"]:
            since_s = span.since_s
        until_s = max(until_s, span.until_s)
        longest_s = max(longest_s, until_s - since_s)
    return longest_s


BEFORE_S = 2 * TIMES["lease_s"]


def situation(evidence: Evidence, note: Note) -> str:
    """When that happened, as the run prints it, and what was done to the fleet just before."""
    faults = evidence.of("fault", "fault_over")
    began_s = faults[0].at_s if faults else note.at_s
    done = evidence.of("fault", "fault_over", "gateway_exit", "gateway_started", "exit", "dies")
    before = [
        f"{each.at_s - began_s:.1f} s {each.event} {each.facts.get('name', each.by)}"
        for each in done
        if note.at_s - BEFORE_S <= each.at_s <= note.at_s
    ]
    return f"at {note.at_s - began_s:.1f} s, after {', '.join(before) or 'nothing'}"
