"""Every program, where the first address is wrong, and where the database refuses it at first."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import anyio
import asyncpg
import pytest
from anyio.to_thread import run_sync

from pgworkd.results import Results
from tests.kits.addresses import Wrong
from tests.kits.commands import Command, Start, Systemd, ended, events, logged, start, systemd
from tests.kits.daemon import LIMIT_S, insert, until, waits_for_status
from tests.kits.gateway import served, token
from tests.kits.metrics import fetch
from tests.kits.schema import granted_login
from tests.kits.server import database_name, free_port

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["start", "systemd"]  # fixtures

RUN = ("run", "--app", "notes:app", "--log-format", "json")
DAEMONS = {
    "run": RUN,
    "processes": (*RUN, "--processes=2"),
    "push": ("push", "--log-format", "json"),
}
COMMANDS = {
    "doctor": ("doctor",),
    "enqueue": ("enqueue", "mail"),
    "queues": ("queues",),
    "set": ("queues", "set", "mail", "--create", "--concurrency", "3"),
    "migrate": ("migrate",),
    "stats": ("stats",),
}
SCALE = ("autoscale", "-q", "mail", "--max=2", "--up-at=5", "--down-at=1", "--every-s=0.1", "--", "sleep", "60")


@pytest.fixture
async def wrong(dsn: str) -> AsyncIterator[Wrong]:
    async with Wrong(dsn).open() as opened:
        yield opened


def cut(dsn: str) -> str:
    return f"""SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = '{database_name(dsn)}' AND application_name LIKE 'pgworkd %'"""  # noqa: S608 - ours


FIRST = ["silent", "frozen", "standby", "closing"]


@pytest.mark.parametrize(
    ("program", "first"),
    [("run", first) for first in FIRST] + [(other, first) for other in ("processes", "push") for first in FIRST[:2]],
)
async def test_a_daemon_starts_and_comes_back_at_the_second_address(
    start: Start, wrong: Wrong, dsn: str, db: asyncpg.Connection[Any], program: str, first: str
) -> None:
    run = start(*DAEMONS[program], PGWORKD_DSN=wrong.of(first, "right"))
    await logged(run, "daemon.ready", 2 if program == "processes" else 1)
    await db.execute(cut(dsn))
    if program != "push":
        await until(waits_for_status(db, await insert(db, "mail"), "completed"))
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE lost_at IS NOT NULL") == 0
    run.stop()
    assert await ended(run) == 0


@pytest.mark.parametrize("first", FIRST)
async def test_commands_are_done(start: Start, wrong: Wrong, first: str) -> None:
    for args in COMMANDS.values():
        run = start(*args, PGWORKD_DSN=wrong.of(first, "right"))
        assert await ended(run) == 0, (args, run.lines)


@pytest.mark.parametrize("first", FIRST)
async def test_the_gateway_the_exporter_the_autoscaler_and_results(
    start: Start, wrong: Wrong, dsn: str, db: asyncpg.Connection[Any], first: str
) -> None:
    there = wrong.of(first, "right")

    def asked() -> None:
        with served(there, "--auth", "none") as (_, url):
            until_ready(url)

    await run_sync(asked)
    port = free_port()
    run = start("exporter", "--listen", f"127.0.0.1:{port}", PGWORKD_DSN=there)
    await run_sync(until_ready, f"http://127.0.0.1:{port}")
    run.stop()
    assert await ended(run) == 0
    scaler = start(*SCALE, PGWORKD_DSN=there, PGWORKD_LOG_FORMAT="json")
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'mail' FROM generate_series(1, 9)")
    await logged(scaler, "autoscale.decided")
    scaler.stop()
    assert await ended(scaler) == 0
    await db.execute("DELETE FROM pgworkd.jobs")
    job = await insert(db, "mail")
    async with Results(there) as results:
        with pytest.raises(TimeoutError):
            await results.result(job, timeout_s=3)


def until_ready(url: str) -> None:
    address, deadline = url.removeprefix("http://"), time.monotonic() + LIMIT_S
    status = 0
    while status != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        with contextlib.suppress(ConnectionRefusedError):  # it is just starting
            status = fetch(address, "/readyz").status


# Refused at first


async def says_refused(run: Command, part: str, text: str) -> None:
    await until(lambda: any(each["part"] == part for each in events(run, "database.refused")))
    assert all(text in each["error"] for each in events(run, "database.refused"))
    assert not events(run, "database.unavailable")


@contextlib.asynccontextmanager
async def locked_out(dsn: str, db: asyncpg.Connection[Any]) -> AsyncIterator[tuple[str, str]]:
    """The DSN of a user with another password, and what puts that right."""
    async with granted_login(dsn, db) as user_dsn:
        user = urlsplit(user_dsn).username
        await db.execute(f"ALTER ROLE {user} PASSWORD 'other'; ALTER ROLE {user} SUPERUSER")
        yield user_dsn, f"ALTER ROLE {user} PASSWORD 'right'"
        await db.execute(f"REASSIGN OWNED BY {user} TO CURRENT_USER")


@pytest.mark.parametrize("program", DAEMONS)
async def test_a_daemon_with_a_wrong_password_waits_and_says_so(
    start: Start, systemd: Systemd, dsn: str, db: asyncpg.Connection[Any], program: str
) -> None:
    port = free_port()
    environ = systemd.environ | {"PGWORKD_METRICS_LISTEN": f"127.0.0.1:{port}"}
    async with locked_out(dsn, db) as (user_dsn, right):
        run = start(*DAEMONS[program], PGWORKD_DSN=user_dsn, **environ)
        await says_refused(run, "start", "password authentication failed")
        prefix = "STATUS=0 of 2 ready; " if program == "processes" else "STATUS="
        await systemd.receives(f"{prefix}waiting for the database: the database refused us: password")
        failing = await run_sync(lambda: fetch(f"127.0.0.1:{port}", "/readyz").failing)
        assert any("password authentication failed" in why for why in failing.values())
        await db.execute(right)
        await logged(run, "daemon.ready", 2 if program == "processes" else 1)
        run.stop()
        assert await ended(run) == 0


async def test_others_with_a_wrong_password_wait_and_say_so(
    start: Start, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    port = free_port()
    async with locked_out(dsn, db) as (user_dsn, right):
        environ = {"PGWORKD_DSN": user_dsn, "PGWORKD_LOG_FORMAT": "json"}
        exporter = start("exporter", "--listen", f"127.0.0.1:{port}", **environ)
        gateway = start("serve", "--listen", f"127.0.0.1:{free_port()}", "--with", "api", **environ)  # asks for tokens
        workers = start("serve", "--listen", f"127.0.0.1:{free_port()}", "--auth", "none", **environ)
        scaler = start(*SCALE, **environ)
        await says_refused(exporter, "metrics", "password authentication failed")
        await says_refused(gateway, "metrics", "password authentication failed")
        await says_refused(scaler, "autoscale", "password authentication failed")
        assert {each["part"] for each in await logged(workers, "database.refused", 2)} == {"metrics", "start"}
        await logged(scaler, "autoscale.started")
        await db.execute(right)
        urls = [f"127.0.0.1:{port}", *[(await logged(g, "http.listening"))[0]["address"] for g in (gateway, workers)]]
        for url in urls:
            await run_sync(until_ready, url)
        await logged(scaler, "database.recovered")
        for run in (exporter, gateway, workers, scaler):
            run.stop()
            assert await ended(run) == 0
        for args in COMMANDS.values():
            wrong = user_dsn.replace("right", "wrong")
            run = start(*args, PGWORKD_DSN=wrong)
            assert await ended(run) == (1 if args == ("doctor",) else 2), "a command does not wait"


@pytest.mark.parametrize("fault", ["token", "scope", "url"])
async def test_a_remote_daemon_that_the_gateway_refuses_waits_and_says_so(
    start: Start, systemd: Systemd, dsn: str, db: asyncpg.Connection[Any], fault: str
) -> None:
    secret = await token(dsn, {"work": None} if fault != "scope" else {"read": None})
    with contextlib.ExitStack() as opened:
        _, url = await run_sync(lambda: opened.enter_context(served(dsn)))
        given = {"PGWORKD_REMOTE": url + "/wrong" * (fault == "url"), "PGWORKD_TOKEN": secret}
        if fault == "token":
            await db.execute("UPDATE pgworkd.tokens SET revoked_at = now()")
        run = start(*RUN, **given, **systemd.environ)
        await says_refused(run, "start", "the gateway refuses: ")
        await systemd.receives("STATUS=waiting for the gateway: the gateway refuses: ")
        if fault == "token":
            await db.execute("UPDATE pgworkd.tokens SET revoked_at = NULL")
            await logged(run, "daemon.ready")
        run.stop()
        assert await ended(run) == 0
        await anyio.to_thread.run_sync(opened.close)


async def test_what_only_another_start_can_put_right_ends_with_2(start: Start) -> None:
    for args in (*DAEMONS.values(), ("serve", "--auth", "none"), ("exporter",), SCALE, ("doctor",)):
        run = start(*args, PGWORKD_DSN="postgresql://u@h/d?pgbouncer=true")
        assert await ended(run) == 2, (args, run.lines)
        (line,) = run.lines
        said = json.loads(line).get("error", "") if line.startswith("{") else line
        assert "dsn (environment PGWORKD_DSN)" in said
