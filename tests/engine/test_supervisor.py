"""`pgworkd run --processes N`: N daemons that are started, stopped, restarted and monitored as one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd.cli import serve
from pgworkd.options import daemon_options
from pgworkd.processes import supervisor
from pgworkd.settings.config import Settings
from tests.kits.commands import NOWHERE, Command, Start, Systemd, ended, events, logged, start, systemd
from tests.kits.daemon import until

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

APP = """
import os, signal, sys, time
from pathlib import Path
import anyio
from pgworkd import App
from pgworkd import Job

app = App()
NAME = sys.argv[-1].removeprefix("--worker-name=")  # of the supervisor it is something else

@app.handler("pair", concurrency=1)
async def pair():
    Path(f"pair.{os.getpid()}").touch()
    while len(list(Path().glob("pair.*"))) < 2:
        await anyio.sleep(0.01)
    return [os.getpid(), sys.stdin.read(), "PGWORKD_SUPERVISED" in os.environ]

@app.handler("once", concurrency=1)
async def once(payload: dict, job: Job):
    if payload.get("stay") and job.attempt == 1:
        await anyio.sleep_forever()

@app.handler("hang", concurrency=1)
async def hang():
    await anyio.sleep_forever()

@app.handler("deaf", concurrency=1)
async def deaf():
    while True:
        try:
            await anyio.sleep_forever()
        except BaseException:
            pass
"""
WAITS_TO_OPEN = "\nwhile NAME.endswith('-2') and not Path('open').exists():\n    time.sleep(0.01)\n"
DIES = "\nif NAME == 'w-1':\n    os._exit(3)\n"
__all__ = ["start", "systemd"]  # fixtures

JSON = {"PGWORKD_LOG_FORMAT": "json", "PGWORKD_WORKER_NAME": "w", "PGWORKD_PROCESSES": "2"}


@pytest.fixture
def play(start: Start, tmp_path: Path) -> Iterator[Any]:
    """Starts two daemons with the app above, extended by `more`."""

    def play_(dsn: str, *args: str, more: str = "", **environ: str) -> Command:
        (tmp_path / "plays.py").write_text(APP + more)
        environ = {"PGWORKD_DSN": dsn, "TMPDIR": directory, **JSON, **environ}
        return start("run", "--app", "plays:app", *args, **environ)

    with tempfile.TemporaryDirectory() as directory:  # a killed supervisor leaves its sockets
        yield play_


async def test_two_processes_are_two_workers_of_one_queue_and_stop_gracefully(
    play: Any, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    run = play(dsn)
    await logged(run, "daemon.ready", 2)
    pids = {facts["worker"]: facts["pid"] for facts in events(run, "process.started")}
    assert dict(await db.fetch("SELECT name, pid FROM pgworkd.workers")) == pids
    assert sorted(pids) == ["w-1", "w-2"]
    assert all(os.getsid(pid) == pid for pid in pids.values()), "Ctrl-C in the terminal would come twice"
    await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('pair'), ('pair')")
    await until(lambda: db.fetchval("SELECT count(*) = 2 FROM pgworkd.finished_jobs WHERE status = 'completed'"))
    results = [json.loads(row["result"]) for row in await db.fetch("SELECT result FROM pgworkd.finished_jobs")]
    assert {pid for pid, _, _ in results} == set(pids.values())
    assert {(read, supervised) for _, read, supervised in results} == {("", False)}
    run.stop()
    assert await ended(run) == 0
    assert [facts["exit_code"] for facts in events(run, "process.ended")] == [0, 0]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 0


async def test_a_killed_process_is_replaced_and_its_jobs_run(play: Any, dsn: str, db: asyncpg.Connection[Any]) -> None:
    run = play(dsn, "--log-level", "debug")
    await logged(run, "daemon.ready", 2)
    await db.execute("INSERT INTO pgworkd.jobs (queue, payload) VALUES ('once', '{\"stay\": true}')")
    await logged(run, "job.started")
    victim = await db.fetchrow("SELECT w.* FROM pgworkd.workers w JOIN pgworkd.jobs j ON j.worker_id = w.id")
    assert victim is not None
    os.kill(victim["pid"], signal.SIGKILL)
    (end,) = await logged(run, "process.ended")
    assert (end["worker"], end["pid"], end["signal"]) == (victim["name"], victim["pid"], "SIGKILL")
    assert end["restart_in_s"] == 0
    assert (await logged(run, "process.started", 3))[2]["worker"] == victim["name"]
    await until(lambda: db.fetchval("SELECT count(*) = 2 FROM pgworkd.workers WHERE id <> $1", victim["id"]))

    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'once' FROM generate_series(1, 20)")
    await until(lambda: db.fetchval("SELECT count(*) = 21 FROM pgworkd.finished_jobs WHERE status = 'completed'"))
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE attempts = 1") == 20
    run.stop()
    assert await ended(run) == 0


async def test_a_second_signal_is_forwarded_to_all_processes(play: Any, dsn: str, db: asyncpg.Connection[Any]) -> None:
    run = play(dsn, "--shutdown-s", "3600", "--log-level", "debug")
    await logged(run, "daemon.ready", 2)
    await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('hang'), ('hang')")
    await logged(run, "job.started", 2)
    run.stop()
    assert [facts["running"] for facts in await logged(run, "daemon.stopping", 2)] == [1, 1]
    run.stop()
    assert await ended(run) == 0
    rows = await db.fetch("SELECT DISTINCT status::text, failures FROM pgworkd.jobs")
    assert [tuple(row) for row in rows] == [("pending", 0)]


async def test_a_third_signal_ends_all_processes(play: Any, dsn: str, db: asyncpg.Connection[Any]) -> None:
    run = play(dsn, "--shutdown-s", "3600", "--log-level", "debug")
    await logged(run, "daemon.ready", 2)
    await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('deaf'), ('deaf')")
    await logged(run, "job.started", 2)
    run.stop()
    await logged(run, "daemon.stopping", 2)
    run.stop(signal.SIGINT)
    run.stop(signal.SIGTERM)
    assert await ended(run) == 1
    assert [facts["reason"] for facts in events(run, "daemon.aborted")] == ["a third stop signal was received"]
    assert run.lines[-1].startswith("{"), "in the format of the log, like all others"


async def test_a_stop_during_startup_is_clean(play: Any) -> None:
    run = play(NOWHERE)
    await logged(run, "process.started")
    run.stop()
    assert await ended(run) == 0


async def test_processes_stop_when_the_supervisor_dies(play: Any, dsn: str, db: asyncpg.Connection[Any]) -> None:
    run = play(dsn)
    await logged(run, "daemon.ready", 2)
    run.process.kill()
    assert await ended(run) == -signal.SIGKILL
    assert [facts["exit_code"] for facts in events(run, "daemon.stopped")] == [0, 0]
    assert len(events(run, "supervisor.gone")) == 2
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 0


def test_a_process_that_cannot_stop_after_the_supervisor_died_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda _thread, number: did.append(number))
    monkeypatch.setattr(serve, "end_process", did.append)
    ours, theirs = os.pipe()
    os.close(theirs)
    serve._follow(ours, 0.001)
    os.close(ours)
    assert did == [signal.SIGTERM, "the supervisor is gone, and the stop takes too long"]


async def test_a_process_that_keeps_dying_is_restarted_with_backoff(play: Any, dsn: str) -> None:
    run = play(dsn, more=DIES)
    ends = await logged(run, "process.ended", 2)
    assert [facts["exit_code"] for facts in ends] == [3, 3]
    assert ends[0]["restart_in_s"] == 0
    assert 0.7 < ends[1]["restart_in_s"] < 1.3
    run.stop()
    assert await ended(run) == 0, "nothing was left behind"


async def test_a_configuration_error_of_all_processes_is_reported_once(
    play: Any, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    await db.execute("UPDATE pgworkd.schema_version SET version = 9999")
    run = play(dsn)
    assert await ended(run) == 2
    assert len([line for line in run.lines if line.startswith("pgworkd: the schema is at version 9999, newer")]) == 1
    assert len(events(run, "process.started")) == 1


async def test_a_permanent_failure_of_one_process_stops_all(
    play: Any, dsn: str, db: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    run = play(dsn)
    await logged(run, "daemon.ready", 2)
    (tmp_path / "pgworkd.toml").write_text("log_level = 'loud'\n")
    os.kill(events(run, "process.started")[1]["pid"], signal.SIGKILL)
    assert await ended(run) == 2
    assert [facts.get("exit_code") for facts in events(run, "process.ended")] == [None, 2, 0]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE name = 'w-1'") == 0


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--app", "nothing:app"), "pgworkd: module 'nothing': No module named 'nothing'"),
        (("--app", "empty:app"), "pgworkd: the app has no handlers"),
        (("--processes", "65"), "pgworkd: processes (flag): must be a whole number from 1 to 64, not '65'"),
    ],
)
def test_wrong_configuration_is_reported_once_and_starts_no_process(
    play: Any, tmp_path: Path, args: tuple[str, ...], line: str
) -> None:
    (tmp_path / "empty.py").write_text("from pgworkd import App\napp = App()\n")
    run = play(NOWHERE, *args)
    assert run.ends() == 2
    assert len(run.lines) == 1
    assert run.lines[0].startswith(line)


async def test_sighup_is_forwarded_to_all_processes_even_during_startup(play: Any, dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "pgworkd.toml"
    file.write_text("processes = 2\n")
    run = play(dsn, more=WAITS_TO_OPEN, PGWORKD_PROCESSES="")
    await logged(run, "process.started", 2)
    file.write_text("processes = 3\nlog_level = 'debug'\n")
    run.stop(signal.SIGHUP)
    reloaded = await logged(run, "settings.reloaded", 2)
    assert [facts["applied"] for facts in reloaded] == [{"log_level": "debug"}] * 2
    assert sorted(facts["after_restart"] for facts in reloaded) == [[], ["processes"]]
    (tmp_path / "open").touch()
    await logged(run, "settings.reloaded", 3)
    run.stop()
    assert await ended(run) == 0
    assert len(events(run, "process.started")) == 2


async def test_systemd_sees_one_service_that_recovers_by_itself(play: Any, dsn: str, systemd: Systemd, tmp_path: Path,
                                                          db: asyncpg.Connection[Any]) -> None:  # fmt: skip
    watched_s = 1.5
    run = play(dsn, more=WAITS_TO_OPEN, **systemd.environ, WATCHDOG_USEC=str(int(watched_s * 1e6)))
    await systemd.receives("STATUS=1 of 2 ready")
    assert "READY=1" not in systemd.received
    (tmp_path / "open").touch()
    await systemd.receives("READY=1")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 2

    frozen = events(run, "process.started")[0]
    os.kill(frozen["pid"], signal.SIGSTOP)
    replaced, pings = False, [time.monotonic()]
    while not replaced:
        await systemd.receives("WATCHDOG=1", after=len(systemd.received))
        pings.append(time.monotonic())
        replaced = len(events(run, "daemon.ready")) == 3
    assert max(after - before for before, after in itertools.pairwise(pings)) < watched_s
    assert {facts["pid"] for facts in events(run, "process.hung")} == {frozen["pid"]}
    assert events(run, "process.ended")[0]["signal"] == "SIGKILL", "one that is stopped hears no SIGABRT"
    assert events(run, "process.started")[-1]["worker"] == frozen["worker"]
    run.stop()
    await systemd.receives("STOPPING=1")
    assert await ended(run) == 0
    assert systemd.received.count("READY=1") == systemd.received.count("STOPPING=1") == 1


async def test_when_all_processes_hang_systemd_is_notified_and_none_is_killed(
    play: Any, dsn: str, systemd: Systemd
) -> None:
    run = play(dsn, **systemd.environ, WATCHDOG_USEC="1500000")
    await systemd.receives("READY=1")
    pids = [facts["pid"] for facts in events(run, "process.started")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with anyio.fail_after(4):
        while not all(line.startswith("STATUS=") for line in systemd.received[-2:]):  # one without WATCHDOG
            await systemd.receives("STATUS=", after=len(systemd.received))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    await systemd.receives("WATCHDOG=1", after=len(systemd.received))
    assert events(run, "process.ended") == events(run, "process.hung") == []
    run.stop()
    assert await ended(run) == 0


def test_worker_names_stay_within_the_length_limit() -> None:
    options = daemon_options(Settings(dsn=NOWHERE, worker_name="n" * 200))
    names = [supervisor.Supervisor(options, 64)._name(number) for number in range(1, 65)]
    assert len(set(names)) == 64
    assert {len(Settings(worker_name=name).worker_name) for name in names} == {199, 200}
