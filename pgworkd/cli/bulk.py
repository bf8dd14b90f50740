"""One operation on all jobs that match a filter: in chunks, each a short transaction, counting the outcomes.

On a terminal it asks for confirmation above CONFIRM_ABOVE jobs and shows a progress bar. Ctrl-C stops it between two
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

from pgworkd.cli.common import ask, confirm, note_unknown
from pgworkd.cli.output import as_json, note, out
from pgworkd.core.validation import counted
from pgworkd.errors import PgworkdError, UsageError

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.admin.background import BackgroundOperation
    from pgworkd.admin.jobs import JobSelection
    from pgworkd.admin.refusals import Refused

CHUNK = 1000
"""Jobs per transaction: the maximum of Admin's operations."""
CONFIRM_ABOVE = 100

Operation = Callable[["Admin", Sequence[UUID]], Awaitable[tuple[Mapping[str, int], Sequence["Refused"]]]]
"""Operates on these jobs; returns the number of jobs by outcome, and the jobs that were left unchanged, and why."""


class Bulk(NamedTuple):
    """The operation `name`; `outcomes` maps each outcome to the text that is printed behind its count."""

    name: str
    operation: Operation
    outcomes: Mapping[str, str]


class _Stop:
    """Records a Ctrl-C; a second one interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before = signal.getsignal(signal.SIGINT)

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, *_: object) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._before)


def through(dsn: str | None, bulk: Bulk, which: JobSelection, *, limit: int | None, yes: bool, json: bool) -> int:
    """Operates on the jobs that match, the oldest first, at most `limit`; prints the counts; the exit code."""
    total = _total(dsn, bulk.name, which, limit, yes=yes)
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
            _report(bulk, counts, left, json=json, stopped=True)
            if isinstance(error, PgworkdError):
                raise
            raise PgworkdError("interrupted; the chunk in progress may have been completed as well") from None
    _report(bulk, counts, left, json=json, stopped=stopped)
    if stopped:
        note(f"stopped after {counted(counts['matched'], 'job')}" + (f" of {total:,}" if total is not None else ""))
    return 1 if stopped or left else 0


def start(
    dsn: str | None,
    name: str,
    which: JobSelection,
    *,
    limit: int | None,
    yes: bool,
    json: bool,
    call_back: bool = False,
) -> int:
    """Starts the operation `name` on the jobs that match in the background, and prints its id; the exit code."""
    if limit is not None:
        raise UsageError("--limit is not for --background, which is for all jobs that match")
    _total(dsn, name, which, None, yes=yes)

    async def question(admin: Admin) -> BackgroundOperation | None:
        return await admin.background.get(await admin.background.start(name, which, call_back=call_back))

    found = ask(dsn, question)
    if found is None:
        raise PgworkdError("the operation has been deleted already")
    if json:
        as_json(found._asdict())
    else:
        matched = "many jobs" if found.expected is None else counted(found.expected, "job")
        out(f"operation {found.id} started: {matched} matched; pgworkd operations shows how far it is")
    return 0


async def _each_chunk(
    admin: Admin,
    bulk: Bulk,
    which: JobSelection,
    limit: int | None,
    counts: Counter[str],
    left: Counter[tuple[str, str]],
    stop: _Stop,
    shown: Callable[[int], None],
) -> bool:
    """Fills `counts` and `left` (by status and reason); True if it was stopped before the end."""
    after: UUID | None = None
    while True:
        most = CHUNK if limit is None else min(CHUNK, limit - counts["matched"])
        found = await admin.jobs.matching(bulk.name, which, after, most)
        if found.ids:
            done, refused = await bulk.operation(admin, found.ids)
            counts.update(done)
            left.update((one.status, one.reason) for one in refused)
            counts["matched"] += len(found.ids)
            shown(len(found.ids))
        after = found.last
        if after is None or counts["matched"] == limit:
            break
        if stop.requested:
            return True
    if not counts["matched"] and which.group is not None:
        note(f"no dead job is of group {which.group}: see pgworkd dead")
    elif not counts["matched"] and which.queue is not None:
        await note_unknown(admin, which.queue)
    return False


def _total(dsn: str | None, name: str, which: JobSelection, limit: int | None, *, yes: bool) -> int | None:
    """The number of jobs, after a confirmation if there are many; None if there is no terminal to show it on."""
    if not which.narrow and not (sys.stdin is not None and sys.stdin.isatty()):
        confirm(f"{name} all{_of(which)}", yes=yes)
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    total = ask(dsn, lambda admin: admin.jobs.count(name, which))
    total = total if limit is None else min(total, limit)
    if total > CONFIRM_ABOVE and not yes and sys.stdin is not None and sys.stdin.isatty():
        typer.confirm(f"{name} {total}{_of(which)}?", abort=True, err=True)
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


def _report(bulk: Bulk, counts: Counter[str], left: Counter[tuple[str, str]], *, json: bool, stopped: bool) -> None:
    if json:
        outcomes = {outcome: counts[outcome] for outcome in ("matched", *bulk.outcomes)}
        refused = [{"jobs": jobs, "status": status, "reason": why} for (status, why), jobs in left.most_common()]
        as_json({"operation": bulk.name, **outcomes, "refused": refused, "stopped": stopped})
        return
    for (status, why), jobs in left.most_common():
        note(f"{counted(jobs, 'job')} left {status}: {why}")
    for number, (outcome, text) in enumerate(bulk.outcomes.items()):
        if counts[outcome] or number == 0:
            out(f"{counted(counts[outcome], 'job')} {text}")


def _of(which: JobSelection) -> str:
    """' dead jobs of queue 'q' and kind 'k'', to follow a number or `all`."""
    fields = {"queue": which.queue, "kind": which.kind, "key": which.key, "batch": which.batch}
    given = [f"{name} {str(value)!r}" for name, value in fields.items() if value is not None]
    given += [] if which.group is None else [f"group {which.group}"]
    status = f" {which.status}" if which.status is not None else ""
    return f"{status} jobs of " + (" and ".join(given) if given else "all queues")
