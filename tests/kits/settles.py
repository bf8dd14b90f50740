"""Settles, as a source of work gets them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from pgworkd.core.fence import Fence, Settlement
from pgworkd.core.job import Ending, Outcome

COMPLETED = Outcome(Ending.COMPLETED)


async def settle(source: Any, outcome: Outcome, *fences: Fence, **how: Any) -> dict[UUID, str]:
    """Ends attempts in this way; the new status of each that still ran."""
    settles = [Settlement(fence, outcome) for fence in fences]
    found: dict[UUID, str] = await source.settle(outcome.ending, settles, **how)
    return found


async def complete(source: Any, *fences: Fence, **how: Any) -> set[UUID]:
    """Completes them, without results; the jobs of those that still ran."""
    return set(await settle(source, COMPLETED, *fences, **how))


def released(delay_s: float | None = None, message: str | None = None) -> Outcome:
    """Given back."""
    return Outcome(Ending.RELEASED, None, delay_s, message=message)


def failed(delay_s: float | None = 5.0, *, permanent: bool = False) -> Outcome:
    """Failed with an error."""
    return Outcome(Ending.FAILED, None, delay_s, permanent, "boom", {"type": "E", "message": "boom"})
