"""The demo's output: a live table, or plain lines without a terminal, and the summary."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pgworkd.demo.jobs import QUEUES
from pgworkd.words import events
from pgworkd.words.validation import counted

RUNS_MAX = 10_000
RATE_WINDOW_S = 5.0
LATEST_MAX = 6
_COLUMNS = ("inserted", "done", "waiting", "retrying", "running", "dead", "retries", "p50 ms", "p95 ms")
_SHOWN = ("completed", "pending", "failed", "running", "dead")
_ENDED = ("cancelled", "expired")


def print_line(line: str) -> None:
    """Prints a line, for any encoding of the terminal and any characters in file names. Raises OSError."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(printable(line).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """`text` with terminal control characters escaped (CWE-150)."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


class Tally:
    """Counts the daemon's events: a listener."""

    def __init__(self) -> None:
        self.began_s = anyio.current_time()
        self.completed: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.dead: Counter[str] = Counter()
        self.lost = 0
        self.runs_s: dict[str, deque[float]] = {}
        self.latest: deque[str] = deque(maxlen=LATEST_MAX)
        self._ends_s: deque[float] = deque(maxlen=5_000)

    def __call__(self, name: str, facts: Mapping[str, Any]) -> None:
        """Counts one event."""
        queue, now_s = str(facts.get("queue", "")), anyio.current_time()
        if name == events.JOB_COMPLETED:
            self.completed[queue] += 1
            self.runs_s.setdefault(queue, deque(maxlen=RUNS_MAX)).append(facts["duration_s"])
            self._ends_s.append(now_s)
            return
        if name == events.JOB_FAILED:
            self.retries[queue] += 1
        elif name == events.JOB_DEAD:
            self.dead[queue] += 1
        elif name == events.JOB_LOST:
            self.lost += facts["status"] == "failed"
        elif name == events.JOB_STARTED or (name == events.JOB_RELEASED and facts["reason"] == "snoozed"):
            return
        what = facts.get("error") or facts.get("reason") or ""
        subject = f"{facts['kind']} #{facts['attempt']}" if "kind" in facts else ""
        self.latest.append(printable(f"{self.elapsed_s:6.1f} s  {name:14}  {subject}  {what}"[:160]))

    @property
    def elapsed_s(self) -> float:
        """Since the daemon was started."""
        return anyio.current_time() - self.began_s

    @property
    def per_s(self) -> float:
        """Completed jobs per second over the last 5 seconds."""
        window_s = max(min(RATE_WINDOW_S, self.elapsed_s), 0.1)
        since_s = anyio.current_time() - window_s
        return sum(end_s >= since_s for end_s in self._ends_s) / window_s

    def run_ms(self, queue: str, share: float) -> float:
        """The quantile `share` of the run times of a queue's completed jobs, in ms; NaN without any."""
        runs_s = sorted(self.runs_s.get(queue, ()))
        return 1000 * runs_s[math.ceil(share * len(runs_s)) - 1] if runs_s else math.nan


@dataclass
class Balance:
    """The counts in the database at the end, and those that the daemon reported."""

    inserted: dict[str, int]
    """Jobs in the ledger by queue: ids recorded by a trigger, in the transaction of each insert."""
    found: dict[tuple[str, str], int]
    """The ledger's jobs by (queue, status); "missing" for one that is in no table."""
    failures: int
    """Their failures by the table."""
    reported: dict[str, int] = field(default_factory=dict)
    """By "completed", "dead" and "failures": the counts of events."""
    without_vector: int = 0
    exit_code: int = 0

    def of(self, status: str) -> int:
        """The number of jobs with a status."""
        return sum(n for (_, found), n in self.found.items() if found == status)

    def differences(self) -> list[str]:
        """The discrepancies; empty if everything adds up."""
        wrong = []
        for queue, inserted in self.inserted.items():
            total = sum(n for (name, status), n in self.found.items() if name == queue and status != "missing")
            if total != inserted:
                wrong.append(f"queue {queue}: {inserted} inserted, {total} found")
        pairs = {"completed": self.of("completed"), "dead": self.of("dead"), "failures": self.failures}
        for what, found in pairs.items():
            if found != self.reported.get(what, 0):
                wrong.append(f"{what}: {found} in the tables, {self.reported.get(what, 0)} reported by the daemon")
        if self.without_vector:
            wrong.append(f"{counted(self.without_vector, 'completed embedding')} without a stored vector")
        if self.exit_code:
            wrong.append(f"the daemon ended with exit code {self.exit_code}")
        return wrong


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A row of `pgworkd.queue_stats`."""

    queue: str
    due: int
    scheduled: int
    running: int
    failed: int
    dead: int


def live_view(title: str, rows: Sequence[QueueRow], tally: Tally) -> Group:
    """The table of queues and the latest events."""
    head = f"{title}   {tally.elapsed_s:.0f} s   {tally.completed.total()} done   {tally.per_s:.0f}/s"
    table = Table(title=Text(head), box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("queue", no_wrap=True)
    for name in ("slots", "due", "later", "running", "retrying", "dead", "done", "retries", "p50 ms", "p95 ms"):
        table.add_column(name, justify="right")
    for row in rows:
        name = row.queue
        numbers: list[object] = [QUEUES.get(name, ""), row.due, row.scheduled, row.running, row.failed, row.dead]
        numbers += [tally.completed[name], tally.retries[name]]
        numbers += [milliseconds(tally.run_ms(name, 0.5)), milliseconds(tally.run_ms(name, 0.95))]
        table.add_row(Text(printable(name)), *map(str, numbers), style="bold" if row.running else "")
    latest = Text("\n".join(tally.latest), no_wrap=True, overflow="ellipsis")
    return Group(table, Panel(latest, title="latest events", height=LATEST_MAX + 2))


def plain_line(rows: Sequence[QueueRow], tally: Tally) -> str:
    """The same in one line."""
    waiting, retrying = sum(r.due + r.scheduled for r in rows), sum(r.failed for r in rows)
    return (
        f"{tally.elapsed_s:6.1f} s  {tally.completed.total():6} done  {tally.per_s:5.1f}/s  "
        f"{sum(r.running for r in rows):3} running  {waiting:4} waiting  {retrying:3} retrying  "
        f"{tally.retries.total():4} retries  {sum(r.dead for r in rows):3} dead"
    )


def milliseconds(value: float) -> str:
    """A duration as text."""
    return "-" if math.isnan(value) else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def summary_table(balance: Balance, tally: Tally) -> list[str]:
    """The lines of the table: one per queue, and the sum. 80 columns wide."""
    lines = [_line("queue", _COLUMNS)]
    for queue, inserted in sorted(balance.inserted.items()):
        cells: list[object] = [inserted, *(balance.found.get((queue, status), 0) for status in _SHOWN)]
        cells += [tally.retries[queue], *(milliseconds(tally.run_ms(queue, share)) for share in (0.5, 0.95))]
        lines.append(_line(queue, cells))
    sums = [sum(balance.inserted.values()), *map(balance.of, _SHOWN), tally.retries.total()]
    lines.append(_line("all", sums))
    return lines


def _line(name: str, cells: Sequence[object]) -> str:
    widths = (len(column) + 1 for column in _COLUMNS)
    return f"{printable(name)[:13]:13}" + "".join(f"{cell!s:>{w}}" for cell, w in zip(cells, widths, strict=False))


def verdict(balance: Balance) -> str:
    """The last line: the sum, or the discrepancies."""
    if wrong := balance.differences():
        return "DOES NOT ADD UP: " + "; ".join(wrong)
    names = {"pending": "waiting", "failed": "retrying"}
    parts = [(names.get(status, status), balance.of(status)) for status in (*_SHOWN, *_ENDED)]
    total = " + ".join(f"{n} {name}" for name, n in parts if n) or "0"
    return (
        f"it adds up: {sum(balance.inserted.values())} inserted = {total}; "
        f"the daemon reported the same numbers of completed, dead and failed ({balance.failures}) runs as the tables"
    )
