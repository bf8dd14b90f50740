"""All invariants by name, what each says, and how its schedules are played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from . import pure
from .kinds import KINDS
from .loop import SimulationFailed
from .world import Played, play


@dataclass(frozen=True)
class Invariant:
    """`says`: one sentence. `play(seed, keeps_trace=...)` raises SimulationFailed or AssertionError."""

    name: str
    says: str
    play: Callable[..., Played]


SAYINGS = {
    "slots": "There are never more handlers of a queue at once than it has slots, whatever changes their number.",
    "settled_once": "Each claimed attempt runs at most once and is settled or given back exactly once, when it is over.",
    "reported_once": "Each outcome is reported once, and as the table has it, even when the answer of a settle is lost.",
    "idle_slot": "While the store answers, no due job waits beside an idle slot for longer than the poll and one second.",
    "claims_bounded": "A claim never asks for more than the free slots and what the pace allows ahead of them.",
    "hoarding": "What was claimed and cannot begin is given back within seconds.",
    "one_flush": "One flush is on its way at a time, and no larger than its bound.",
    "backlog": "No claim asks for more than there is room to settle, and a full settler stops claims.",
    "stop": "A stop at any instant ends in bounded time whatever the store does, begins nothing and says what it left.",
    "lease": "When others may take a job over, its run here has come out or the process has ended.",
    "removal": "A queue can be removed and added again at any time, and nothing of it is lost.",
    "all_end": "After any weather every job comes to its end, and the daemon leaves nothing behind.",
    "cursor": "Every row that becomes claimable is found within the sweep that is due for it, whatever the order.",
    "backoff": "Delays are finite, within bounds and jitter, never shrink, and reach their cap.",
    "schedule": "Occurrences are strictly later, in UTC, and those of a second calculation; so is what is made up for.",
}
PURE = {"cursor": pure.cursor, "backoff": pure.backoff, "schedule": pure.schedule}
INVARIANTS = {
    name: Invariant(name, says, PURE[name] if name in PURE else partial(play, KINDS[name]))
    for name, says in SAYINGS.items()
}


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
        return INVARIANTS[name].play(seed, keeps_trace=keeps_trace)
    except BaseExceptionGroup as group:
        _, rest = group.split((SimulationFailed, AssertionError))
        if rest is not None:
            raise
        return _failure(name, seed, group.exceptions[0])
    except (SimulationFailed, AssertionError) as error:
        return _failure(name, seed, error)


def _failure(name: str, seed: int, error: BaseException) -> Failure:
    said = f"{type(error).__name__}: {error}"
    return Failure(name, seed, said, "\n".join(getattr(error, "__notes__", ())))
