"""In a copy of another database no job runs, and nothing is changed, until an operator adopts it; all say so."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.engine.life import startup
from pgworkd.engine.life.daemon import Daemon
from pgworkd.metrics.daemon import DaemonSource
from tests.kits.cli import CANARY, Shell, clean, shell
from tests.kits.daemon import Recorder, insert, made, quick_options, running, until, waits_for_status
from tests.kits.gateway import calling

__all__ = ["clean", "shell"]  # fixtures

MOVED = "UPDATE pgworkd.origin SET database = 'production'"
GONE_WORKER = """INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until, steady_since)
    VALUES ('production', 1, '0', 1, now() - interval '1 hour', now() - interval '2 hours') RETURNING id"""


def app_of(ran: list[str]) -> App:
    app = App()

    @app.handler("mail")
    async def mail() -> None:
        ran.append("mail")

    @app.handler("charge", max_attempts=1)
    async def charge() -> None:
        ran.append("charge")

    @app.handler("nightly", every=1, missed="all")
    async def nightly() -> None:
        ran.append("nightly")

    return app


@pytest.fixture
async def copy(db: asyncpg.Connection[Any]) -> dict[str, Any]:
    """A copy of production as it was at work: jobs that are due and running, and a schedule."""
    await db.execute("SELECT pgworkd.belong(NULL)")
    await db.execute(MOVED)
    mail, charge = await insert(db, "mail"), await insert(db, "charge", max_attempts=1)
    gone = await db.fetchval(GONE_WORKER)
    await db.execute(
        "UPDATE pgworkd.jobs SET status = 'running', attempts = 1, worker_id = $1, started_at = now() WHERE id = $2",
        gone,
        charge,
    )
    return {"mail": mail, "charge": charge}


async def contents(db: asyncpg.Connection[Any]) -> list[Any]:
    tables = ("jobs", "workers", "schedules", "finished_jobs", "origin", "audit", "pools")
    return [await db.fetch(f"SELECT t::text FROM pgworkd.{table} t ORDER BY 1") for table in tables]  # noqa: S608


@contextlib.asynccontextmanager
async def starting(app: App, dsn: str, **changes: Any) -> AsyncIterator[tuple[Daemon, Recorder]]:
    """A daemon that may not become ready."""
    recorder = Recorder()
    daemon = made(app, quick_options(dsn, **changes))
    daemon.events.listen(recorder)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        yield daemon, recorder
        daemon.request_stop()


async def test_a_daemon_waits_in_a_copy_says_so_again_and_again_and_goes_on_when_it_is_adopted(
    dsn: str, db: asyncpg.Connection[Any], copy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "REMIND_S", 0.05)
    monkeypatch.setattr(startup, "SCHEMA_POLL_S", 0.02)
    ran: list[str] = []
    before = await contents(db)
    async with starting(app_of(ran), dsn) as (daemon, seen):
        told = await seen.wait(events.DATABASE_COPIED, 3)
        assert told["error"].startswith(
            "this database is a copy, its jobs belong to the database 'production', and this"
        )
        assert "type: pgworkd adopt" in told["remedy"]
        assert "first pgworkd cancel --all and pgworkd schedules disable --all" in told["remedy"]
        assert daemon.status() == "waiting for pgworkd adopt"
        checks = {check.name: check for check in DaemonSource(daemon).checks()}
        assert not checks["claims"].ok
        assert checks["claims"].says == "waiting for pgworkd adopt"
        assert await contents(db) == before
        assert ran == []
        await db.execute("SELECT pgworkd.adopt(NULL)")
        await seen.wait(events.DAEMON_READY)
        await until(waits_for_status(db, copy["mail"], "completed"))
        await until(waits_for_status(db, copy["charge"], "dead"))  # it may have been charged
        await until(lambda: "nightly" in ran)


async def test_a_stop_ends_the_wait(dsn: str, db: asyncpg.Connection[Any], copy: dict[str, Any]) -> None:
    async with starting(app_of([]), dsn) as (daemon, seen):
        await seen.wait(events.DATABASE_COPIED)
        daemon.request_stop()
        assert (await seen.wait(events.DAEMON_STOPPED))["exit_code"] == 0


async def test_an_emptied_copy_can_be_adopted_and_runs_what_is_new(
    dsn: str, db: asyncpg.Connection[Any], copy: dict[str, Any], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the log says: the operator's commands work in a copy."""
    monkeypatch.setattr(startup, "SCHEMA_POLL_S", 0.02)
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('theirs', 'mail', 1)")
    ran: list[str] = []
    async with starting(app_of(ran), dsn) as (_, seen):
        await seen.wait(events.DATABASE_COPIED)

        def operate() -> None:
            shell("cancel", "--all", "--yes")
            assert shell("schedules", "disable", "--all").stdout == "1 schedule disabled\n"
            shell("adopt", "--yes")

        await anyio.to_thread.run_sync(operate)
        await seen.wait(events.DAEMON_READY)
        new = await insert(db, "mail")
        await until(waits_for_status(db, new, "completed"))
        await until(waits_for_status(db, copy["charge"], "dead"))  # it may have been charged, in production
        assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs WHERE schedule = 'theirs'") == 0
    assert "charge" not in ran


async def test_an_environment_keeps_copies_from_running_and_lets_what_was_moved_run(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with running(app_of([]), dsn, environment="production"):
        assert await db.fetchval("SELECT environment FROM pgworkd.origin") == "production"
    await db.execute(MOVED + ", server = 7")  # a restore elsewhere
    async with running(app_of([]), dsn, environment="production"):
        assert await db.fetchval("SELECT database = current_database() FROM pgworkd.origin")
    for environment, ours in ((None, "none"), ("staging", "'staging'")):
        async with starting(app_of([]), dsn, environment=environment) as (_, seen):
            told = await seen.wait(events.DATABASE_COPIED)
            said = f"this database belongs to the environment 'production', and this process to {ours}"
            assert told["error"] == said
            assert told["remedy"].startswith("if it is that one, set PGWORKD_ENVIRONMENT=production here; ")


async def test_a_daemon_that_finds_itself_in_a_copy_later_does_not_go_on_there(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Its address leads to another server, where it has no registration."""
    async with running(app_of([]), dsn) as (daemon, seen):
        await until(lambda: daemon.worker.may_claim)
        await db.execute(MOVED)
        await db.execute("UPDATE pgworkd.workers SET lost_at = now()")
        await seen.wait(events.LEASE_LOST)
        told = await seen.wait(events.STATEMENT_FAILED, part="register")
        assert "this database is a copy" in told["error"]
        job = await insert(db, "mail")
        await db.execute("SELECT pgworkd.adopt(NULL)")
        await until(waits_for_status(db, job, "completed"))


async def test_a_gateway_in_a_copy_takes_jobs_and_gives_none(
    dsn: str, db: asyncpg.Connection[Any], copy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "SCHEMA_POLL_S", 0.02)
    monkeypatch.setattr("pgworkd.gateway.api.request.gateway.START_S", 0.2)
    async with calling(dsn, workers=True) as caller:
        worker = {"name": "w", "lease_s": 10, "queues": {"mail": 1}}
        assert (await caller.problem("POST", "/v1/workers", worker))[:2] == (503, "unavailable")
        await caller.ok("POST", "/v1/jobs", {"queue": "mail"})
        assert await db.fetchval("SELECT status::text FROM pgworkd.jobs WHERE id = $1", copy["charge"]) == "running"
        await db.execute("SELECT pgworkd.adopt(NULL)")
        await until(lambda: _is_dead(db, copy["charge"]))


async def _is_dead(db: asyncpg.Connection[Any], job: Any) -> bool:
    return bool(await db.fetchval("SELECT status = 'dead' FROM pgworkd.jobs WHERE id = $1", job))


# Commands.


def test_doctor_tells_of_a_copy(shell: Shell) -> None:
    shell.sql("SELECT pgworkd.belong(NULL)")
    shell.sql(MOVED)
    said = shell("doctor", code=1).stdout
    assert "bad   origin         this database is a copy, its jobs belong to the database 'production'" in said
    assert "type: pgworkd adopt" in said
    shell("adopt", "--yes")
    assert "origin" not in shell("doctor").stdout


def test_doctor_on_a_machine_without_an_environment_only_names_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.sql("SELECT pgworkd.adopt('production')")
    assert "ok    origin         the environment 'production'" in shell("doctor").stdout
    monkeypatch.setenv("PGWORKD_ENVIRONMENT", "staging")
    said = shell("doctor", code=1).stdout
    assert "bad   origin         this database belongs to the environment 'production', and this process to" in said


def test_adopt_asks_says_what_will_run_and_is_in_the_audit(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.sql("SELECT pgworkd.belong(NULL)")
    shell.sql(MOVED)
    shell.sql("INSERT INTO pgworkd.jobs (queue) VALUES ('q'), ('q')")
    refused = shell.refused("adopt")
    assert "which belong to the database 'production' of this server: 2 jobs due, 0 later, 0 running" in refused
    assert refused.endswith("add --yes to confirm, as there is no terminal to ask on")
    assert CANARY not in refused
    assert shell("adopt", "--yes").stdout == "its jobs belong to this database, and run here from now on\n"
    assert shell("adopt").stdout == "its jobs belong to this database already: nothing to do\n"
    monkeypatch.setenv("PGWORKD_ENVIRONMENT", "production")
    assert "to the environment 'production'" in shell("adopt", "--yes").stdout
    entries = json.loads(shell("audit", "--json").stdout)
    assert [entry["what"] for entry in entries] == ["adopt", "adopt"]


@pytest.mark.parametrize("name", ["", "n" * 201, "a\nb", "a b", "postgresql://u:c4n4ry@h/db"])
def test_the_name_of_an_environment_is_checked(name: str, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    monkeypatch.setenv("PGWORKD_ENVIRONMENT", name)
    if name == "":
        shell("adopt", "--yes")  # an empty variable is none
    else:
        assert "environment (environment PGWORKD_ENVIRONMENT): must be a word, such as production" in shell.refused(
            "adopt"
        )


# All at once.


def test_all_schedules_are_switched_at_once(shell: Shell) -> None:
    shell.sql(
        "INSERT INTO pgworkd.schedules (name, queue, every_s, enabled) SELECT n, 'q', 9, n < 'c' FROM unnest"
        "(ARRAY['a', 'b', 'c']) n"
    )
    assert shell("schedules", "disable", "--all").stdout == "2 schedules disabled\n"
    assert shell("schedules", "disable", "--all").stdout == "0 schedules disabled\n"
    assert shell("schedules", "enable", "--all").stdout == "3 schedules enabled\n"
    assert shell.sql("SELECT count(*) FROM pgworkd.audit WHERE what = 'schedule'") == 5


def test_all_queues_are_paused_at_once(shell: Shell) -> None:
    shell.sql("INSERT INTO pgworkd.jobs (queue) VALUES ('a'), ('a'), ('b')")
    shell.sql("INSERT INTO pgworkd.queues (name) VALUES ('c')")
    assert shell("queues", "pause", "--all").stdout == "3 queues paused: until resumed\n"
    assert shell.sql("SELECT count(*) FROM pgworkd.queues WHERE paused_until = 'infinity'") == 3
    assert shell("queues", "resume", "--all").stdout == "3 queues resumed\n"
    assert shell("queues", "resume", "--all").stdout == "0 queues resumed\n"


@pytest.mark.parametrize(
    "command", [("schedules", "disable"), ("schedules", "enable"), ("queues", "pause"), ("queues", "resume")]
)
def test_one_name_or_all(shell: Shell, command: tuple[str, str]) -> None:
    what = command[0].removesuffix("s")
    assert shell.refused(*command) == f"give the name of a {what}, or --all"
    assert shell.refused(*command, "x", "--all") == f"give the name of a {what}, or --all, not both"
