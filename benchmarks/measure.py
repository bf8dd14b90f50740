"""Samples, bars and verdicts.

Contenders of one comparison run alternately, in rotating order, because the machine's speed drifts: only what was
measured side by side is compared. The median of the rounds is judged, the ratio of the medians where there is a
reference.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, TypeVar

Sample = TypeVar("Sample")


@dataclass(frozen=True, slots=True)
class Bar:
    """What a line must reach: by its ratio to the reference if it has one, else by its own value, in its unit."""

    sense: Literal["at least", "at most"]
    limit: float

    def holds(self, reached: float) -> bool:
        """True if the bar is reached; NaN reaches none."""
        return reached >= self.limit if self.sense == "at least" else reached <= self.limit

    def margin(self, reached: float) -> float:
        """How far above (1.0: exactly reached, 2.0: twice as good) or below."""
        best, least = (reached, self.limit) if self.sense == "at least" else (self.limit, reached)
        return best / least if least > 0 else math.inf

    def __str__(self) -> str:
        return f"{'≥' if self.sense == 'at least' else '≤'} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report: ours beside a reference, each with one sample per round."""

    row: str
    what: str
    unit: str
    ours: Sequence[float]
    reference: Sequence[float] = ()
    against: str = ""
    bar: Bar | None = None
    note: str = ""

    @property
    def reached(self) -> float:
        """The value compared with the bar: the ratio of the medians, or our median if there is no reference."""
        return ratio(self.ours, self.reference) if self.reference else middle(self.ours)

    @property
    def verdict(self) -> Literal["holds", "missed", ""]:
        """Empty without a bar."""
        if self.bar is None:
            return ""
        return "holds" if self.bar.holds(self.reached) else "missed"


@dataclass(slots=True)
class Rates:
    """Lines of one subject and the unit that they have in common, for the chart."""

    title: str
    unit: str
    values: dict[str, Sequence[float]] = field(default_factory=dict)


def middle(samples: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return median(samples) if samples else math.nan


def ratio(ours: Sequence[float], reference: Sequence[float]) -> float:
    """The ratio of the medians; NaN if there is none."""
    below = middle(reference)
    return middle(ours) / below if below else math.nan


async def interleave(
    contenders: Mapping[str, Callable[[], Awaitable[Sample]]], rounds: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, list[Sample]]:
    """Runs each contender once per round, in rotating order. Samples by name, by round."""
    names = list(contenders)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            sample = await contenders[name]()
            samples[name].append(sample)
            say(
                f"  round {number + 1}/{rounds}  {name}: {sample:,.0f}"
                if isinstance(sample, float)
                else f"  round {number + 1}/{rounds}  {name}: {sample}"
            )
    return samples


def longest_idle_s(
    runs: Sequence[Sequence[tuple[float, float]]], slots: int, due_at: float, *, until: float | None = None
) -> float:
    """The longest time that any slot was idle while a job was due and had not started.

    `runs`: of each daemon, (start, end) of its runs, in seconds on one clock; `slots` each; all jobs due at `due_at`.
    A slot is idle from the end of its run (or from `due_at`) to its next start, or to the last start of all: until
    then some job was waiting. `until` overrides the latter, for jobs that were never started.
    """
    starts = [start for each in runs for start, _ in each]
    last = until if until is not None else max(starts, default=due_at)
    longest = 0.0
    for each in runs:
        free = [due_at] * slots + sorted(end for _, end in each)  # when slots became free, in order
        taken = sorted(start for start, _ in each) + [last] * slots  # and when they were taken, or no longer needed
        longest = max(longest, *(min(start, last) - end for end, start in zip(free, taken, strict=True)))
    return longest
