"""What all parts of one process share."""

from __future__ import annotations

from dataclasses import dataclass

from pgworkd.core.events import Events
from pgworkd.engine.attempts import InFlight
from pgworkd.engine.counters import Counters


@dataclass(frozen=True, slots=True)
class Shared:
    """The attempts in flight in this process, its events, and what it counts."""

    in_flight: InFlight
    events: Events
    counters: Counters
