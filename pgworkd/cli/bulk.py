"""One act on all jobs that match: chunk by chunk, each a short transaction, with a count of what was done.

On a terminal more than ASKED_FROM jobs are asked about first, and a bar shows how far it is. Ctrl-C stops between two
chunks.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

import typer

from pgworkd.cli.common import ask, confirm, known
from pgworkd.cli.output import as_json, note, out
from pgworkd.errors import PgworkdError
from pgworkd.words.validation import counted

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.admin.jobs import Which
    from pgworkd.admin.refusals import Refused

CHUNK = 1000
"""Jobs per transaction: what Admin takes at most."""
ASKED_FROM = 100

Act = Callable[["Admin", Sequence[UUID]], Awaitable[tuple[Mapping[str, int], Sequence["Refused"]]]]
"""Acts on these jobs; how many came to which outcome, and which were left alone, and why."""


class Bulk(NamedTuple):
    """What is to be done: `name` is the act's, `outcomes` how people are told of each kind of outcome."""

    name: str
    act: Act
    outcomes: Mapping[str, str]


class _Stop:
    """Remembers a Ctrl-C; a second one interrupts at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _heard(self, *_: object) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._before)


def through(dsn: str | None, bulk: Bulk, which: Which, *, limit: int | None, yes: bool, json: bool) -> int:
    """Acts on the jobs that match, the oldest first, at most `limit`; tells the counts; the exit code."""
    total = _total(dsn, bulk, which, limit, yes=yes)
    counts: Counter[str] = Counter()
    left: Counter[tuple[str, str]] = Counter()
    stopped = False
    with _Stop() as stop, _bar(bulk.name, total) as shown:

        async def question(admin: Admin) -> bool:
            return await _each_chunk(admin, bulk, which, limit, counts, left, stop, shown)

        try:
            stopped = ask(dsn, question)
        except (PgworkdError, KeyboardInterrupt) as error:
            if not counts:
                raise
            _tell(bulk, counts, left, json=json, stopped=True)
            if isinstance(error, PgworkdError):
                raise
            raise PgworkdError("interrupted; what was under way then may have been done as well") from None
    _tell(bulk, counts, left, json=json, stopped=stopped)
    if stopped:
        note(f"stopped after {counted(counts['matched'], 'job')}" + (f" of {total:,}" if total is not None else ""))
    return 1 if stopped or left else 0


async def _each_chunk(
    admin: Admin,
    bulk: Bulk,
    which: Which,
    limit: int | None,
    counts: Counter[str],
    left: Counter[tuple[str, str]],
    stop: _Stop,
    shown: Callable[[int], None],
) -> bool:
    """Fills `counts` and `left` (by status and reason); True if it was asked to stop before the end."""
    after: UUID | None = None
    while True:
        room = CHUNK if limit is None else min(CHUNK, limit - counts["matched"])
        found = await admin.matching(bulk.name, which, after, room)
        if found.ids:
            done, refused = await bulk.act(admin, found.ids)
            counts.update(done)
            left.update((one.status, one.reason) for one in refused)
            counts["matched"] += len(found.ids)
            shown(len(found.ids))
        after = found.last
        if after is None or counts["matched"] == limit:
            break
        if stop.asked:
            return True
    if not counts["matched"] and which.queue is not None:
        await known(admin, which.queue)
    return False


def _total(dsn: str | None, bulk: Bulk, which: Which, limit: int | None, *, yes: bool) -> int | None:
    """How many it will be, asked about if they are many; None where nobody looks."""
    if not which.narrow and not (sys.stdin is not None and sys.stdin.isatty()):
        confirm(f"{bulk.name} all{_of(which)}", yes=yes)
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    total = ask(dsn, lambda admin: admin.count(bulk.name, which))
    total = total if limit is None else min(total, limit)
    if total > ASKED_FROM and not yes and sys.stdin is not None and sys.stdin.isatty():
        typer.confirm(f"{bulk.name} {total}{_of(which)}?", abort=True, err=True)
    return total


@contextlib.contextmanager
def _bar(name: str, total: int | None) -> Iterator[Callable[[int], None]]:
    if total is None:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda count: progress.advance(task, count)


def _tell(bulk: Bulk, counts: Counter[str], left: Counter[tuple[str, str]], *, json: bool, stopped: bool) -> None:
    if json:
        told = {outcome: counts[outcome] for outcome in ("matched", *bulk.outcomes)}
        refused = [{"jobs": jobs, "status": status, "reason": why} for (status, why), jobs in left.most_common()]
        as_json({"act": bulk.name, **told, "refused": refused, "stopped": stopped})
        return
    for (status, why), jobs in left.most_common():
        note(f"{counted(jobs, 'job')} left {status}: {why}")
    for number, (outcome, told_as) in enumerate(bulk.outcomes.items()):
        if counts[outcome] or number == 0:
            out(f"{counted(counts[outcome], 'job')} {told_as}")


def _of(which: Which) -> str:
    """' dead jobs of queue 'q' and kind 'k'', to be put behind a number or `all`."""
    words = {"queue": which.queue, "kind": which.kind, "key": which.key, "batch": which.batch}
    said = [f"{name} {str(value)!r}" for name, value in words.items() if value is not None]
    status = f" {which.status}" if which.status is not None else ""
    return f"{status} jobs of " + (" and ".join(said) if said else "all queues")
