"""The numbered bad inputs, a module for each place where they come in; here: what a case is, and the usual checks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import InvalidPayload, UsageError
from tests.kits.apps import dead_end
from tests.kits.cli import Shell, run_bare
from tests.kits.commands import Start
from tests.kits.daemon import Recorder, insert, running, until, waits_for_status
from tests.kits.drivers import refused_at_the_call
from tests.kits.verbs import Db

Check: TypeAlias = Callable[[str, Db], Awaitable[None]]
"""Takes a database's DSN and a connection to it."""


class Case(NamedTuple):
    """One bad input. Variants of the same input share a number."""

    number: int
    name: str
    check: Callable[..., Any]
    """A Check, or a UsageCheck."""

    def __str__(self) -> str:
        return f"{self.number}: {self.name}"


def refused(sql: str, sqlstate: str, constraint: str | None = None, *, message: str = "", args: Any = ()) -> Check:
    """The statement fails with this SQLSTATE and constraint, and has changed nothing."""

    async def check(_: str, db: Db) -> None:
        with pytest.raises(asyncpg.PostgresError) as caught:
            await db.execute(sql, *args)
        error: Any = caught.value
        assert (error.sqlstate, error.constraint_name) == (sqlstate, constraint), error
        assert message in str(error)
        assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 0

    return check


def column(name: str, value: str, sqlstate: str, constraint: str | None = None, *, message: str = "") -> Check:
    """A row with this value (an SQL expression) in one of its columns is refused."""
    sql = f"INSERT INTO pgworkd.jobs (queue, {name}) VALUES ('q', {value})"  # noqa: S608 - names are ours
    return refused(sql, sqlstate, constraint, message=message)


def arguments(message: str, **fields: Any) -> Check:
    """The client refuses these arguments, with this message (a pattern), before it touches the connection."""

    async def check(_: str, __: Db) -> None:
        error = refused_at_the_call(fields, message)
        assert isinstance(error, InvalidPayload if {"payload", "meta"} & set(fields) else UsageError)

    return check


@contextlib.asynccontextmanager
async def among_good_ones(dsn: str, db: Db, app: App, **columns: Any) -> AsyncIterator[tuple[UUID, Daemon, Recorder]]:
    """An odd job, claimed together with two good ones, which complete, as does another good one at the end."""
    good_kind = "good one"

    @app.handler(good_kind, queue="q", concurrency=10)
    async def good() -> None:
        return None

    async with db.transaction():
        first = await insert(db, "q", kind=good_kind)
        odd = await insert(db, "q", **columns)
        last = await insert(db, "q", kind=good_kind)
    async with running(app, dsn) as (daemon, seen):
        for job_id in (first, last):
            await seen.wait(events.JOB_COMPLETED, job_id=str(job_id))
        yield odd, daemon, seen
        await until(waits_for_status(db, await insert(db, "q", kind=good_kind), "completed"))
        assert daemon.worker.may_claim
        assert seen.all(events.MAINTENANCE_FAILED) == []


def dead_payload(payload: str, error: str) -> Check:
    """The table accepts the payload; its job is dead at once, with this error."""

    async def check(dsn: str, db: Db) -> None:
        app = App()

        @app.handler("odd", queue="q")
        async def handle(payload: dict[str, Any]) -> None:
            raise AssertionError(f"no handler gets such a payload: {len(payload)}")

        async with among_good_ones(dsn, db, app, kind="odd", payload=payload) as (odd, _, seen):
            await seen.wait(events.JOB_DEAD, job_id=str(odd))
        row = await db.fetchrow("SELECT status::text, attempts, failures, error FROM pgworkd.jobs WHERE id = $1", odd)
        assert row is not None
        assert tuple(row)[:3] == ("dead", 1, 1)
        assert row["error"].startswith(f"pgworkd.errors.InvalidPayload: {error}")

    return check


def dead_handler(handle: Callable[..., Any], error: str, **options: Any) -> Check:
    """The handler fails its only attempt with this error; the next job runs in the same slot."""

    async def check(dsn: str, db: Db) -> None:
        assert (await dead_end(dsn, db, handle, **options))["error"] == error

    return check


# Wrong usages


@dataclasses.dataclass(frozen=True)
class Usage:
    """`directory` is the working directory of both; `start` has written an app into it, notes:app."""

    shell: Shell
    start: Start
    directory: Path
    empty_dsn: str
    monkeypatch: pytest.MonkeyPatch

    def write(self, name: str, text: str, mode: int = 0o600) -> Path:
        path = self.directory / name
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        return path


UsageCheck: TypeAlias = Callable[[Usage], None]


def bare(*args: str) -> str:
    """The one line of error output of this command; it takes settings from files and the environment only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pgworkd.cli.serve._Service", None)  # a daemon that started anyway would run here forever
        result = run_bare(*args)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("pgworkd: ").rstrip("\n")
