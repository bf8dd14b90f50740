"""All invariants by name, what each states, and how its schedules are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import pure
from .kinds import KINDS
from .world import Played, play


@dataclass(frozen=True)
class Invariant:
    """`says`: the invariant in one sentence. `kind`: the kind of schedules that test it; invariants may share one."""

    name: str
    kind: str
    says: str


_ALL = (
    ("slots", "slots", "A queue never has more handlers at once than slots, whatever changes their number."),
    ("removal", "slots", "A queue can be removed and added again at any time, and no job is lost."),
    (
        "settled_once",
        "settles",
        "Each claimed attempt runs at most once, and is settled or released once, after it ended.",
    ),
    ("reported_once", "settles", "Each outcome is reported once, correctly, even if the reply to a settle is lost."),
    ("one_flush", "settles", "One flush is in progress at a time, and no larger than its bound."),
    (
        "idle_slot",
        "idle",
        "While the store responds, no due job waits beside an idle slot for poll + 1 s.",
    ),
    ("comes_back", "wakes", "A pool that is not announced as idle has its next iteration within a second."),
    (
        "claims_bounded",
        "claims",
        "A claim asks for no more than the free slots plus the prefetch.",
    ),
    ("hoarding", "claims", "A claimed job that cannot start is released within seconds."),
    (
        "backlog",
        "backlog",
        "No claim asks for more than the settler has capacity for, and a full settler stops claims.",
    ),
    ("stop", "stop", "A stop at any instant ends in bounded time whatever the store does, and starts no more jobs."),
    ("lease", "lease", "When others may take over a job, its run here has ended or the process has exited."),
    ("all_end", "anything", "After any faults every job reaches a final state, and the daemon leaves nothing behind."),
    ("cursor", "cursor", "Each row that becomes claimable is found by the sweep that is due for it, in any order."),
    ("backoff", "backoff", "Delays are finite, within bounds and jitter, never shrink, and reach their cap."),
    (
        "schedule",
        "schedule",
        "Occurrences are increasing, in UTC, and match a second calculation; also after an outage.",
    ),
)
INVARIANTS = {name: Invariant(name, kind, says) for name, kind, says in _ALL}
PLAYS: dict[str, Callable[..., Played]] = {
    **{name: partial(play, profile) for name, profile in KINDS.items()},
    "cursor": pure.cursor,
    "backoff": pure.backoff,
    "schedule": pure.schedule,
}
"""By kind: `play(seed, keeps_trace=...)` raises SimulationFailed or AssertionError when something does not hold."""


@dataclass(frozen=True)
class Failure:
    """A schedule in which an invariant did not hold."""

    invariant: str
    seed: int
    said: str
    trace: str = ""

    @property
    def replay(self) -> str:
        return f"python -m tests.simulation --invariant {self.invariant} --seed {self.seed}"


@dataclass
class Tally:
    """The results of some schedules of one invariant."""

    schedules: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    seconds: float = 0.0
    failures: tuple[Failure, ...] = ()

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.steps += other.steps
        self.virtual_s += other.virtual_s
        self.seconds += other.seconds
        self.failures += other.failures


def check(name: str, seed: int, *, keeps_trace: bool = False) -> Played | Failure:
    """Runs one schedule."""
    try:
        return PLAYS[INVARIANTS[name].kind](seed, keeps_trace=keeps_trace)
    except Exception as error:  # noqa: BLE001 - whatever it is, this schedule has failed, and its caller says so
        said = f"{type(error).__name__}: {error}"
        return Failure(name, seed, said, "\n".join(getattr(error, "__notes__", ())))
