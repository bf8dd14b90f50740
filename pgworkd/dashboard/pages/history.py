"""Charts and sparklines of what ended in queues, for the pages that show them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from pgworkd.admin.admin import Admin
from pgworkd.admin.throughput import Activity, DepthStep, ThroughputStep
from pgworkd.dashboard.draw.charts import Chart, Spark, Steps, durations, spark, stacked
from pgworkd.dashboard.reads import Questions

SPANS = {"1h": (60, 60), "24h": (1800, 48), "7d": (10_800, 56), "30d": (43_200, 60)}
"""What can be shown: how long a step is, in seconds, and how many there are."""
Span = Literal["1h", "24h", "7d", "30d"]
SPARK_STEPS = (300, 12)
FRESH_S, FRESH_S_MAX = 10.0, 300.0
"""How long what was read is shown without being read again: statistics come each 10 s."""


async def charts(reads: Questions, span: Span, queue: str | None) -> dict[str, Any]:
    """The charts of a queue, or of all: members of the page's template."""
    steps = Steps.until(datetime.now(UTC), *SPANS[span])
    for_s = min(max(FRESH_S, steps.step_s / 30), FRESH_S_MAX)

    async def question(admin: Admin) -> tuple[list[ThroughputStep], list[DepthStep]]:
        asked = (steps.since, steps.end, steps.step_s)
        ended = await admin.queues.throughput(*asked, queue)
        return ended, [] if queue is None else await admin.queues.depths(*asked, queue)

    found = await reads.kept("charts", (queue, steps), for_s, question)
    drawn = [] if found is None else _drawn(steps, *found, has_depths=queue is not None)
    is_estimated = found is not None and any(each.share < 1 for each in found[0])
    return {"charts": drawn, "span": span, "spans": list(SPANS), "is_estimated": is_estimated}


def _drawn(
    steps: Steps, ended: Sequence[ThroughputStep], depths: Sequence[DepthStep], *, has_depths: bool
) -> list[Chart]:
    by_place = {steps.place(each.at): each for each in ended}
    row = [by_place.get(place) for place in range(steps.number)]
    counts = [(name, name, [getattr(each, name, 0) for each in row]) for name in ("completed", "failed", "dead")]

    def note(place: int) -> str:
        each = row[place]
        return "" if each is None or each.share >= 1 else f"estimated from {each.share:.0%} of the step"

    found = [stacked("Jobs that ended", steps, counts, note)]
    for what, title in (("wait", "Wait, from due to start"), ("run", "Run, from start to end")):
        lines = [(part, part, [getattr(each, f"{what}_{part}_s", None) for each in row]) for part in ("p50", "p95")]
        found.append(durations(title, steps, lines))
    if has_depths:
        due = {steps.place(each.at): each.due for each in depths}
        found.append(
            stacked("Due, at most", steps, [("due", "due", [due.get(place, 0) for place in range(steps.number)])])
        )
    return found


async def sparks(reads: Questions, queues: Sequence[str]) -> dict[str, Spark]:
    """What ended in each of these queues in the last hour."""
    steps = Steps.until(datetime.now(UTC), *SPARK_STEPS)

    async def question(admin: Admin) -> list[Activity]:
        return await admin.queues.activity(steps.since, steps.end, steps.step_s, queues)

    key = (tuple(queues), steps)
    found = await reads.kept("the last hour", key, FRESH_S, question) if queues else []
    numbers = {queue: ([0] * steps.number, [0] * steps.number) for queue in queues}
    for each in found or []:
        for had, more in zip(numbers[each.queue], (each.completed, each.failed), strict=True):
            had[steps.place(each.at)] += more
    return {} if found is None else {queue: spark(*both, "the last hour") for queue, both in numbers.items()}
