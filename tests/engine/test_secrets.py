"""The database password is in no log line, error, traceback, command line, pickle, repr() or stored row."""

from __future__ import annotations

import json
import pickle
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from pgworkd import App
from pgworkd.admin import Admin
from pgworkd.database.connection import Connection, ConnectionOptions, Listener
from pgworkd.database.transactions import TransactionPool
from pgworkd.embedded import EmbeddedPostgres
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.run import process_pool
from pgworkd.errors import PgworkdError
from pgworkd.options import daemon_options
from pgworkd.processes.supervisor import Supervisor, without_dsn
from pgworkd.results import Results
from pgworkd.settings.config import Settings
from tests.kits.commands import Start, start
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.schema import PASSWORDS, leaks, secret_dsn, with_login

__all__ = ["secret_dsn", "start"]  # fixtures

APP = """
import os, sys
from pathlib import Path
from urllib.parse import unquote
import asyncpg
from pgworkd import App

app = App()
DSN = os.environ.get("PGWORKD_DSN") or Path("dsn").read_text()

@app.handler("tells", max_attempts=1)
async def tells():
    try:
        raise KeyError(unquote(DSN))
    except KeyError as error:
        error.add_note("noted " + DSN)
        raise RuntimeError(DSN.encode(), {"dsn": unquote(DSN)}) from error

@app.handler("tells_elsewhere", max_attempts=1, run_in="process")
def tells_elsewhere():
    password = DSN[DSN.index(":", 15) + 1 : DSN.rindex("@")]
    raise RuntimeError("x" * 4080 + password)  # so long that it is cut in the password

@app.handler("looks", run_in="process")
def looks():
    return [Path("/proc/self/cmdline").read_text().replace("\\0", " "), "PGWORKD_DSN" in os.environ]

@app.handler("prints")
async def prints():
    print(DSN, file=sys.stderr, flush=True)
"""


@pytest.fixture
def app_file(tmp_path: Path, secret_dsn: str) -> str:
    """The name of an app that tries to reveal the DSN, which it finds in its environment or a file."""
    (tmp_path / "leaky.py").write_text(APP)
    (tmp_path / "dsn").write_text(secret_dsn)
    return "leaky:app"


async def everything_stored(db: asyncpg.Connection[Any]) -> list[str]:
    jobs = await db.fetch("SELECT j::text FROM pgworkd.all_jobs j UNION ALL SELECT w::text FROM pgworkd.workers w")
    return [row[0] for row in jobs]


@pytest.mark.slow("commands and daemons in processes of their own")
@pytest.mark.parametrize("form", ["json", "console"])
async def test_a_daemon_never_prints_or_stores_the_password(
    start: Start, app_file: str, secret_dsn: str, db: asyncpg.Connection[Any], form: str
) -> None:
    run = start("run", "--app", app_file, "--log-format", form, "--log-level", "debug", PGWORKD_DSN=secret_dsn)
    run.says("daemon.ready")
    for queue in ("tells", "tells_elsewhere"):
        assert await until(waits_for_status(db, await insert(db, queue), "dead"))
    cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE 'pgworkd %'"
    assert await db.fetchval(cut + " AND datname = current_database()")
    run.says("database.unavailable")
    run.says("database.recovered")
    looks = await insert(db, "looks")
    assert await until(waits_for_status(db, looks, "completed"))
    run.stop()
    assert run.ends() == 0
    stored = await everything_stored(db)
    assert not leaks(*run.lines, *stored)
    result = await db.fetchval("SELECT result FROM pgworkd.finished_jobs WHERE id = $1", looks)
    assert "pgworkd.engine.run.process_child" in result
    assert json.loads(result)[1], "the app is imported in the child, too, and may need its environment"
    assert sum("RuntimeError" in row for row in stored) == 2
    assert sum("***@127.0.0.1" in row for row in stored) == 1, "the other is cut"


@pytest.mark.slow("commands and daemons in processes of their own")
async def test_the_check_sees_a_leak(start: Start, app_file: str, secret_dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The output of a handler is its own responsibility; here it proves that the tests would notice a leak."""
    run = start("run", "--app", app_file, PGWORKD_DSN=secret_dsn)
    await insert(db, "prints")
    run.says("postgresql://")
    assert leaks(*run.lines)


@pytest.mark.slow("commands and daemons in processes of their own")
@pytest.mark.parametrize("secret_dsn", ["encoded"], indirect=True)
async def test_daemons_of_a_supervisor_get_the_dsn_by_environment(start: Start, app_file: str, secret_dsn: str) -> None:
    args = ["run", "--dsn", secret_dsn, "--app", app_file, "--processes", "2"]
    run = start(*args, PGWORKD_LOG_FORMAT="json")
    run.says('"worker_id": 2')  # the second is ready as well
    said = [json.loads(line) for line in list(run.lines)]
    lines = [command_line_of(facts["pid"]) for facts in said if facts["event"] == "process.started"]
    assert len(lines) == 2
    assert all("run --app leaky:app" in line for line in lines)
    run.stop()
    assert run.ends() == 0
    assert not leaks(*lines, *run.lines)


@pytest.mark.parametrize("given", [["--dsn", "D"], ["--dsn=D"], ["--dsn=x", "--dsn", "D"], ["--dsn", "x", "--dsn=D"]])
def test_the_dsn_is_removed_from_a_command_line_and_the_last_one_wins(given: list[str]) -> None:
    argv = ["-m", "pgworkd.cli", "run", *given, "--app", "a:b"]
    assert without_dsn(argv) == (["-m", "pgworkd.cli", "run", "--app", "a:b"], "D")
    assert without_dsn(["run"]) == (["run"], None)


def command_line_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def broken(dsn: str) -> dict[str, str]:
    """DSNs that fail when connecting, each in its own way."""
    there = with_login(dsn, "postgres", PASSWORDS["encoded"])
    return {
        "wrong password": there,
        "unknown user": with_login(dsn, "nobody_here", PASSWORDS["raw"]),
        "nobody listens": f"postgresql://u:{PASSWORDS['encoded']}@127.0.0.1:1/db",
        "no such host": f"postgresql://u:{PASSWORDS['raw']}@nowhere.invalid/db",
        "no socket": f"postgresql://u:{PASSWORDS['encoded']}@%2Fnowhere/db",
        "no TLS there": f"{there}?sslmode=require",
        "no such certificate": f"{there}?sslmode=verify-full&sslrootcert=/nowhere.crt",
        "unknown sslmode": f"{there}?sslmode=perhaps",
        "secrets in the query": f"postgresql://127.0.0.1:1/db?user=u&password={PASSWORDS['encoded']}",
        "unknown setting": f"{there}?flavour=sweet",
    }


@pytest.mark.parametrize("how", broken("postgresql://"))
@pytest.mark.parametrize("part", ["connection", "listener", "transactions"])
async def test_errors_hold_no_password_in_their_chain_or_frame_variables(dsn: str, how: str, part: str) -> None:
    async def fail(address: str) -> None:
        options = ConnectionOptions(address, connect_timeout_s=1, command_timeout_s=1)
        if part == "connection":
            await Connection(options, "test").value("SELECT 1")
        elif part == "listener":
            async with Listener(options).listen("x", print, lambda: None):
                pass
        else:
            async with TransactionPool(options, 1).begin():
                pass

    with pytest.raises(PgworkdError) as caught:
        await fail(broken(dsn)[how])
    error = caught.value
    trace = error.__traceback__
    assert trace is not None
    # The DSN comes from this function and the one above.
    error.__traceback__ = trace.tb_next and trace.tb_next.tb_next
    shown = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    assert not leaks(shown, repr(error), *chain(error))


def chain(error: BaseException | None) -> Iterator[object]:
    """The texts of all its causes and contexts."""
    while error is not None:
        yield from (str(error), repr(error), error.args, getattr(error, "__notes__", ()))
        error = error.__cause__ or error.__context__


def ours_in(thing: object, seen: dict[int, object]) -> dict[int, object]:
    """All objects of our own classes that are reachable from `thing`, which is one of them."""
    if id(thing) in seen or isinstance(thing, (type, types.ModuleType, types.FunctionType)):
        return seen
    seen[id(thing)] = thing
    names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
    for value in [getattr(thing, name, None) for name in names]:
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        for each in values:
            if type(each).__module__.startswith("pgworkd"):
                ours_in(each, seen)
    return seen


def handle() -> None:
    """A handler."""


async def test_no_repr_shows_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    dsn = f"postgresql://u:{PASSWORDS['encoded']}@127.0.0.1:1/db?sslpassword=c4n4ry"
    settings = Settings(dsn=dsn)
    app = App()
    app.handler("q")(handle)
    options = daemon_options(settings)
    daemon = Daemon(app, options)
    server = EmbeddedPostgres()
    monkeypatch.setattr(server, "_password", PASSWORDS["raw"])
    roots = [settings, daemon, Supervisor(options, 2), Admin(options.connection), Results(dsn), server]
    reached = [each for root in roots for each in ours_in(root, {}).values()]
    assert {"Daemon", "Store", "Connection", "ConnectionOptions", "DaemonOptions", "TransactionPool", "Settings"} <= {
        type(each).__name__ for each in reached
    }
    assert not leaks(*(text for each in reached for text in (repr(each), str(each), f"{each}")))


@pytest.mark.slow("commands and daemons in processes of their own")
async def test_pickles_for_child_processes_hold_no_password(
    secret_dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    real = pickle.dumps

    def dumps(value: object) -> bytes:
        sent.append(real(value))
        return sent[-1]

    monkeypatch.setattr(process_pool, "pickle", types.SimpleNamespace(dumps=dumps, loads=pickle.loads))
    app = App()
    app.handler("q", run_in="process")(handle)
    async with running(app, secret_dsn):
        job = await insert(db, "q")
        await until(waits_for_status(db, job, "completed"))
    assert len(sent) == 1
    assert b"test_secrets" in sent[0]
    assert not leaks(*sent)


def test_an_embedded_server_never_shows_its_password() -> None:
    with EmbeddedPostgres() as server:
        password = server.dsn().partition("postgres:")[2].partition("@")[0]
        assert len(password) > 20
        assert server._server is not None
        assert server._guard is not None
        pids = [server._server.pid, server._guard.pid]
        shown = [Path(f"/proc/{pid}/{what}").read_bytes() for pid in pids for what in ("cmdline", "environ")]
        assert not [text for text in shown if password.encode() in text]
        assert b"pgdata" in shown[0]
        assert server._dir is not None
        modes = {name: (server._dir / name).stat().st_mode & 0o777 for name in ("password", "pgdata", "server.log")}
        assert modes == {"password": 0o600, "pgdata": 0o700, "server.log": 0o600}
        assert password not in (server._dir / "server.log").read_text()
        assert password not in repr(server)
