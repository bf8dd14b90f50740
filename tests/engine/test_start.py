"""Startup: what somebody else can put right is waited for; what only another start can, is refused with a remedy."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import anyio
import asyncpg
import pytest
from anyio.abc import SocketAttribute

from pgworkd import App
from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.registration import SESSIONS_MIN
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.schema import VERSION
from pgworkd.engine.life import startup
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import AccessRefused, PgworkdError, SchemaError, UsageError
from pgworkd.metrics.daemon import DaemonSource
from tests.kits.apps import app_of_one
from tests.kits.daemon import Recorder, insert, quick_options, running, until, waits_for_status
from tests.kits.schema import granted_login, plain_user
from tests.kits.server import create_empty_database, database_name, drop_database, set_read_only


async def refusal(dsn: str, **changes: Any) -> PgworkdError:
    """Starts a daemon that must refuse to run; its error."""
    seen = Recorder()
    daemon = Daemon(app_of_one(), quick_options(dsn, **changes))
    daemon.events.listen(seen)
    with anyio.fail_after(10):
        with pytest.raises(PgworkdError) as caught:
            await daemon.run()
    assert not daemon.ready.is_set()
    code = 2 if isinstance(caught.value, SchemaError | UsageError) else 1  # the log configuration is global
    assert seen.all(events.DAEMON_STOPPED, exit_code=code) != []
    return caught.value


def with_parts(dsn: str, **parts: Any) -> str:
    return urlunsplit(urlsplit(dsn)._replace(**parts))


async def outage(dsn: str) -> str:
    """Starts a daemon that must wait; what it reports, once. Then it is stopped and exits quickly."""
    seen = Recorder()
    daemon = Daemon(app_of_one(), quick_options(dsn))
    daemon.events.listen(seen)
    codes: list[int] = []

    async def run() -> None:
        codes.append(await daemon.run())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        outage = await seen.wait(events.DATABASE_UNAVAILABLE)
        await anyio.sleep(0.05)
        assert not daemon.ready.is_set()
        assert daemon.status() == "waiting for the database"
        daemon.request_stop()
        with anyio.fail_after(2):
            await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    assert codes == [0]
    assert len(seen.all(events.DATABASE_UNAVAILABLE)) == 1
    return str(outage["error"])


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://someone:canary@127.0.0.1:1/nowhere",
        "postgresql://someone:canary@no-such-host.invalid/nowhere",
        "postgresql://someone:canary@/nowhere?host=/no/such/directory",
    ],
    ids=["closed port", "unknown host", "no socket"],
)
async def test_an_unreachable_server_is_waited_for(dsn: str) -> None:
    said = await outage(dsn)
    assert "no connection to the database" in said
    assert "canary" not in said


async def test_a_server_that_accepts_but_never_responds_is_waited_for() -> None:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - no Django
    seen = Recorder()
    deaf = ConnectionOptions(f"postgresql://a@127.0.0.1:{port}/b", connect_timeout_s=0.1, command_timeout_s=0.1)
    daemon = Daemon(app_of_one(), quick_options(deaf.dsn, connection=deaf))
    daemon.events.listen(seen)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, _stay_silent)
        tasks.start_soon(daemon.run)
        outage = await seen.wait(events.DATABASE_UNAVAILABLE)
        assert outage["error"] == f"no connection to the database: 127.0.0.1 port {port}: did not answer in time"
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
        tasks.cancel_scope.cancel()
    await listener.aclose()


async def _stay_silent(stream: Any) -> None:
    async with stream:
        await anyio.sleep_forever()


async def test_the_daemon_starts_when_the_server_accepts_connections_again(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with plain_user(dsn, db) as user_dsn:
        await db.execute(f"ALTER DATABASE {database_name(dsn)} CONNECTION LIMIT 0")
        seen = Recorder()
        daemon = Daemon(app_of_one(), quick_options(user_dsn))
        daemon.events.listen(seen)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(daemon.run)
            outage = await seen.wait(events.DATABASE_UNAVAILABLE)
            assert "too many connections" in outage["error"]
            await db.execute(f"ALTER DATABASE {database_name(dsn)} CONNECTION LIMIT -1")
            await seen.wait(events.DAEMON_READY)
            assert (await seen.wait(events.DATABASE_RECOVERED, part="start"))["outage_s"] > 0
            await until(waits_for_status(db, await insert(db, "q"), "completed"))
            daemon.request_stop()


# What is refused, and how it is put right: by somebody else, while the daemon waits.

REFUSALS = {
    "password": ("ALTER ROLE {user} PASSWORD 'other'", "ALTER ROLE {user} PASSWORD 'right'", "28P01"),
    "user": ("ALTER ROLE {user} RENAME TO {user}_gone", "ALTER ROLE {user}_gone RENAME TO {user}", "28P01"),
    "login": ("ALTER ROLE {user} NOLOGIN", "ALTER ROLE {user} LOGIN", "28000"),
    "expired": ("ALTER ROLE {user} VALID UNTIL '2020-01-01'", "ALTER ROLE {user} VALID UNTIL 'infinity'", "28P01"),
    "connect": (
        "REVOKE CONNECT ON DATABASE {database} FROM PUBLIC",
        "GRANT CONNECT ON DATABASE {database} TO PUBLIC",
        "42501",
    ),
    "schema": ("REVOKE ALL ON SCHEMA pgworkd FROM {user}", "GRANT USAGE ON SCHEMA pgworkd TO {user}", "42501"),
    "table": (
        "REVOKE ALL ON pgworkd.workers FROM {user}",
        "GRANT ALL ON pgworkd.workers TO {user}",
        "42501",
    ),
    "function": (
        "REVOKE ALL ON FUNCTION pgworkd.register FROM PUBLIC, {user}",
        "GRANT EXECUTE ON FUNCTION pgworkd.register TO {user}",
        "42501",
    ),
}


@contextlib.asynccontextmanager
async def waiting(dsn: str, **changes: Any) -> AsyncIterator[tuple[Daemon, Recorder]]:
    """A daemon that runs; it is stopped, and must have left with 0, at the end."""
    seen, codes = Recorder(), []
    daemon = Daemon(app_of_one(), quick_options(dsn, **changes))
    daemon.events.listen(seen)

    async def run() -> None:
        codes.append(await daemon.run())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        try:
            yield daemon, seen
        finally:
            daemon.request_stop()
    assert codes == [0]


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
async def test_a_daemon_is_not_ready_without_the_sessions_it_serves_with(
    dsn: str, db: asyncpg.Connection[Any], limit: int
) -> None:
    """Else it would claim, and could settle nothing."""
    async with plain_user(dsn, db) as user_dsn:
        role = urlsplit(user_dsn).username
        await db.execute(f"ALTER ROLE {role} CONNECTION LIMIT {limit}")
        async with waiting(user_dsn) as (_, seen):
            error = (await seen.wait(events.DATABASE_UNAVAILABLE))["error"]
            assert "too many connections for role" in error
            assert f"it needs {SESSIONS_MIN} sessions, and has {limit}; raise the limit" in error
            assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 0
            assert seen.all(events.DAEMON_READY) == []
            await db.execute(f"ALTER ROLE {role} CONNECTION LIMIT {SESSIONS_MIN}")
            await seen.wait(events.DAEMON_READY)
            await until(waits_for_status(db, await insert(db, "q"), "completed"))
        assert seen.all(events.DATABASE_UNAVAILABLE, part="claims") == []


@pytest.mark.parametrize("what", REFUSALS)
async def test_a_server_that_refuses_us_is_waited_for_until_it_is_put_right(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(startup, "REMIND_S", 0.2)
    monkeypatch.setattr(startup, "REFUSED_S", 0.1)
    async with granted_login(dsn, db) as user_dsn:
        user = urlsplit(user_dsn).username or ""
        wrong, right, code = (each.format(user=user, database=database_name(dsn)) for each in REFUSALS[what])
        await db.execute(wrong)
        async with waiting(user_dsn) as (daemon, seen):
            refused = await seen.wait(events.DATABASE_REFUSED)
            assert (refused["part"], code in refused["error"]) == ("start", True)
            assert "check user, password, database and grants" in refused["error"]
            assert "canary" not in refused["error"]
            assert daemon.status() == f"waiting for the database: {refused['error']}"
            checks = {check.name: check for check in DaemonSource(daemon).checks()}
            assert not checks["database"].ok
            assert checks["database"].says == daemon.status()
            await seen.wait(events.DATABASE_REFUSED, 2)  # it says so again
            assert not daemon.ready.is_set()
            await db.execute(right)
            await seen.wait(events.DAEMON_READY)
            await until(waits_for_status(db, await insert(db, "q"), "completed"))
    assert not seen.all(events.DATABASE_UNAVAILABLE)


async def test_an_unknown_database_is_waited_for(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "REFUSED_S", 0.1)
    there = database_name(dsn)
    async with waiting(with_parts(dsn, path=f"/{there}_b")) as (_, seen):
        refused = await seen.wait(events.DATABASE_REFUSED)
        assert f'"{there}_b" does not exist (3D000)' in refused["error"]
        await create_empty_database(dsn, f"{there}_b")
        await seen.wait(events.SCHEMA_AWAITED)
    await drop_database(dsn, f"{there}_b")


async def test_what_a_start_waits_for_may_change_and_is_told_each_time(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "REFUSED_S", 0.1)
    async with granted_login(dsn, db) as user_dsn:
        user = urlsplit(user_dsn).username
        await db.execute(f"ALTER ROLE {user} PASSWORD 'other'; REVOKE ALL ON SCHEMA pgworkd FROM {user}")
        async with waiting(user_dsn) as (_, seen):
            assert "28P01" in (await seen.wait(events.DATABASE_REFUSED))["error"]
            await db.execute(f"ALTER ROLE {user} PASSWORD 'right'")
            assert "42501" in (await seen.wait(events.DATABASE_REFUSED, 2))["error"]
            await db.execute(f"GRANT USAGE ON SCHEMA pgworkd TO {user}")
            await seen.wait(events.DAEMON_READY)
    assert len(seen.all(events.DATABASE_REFUSED)) == 2
    assert len(seen.all(events.DATABASE_RECOVERED, part="start")) == 1


async def test_a_refusal_is_not_tried_again_and_again() -> None:
    """Some servers shut out who comes with a wrong password too often."""
    state = startup.Startup(anyio.sleep_forever, Events())
    delays = [state._delay_s(AccessRefused("no")) for _ in range(9)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


@pytest.mark.parametrize(
    "dsn",
    [
        "canary",
        "mysql://someone:canary@127.0.0.1:1/x",
        "postgresql://someone@127.0.0.1:port/x?password=canary",
        "postgresql://someone:se/canary@127.0.0.1:1/x",
        "postgresql://someone:se?canary@127.0.0.1:1/x",
        "postgresql://someone:se#canary@127.0.0.1:1/x",
        "postgresql://someone:canary@127.0.0.1:1/x?sslmode=perhaps",
    ],
)
async def test_a_malformed_dsn_is_refused_without_showing_the_password(dsn: str) -> None:
    with pytest.raises(UsageError, match="the DSN") as caught:
        raise await refusal(dsn)  # what the options do not detect, the first connection does
    assert "canary" not in str(caught.value)


async def test_a_newer_schema_is_refused(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute("UPDATE pgworkd.schema_version SET version = version + 1")
    error = await refusal(dsn)
    assert isinstance(error, SchemaError)
    newer = f"the schema is at version {VERSION + 1}, newer than this program ({VERSION})"
    assert str(error) == f"{newer}: upgrade pgworkd on this host"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 0


async def test_a_schema_that_was_half_deleted_is_refused(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute("DROP FUNCTION pgworkd.register(text, int, text, real, uuid, text[], text)")
    error = await refusal(dsn)
    assert isinstance(error, SchemaError)
    assert "pgworkd migrate" in str(error)


async def test_a_read_only_server_is_waited_for(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await set_read_only(dsn, db, "on")
    said = await outage(dsn)
    assert re.search(r"read|standby", said), said


async def test_a_temporarily_read_only_server_costs_no_job_and_no_attempt(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """A failover: all sessions are terminated, and new ones are read-only until the standby is promoted."""
    app, go_on = App(), anyio.Event()

    @app.handler("q")
    async def handle(payload: dict[str, Any]) -> str:
        await go_on.wait()
        if payload:
            raise ValueError("a failure of its own")
        return "done"

    async with running(app, dsn) as (_, seen):
        completes, fails = await insert(db, "q"), await insert(db, "q", '{"fail": 1}')
        await seen.wait(events.JOB_STARTED, count=2)
        await set_read_only(dsn, db, "on")
        await db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'pgworkd %'"
        )
        go_on.set()
        await seen.wait(events.DATABASE_UNAVAILABLE, part="settler")
        await anyio.sleep(0.05)
        await set_read_only(dsn, db, "off")
        await until(waits_for_status(db, completes, "completed"), limit_s=4)
        await until(waits_for_status(db, fails, "failed"), limit_s=4)
    rows = await db.fetch("SELECT attempts, failures, error FROM pgworkd.all_jobs ORDER BY failures")
    assert [tuple(row) for row in rows] == [(1, 0, None), (1, 1, "ValueError: a failure of its own")]


# Wrong usage is reported before connecting.


def test_an_app_without_handlers_is_refused() -> None:
    with pytest.raises(UsageError, match="the app has no handlers"):
        Daemon(App(), quick_options("postgresql://127.0.0.1:1/x"))


def test_a_queue_without_a_handler_is_refused_and_the_known_ones_named() -> None:
    app = app_of_one()
    app.handler("a")(lambda: None)
    with pytest.raises(UsageError, match=r"no handler serves queue 'p'; the app knows: a, q"):
        Daemon(app, quick_options("postgresql://127.0.0.1:1/x"), queues={"q": None, "p": 3})


def test_requested_slots_override_those_of_the_app() -> None:
    app = app_of_one()
    app.handler("a", concurrency=7)(lambda: None)
    dsn = "postgresql://127.0.0.1:1/x"
    assert {q: p.concurrency for q, p in Daemon(app, quick_options(dsn)).pools.items()} == {"q": 10, "a": 7}
    chosen = Daemon(app, quick_options(dsn), queues={"a": None, "q": 3}).pools
    assert {q: p.concurrency for q, p in chosen.items()} == {"q": 3, "a": 7}
