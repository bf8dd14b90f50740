"""The states of a job as a diagram, with where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PLACES = {
    "blocked": (4, 8),
    "pending": (97, 8),
    "running": (190, 8),
    "completed": (284, 8),
    "failed": (190, 60),
    "dead": (284, 60),
    "expired": (4, 112),
    "cancelled": (97, 112),
    "discarded": (284, 112),
}
"""The left upper corner of each state's box, of 72 by 22."""
WAYS = {
    ("blocked", "pending"): "M76 19H95",
    ("pending", "running"): "M169 19H188",
    ("running", "completed"): "M262 19H282",
    ("running", "failed"): "M216 30V58",
    ("failed", "running"): "M236 60V32",
    ("running", "dead"): "M262 27L283 58",
    ("dead", "discarded"): "M320 82V110",
    ("pending", "expired"): "M112 30L50 110",
    ("pending", "cancelled"): "M133 30V110",
    ("failed", "cancelled"): "M200 82L160 110",
    ("blocked", "cancelled"): "",
    ("blocked", "expired"): "",
    ("failed", "expired"): "",
    ("running", "pending"): "",
    ("running", "cancelled"): "",
    ("dead", "pending"): "",
}
"""From which state a job comes to which, as a line; "": only said, as its line would cross others."""


class Box(NamedTuple):
    """A state of the diagram; `is_now`: the job is in it."""

    name: str
    x: float
    y: float
    is_now: bool


class Diagram(NamedTuple):
    """The states, and the ways between them; `open`: those that lead on from where the job is. `says`: all in words."""

    boxes: Sequence[Box]
    ways: Sequence[str]
    open: Sequence[str]
    says: str


def diagram(status: str) -> Diagram:
    """The diagram of a job with this status."""
    boxes = [Box(name, *place, name == status) for name, place in PLACES.items()]
    on = [to for begin, to in WAYS if begin == status]
    says = f"The job is {status}. " + (f"From here it can become {', '.join(on)}." if on else "That is its end.")
    ways = [way for (begin, _), way in WAYS.items() if begin != status and way]
    return Diagram(boxes, ways, [way for (begin, _), way in WAYS.items() if begin == status and way], says)
