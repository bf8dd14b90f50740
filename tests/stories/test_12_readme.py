"""README's own blocks, as they stand there: its tour from the first line to a job that is done, then the rest."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

from pgworkd import cli_app
from pgworkd.app import App
from pgworkd.job import Job
from tests.kit import LIMIT_S, running, until, waits_for_status

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ADDRESS = "postgresql://user:password@127.0.0.1/app"
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("PGWORKD_", "PG"))}


def blocks(heading: str, language: str) -> list[str]:
    """The code blocks of one language under a heading, in order."""
    section = re.split(r"(?m)^##+ ", README)
    found = next(part for part in section if part.startswith(heading + "\n"))
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", found)


async def play(code: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Runs Python in which `await` may stand at the top; the names it leaves behind."""
    scope = dict(names)
    made = compile(code, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(made, scope)  # noqa: S307 - our own README
    if inspect.isawaitable(result):
        await result
    return scope


def shell(code: str, environ: Mapping[str, str], directory: Path) -> None:
    """Runs commands as a reader would paste them; each must succeed."""
    done = subprocess.run(
        ["/bin/sh", "-ec", code], cwd=directory, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"


@pytest.fixture
async def reader(server_dsn: str) -> Any:
    """The database that the tour's address names, on the tests' server, and an environment that finds its port."""
    admin = await asyncpg.connect(server_dsn)
    await admin.execute("SELECT pg_advisory_lock(12)")  # one at a time, should several processes test on this server
    if await admin.fetchval("SELECT EXISTS (SELECT FROM pg_database WHERE datname = 'app')"):
        await admin.close()
        pytest.skip("there is a database `app` already")
    await admin.execute("""CREATE ROLE "user" LOGIN PASSWORD 'password'""")
    await admin.execute("""CREATE DATABASE app TEMPLATE template0 OWNER "user" """)
    port = str(urlsplit(server_dsn).port or 5432)
    yield PLAIN | {"PGPORT": port, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    await admin.execute("DROP DATABASE app WITH (FORCE)")
    await admin.execute('DROP ROLE "user"')
    await admin.close()


@contextlib.contextmanager
def left_running(code: str, environ: Mapping[str, str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A shell block whose last command stays; what is still there at the end is killed."""
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-ec", code], cwd=directory, env=environ, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def test_the_tour_runs_as_it_stands(reader: dict[str, str], tmp_path: Path) -> None:
    code, call = blocks("A tour", "python")
    (setup,), (insert,) = blocks("A tour", "sh"), blocks("A tour", "sql")
    assert ADDRESS in setup
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "jobs.py").write_text(code, encoding="utf-8")
    db = await asyncpg.connect(ADDRESS, port=int(reader["PGPORT"]))
    await db.execute("CREATE TABLE notes (id int, embedded_at timestamptz); INSERT INTO notes VALUES (7)")
    with left_running(setup, reader, tmp_path) as daemon:

        async def served() -> Any:
            assert daemon.poll() is None, (tmp_path / "log").read_text()
            known = await db.fetchval("SELECT to_regclass('pgworkd.pools') IS NOT NULL")
            return known and await db.fetchval("SELECT count(*) FROM pgworkd.pools") == 2

        await until(served)
        await db.execute(insert)
        await until(lambda: db.fetchval("SELECT embedded_at IS NOT NULL FROM notes"))
        await play(call, {"connection": db, "Note": (await play(code, {"__name__": "notes.jobs"}))["Note"]})
        rows = await db.fetch("SELECT dedupe_key, run_at > now() AS later FROM pgworkd.jobs WHERE queue = 'embedding'")
        assert [tuple(row) for row in rows] == [("note-7", True)]
        environ = reader | {"PGWORKD_DSN": ADDRESS, "PGWORKD_APP": "notes.jobs:app"}
        for statements in (*blocks("Recurring", "sql"), *blocks("Keys and limits", "sql")):
            await db.execute(statements)
        assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE dedupe_key = 'welcome-7'") == 1
        for commands in (*blocks("Keys and limits", "sh"), *blocks("Settings of a running fleet", "sh")):
            shell(commands, environ, tmp_path)
        assert await db.fetchval("SELECT max_running FROM pgworkd.queues WHERE name = 'partner'") == 5
        os.kill(await db.fetchval("SELECT pid FROM pgworkd.workers"), signal.SIGTERM)
        assert daemon.wait(30) == 0, (tmp_path / "log").read_text()
    await db.close()


async def test_batches_dependencies_and_results_run_as_they_stand(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()
    for kind in ("calculate", "send_cheque", "report", "etl", "load", "mail"):
        app.handler(kind)(handle)
    names = {"app": app, "connection": db, "dsn": dsn, "employees": range(3), "left_id": None, "right_id": None}
    (batch,) = blocks("Batches", "python")
    (flow,) = blocks("Dependencies, results, progress", "python")
    async with running(app, dsn):
        payroll = (await play(batch, names))["payroll"]
        for name in ("left_id", "right_id"):
            names[name] = await db.fetchval("INSERT INTO pgworkd.jobs (queue) VALUES ('etl') RETURNING id")
        job_id = (await play(flow, names | {"payroll": payroll}))["job_id"]
        await until(waits_for_status(db, job_id, "completed"), LIMIT_S)
        over = "SELECT done = 6 AND finished_at IS NOT NULL FROM pgworkd.batch_trees WHERE id = $1"
        await until(lambda: db.fetchval(over, payroll.id))
        again = (await play(batch, names))["payroll"]  # the month is paid once
        assert (again.id, again.created) == (payroll.id, False)
    paid = await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs WHERE kind IN ('calculate', 'send_cheque')")
    assert paid == 6
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs WHERE queue = 'report'") == 1


async def handle(job: Job) -> dict[str, int]:
    return {"attempt": job.attempt}


async def test_a_batch_in_sql_runs_as_it_stands(db: asyncpg.Connection[Any]) -> None:
    (script,) = blocks("Batches", "sql")
    root = uuid4()
    for statement in filter(None, map(str.strip, re.sub(r"--.*", "", script).split(";"))):
        found = await db.fetchval(statement.replace(":root", f"'{root}'"))
        root = root if ":root" in statement else found
    assert await db.fetchval("SELECT total FROM pgworkd.batch_progress WHERE id = $1", root) == 1


@pytest.mark.parametrize("line", sorted(set(re.findall(r"(?m)^pgworkd ([a-z]+(?: [a-z]+)?)", README))))
def test_every_command_of_readme_exists(line: str) -> None:
    import typer

    command = typer.main.get_command(cli_app.app)
    first, _, second = line.partition(" ")
    assert first in command.commands  # type: ignore[attr-defined]
    group = getattr(command.commands[first], "commands", None)  # type: ignore[attr-defined]
    assert group is None or not second or second in group
