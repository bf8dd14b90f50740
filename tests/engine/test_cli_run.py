"""`pgworkd run` as a process: startup, signals and exit codes."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from itertools import takewhile
from pathlib import Path

import psycopg
import pytest

from tests.kits.commands import APP, LIMIT_S, NOWHERE, Start, catches, database, start, waits_until

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
