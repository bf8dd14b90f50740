"""The demo's view: what the daemon reports, the table of queues, and whether the jobs add up."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pgworkd.core import events
from pgworkd.process.redaction import escaped

_PROBLEMS = {events.JOB_FAILED, events.JOB_DEAD, events.JOB_LOST, events.JOB_RELEASED}


class DemoTally:
    """Counts by queue what the daemon reports: a listener for its events."""

    def __init__(self) -> None:
        self.began_s = anyio.current_time()
        self.completed, self.retries, self.dead = Counter[str](), Counter[str](), Counter[str]()
        self.latest: deque[str] = deque(maxlen=6)

    def __call__(self, name: str, facts: Mapping[str, Any]) -> None:
        """Counts one event."""
        queue = str(facts.get("queue"))
        if name == events.JOB_COMPLETED:
            self.completed[queue] += 1
        elif name == events.JOB_DEAD or (name == events.JOB_LOST and facts["status"] == "dead"):
            self.dead[queue] += 1
        elif name in (events.JOB_FAILED, events.JOB_LOST):
            self.retries[queue] += 1
        if name in _PROBLEMS:
            problem = f"{facts['kind']}: {facts.get('error') or facts.get('reason') or ''}"
            self.latest.append(f"{self.elapsed_s:6.1f} s  {name:12} {escaped(problem)}"[:160])

    @property
    def elapsed_s(self) -> float:
        """Seconds since the daemon was started."""
        return anyio.current_time() - self.began_s


def queue_table(slots: Mapping[str, int], rows: Sequence[Sequence[Any]], tally: DemoTally) -> Table:
    """A row for each queue. `rows`: (queue, waiting, running, retrying, dead), by the database."""
    table = Table("queue", box=box.SIMPLE_HEAD)
    for heading in ("slots", "waiting", "running", "retrying", "dead", "completed", "retries"):
        table.add_column(heading, justify="right", no_wrap=True)
    live = {str(queue): numbers for queue, *numbers in rows}
    for queue in sorted({*slots, *live}):
        cells = [slots.get(queue, ""), *live.get(queue, [0] * 4), tally.completed[queue], tally.retries[queue]]
        table.add_row(escaped(queue), *map(str, cells))
    return table


def live_view(table: Table, tally: DemoTally) -> Group:
    """The table of queues, and below it the latest problems."""
    return Group(f"{tally.elapsed_s:.0f} s", table, Text("\n".join(tally.latest), no_wrap=True, overflow="ellipsis"))


def differences(
    inserted: int, found: Mapping[str, int], stored: Mapping[str, int], reported: Mapping[str, int], exit_code: int
) -> list[str]:
    """The ways in which the jobs do not add up, a text for each.

    `inserted`: jobs whose ids the application noted; `found`: the same by status, "missing" for those in no table;
    `stored`: all jobs "completed" and "dead" in this run, and the "failures"; `reported`: the same by the daemon.
    """
    total = sum(n for status, n in found.items() if status != "missing")
    wrong = [] if total == inserted and "missing" not in found else [f"{inserted} inserted, {total} found"]
    for what, n in stored.items():
        wrong += [] if n == reported[what] else [f"{what}: {n} in the tables, {reported[what]} reported by the daemon"]
    return wrong + ([f"the daemon ended with exit code {exit_code}"] if exit_code else [])


def verdict(inserted: int, found: Mapping[str, int], reported: Mapping[str, int]) -> str:
    """The sum, in one line, of a demo without differences."""
    states = " + ".join(f"{n} {status}" for status, n in found.items())
    reports = ", ".join(f"{n} {what}" for what, n in reported.items())
    return f"it adds up: {inserted} inserted = {states}; reported, with batches and schedule: {reports}"
