"""An attempt that has ended, on its way to the database."""

from __future__ import annotations

from typing import Protocol

from pgworkd.core.fence import Settling
from pgworkd.core.job import Outcome


class Item(Settling, Protocol):
    """An ended attempt: a daemon's `Attempt`, or what a gateway was sent."""

    worker_id: int | None
    queue: str
    size: int
    """About how many bytes the settle sends or copies; most of them have been kept in memory since the attempt ran."""
    delays: int
    """How often the settle was delayed: the row was locked, or the database rejected it."""
    outcome_unknown: bool
    """The attempt may have been settled before: the answer to a COMMIT, or to its settle, was lost."""


def size_of(outcome: Outcome) -> int:
    """About how many bytes an outcome has, for `Item.size`."""
    size = len(outcome.result or "")
    return size if outcome.error is None else size + len(str(outcome.error.get("traceback", "")))
