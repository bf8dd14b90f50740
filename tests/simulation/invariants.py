"""All invariants by name, what each says, and how its schedules are played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import pure
from .kinds import KINDS
from .world import Played, play


@dataclass(frozen=True)
class Invariant:
    """`says`: one sentence. `kind`: of the schedules that are made for it; invariants may share them."""

    name: str
    kind: str
    says: str


_ALL = (
    ("slots", "slots", "A queue never has more handlers at once than slots, whatever changes their number."),
    ("removal", "slots", "A queue can be removed and added again at any time, and nothing of it is lost."),
    (
        "settled_once",
        "settles",
        "Each claimed attempt runs once at most, and is settled or given back once, when over.",
    ),
    ("reported_once", "settles", "Each outcome is reported once, and truly, even when the answer of a settle is lost."),
    ("one_flush", "settles", "One flush is on its way at a time, and no larger than its bound."),
    (
        "idle_slot",
        "idle",
        "While the store answers, no due job waits beside an idle slot for poll + 1 s.",
    ),
    ("comes_back", "wakes", "A pool that is not announced as idle has its next iteration within a second."),
    (
        "claims_bounded",
        "claims",
        "A claim asks for no more than the free slots and what the pace allows ahead of them.",
    ),
    ("hoarding", "claims", "What was claimed and cannot begin is given back within seconds."),
    ("backlog", "backlog", "No claim asks for more than there is room to settle, and a full settler stops claims."),
    ("stop", "stop", "A stop at any instant ends in bounded time whatever the store does, and begins nothing more."),
    ("lease", "lease", "When others may take a job over, its run here has come out or the process has ended."),
    ("all_end", "anything", "After any weather every job comes to its end, and the daemon leaves nothing behind."),
    ("cursor", "cursor", "Each row that becomes claimable is found by the sweep that is due for it, in any order."),
    ("backoff", "backoff", "Delays are finite, within bounds and jitter, never shrink, and reach their cap."),
    ("schedule", "schedule", "Occurrences are later, in UTC, as a second calculation has them; also after an outage."),
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
    """A schedule in which something did not hold."""

    invariant: str
    seed: int
    said: str
    trace: str = ""

    @property
    def replay(self) -> str:
        return f"python -m tests.simulation --invariant {self.invariant} --seed {self.seed}"


@dataclass
class Tally:
    """What some schedules of one invariant came to."""

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
    """Plays one schedule."""
    try:
        return PLAYS[INVARIANTS[name].kind](seed, keeps_trace=keeps_trace)
    except Exception as error:  # noqa: BLE001 - whatever it is, this schedule has failed, and its caller says so
        said = f"{type(error).__name__}: {error}"
        return Failure(name, seed, said, "\n".join(getattr(error, "__notes__", ())))
