"""Time without a loop or the interpreter lock: a handler blocks its daemon, with another daemon beside it.

Whatever is blocked and however long, no two runs of a job go on at once. What is kept, and what is taken over when,
the table says.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from anyio.to_thread import run_sync

from pgworkd.core import events
from pgworkd.engine.life.kill_timer import EXIT_CODE
from tests.kits import blocking
from tests.kits.daemon import insert, running, until

pytestmark = pytest.mark.slow("handlers that block daemons for up to three leases")

TIMES = {"lease_s": 3.0, "heartbeat_s": 0.5, "loop_limit_s": 7.0}
SHORT_S, NEARLY_S, LONG_S, VERY_LONG_S = 1.6, 2.7, 4.5, 9.0
"""1 s and a little, nearly a lease, one and a half, three."""
ALIVE = 0
"""In the place of an exit code: the daemon lives, and the first run is the only one."""


class Cell:
    """One daemon with one job."""

    def __init__(self, mode: str, how: str, seconds: float, directory: Path) -> None:
        self.mode, self.how, self.seconds = mode, how, seconds
        self.queue = f"{mode} {how} {seconds:g}"
        self.ledger, self.log_file = directory / f"{self.queue}.ledger", directory / f"{self.queue}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, dsn: str) -> None:
        self.process = blocking.started(dsn, self.queue, self.log_file, **TIMES)

    @property
    def payload(self) -> str:
        return json.dumps({"ledger": str(self.ledger), "how": self.how, "seconds": self.seconds})

    @property
    def began(self) -> int:
        return sum(line.what == "began" for line in blocking.lines(self.ledger))

    def code(self) -> int:
        """Its exit code, or ALIVE; it is stopped then."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            assert self.process.wait(20) == 0
            return ALIVE
        return self.process.returncode

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def logged(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines() if f'"event": "{name}"' in line]


@pytest.mark.parametrize(
    ("mode", "how", "codes"),
    [
        ("loop", "sleep", {SHORT_S: {ALIVE}, NEARLY_S: {ALIVE}, LONG_S: {ALIVE}, VERY_LONG_S: {1}}),
        ("loop", "lock", {SHORT_S: {ALIVE}, NEARLY_S: {ALIVE}, LONG_S: {ALIVE}, VERY_LONG_S: {1}}),
        (
            "loop",
            "gil",
            {SHORT_S: {ALIVE}, NEARLY_S: {ALIVE, EXIT_CODE}, LONG_S: {EXIT_CODE}, VERY_LONG_S: {EXIT_CODE}},
        ),
        (
            "thread",
            "gil",
            {SHORT_S: {ALIVE}, NEARLY_S: {ALIVE, EXIT_CODE}, LONG_S: {EXIT_CODE}, VERY_LONG_S: {EXIT_CODE}},
        ),
        ("thread", "sleep", {LONG_S: {ALIVE}, VERY_LONG_S: {ALIVE}}),
        ("process", "gil", {LONG_S: {ALIVE}, VERY_LONG_S: {ALIVE}}),
    ],
)
async def test_no_two_runs_go_on_at_once(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, mode: str, how: str, codes: dict[float, set[int]]
) -> None:
    cells = [Cell(mode, how, seconds, tmp_path) for seconds in codes]
    try:
        # The daemon beside: it takes jobs back, and gets a queue as soon as the first attempt has begun elsewhere.
        beside = running(blocking.app_of("idle", *(cell.queue for cell in cells)), dsn, queues={"idle": 1}, **TIMES)
        async with beside as (other, _):
            for cell in cells:
                cell.start(dsn)
            for cell in cells:
                await insert(db, cell.queue, cell.payload, kind=f"{mode} {cell.queue}")
            for cell in cells:
                await until(lambda cell=cell: cell.began)  # type: ignore[misc]
                other.add_queue(cell.queue)
            await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=40)
        for cell in cells:
            code = await run_sync(cell.code)
            assert code in codes[cell.seconds], (cell.queue, code, cell.log)
            _judge(cell, code)
    finally:
        for cell in cells:
            if cell.process is not None:
                cell.process.kill()
                cell.process.wait()
    rows = await db.fetch("SELECT status::text, failures FROM pgworkd.finished_jobs")
    assert [tuple(row) for row in rows] == [("completed", 0)] * len(cells)


def _judge(cell: Cell, code: int) -> None:
    found = blocking.lines(cell.ledger)
    assert [line.beside for line in found] == [[]] * len(found), "two runs at once"
    if cell.how == "gil" and cell.mode != "process" and cell.seconds == NEARLY_S:
        return  # whether it is fenced, ended or neither depends on when the last renewal was
    assert [line.attempt for line in found if line.what == "ended"] == [1 if code == ALIVE else 2]
    if cell.mode == "loop" and cell.how != "gil":
        (blocked,) = cell.logged(events.LOOP_BLOCKED)
        assert blocked["kind"] == f"loop {cell.queue}"
        assert "blocking.py" in blocked["stack"]
        assert blocked["limit_s"] == TIMES["loop_limit_s"]
        assert len(cell.logged(events.LOOP_RESUMED)) == (code == ALIVE)
        assert len(cell.logged(events.LOOP_STUCK)) == (code == 1)
        assert len(cell.logged(events.DAEMON_ABORTED)) == (code == 1)
    elif code == EXIT_CODE:
        assert "in hold" in cell.log, "the stacks of all threads"
        assert cell.logged(events.LOOP_BLOCKED) == []
    elif cell.how == "gil" and cell.mode != "process":
        assert cell.logged(events.PROCESS_STALLED)
    assert cell.logged(events.LEASE_FENCED) == []


async def test_handlers_in_processes_end_with_their_daemon(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    """A daemon that is ended at the end of its lease leaves none that runs on: see `beside`."""
    holds, child = (Cell(mode, how, VERY_LONG_S, tmp_path) for mode, how in (("loop", "gil"), ("process", "sleep")))
    child.queue = holds.queue
    holds.start(dsn)
    try:
        async with running(blocking.app_of("idle", holds.queue), dsn, queues={"idle": 1}, **TIMES) as (other, seen):
            await insert(db, child.queue, child.payload, kind=f"process {child.queue}")
            await until(lambda: child.began)
            await insert(db, holds.queue, holds.payload, kind=f"loop {holds.queue}")
            await until(lambda: holds.began)
            other.add_queue(holds.queue)
            await seen.wait(events.JOB_LOST, count=2)
            await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
        assert await run_sync(holds.code) == EXIT_CODE
    finally:
        assert holds.process is not None
        holds.process.kill()
        holds.process.wait()
    for cell in (holds, child):
        found = blocking.lines(cell.ledger)
        assert [(line.what, line.attempt, line.beside) for line in found] == [
            ("began", 1, []),
            ("began", 2, []),
            ("ended", 2, []),
        ]
