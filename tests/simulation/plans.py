"""What happens in one schedule, and when: drawn at random before it starts, so that it can be read beforehand."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from .network import CALM, Weather

QUEUES = ("q0", "q1")
DOINGS = ("ok", "ok", "result", "fail", "permanent", "retry_after", "snooze", "burn", "context")
ODD = ("self_cancel", "swallow", "stubborn", "late", "stray_scope")
CHANGES = ("pause", "concurrency", "limit", "cancel", "cut", "remove")
STORMS = (
    Weather(slow_share=0.1),
    Weather(refused_share=0.1, lost_share=0.1),
    Weather(hung_share=0.05, slow_share=0.1, slow_s=0.8),
    Weather(lost_share=0.3, verbs=("completed", "failed", "released", "ended")),
    Weather(lost_share=0.3, refused_share=0.2, verbs=("claim",)),
    Weather(hung_share=0.5, verbs=("completed", "failed", "released")),
    Weather(slow_share=0.5, slow_s=0.9, verbs=("completed",)),
    Weather(slow_share=0.5, slow_s=0.9, verbs=("claim",)),
)
DEAF = (Weather(notice_lost_share=1.0), Weather(notice_lost_share=0.5, notice_twice_share=0.5))


class Doing(NamedTuple):
    """What one run of a job does, and for how long."""

    kind: str
    takes_s: float


class Act(NamedTuple):
    """Something that happens to the daemon or the table."""

    at_s: float
    name: str
    arguments: dict[str, object]


@dataclass(frozen=True)
class Profile:
    """What schedules of a kind may contain."""

    queues_max: int = len(QUEUES)
    slots_max: int = 5
    bursts_max: int = 4
    burst_jobs_max: int = 10
    lasts_s: float = 1.2
    takes_s: tuple[float, ...] = (0.0, 0.0005, 0.003, 0.03, 0.3)
    doings: tuple[str, ...] = DOINGS
    weathers: tuple[Weather, ...] = (CALM,)
    outages_max: int = 0
    outage_s: float = 0.5
    changes: tuple[str, ...] = ()
    stops: bool = False
    """Whether the stop comes at a random instant; otherwise after all jobs have finished."""
    flush_max: tuple[int, ...] = (1_000, 3)
    capacity: tuple[int, ...] = (10_000,)
    lease_s: float = 30.0
    trickles_max: int = 0
    """Jobs that arrive one by one, at a rate that may be too high for a notification each."""


@dataclass(frozen=True)
class Plan:
    """One schedule."""

    slots: dict[str, int]
    acts: list[Act]
    weather: Weather
    flush_max: int
    capacity: int
    lease_s: float
    lasts_s: float
    shutdown_s: float
    stops: bool


def draw(profile: Profile, chance: random.Random) -> Plan:
    """A schedule of that kind."""
    queues = list(QUEUES[: chance.randint(1, profile.queues_max)])
    slots = {queue: chance.randint(1, profile.slots_max) for queue in queues}
    acts = [_burst(profile, chance, queues) for _ in range(chance.randint(1, profile.bursts_max))]
    for _ in range(chance.randint(1, profile.trickles_max) if profile.trickles_max else 0):
        acts += _trickle(profile, chance, chance.choice(queues))
    for _ in range(chance.randint(0, profile.outages_max)):
        begins_s = chance.random() * profile.lasts_s
        acts.append(Act(begins_s, "outage", {"for_s": chance.random() * profile.outage_s}))
    for _ in range(chance.randint(1, 4) if profile.changes else 0):
        acts += _change(profile, chance, queues)
    if profile.stops:
        acts.append(Act(chance.random() * profile.lasts_s, "stop", {"now": chance.random() < 0.3}))
    return Plan(
        slots=slots,
        acts=sorted(acts, key=lambda act: act.at_s),
        weather=chance.choice(profile.weathers),
        flush_max=chance.choice(profile.flush_max),
        capacity=chance.choice(profile.capacity),
        lease_s=profile.lease_s,
        lasts_s=profile.lasts_s,
        shutdown_s=chance.choice((0.0, 0.3, 1.5)),
        stops=profile.stops,
    )


def _burst(profile: Profile, chance: random.Random, queues: list[str]) -> Act:
    takes_s = chance.choice(profile.takes_s)
    jobs = []
    for _ in range(chance.randint(1, profile.burst_jobs_max)):
        doings = [Doing(chance.choice(profile.doings), takes_s * chance.choice((1, 1, 0.5, 3))) for _ in range(2)]
        jobs.append({"doings": doings, "timeout_s": chance.choice((None, None, None, 0.02 + 2 * takes_s))})
    arguments: dict[str, object] = {
        "queue": chance.choice(queues),
        "priority": chance.choice((0, 0, 0, 0, 5, -5)),
        # Due now; due but committed late, by a long transaction; or due later.
        "due_in_s": chance.choice((0, 0, 0, 0, -0.01, -0.4, -30, 0.2, 0.9)),
        "jobs": jobs,
    }
    return Act(chance.choice((0.0, 1.0, 1.0)) * chance.random() * profile.lasts_s, "insert", arguments)


def _trickle(profile: Profile, chance: random.Random, queue: str) -> list[Act]:
    rate = chance.choice((50, 95, 110, 150, 200, 300, 500))
    takes_s, begins_s = chance.choice((0.0, 0.0005, 0.003)), chance.random() * profile.lasts_s
    even, acts, at_s = chance.random() < 0.5, [], begins_s
    while at_s < begins_s + profile.lasts_s / 2:
        jobs = [{"doings": [Doing("ok", takes_s)], "timeout_s": None}]
        acts.append(Act(at_s, "insert", {"queue": queue, "priority": 0, "due_in_s": 0, "jobs": jobs}))
        at_s += 1 / rate if even else chance.expovariate(rate)
    return acts


def _change(profile: Profile, chance: random.Random, queues: list[str]) -> list[Act]:
    """One change, and the change that reverts it where necessary."""
    name, queue = chance.choice(profile.changes), chance.choice(queues)
    at_s, back_s = (chance.random() * profile.lasts_s for _ in range(2))
    match name:
        case "pause":
            settings = [{"paused": True}, {"paused": False}]
        case "limit":
            settings = [{"max_running": chance.randint(1, 3)}, {"max_running": None}]
        case "concurrency":
            settings = [{"concurrency": chance.randint(1, profile.slots_max)}]
        case "remove":
            return [Act(at_s, "remove", {"queue": queue}), Act(at_s + back_s, "add", {"queue": queue})]
        case _:
            return [Act(at_s, name, {"which": chance.random()})]
    times_s = (at_s, at_s + back_s)
    return [Act(time_s, "set", {"queue": queue, **each}) for time_s, each in zip(times_s, settings, strict=False)]
