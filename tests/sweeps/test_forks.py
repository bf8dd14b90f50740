"""Handlers that start processes, in every way and every mode: what befalls those does not befall the daemon."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgworkd.cli.main import EXIT_S
from tests.kits import forking
from tests.kits.commands import database, lives
from tests.kits.programs import LIMIT_S, Launch, Program, launch

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

__all__ = ["launch"]  # a fixture
Db = psycopg.Connection[Any]
MODES = ("loop", "thread", "process")
PAIRS = [(mode, way) for mode in MODES for way in forking.WAYS]
LEASE_S = 6.0
SESSIONS = """SELECT coalesce(array_agg(application_name), '{}') FROM pg_stat_activity
    WHERE datname = current_database() AND application_name LIKE 'pgworkd %'"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The test's directory, with the application; whatever its handlers have left is ended after the test."""
    shutil.copy(forking.__file__, tmp_path / "plays.py")
    yield tmp_path
    (tmp_path / "go").touch()
    for file in tmp_path.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.fixture
def db(dsn: str) -> Iterator[Db]:
    with database(dsn) as connection:
        yield connection


def enqueue(db: Db, queue: str, **payload: Any) -> Any:
    row = db.execute(
        "INSERT INTO pgworkd.jobs (queue, payload) VALUES (%s, %s::jsonb) RETURNING id", (queue, json.dumps(payload))
    ).fetchone()
    assert row is not None
    return row[0]


def run(launch: Launch, dsn: str, processes: int = 1, **more: str) -> Program:
    environ = {"PGWORKD_DSN": dsn, "PGWORKD_APP": "plays:app", "PGWORKD_LOG_LEVEL": "debug", **more}
    program = launch("run", *(("--processes", str(processes)) if processes > 1 else ()), **environ)
    program.logs("daemon.ready", processes)
    return program


def all_begin(program: Program, db: Db, place: Path, pairs: Any = PAIRS, **payload: Any) -> list[int]:
    """One job for each pair of mode and way; their processes."""
    for mode, way in pairs:
        enqueue(db, mode, way=way, **payload)
    files = [place / f"{mode}-{way}.pid" for mode, way in pairs]
    with contextlib.suppress(AssertionError):
        program.until(lambda: all(file.exists() and file.read_text() for file in files), "all begin")
    assert [file.name for file in files if not file.exists()] == [], program.tail()
    return [int(file.read_text()) for file in files]


def statuses(db: Db) -> dict[str, int]:
    return dict(db.execute("SELECT status::text, count(*) FROM pgworkd.all_jobs GROUP BY 1").fetchall())


def all_complete(program: Program, db: Db, count: int, limit_s: float = LIMIT_S) -> None:
    """Waits until so many jobs are completed, and no other is there."""
    try:
        program.until(lambda: statuses(db) == {"completed": count}, limit_s=limit_s)
    except AssertionError as error:
        left = db.execute("SELECT queue, payload, status::text, attempts, error FROM pgworkd.jobs").fetchall()
        raise AssertionError(f"left: {left}; {error}") from None


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_a_signal_for_a_child_is_for_the_child(
    launch: Launch, dsn: str, db: Db, place: Path, number: signal.Signals, processes: int
) -> None:
    program = run(launch, dsn, processes)
    for mode, way in PAIRS:
        enqueue(db, mode, way=way, signal=number)
    enqueue(db, "quickly")
    all_complete(program, db, len(PAIRS) + 1)
    rows = db.execute("SELECT queue || ' ' || (payload ->> 'way'), result::text FROM pgworkd.finished_jobs").fetchall()
    codes = {name: code for name, code in rows if name is not None}
    assert codes == {f"{mode} {way}": "0" if way == "daemon" else str(-number) for mode, way in PAIRS}
    (quickly,) = [json.loads(code) for name, code in rows if name is None]
    assert quickly == [-signal.SIGTERM] * 40
    enqueue(db, "counts")
    all_complete(program, db, len(PAIRS) + 2)
    for name in ("daemon.stopping", "settings.reloaded", "process.ended"):
        assert program.events(name) == []
    program.send(signal.SIGTERM)
    assert program.ends() == 0


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGTERM, False)])
def test_a_stop_counts_once_and_stays_graceful(
    launch: Launch, dsn: str, db: Db, place: Path, number: signal.Signals, group: bool, processes: int
) -> None:
    """Also if it is for the whole process group, as by Ctrl-C in a terminal."""
    program = run(launch, dsn, processes)
    all_begin(program, db, place)
    enqueue(db, "slow")
    program.until((place / "slow.began").exists)
    (program.send_group if group else program.send)(number)
    program.logs("daemon.stopping", processes)
    (place / "go").touch()
    assert program.ends(limit_s=40) == 0
    assert statuses(db) == {"completed": len(PAIRS) + 1}
    assert len(program.events("daemon.stopping")) == processes
    assert [facts["exit_code"] for facts in program.events("daemon.stopped")] == [0] * processes


@pytest.mark.parametrize("processes", [1, 2])
def test_children_that_live_on_do_not_keep_a_process_that_has_stopped(
    launch: Launch, dsn: str, db: Db, place: Path, processes: int
) -> None:
    program = run(launch, dsn, processes)
    pids = all_begin(program, db, place, leaves=True)
    all_complete(program, db, len(PAIRS))
    program.send(signal.SIGTERM)
    program.logs("daemon.stopped", processes)
    assert program.ends(limit_s=EXIT_S + 5) == 0
    assert any(map(lives, pids))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_children_of_a_daemon_that_was_killed_keep_nothing_of_it(launch: Launch, dsn: str, db: Db, place: Path) -> None:
    db.execute("CREATE TABLE notes AS SELECT 0 AS n")
    times = {"PGWORKD_LEASE_S": f"{LEASE_S:g}", "PGWORKD_HEARTBEAT_S": "2", "PGWORKD_COMMAND_TIMEOUT_S": "2"}
    times["PGWORKD_METRICS_LISTEN"] = f"127.0.0.1:{free_port()}"
    killed = run(launch, dsn, **times)
    enqueue(db, "writes")
    killed.until((place / "writes.began").exists)
    pids = all_begin(killed, db, place)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.ends() == -signal.SIGKILL
    assert all(map(lives, [pid for (mode, _), pid in zip(PAIRS, pids, strict=True) if mode != "process"]))
    heir = run(launch, dsn, **times)  # on the same port
    ready_s = time.monotonic()
    all_complete(heir, db, len(PAIRS) + 1, LEASE_S + 20)
    assert time.monotonic() - ready_s < LEASE_S + 10
    assert db.execute("SELECT n FROM notes").fetchone() == (1,)
    heir.send(signal.SIGTERM)
    assert heir.ends() == 0
    assert db.execute(SESSIONS).fetchone() == ([],), "sessions of the one that was killed"


def test_a_sibling_takes_over_at_once_whatever_the_children_of_the_dead_process_do(
    launch: Launch, dsn: str, db: Db, place: Path
) -> None:
    db.execute("CREATE TABLE notes AS SELECT 0 AS n")
    program = run(launch, dsn, 2, PGWORKD_LEASE_S="60", PGWORKD_HEARTBEAT_S="20")
    enqueue(db, "writes")
    program.until((place / "writes.began").exists)
    all_begin(program, db, place)
    (owner,) = db.execute(
        "SELECT w.pid FROM pgworkd.workers w JOIN pgworkd.jobs j ON j.worker_id = w.id WHERE j.queue = 'writes'"
    ).fetchone() or (0,)
    (ran,) = db.execute(
        "SELECT count(*) FROM pgworkd.workers w JOIN pgworkd.jobs j ON j.worker_id = w.id WHERE w.pid = %s", (owner,)
    ).fetchone() or (0,)
    os.kill(owner, signal.SIGKILL)
    program.until(lambda: statuses(db).get("completed") == ran, "taken over at once")
    (place / "go").touch()
    all_complete(program, db, len(PAIRS) + 1)
    program.send(signal.SIGTERM)
    assert program.ends() == 0


BACK = [(mode, how) for mode in MODES for how in ("return", "exit", "raise")] + [("loop", "await")]


def test_a_child_that_comes_back_ends_and_is_no_second_daemon(launch: Launch, dsn: str, db: Db, place: Path) -> None:
    program = run(launch, dsn)
    count = 30
    for mode, how in BACK[:-1]:
        enqueue(db, f"back-{mode}", how=how)
    for _ in range(count):
        enqueue(db, "counts")
    all_complete(program, db, len(BACK) - 1 + count)
    mode, how = BACK[-1]  # alone, else what ends the copy of the loop may be another handler's in it
    enqueue(db, f"back-{mode}", how=how)
    all_complete(program, db, len(BACK) + count)
    rows = db.execute(
        "SELECT queue, payload ->> 'how', result::text FROM pgworkd.finished_jobs WHERE queue LIKE 'back-%'"
    ).fetchall()
    codes = {"return": "0", "exit": "3", "raise": "1", "await": "1"}
    assert {(queue, how): code for queue, how, code in rows} == {
        (f"back-{mode}", how): codes[how] for mode, how in BACK
    }
    runs = (place / "counts").read_text().split()
    assert len(runs) == len(set(runs)) == count
    assert program.log.read_text().count("a forked child has come back to the event loop") == 1
    program.send(signal.SIGTERM)
    assert program.ends() == 0
    assert len(program.events("daemon.ready")) == len(program.events("daemon.stopped")) == 1
