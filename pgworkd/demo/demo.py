"""`pgworkd demo`: an embedded Postgres, a daemon that works on your text files, a live view of its queues, its pages.

The application inserts jobs a few times a second, as any program would, and notes their ids in a table of its own, in
the same transaction. The daemon is the real one, with the handlers of `demo.jobs`. At the end the jobs are counted:
each that was noted must be found in exactly one state, and what the daemon reported must agree with the tables.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.live import Live
from rich.table import Table

from pgworkd import ConnectionOptions, Daemon, DaemonOptions, UsageError
from pgworkd.client import NewJob, enqueue_many
from pgworkd.core.validation import counted
from pgworkd.database import schema
from pgworkd.database.connection import Connection, connect
from pgworkd.database.driver_errors import BROKEN, translate
from pgworkd.demo.jobs import TABLES, File, app
from pgworkd.demo.view import DemoTally, differences, live_view, queue_table, verdict
from pgworkd.embedded import EmbeddedPostgres
from pgworkd.engine.life.heartbeat import end_process
from pgworkd.engine.life.maintenance import Periods
from pgworkd.process import output, stop_signals
from pgworkd.process.redaction import escaped

TICK_S, LIVE_PERIOD_S, TICKS_PER_BATCH, FILES_PER_BATCH = 0.25, 0.25, 12, 10
UNFINISHED_MAX = 500  # with more unfinished jobs than this, nothing is inserted
DRAIN_S = 5.0  # how long jobs may take to finish after the last insert
FILES_MAX, FILE_BYTES_MAX = 500, 256 * 1024
KEPT_S = 20.0  # how long it runs with --keep, if nothing is said
UNKNOWN_KIND = "index_of_tomorrow"
Dashboard = Callable[[str], AbstractAsyncContextManager[str]]
"""Serves the pages of a database, by its DSN, while the block lasts; says where they are."""

_IDS = "CREATE TABLE IF NOT EXISTS demo.inserted (id uuid PRIMARY KEY); TRUNCATE demo.inserted;"
_NOTE = "INSERT INTO demo.inserted SELECT unnest($1::uuid[])"
_QUEUES = "SELECT queue, due + scheduled + blocked, running, failed, dead FROM pgworkd.queue_stats"
_UNFINISHED = """SELECT count(*) FROM pgworkd.jobs WHERE schedule IS NULL AND status NOT IN ('dead', 'completed')
    AND (status <> 'pending' OR run_at < pgworkd.clock() + interval '1 s')"""
_FOUND = """SELECT coalesce(status, 'missing'), count(*)
    FROM demo.inserted LEFT JOIN pgworkd.all_jobs USING (id) GROUP BY 1 ORDER BY 2 DESC, 1"""
_STORED = """SELECT count(*) FILTER (WHERE status = 'completed') AS completed,
    count(*) FILTER (WHERE status = 'dead') AS dead, coalesce(sum(failures), 0)::int AS failures,
    (SELECT count(*) FROM pgworkd.audit) AS acts
    FROM pgworkd.all_jobs"""
_REMAINING = """SELECT status, kind, attempts, left(error, 200) FROM demo.inserted JOIN pgworkd.all_jobs USING (id)
    WHERE status IN ('dead', 'pending') AND error IS NOT NULL ORDER BY 1, 2, id LIMIT 20"""


def main(
    *,
    seconds: float | None,
    data_dir: Path | None,
    path: Path | None,
    keep: bool = False,
    dashboard: Dashboard = lambda _: nullcontext(""),
) -> int:
    """Runs the demo for `seconds` (None: until Ctrl-C) on the text files below `path` (None: pgworkd's own).

    `keep`: leaves the dashboard up after that, until Ctrl-C.
    Returns 0 if the jobs add up, else 1. Raises UsageError for invalid arguments, PgworkdError if the embedded Postgres
    cannot be started; one that ends later raises it in an ExceptionGroup.
    """
    if seconds is not None and not 0 < seconds < math.inf:
        raise UsageError(f"--seconds {seconds:g}: give more than 0, or nothing for a demo that Ctrl-C ends")
    root = (path or Path(__file__).parents[1]).expanduser().resolve()
    if not (files := text_files(root)):
        raise UsageError(f"--path {root}: give a directory with text files of at most {FILE_BYTES_MAX // 1024} KiB")
    server = EmbeddedPostgres(data_dir)
    try:
        server.start()
        seconds = KEPT_S if keep and seconds is None else seconds
        return int(stop_signals.run(Demo(server.dsn(), files, seconds, dashboard, keep=keep).run))
    except OSError as error:
        raise UsageError(f"--data {data_dir or '(temporary)'}: {error.strerror or error}") from error
    finally:
        stop_signals.ignore()
        server.stop()


def text_files(root: Path) -> list[Path]:
    """At most FILES_MAX text files below `root`: nothing hidden or binary, no links."""
    found: list[Path] = []
    for directory, folders, names in os.walk(root):
        here = Path(directory)
        # Neither a database, which may be the demo's own, nor another file system such as /proc.
        if "pgdata" in folders or (here != root and here.is_mount()):
            folders.clear()
            continue
        folders[:] = sorted(folder for folder in folders if not folder.startswith((".", "node_modules")))
        found += filter(_is_text, (here / name for name in sorted(names) if not name.startswith(".")))
        if len(found) >= FILES_MAX:
            break
    return found[:FILES_MAX]


def _is_text(path: Path) -> bool:
    try:
        str(path).encode()  # a name that is not UTF-8 cannot be in a payload
        is_small = path.is_file() and not path.is_symlink() and 0 < path.stat().st_size <= FILE_BYTES_MAX
        return is_small and b"\0" not in path.read_bytes()
    except (OSError, UnicodeEncodeError):
        return False


class Demo:
    """One demo on a database, from the migration to the verdict."""

    def __init__(
        self,
        dsn: str,
        files: list[Path],
        seconds: float | None,
        dashboard: Dashboard = lambda _: nullcontext(""),
        *,
        keep: bool = False,
    ) -> None:
        self._files, self._seconds = files, math.inf if seconds is None else seconds
        self._dashboard, self._keep = dashboard(dsn), keep
        periods = Periods(keep_days=3650)  # deleted jobs could not be counted
        self._options = DaemonOptions(ConnectionOptions(dsn), "demo", shutdown_s=5, periods=periods)
        self._database = Connection(self._options.connection, "demo")
        self._console = Console(highlight=False, markup=False, emoji=False)

    async def run(self) -> int:
        """Runs the demo from the migration to the verdict; the exit code."""
        with stop_signals.received() as signals:
            return await self._run(signals)

    async def _run(self, signals: AsyncIterator[signal.Signals]) -> int:
        self._stopping, self._tally = anyio.Event(), DemoTally()
        try:
            await schema.migrate(self._options.connection)
            await self._database.script(TABLES + _IDS)
            async with self._dashboard as said:
                code = await self._work(signals, said)
                if self._keep:
                    self._print("The dashboard stays up, without the daemon: Ctrl-C ends it")
                if self._keep:  # unless nobody is left to read that
                    await anext(signals)
            return code
        finally:
            await self._database.close()

    async def _work(self, signals: AsyncIterator[signal.Signals], said: str) -> int:
        """Runs the daemon and its jobs until they are over, and sums up; `said`: of the dashboard."""
        before = await self._stored()
        daemon = Daemon(app, self._options, end_process=end_process)
        daemon.events.listen(self._tally)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._heed_signals, signals, daemon)
            tasks.start_soon(self._use, daemon, said)
            tasks.start_soon(self._show)
            exit_code = await daemon.run()
            tasks.cancel_scope.cancel()
        return await self._sum_up(before, exit_code)

    async def _heed_signals(self, signals: AsyncIterator[signal.Signals], daemon: Daemon) -> None:
        """The first signal ends the demo gracefully, the second at once."""
        async for _ in signals:
            if self._stopping.is_set():
                daemon.request_stop(now=True)
            self._end()

    def _end(self) -> None:
        """Ends the demo soon, and keeps nothing up."""
        self._keep = False
        self._stopping.set()

    async def _use(self, daemon: Daemon, said: str) -> None:
        """Inserts jobs until the time is over, lets them finish, and stops the daemon; after a signal at once."""
        await daemon.ready.wait()
        self._print(f"pgworkd demo: {counted(len(self._files), 'text file')}; Ctrl-C ends it")
        if said:
            self._print(said)
        ends_at = anyio.current_time() + self._seconds
        try:
            self._connection = await connect(self._options.connection, "demo application")
            for tick in count():
                overtime_s = anyio.current_time() - ends_at
                unfinished = await self._connection.fetchval(_UNFINISHED)
                if overtime_s < 0 and unfinished < UNFINISHED_MAX:
                    await self._insert(tick)
                if self._stopping.is_set() or overtime_s > DRAIN_S or (overtime_s >= 0 and not unfinished):
                    break
                with anyio.move_on_after(TICK_S):
                    await self._stopping.wait()
            await self._connection.close()
        except BROKEN as error:
            raise translate(error) from error
        self._stopping.set()
        daemon.request_stop()

    async def _insert(self, tick: int) -> None:
        """Inserts jobs for the next file, now and then a batch, and notes their ids: all, or none.

        The serialize_key lets one job at a time index a file: two would wait for each other's row.
        """
        file = File(str(self._files[tick % len(self._files)]))
        jobs = [NewJob("index", file, serialize_key=file.path), NewJob("compress", file), NewJob("notify", file)]
        if tick == 0:
            jobs += [NewJob("count", kind="crash"), NewJob("index", file, kind=UNKNOWN_KIND)]
        async with self._connection.transaction():
            ids = await enqueue_many(self._connection, jobs)
            if tick % TICKS_PER_BATCH == 0:
                chosen = [self._files[(tick + n) % len(self._files)] for n in range(FILES_PER_BATCH)]
                async with app.batch(self._connection, "files", kind="count", on_complete=NewJob("report")) as batch:
                    ids += await batch.add(File(str(path)) for path in chosen)
            await self._connection.execute(_NOTE, ids)

    async def _show(self) -> None:
        try:
            with Live(console=self._console, auto_refresh=False, transient=True) as live:
                while True:
                    live.update(live_view(await self._table(), self._tally), refresh=True)
                    if output.is_broken("stdout"):  # nobody is left to show it to
                        self._end()
                    await anyio.sleep(LIVE_PERIOD_S)
        except (OSError, SystemExit):  # as above; rich makes SystemExit of a broken pipe
            self._end()

    async def _table(self) -> Table:
        return queue_table(app.queues(), await self._database.fetch(_QUEUES), self._tally)

    def _print(self, shown: str | Table) -> None:
        try:
            self._console.print(escaped(shown) if isinstance(shown, str) else shown, soft_wrap=True)
        except (OSError, SystemExit):  # as above
            self._end()

    async def _stored(self) -> dict[str, int]:
        row: Any = (await self._database.fetch(_STORED))[0]
        return dict(row)

    async def _sum_up(self, before: dict[str, int], exit_code: int) -> int:
        """Prints what became of the jobs; 0 if they add up."""
        completed, retries, dead = (n.total() for n in (self._tally.completed, self._tally.retries, self._tally.dead))
        inserted = await self._database.value("SELECT count(*) FROM demo.inserted")
        found = {str(status): n for status, n in await self._database.fetch(_FOUND)}
        stored = {what: n - before[what] for what, n in (await self._stored()).items()}
        reported = {"completed": completed, "dead": dead, "failures": retries + dead}
        if stored.pop("acts"):
            self._print("jobs or queues were changed by hand: the tables need not hold what the daemon reported")
            stored = {}
        wrong = differences(inserted, found, stored, reported, exit_code)
        self._print(await self._table())
        for status, kind, attempts, error in await self._database.fetch(_REMAINING):
            self._print(f"{status}: {kind}, attempt {attempts}: {error}")
        self._print(f"{completed / self._tally.elapsed_s:.1f} jobs/s over {self._tally.elapsed_s:.1f} s")
        self._print(verdict(inserted, found, reported) if not wrong else f"DOES NOT ADD UP: {'; '.join(wrong)}")
        return 1 if wrong else 0
