"""The long-running programs, each with what shows that it is up and that it works, without reading its output."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.kits.commands import database
from tests.kits.gateway import token
from tests.kits.programs import Launch, Program

APP = """
import os, sys, time
import anyio
from pathlib import Path
from pgworkd import App

app = App()
TEXT = "x" * 100

def say():
    print(TEXT, flush=True)
    print(TEXT, file=sys.stderr)
    sys.stdout.buffer.write(b"bytes\\n")

@app.handler("loop")
async def loop(): say()

@app.handler("thread")
def thread(): say()

@app.handler("process", run_in="process", concurrency=1)
def process(): say()

def close():
    sys.stdout.close(); sys.stderr.close()
    for number in (0, 1, 2):
        os.close(number)
    sys.stdout = sys.stderr = None

@app.handler("close-loop", queue="loop")
async def close_loop(): close()

@app.handler("close-process", queue="process", run_in="process")
def close_process(): close()

@app.handler("slow")
async def slow():
    Path("slow.began").touch()
    await anyio.sleep(1.0)
"""
QUEUES = ("loop", "thread", "process")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Stage:
    """Where one program runs."""

    launch: Launch
    dsn: str
    place: Path
    data: Path
    port: int = field(default_factory=free_port)
    done: int = 0

    def __post_init__(self) -> None:
        """The application is beside it."""
        (self.place / "plays.py").write_text(APP)

    @contextlib.contextmanager
    def db(self) -> Any:
        """A connection to its database."""
        with database(self.dsn) as connection:
            yield connection

    def value(self, sql: str) -> Any:
        """The first value of the first row."""
        with self.db() as db:
            return (db.execute(sql).fetchone() or (None,))[0]

    def answers(self, path: str) -> bool:
        """Whether its port answers this path with 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


@dataclass(frozen=True)
class Subject:
    """A program. `ready` and `works` are facts to wait for; `works` first asks for the work, `begun` times before."""

    name: str
    args: Callable[[Stage], list[str]]
    ready: Callable[[Stage], Any]
    work: Callable[[Stage], Callable[[], Any]]

    def start(
        self, stage: Stage, *, prefix: list[str] | None = None, popen: dict[str, Any] | None = None, **more: str
    ) -> Program:
        """Starts it; it is not ready. `more`: for its environment."""
        environ = {
            "PGWORKD_DSN": stage.dsn,
            "PGWORKD_APP": "plays:app",
            "PGWORKD_WORKER_NAME": "w",
            "PGWORKD_LOG_LEVEL": "debug",
            "PGWORKD_SHUTDOWN_S": "5",
        }
        if self.name == "run --remote":
            environ |= {"PGWORKD_TOKEN": asyncio.run(token(stage.dsn)), "PGWORKD_LEASE_S": "30"}
            del environ["PGWORKD_DSN"]
        return stage.launch(*self.args(stage), prefix=prefix or [], popen=popen or {}, **environ | more)


def _jobs(stage: Stage) -> Callable[[], Any]:
    with stage.db() as db:
        sql = "INSERT INTO pgworkd.jobs (queue) SELECT q FROM unnest(%s::text[]) q, generate_series(1, 20)"
        db.execute(sql, (list(QUEUES),))
    stage.done += 20 * len(QUEUES)
    done = stage.done
    return lambda: stage.value("SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed'") == done


def _workers(count: int) -> Callable[[Stage], Any]:
    sql = """SELECT count(DISTINCT w.id) FROM pgworkd.workers w JOIN pgworkd.pools p ON p.worker_id = w.id
        WHERE w.kind <> 'gateway'"""
    return lambda stage: stage.value(sql) == count


def _gateway(stage: Stage) -> list[str]:
    gateway = stage.launch("serve", "--listen", f"127.0.0.1:{stage.port}", PGWORKD_DSN=stage.dsn)
    gateway.until(lambda: stage.answers("/healthz"))
    return ["run", "--remote", f"http://127.0.0.1:{stage.port}"]


def _asks(path: str, times: int) -> Callable[[Stage], Callable[[], Any]]:
    return lambda stage: lambda: all(stage.answers(path) for _ in range(times))


def _autoscale(stage: Stage) -> list[str]:
    flags = ["--queue=loop", "--min=1", "--max=2", "--up-at=1000", "--down-at=1", "--every-s=0.2"]
    return ["autoscale", *flags, "--", "sh", "-c", "echo $$ >> up; exec sleep 60"]


def _started(stage: Stage) -> list[str]:
    file = stage.place / "up"
    return file.read_text().split() if file.exists() else []


def _replaced(stage: Stage) -> Callable[[], Any]:
    pids = _started(stage)
    os.kill(int(pids[-1]), 15)
    return lambda: len(_started(stage)) > len(pids)


def _asked(stage: Stage, sql: str) -> Any:
    try:
        port, password = int((stage.data / "port").read_text()), (stage.data / "password").read_text()
        address = f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"
        with psycopg.connect(address, autocommit=True, connect_timeout=5) as db:
            return (db.execute(sql).fetchone() or (None,))[0]
    except (OSError, ValueError, psycopg.Error):
        return None


def _more(stage: Stage) -> Callable[[], Any]:
    before = _asked(stage, "SELECT count(*) FROM demo.inserted") or 0
    return lambda: (_asked(stage, "SELECT count(*) FROM demo.inserted") or 0) > before


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("run", lambda _: ["run"], _workers(1), _jobs),
        Subject("run --processes", lambda _: ["run", "--processes", "2"], _workers(2), _jobs),
        Subject("run --remote", _gateway, _workers(1), _jobs),
        Subject(
            "push",
            lambda _: ["push"],
            lambda s: s.value("SELECT count(*) FROM pgworkd.workers") == 1,
            lambda _: lambda: True,
        ),
        Subject(
            "serve",
            lambda s: ["serve", "--listen", f"127.0.0.1:{s.port}", "--auth", "none", "--debug-http"],
            lambda s: s.answers("/healthz"),
            _asks("/v1/queues", 100),
        ),
        Subject(
            "exporter",
            lambda s: ["exporter", "--listen", f"127.0.0.1:{s.port}"],
            lambda s: s.answers("/healthz"),
            _asks("/metrics", 5),
        ),
        Subject("autoscale", _autoscale, lambda s: _started(s) != [], _replaced),
        Subject(
            "dev",
            lambda s: ["dev", f"--data={s.data}"],
            lambda s: _asked(s, "SELECT count(*) FROM pgworkd.jobs") == 0,
            lambda s: lambda: _asked(s, "SELECT 1") == 1,
        ),
        Subject(
            "demo",
            lambda s: ["demo", f"--data={s.data}"],
            lambda s: _asked(s, "SELECT count(*) FROM demo.inserted"),
            _more,
        ),
    )
}
