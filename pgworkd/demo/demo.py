"""`pgworkd demo`: an embedded Postgres, a daemon with six queues, real work on your files, and a live table.

Three parties share the database. The *application* (here) inserts jobs as any program would; the *daemon* is
the real one, with the handlers of `demo.jobs`; the *downstream* is an HTTP server that fails now and then. At
the end the jobs are counted: a trigger has recorded the id of every job ever inserted, so each must be found in
exactly one state, and the events that the daemon reported must agree with the rows.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import sys
import threading
from itertools import count
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from rich.console import Console
from rich.live import Live

from pgworkd.database import schema
from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.demo.downstream import Downstream
from pgworkd.demo.jobs import LOOP_BYTES_MAX, TABLES, UNKNOWN_KIND, demo_app, text_files
from pgworkd.demo.view import Balance, QueueRow, Tally, live_view, plain_line, print_line, summary_table, verdict
from pgworkd.embedded import EmbeddedPostgres, EmbeddedUnavailable
from pgworkd.engine.life.daemon import Daemon, DaemonOptions
from pgworkd.engine.life.heartbeat import end_process
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.words.validation import counted

TICK_S = 0.25
TICKS_PER_SURVEY = 12
JOBS_MAX = 100_000
"""The maximum number of jobs that the application inserts."""
WAITING_MAX = 500
DRAIN_S = 5.0
"""How long, in seconds, jobs that are due or wait for a retry may take to finish after the last insert."""
SECONDS_MAX = 366 * 86_400
LIVE_PERIOD_S, LINE_PERIOD_S = 0.25, 2.0

_LEDGER = """
CREATE TABLE IF NOT EXISTS demo.ledger (id uuid PRIMARY KEY, queue text NOT NULL, failures int NOT NULL);
TRUNCATE demo.ledger;
INSERT INTO demo.ledger SELECT id, queue, failures FROM pgworkd.jobs WHERE status <> 'dead';
CREATE OR REPLACE FUNCTION demo.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO demo.ledger SELECT id, queue, failures FROM inserted;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER demo_note AFTER INSERT ON pgworkd.jobs
    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION demo.note();
"""
_INSERT = """INSERT INTO pgworkd.jobs (queue, kind, payload)
    SELECT queue, kind, payload::jsonb FROM unnest($1::text[], $2::text[], $3::text[]) AS n (queue, kind, payload)"""
_QUEUES = "SELECT queue, due, scheduled, running, failed, dead FROM pgworkd.queue_stats ORDER BY queue"
_UNFINISHED = """SELECT count(*) FROM pgworkd.jobs WHERE schedule IS NULL
    AND (status IN ('running', 'failed') OR (status = 'pending' AND run_at < pgworkd.clock() + interval '1 s'))"""
_FOUND = """SELECT l.queue, coalesce(a.status::text, 'missing'), count(*), sum(coalesce(a.failures, 0) - l.failures)
    FROM demo.ledger l LEFT JOIN pgworkd.all_jobs a ON a.id = l.id GROUP BY 1, 2"""
_WITHOUT_VECTOR = """SELECT count(*) FROM demo.ledger l JOIN pgworkd.finished_jobs f ON f.id = l.id
    WHERE f.kind = 'embedding' AND f.status = 'completed'
      AND NOT EXISTS (SELECT FROM demo.embeddings e WHERE e.path = f.payload->>'path')"""
_STAYING = """SELECT CASE status WHEN 'dead' THEN 'dead' ELSE 'waiting' END, kind, attempts, left(error, 200)
    FROM demo.ledger JOIN pgworkd.all_jobs USING (id)
    WHERE status = 'dead' OR (status = 'pending' AND error IS NOT NULL) ORDER BY 1, 2, 3 LIMIT 20"""
_STORED = """SELECT (SELECT count(*) FROM demo.embeddings), (SELECT count(*) FROM demo.neighbours),
    (SELECT count(*) FROM demo.counts)"""
_READ = """SELECT count(*), sum(length(result->>'drawn')), sum((result->>'wrong')::int)
    FROM demo.ledger l JOIN pgworkd.finished_jobs f ON f.id = l.id WHERE f.queue = 'ocr' AND f.status = 'completed'"""

NewJob = tuple[str, str | None, str]


def main(*, seconds: float | None, data_dir: Path | None, path: Path | None) -> int:
    """Runs the demo for `seconds` (None: until Ctrl-C) on the files below `path` (None: the project's own).

    Returns 0 if the summary adds up, else 1. Raises UsageError for invalid arguments, PgworkdError if the embedded
    Postgres cannot be started.
    """
    if seconds is not None and not 0 < seconds <= SECONDS_MAX:
        raise UsageError(f"--seconds {seconds:g}: give more than 0 and at most 366 days")
    root = (path or _own_folder()).expanduser().resolve()
    if not root.is_dir() or not str(root).isprintable():
        raise UsageError(f"--path {root}: give a directory with files to process")
    server = EmbeddedPostgres(data_dir)
    try:
        _start(server, data_dir)
        uvloop = importlib.util.find_spec("uvloop") is not None
        return anyio.run(Demo(server.dsn(), root, seconds).run, backend_options={"use_uvloop": uvloop})
    except KeyboardInterrupt:
        return 0  # before there was anything to count
    finally:
        server.stop()


def _start(server: EmbeddedPostgres, data_dir: Path | None) -> None:
    try:
        server.start()
    except EmbeddedUnavailable as error:
        raise PgworkdError(str(error)) from error
    except OSError as error:
        raise UsageError(f"--data {data_dir or '(temporary)'}: {error.strerror or error}") from error


def _own_folder() -> Path:
    """The checkout; for an installed package, whose parent is site-packages, the package only."""
    package = Path(__file__).resolve().parents[1]
    if (package.parent / "pyproject.toml").is_file():
        return package.parent
    return package if package.is_dir() else Path.cwd()


class Demo:
    """One demo, from the empty database to the summary."""

    def __init__(self, dsn: str, root: Path, seconds: float | None) -> None:
        self._root = root
        self._seconds = math.inf if seconds is None else seconds
        self._options = DaemonOptions(
            ConnectionOptions(dsn), worker_name="demo", lease_s=10, heartbeat_s=3, shutdown_s=5
        )
        self._connection = Connection(self._options.connection, "demo")
        self._files: list[tuple[Path, int]] = []
        self._carried = 0
        self._daemon: Daemon | None = None
        self._exit_code = 1

    async def run(self) -> int:
        """All of it; the exit code."""
        self._stopping, self._ended = anyio.Event(), anyio.Event()
        self._tally, self._downstream = Tally(), Downstream()
        problem: PgworkdError | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._heed_signals)
                try:
                    await self._live(tasks)
                except PgworkdError as error:
                    problem = error  # raised below: the task group would wrap it
                tasks.cancel_scope.cancel()
            if problem is not None:
                raise problem
            return await self._sum_up()
        finally:
            await self._connection.close()

    async def _live(self, tasks: TaskGroup) -> None:
        await schema.migrate(self._options.connection)
        await self._connection.script(TABLES + _LEDGER)
        self._carried = int(await self._connection.value("SELECT count(*) FROM demo.ledger"))
        self._files = await anyio.to_thread.run_sync(text_files, self._root)
        version = str(await self._connection.value("SHOW server_version")).split(" ")[0]
        self._print(f"pgworkd demo: Postgres {version}, {counted(len(self._files), 'text file')} in {self._root}")
        port = await tasks.start(self._downstream.serve)
        self._daemon = daemon = Daemon(demo_app(port), self._options, end_process=end_process)
        daemon.events.listen(self._tally)
        tasks.start_soon(self._work, daemon)
        while not (daemon.ready.is_set() or self._ended.is_set()):
            await anyio.sleep(0.01)
        tasks.start_soon(self._show)
        self._tally.began_s = anyio.current_time()
        with anyio.move_on_after(self._seconds):
            await self._use()
        if not self._stopping.is_set():
            self._stopping.set()
            await self._drain()  # not after a signal, which stops at once
        daemon.request_stop()
        await self._ended.wait()

    async def _work(self, daemon: Daemon) -> None:
        try:
            self._exit_code = await daemon.run()
        finally:
            self._stopping.set()
            self._ended.set()

    async def _heed_signals(self) -> None:
        """The first signal ends the demo gracefully, the second at once."""
        if threading.current_thread() is not threading.main_thread():
            return
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if self._stopping.is_set() and self._daemon is not None:
                    self._daemon.request_stop(now=True)
                self._stopping.set()

    # The application.

    async def _use(self) -> None:
        """Inserts a few jobs per second until the stop."""
        inserted = 0
        for tick in count():
            jobs = self._jobs(tick)
            waiting = await self._connection.value(_UNFINISHED)
            if inserted + len(jobs) <= JOBS_MAX and waiting < WAITING_MAX:
                await self._connection.fetch(_INSERT, *map(list, zip(*jobs, strict=True)))
                inserted += len(jobs)
            with anyio.move_on_after(TICK_S):
                await self._stopping.wait()
            if self._stopping.is_set():
                return

    def _jobs(self, tick: int) -> list[NewJob]:
        """The jobs that the application inserts at its nth tick."""
        small = [path for path, size in self._files if size <= LOOP_BYTES_MAX]
        path = small[tick % len(small)] if small else self._root
        subject = json.dumps({"path": str(path)})
        jobs: list[NewJob] = [("notification", None, json.dumps({"text": f"note {tick}: {path.name}"}))]
        if small:
            jobs.append(("embedding", None, subject))
        if tick % 2 == 0:
            jobs.append(("ocr", None, subject))
            jobs += [("inference", None, subject)] if small else []
        if tick % TICKS_PER_SURVEY == 0:
            directories = sorted({path.parent for path, _ in self._files}) or [self._root]
            directory = directories[tick // TICKS_PER_SURVEY % len(directories)]
            jobs.append(("agent", None, json.dumps({"path": str(directory)})))
        if tick == 0:
            jobs += [("inference", "inference_crash", subject), ("agent", UNKNOWN_KIND, subject)]
        return jobs

    async def _drain(self) -> None:
        """Waits until no job is due, running or waiting for a retry."""
        with anyio.move_on_after(DRAIN_S):
            while not self._ended.is_set() and await self._connection.value(_UNFINISHED):
                await anyio.sleep(0.05)

    # Output.

    async def _show(self) -> None:
        title = f"pgworkd demo, {self._root.name}"
        if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            while True:
                await anyio.sleep(LINE_PERIOD_S)
                self._print(plain_line(await self._rows(), self._tally))
        try:
            with Live(console=Console(), auto_refresh=False, transient=True) as live:
                while True:
                    live.update(live_view(title, await self._rows(), self._tally), refresh=True)
                    await anyio.sleep(LIVE_PERIOD_S)
        except (OSError, SystemExit):  # the terminal is gone; rich makes SystemExit of a broken pipe
            self._stopping.set()

    async def _rows(self) -> list[QueueRow]:
        try:
            return [QueueRow(*row) for row in await self._connection.fetch(_QUEUES)]
        except PgworkdError:
            return []  # the application gets the same error, and ends the demo

    def _print(self, line: str) -> None:
        try:
            print_line(line)
        except OSError:  # standard output is closed
            self._stopping.set()

    async def _sum_up(self) -> int:
        """Counts, compares and prints; the exit code."""
        connection, tally = self._connection, self._tally
        balance = await self._balance()
        elapsed_s = tally.elapsed_s
        lines = ["", *summary_table(balance, tally), ""]
        for state, kind, attempts, error in await connection.fetch(_STAYING):
            lines.append(f"{state:11} {kind}, attempt {attempts}: {error}")
        vectors, neighbours, counts = (await connection.fetch(_STORED))[0]
        maintained = f"{counted(counts, 'count')} by maintenance"
        names, characters, wrong = (await connection.fetch(_READ))[0]
        answered = self._downstream.answered
        refused = f"{answered['busy']} x 429, {answered['broken']} x 500, {answered['slow']} x too slow"
        lines += [
            f"stored      {counted(vectors, 'vector')}, {counted(neighbours, 'list')} of neighbours, {maintained}",
            f"ocr         {counted(names, 'name')} read back, {wrong or 0} of {characters or 0} characters wrong",
            f"downstream  {counted(len(self._downstream.accepted), 'notice')} taken; refused: {refused}",
            f"throughput  {tally.completed.total() / elapsed_s:.1f} jobs/s over {elapsed_s:.1f} s"
            + (f"; {counted(self._carried, 'job')} carried over from an earlier run" if self._carried else ""),
            verdict(balance),
        ]
        for line in lines:
            self._print(line)
        return 1 if balance.differences() else 0

    async def _balance(self) -> Balance:
        inserted = await self._connection.fetch("SELECT queue, count(*) FROM demo.ledger GROUP BY 1")
        found = await self._connection.fetch(_FOUND)
        tally = self._tally
        retries, dead = tally.retries.total() + tally.lost, tally.dead.total()
        return Balance(
            inserted={str(row[0]): int(row[1]) for row in inserted},
            found={(queue, status): n for queue, status, n, _ in found},
            failures=sum(int(row[3]) for row in found),
            reported={"completed": tally.completed.total(), "dead": dead, "failures": retries + dead},
            without_vector=int(await self._connection.value(_WITHOUT_VECTOR)),
            exit_code=self._exit_code,
        )
