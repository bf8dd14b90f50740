"""`pgworkd demo`: an embedded Postgres, a daemon with six queues, real work on your files, and a live table.

Three actors share the database. The *application* (here) inserts jobs as any program would; the *daemon* is
the real one, with the handlers of `demo_jobs`; the *downstream* is an HTTP server that fails now and then. At
the end the database counts: a trigger has noted the id of every job that was ever inserted, so each must be
found in exactly one state, and what the daemon reported must be what the rows say.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from . import events, schema
from .daemon import Daemon, Options
from .demo_downstream import Downstream
from .demo_jobs import LOOP_BYTES_MAX, QUEUES, TABLES, UNKNOWN_KIND, demo_app, text_files
from .embedded import EmbeddedPostgres, EmbeddedUnavailable
from .errors import PgworkdError, UsageError
from .link import Link, LinkOptions

TICK_S = 0.25
TICKS_PER_SURVEY = 12
JOBS_MAX = 100_000
"""The application inserts no more than that, however long the demo runs."""
WAITING_MAX = 500
DRAIN_S = 5.0
"""After the last insert, so long may what is due or waits for a retry be finished."""
SECONDS_MAX = 366 * 86_400
STATUSES = ("completed", "pending", "failed", "running", "dead", "cancelled", "expired")

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
_BY_STATUS = """SELECT l.queue, coalesce(a.status::text, 'missing'), count(*), sum(coalesce(a.failures, 0) - l.failures)
    FROM demo.ledger l LEFT JOIN pgworkd.all_jobs a ON a.id = l.id GROUP BY 1, 2"""
_WITHOUT_VECTOR = """SELECT count(*) FROM demo.ledger l JOIN pgworkd.finished_jobs f ON f.id = l.id
    WHERE f.kind = 'embedding' AND f.status = 'completed'
      AND NOT EXISTS (SELECT FROM demo.embeddings e WHERE e.path = f.payload->>'path')"""
_STAYING = """SELECT kind, status::text, attempts, error FROM demo.ledger JOIN pgworkd.all_jobs USING (id)
    WHERE status = 'dead' OR (status = 'pending' AND error IS NOT NULL) ORDER BY status DESC, kind LIMIT 20"""
_UNFINISHED = """SELECT count(*) FROM pgworkd.jobs WHERE schedule IS NULL
    AND (status IN ('running', 'failed') OR (status = 'pending' AND run_at < pgworkd.clock() + interval '1 s'))"""
_INSERT = """INSERT INTO pgworkd.jobs (queue, kind, payload)
    SELECT queue, kind, payload::jsonb FROM unnest($1::text[], $2::text[], $3::text[]) AS n (queue, kind, payload)"""


def main(*, seconds: float | None, data_dir: Path | None, path: Path | None) -> int:
    """Runs the demo for `seconds` (None: until Ctrl-C) on the files below `path` (None: the project's own).

    Returns 0 when the summary adds up, 1 when it does not. Raises UsageError for arguments that cannot be,
    PgworkdError when there is no embedded Postgres to be had.
    """
    if seconds is not None and not 0 < seconds <= SECONDS_MAX:
        raise UsageError(f"--seconds {seconds:g}: give more than 0 and at most 366 days")
    root = (path or _own_folder()).expanduser().resolve()
    if not root.is_dir():
        raise UsageError(f"--path {root}: give a directory with files to work on")
    try:
        with EmbeddedPostgres(data_dir) as server:
            return anyio.run(Demo(server.dsn(), root, seconds).run, backend_options=_backend())
    except EmbeddedUnavailable as error:
        raise PgworkdError(str(error)) from error
    except OSError as error:
        raise UsageError(f"--data {data_dir or '(temporary)'}: cannot be used: {error.strerror or error}") from error
    except KeyboardInterrupt:
        say("stopped before it began")
        return 0


def _own_folder() -> Path:
    """The checkout; in an installed package, whose parent holds everyone's packages, the package alone."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent, package):
        if folder.is_dir() and (folder == package or (folder / "pyproject.toml").is_file()):
            return folder
    return Path.cwd()


def _backend() -> dict[str, Any]:
    return {"use_uvloop": importlib.util.find_spec("uvloop") is not None}


def say(line: str) -> None:
    """Prints a line, whatever the terminal's encoding and whatever a file's name holds. Raises OSError."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    sys.stdout.write(printable(line).encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """`text` without what could steer a terminal (CWE-150)."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


class Tally:
    """What the daemon reports, counted: a listener of its events."""

    def __init__(self) -> None:
        self.began_s = anyio.current_time()
        self.completed: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.dead: Counter[str] = Counter()
        self.lost = 0
        self.runs_s: dict[str, deque[float]] = {queue: deque(maxlen=10_000) for queue in QUEUES}
        self.latest: deque[str] = deque(maxlen=6)
        self._ends_s: deque[float] = deque(maxlen=5_000)

    def __call__(self, name: str, facts: Mapping[str, Any]) -> None:
        """Hears one event."""
        queue, now_s = str(facts.get("queue", "")), anyio.current_time()
        if name == events.JOB_COMPLETED:
            self.completed[queue] += 1
            self.runs_s.setdefault(queue, deque(maxlen=10_000)).append(facts["duration_s"])
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
        """Completed jobs per second over the last five."""
        window_s = max(min(5.0, self.elapsed_s), 0.1)
        since_s = anyio.current_time() - window_s
        return sum(end_s >= since_s for end_s in self._ends_s) / window_s

    def run_ms(self, queue: str, share: float) -> float:
        """The run time in ms that this share of a queue's completed runs did not exceed; NaN without runs."""
        runs_s = sorted(self.runs_s.get(queue, ()))
        return 1000 * runs_s[math.ceil(share * len(runs_s)) - 1] if runs_s else math.nan


@dataclass
class Balance:
    """What the database counted at the end, beside what the daemon reported."""

    inserted: dict[str, int]
    """Jobs in the ledger by queue: ids noted by a trigger, in the transaction of each insert."""
    found: dict[tuple[str, str], int]
    """The ledger's jobs by (queue, status); "missing" for one that no table holds."""
    failures: int
    """Budget spent on them, says the table."""
    reported: dict[str, int] = field(default_factory=dict)
    """By "completed", "dead" and "failures": what the events say."""
    without_vector: int = 0
    exit_code: int = 0

    def of(self, status: str) -> int:
        """How many jobs there are in a status."""
        return sum(n for (_, found), n in self.found.items() if found == status)

    def differences(self) -> list[str]:
        """What does not add up; empty when all does."""
        wrong = []
        for queue, inserted in self.inserted.items():
            total = sum(n for (name, status), n in self.found.items() if name == queue and status != "missing")
            if total != inserted:
                wrong.append(f"queue {queue}: {inserted} inserted, {total} found")
        pairs = {"completed": self.of("completed"), "dead": self.of("dead"), "failures": self.failures}
        for what, counted in pairs.items():
            if counted != self.reported.get(what, 0):
                wrong.append(f"{what}: {counted} in the tables, {self.reported.get(what, 0)} reported by the daemon")
        if self.without_vector:
            wrong.append(f"{self.without_vector} completed embeddings without a stored vector")
        if self.exit_code:
            wrong.append(f"the daemon ended with exit code {self.exit_code}")
        return wrong


class Demo:
    """One demo, from the empty database to the summary."""

    def __init__(self, dsn: str, root: Path, seconds: float | None) -> None:
        self._root = root
        self._seconds = math.inf if seconds is None else seconds
        self._options = Options(LinkOptions(dsn), worker_name="demo", lease_s=10, heartbeat_s=3, shutdown_s=5)
        self._link = Link(self._options.link, "demo")
        self._files: list[tuple[Path, int]] = []
        self._over, self._ended = anyio.Event(), anyio.Event()
        self._exit_code = 1
        self._problem: PgworkdError | None = None

    async def run(self) -> int:
        """All of it; the exit code."""
        self._tally, self._downstream = Tally(), Downstream()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._heed_signals)
                await self._prepare()
                self._daemon = Daemon(demo_app(await tasks.start(self._downstream.serve)), self._options)
                self._daemon.events.listen(self._tally)
                tasks.start_soon(self._work)
                tasks.start_soon(self._show)
                await self._use()
                self._daemon.request_stop()
                await self._ended.wait()
                tasks.cancel_scope.cancel()
            if self._problem is not None:
                raise self._problem
            return await self._sum_up()
        finally:
            await self._link.close()

    async def _prepare(self) -> None:
        await schema.migrate(self._options.link)
        await self._link.script(TABLES + _LEDGER)
        self._files = await anyio.to_thread.run_sync(text_files, self._root)

    async def _work(self) -> None:
        try:
            self._exit_code = await self._daemon.run()
        except PgworkdError as error:
            self._problem = error  # kept out of the task group, which would wrap it
        finally:
            self._over.set()
            self._ended.set()

    async def _heed_signals(self) -> None:
        """The first signal ends the demo gracefully, the second at once."""
        if threading.current_thread() is not threading.main_thread():
            return
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if self._over.is_set():
                    self._daemon.request_stop(now=True)
                self._over.set()
