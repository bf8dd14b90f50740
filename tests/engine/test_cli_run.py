"""`pgworkd run` as a process: startup, signals and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import psycopg
import pytest

LIMIT_S = 20.0
NOBODY = "postgresql://nobody:c4n4ry@127.0.0.1:1/nothing"

APP = """
import threading, time
import anyio
from pgworkd import App

app = App()

@app.handler("mail", concurrency=3)
async def mail(): ...

@app.handler("hang")
async def hang():
    await anyio.sleep_forever()
"""


class Command:
    """A `pgworkd` process; its standard error is read continuously."""

    def __init__(self, directory: Path, args: tuple[str, ...], environ: dict[str, str], stdout: Any) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PGWORKD_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgworkd.cli", *args],
            cwd=directory,
            env=clean | environ,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._ended = True
            self._said.notify_all()

    def says(self, text: str, after: int = 0) -> str:
        """The first line from the `after`-th on that contains the text; waits for it."""

        def found() -> list[str]:
            return [line for line in self.lines[after:] if text in line]

        with self._said:
            self._said.wait_for(lambda: found() or self._ended, LIMIT_S)
            assert found(), f"no {text!r} in {self.lines}"
            return found()[0]

    def event(self, name: str, after: int = 0) -> dict[str, Any]:
        """The facts of a log line."""
        facts: dict[str, Any] = json.loads(self.says(f'"event": "{name}"', after))
        return facts

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        """The exit code; waits for it."""
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        said = "\n".join(self.lines)
        assert not any(line.startswith("Traceback") for line in self.lines), said  # those of jobs are indented
        assert not any("c4n4ry" in line for line in self.lines), self.lines
        return code


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "notes.py").write_text(APP)
    with contextlib.ExitStack() as stack:

        def start_(*args: str, stdout: Any = subprocess.DEVNULL, **environ: str) -> Command:
            command = Command(tmp_path, args, environ, stdout)
            stack.callback(_clear, command)
            return command

        yield start_


def _clear(command: Command) -> None:
    command.process.kill()
    command.process.wait()
    command._reader.join(LIMIT_S)
    for pipe in (command.process.stdout, command.process.stderr):
        if pipe is not None:
            pipe.close()


@contextlib.contextmanager
def database(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with contextlib.closing(psycopg.connect(dsn, autocommit=True)) as connection:
        yield connection


def until(fact: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def catches(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """The process has a handler for the signal (proc(5), SigCgt)."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def test_run_becomes_ready_works_and_stops_gracefully(start: Start, dsn: str) -> None:
    run = start("run", "--app", "notes:app", "--queue", "mail=2", "--log-format", "json", PGWORKD_DSN=dsn)
    assert run.event("daemon.ready")["queues"] == {"mail": 2}
    with database(dsn) as db:
        db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('mail')")
    run.event("job.completed")
    run.stop()
    assert run.ends() == 0
    assert run.event("daemon.stopped")["exit_code"] == 0
    with database(dsn) as db:
        assert db.execute("SELECT count(*) FROM pgworkd.workers").fetchone() == (0,)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_startup_is_clean(start: Start, dsn: str, number: signal.Signals) -> None:
    run = start("run", "--app", "notes:app", PGWORKD_DSN=dsn)
    until(lambda: catches(run.process, signal.SIGTERM))
    run.stop(number)
    assert run.ends() == 0


def test_a_stop_while_the_app_is_imported_is_clean(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(60)\n")
    run = start("run", "--app", "slow:app", PGWORKD_DSN=NOBODY)
    until((tmp_path / "began").exists)
    run.stop()
    assert run.ends() == 0
    assert run.lines == []


def test_a_stop_while_the_database_is_unavailable_is_clean(start: Start) -> None:
    run = start("run", "--app", "notes:app", PGWORKD_DSN=NOBODY, PGWORKD_LOG_FORMAT="json")
    assert "no connection to the database" in run.event("database.unavailable")["error"]
    run.stop()
    assert run.ends() == 0


def test_a_stop_while_the_database_does_not_respond_is_clean(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"postgresql://u:c4n4ry@127.0.0.1:{silent.getsockname()[1]}/d"
        run = start("run", "--app", "notes:app", PGWORKD_DSN=dsn, PGWORKD_CONNECT_TIMEOUT_S="1")
        silent.settimeout(LIMIT_S)
        line, _ = silent.accept()
        run.stop()
        assert run.ends() == 0
        line.close()


def test_a_second_signal_ends_a_hanging_handler_at_once(start: Start, dsn: str) -> None:
    run = start(
        "run", "--app=notes:app", "--shutdown-s=3600", "--log-level=debug", PGWORKD_DSN=dsn, PGWORKD_LOG_FORMAT="json"
    )
    run.event("daemon.ready")
    with database(dsn) as db:
        db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('hang')")
        run.event("job.started")
        run.stop()
        assert run.event("daemon.stopping")["running"] == 1
        run.stop()
        assert run.ends() == 0
        assert db.execute("SELECT status::text, failures FROM pgworkd.jobs").fetchone() == ("pending", 0)


def test_a_third_signal_ends_the_process(start: Start, dsn: str, tmp_path: Path) -> None:
    text = "@app.handler('deaf')\nasync def deaf():\n    while True:\n        try:\n            await anyio.sleep(60)\n"
    (tmp_path / "deaf.py").write_text(APP + text + "        except BaseException: pass\n")
    run = start(
        "run", "--app=deaf:app", "--shutdown-s=3600", "--log-level=debug", PGWORKD_DSN=dsn, PGWORKD_LOG_FORMAT="json"
    )
    run.event("daemon.ready")
    with database(dsn) as db:
        db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('deaf')")
        run.event("job.started")
    run.stop()
    run.event("daemon.stopping")
    run.stop(signal.SIGINT)
    run.stop(signal.SIGTERM)
    assert run.ends() == 1
    run.says("pgworkd: a third stop signal was received; ending the process")


def test_threads_of_the_app_do_not_keep_the_process_alive(start: Start, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(APP + "threading.Thread(target=time.sleep, args=(3600,)).start()\n")
    run = start("run", "--app", "busy:app", PGWORKD_DSN=dsn, PGWORKD_LOG_FORMAT="json")
    run.event("daemon.ready")
    run.stop()
    assert run.ends() == 0
    run.event("daemon.stopped")


def test_sighup_reloads_what_can_change_and_logs_the_rest(start: Start, dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "pgworkd.toml"
    file.write_text('log_level = "warning"\nlog_format = "json"\n')
    # shutdown_s is set explicitly: in a container the default causes a warning.
    run = start("run", "--app", "notes:app", PGWORKD_DSN=dsn, PGWORKD_SHUTDOWN_S="30", NOTIFY_SOCKET="")
    with database(dsn) as db:
        until(lambda: db.execute("SELECT 1 FROM pgworkd.pools").fetchone())
    assert run.lines == []

    file.write_text('log_level = "info"\nlog_format = "json"\nkeep_days = 3\nqueues = ["mail"]\n')
    run.stop(signal.SIGHUP)
    reloaded = run.event("settings.reloaded")
    assert reloaded["applied"] == {"log_level": "info", "queues": {"mail": None}}
    assert sorted(reloaded["after_restart"]) == ["keep_days"]

    file.write_text("log_level = 'loud'\n")
    run.stop(signal.SIGHUP)
    kept = run.event("reload.rejected")
    assert "log_level (pgworkd.toml): must be one of debug" in kept["error"]
    assert kept["level"] == "error"
    run.stop()
    assert run.ends() == 0
    assert run.event("daemon.stopped"), "which is logged at the level that the reload has set"


def test_help_and_version_are_fast(start: Start) -> None:
    began_s = time.monotonic()
    assert start("--help").ends() == 0
    assert time.monotonic() - began_s < 2.0, "0.2 s on an idle machine"


def test_dev_runs_a_database_with_the_schema_until_it_is_stopped(start: Start) -> None:
    command = start("dev", stdout=subprocess.PIPE)
    assert command.process.stdout is not None
    printed = list(takewhile(lambda line: not line.startswith("\n"), command.process.stdout))
    assert any("--data DIR" in line for line in printed), "how to keep the data and the address"
    export = next((line for line in command.process.stdout if line.startswith("export ")), None)
    assert export is not None, command.lines
    dsn = export.split("'")[1]
    with database(dsn) as db:
        assert db.execute("SELECT version FROM pgworkd.schema_version").fetchone() is not None
    command.stop(signal.SIGINT)
    assert command.ends() == 0
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)
