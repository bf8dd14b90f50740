"""Commands in this process, against a real database: a shell, and the rows that tests of commands want."""

from __future__ import annotations

import getpass
import os
import re
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import typer.main
from click.testing import CliRunner, Result

from pgworkd.cli.app import app

COMMAND = typer.main.get_command(app)
"""Built once: typer would build it anew at each call, which takes longer than most commands."""
UUID_LINE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\n")
NOBODY = str(uuid.UUID(int=7))
CANARY = "c4n4ry"
ME = f"{getpass.getuser()}@{socket.gethostname()}"
WORKER = """INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until)
    VALUES (%s, 1, '0', 30, now() + %s::interval) RETURNING id"""


def invoke(args: Sequence[str], **options: Any) -> Result:
    """Runs a command; `options` are those of `CliRunner.invoke`."""
    return CliRunner().invoke(COMMAND, args, **options)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No outside settings: an empty working directory and no PGWORKD_ variables, nor DATABASE_URL."""
    for name in list(os.environ):
        if name.upper().startswith(("PGWORKD_", "DATABASE_URL")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


class Shell:
    """Runs commands; `sql` queries the database directly."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.db = psycopg.connect(dsn, autocommit=True)

    def __call__(self, *args: str, code: int = 0, stdin: bytes | str | None = None) -> Result:
        result = invoke(args, input=stdin, env={"PGWORKD_DSN": self.dsn}, catch_exceptions=False)
        said = result.stdout + result.stderr
        assert result.exit_code == code, said
        assert "Traceback" not in said
        assert (urlsplit(self.dsn).password or CANARY) not in said
        if code:
            assert all(line.startswith("pgworkd: ") for line in result.stderr.splitlines()), result.stderr
        return result

    def refused(self, *args: str, code: int = 2, stdin: bytes | str | None = None) -> str:
        """The one line on standard error; nothing on standard output."""
        result = self(*args, code=code, stdin=stdin)
        assert not result.stdout
        assert result.stderr.count("\n") == 1, result.stderr
        return result.stderr.removeprefix("pgworkd: ").rstrip("\n")

    def sql(self, text: str, *args: Any) -> Any:
        """The first value that a statement returns, if any."""
        cursor = self.db.execute(text, args)
        row = cursor.fetchone() if cursor.description else None
        return None if row is None else row[0]

    def die(self, queue: str = "q", **columns: Any) -> str:
        """Inserts a dead job."""
        names = ["queue", *columns]
        marks = ", ".join(["%s"] * len(names))
        insert = f"INSERT INTO pgworkd.jobs ({', '.join(names)}) VALUES ({marks}) RETURNING id"  # noqa: S608
        job_id = self.sql(insert, queue, *columns.values())
        self.sql("UPDATE pgworkd.jobs SET status = 'dead', failures = 3, failed_at = now() WHERE id = %s", job_id)
        return str(job_id)

    def status(self, job_id: str) -> Any:
        return self.sql("SELECT status::text FROM pgworkd.all_jobs WHERE id = %s", job_id)


@pytest.fixture
def shell(dsn: str) -> Any:
    shell = Shell(dsn)
    yield shell
    shell.db.close()


def run_bare(*args: str) -> Result:
    return invoke(args, catch_exceptions=False)


def enqueue(shell: Shell, queue: str = "q", *args: str) -> str:
    return shell("enqueue", queue, *args).stdout.strip()


def run(shell: Shell, *ids: str) -> None:
    """Lets a worker claim these jobs."""
    worker = shell.sql(WORKER, "w", "1 min")
    for job_id in ids:
        shell.sql(
            "UPDATE pgworkd.jobs SET status = 'running', attempts = 1, worker_id = %s WHERE id = %s", worker, job_id
        )
