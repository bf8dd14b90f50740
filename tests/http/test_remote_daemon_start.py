"""Starts of daemons that work through a gateway: what is refused, and what is waited for."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.errors import UsageError
from pgworkd.remote.client import GatewayAddress
from pgworkd.remote.daemon import RemoteDaemon
from tests.kits.commands import Start, start
from tests.kits.daemon import Recorder, insert, quick_options, running, until, waits_for_status
from tests.kits.gateway import served, token
from tests.kits.remote_daemon import remote_daemons

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["start"]  # a fixture


def test_an_app_with_alerts_is_refused(dsn: str) -> None:
    app = App()
    app.alert(to="ops@example.com")
    with pytest.raises(UsageError, match=r"app\.alert needs the database"):
        RemoteDaemon(app, quick_options("postgresql://"), GatewayAddress("http://127.0.0.1:1", "pgw_x"))


@pytest.mark.parametrize(
    ("scopes", "says"),
    [
        ({"operate": None}, "needs the scope work"),
        ({"operate": None, "work": ["other"]}, "needs the scope work"),
        ({"read": None}, "schedule 'tick' needs a token with the scope operate"),
        ({"work": None}, "schedule 'tick' needs a token with the scope operate"),
    ],
)
async def test_a_token_that_does_not_allow_it_is_waited_for_and_leaves_no_worker(
    dsn: str, db: asyncpg.Connection[Any], scopes: dict[str, list[str] | None], says: str
) -> None:
    app = App()

    @app.handler("tick", every=1.0)
    async def tick() -> None:
        return None

    secret = await token(dsn, scopes)
    with served(dsn) as (_, url):
        daemon = RemoteDaemon(app, quick_options("postgresql://", lease_s=10.0), GatewayAddress(url + "/", secret))
        seen = Recorder()
        daemon.events.listen(seen)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(daemon.run)
            refused = await seen.wait(events.DATABASE_REFUSED)
            assert says in refused["error"]
            assert daemon.status() == f"waiting for the gateway: {refused['error']}"
            daemon.request_stop()
            await seen.wait(events.DAEMON_STOPPED, exit_code=0)
        assert await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE kind = 'remote'") == 0


async def test_a_gateway_that_is_not_there_is_waited_for_and_a_stop_is_obeyed(dsn: str) -> None:
    app = App()

    @app.handler("q")
    async def handle() -> None:
        return None

    daemon = RemoteDaemon(app, quick_options("postgresql://"), GatewayAddress("http://127.0.0.1:1", "pgw_x"))
    seen = Recorder()
    daemon.events.listen(seen)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        outage = await seen.wait(events.DATABASE_UNAVAILABLE)
        assert "no connection to the gateway" in outage["error"]
        assert daemon.status() == "waiting for the gateway"
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)


async def test_a_schedule_is_stored_as_a_daemon_with_a_database_stores_it(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App()

    @app.handler(
        "tick", every="0 3 * * *", timezone="Europe/Vienna", missed="once", payload={"n": 1}, missed_grace_s=7.0
    )
    async def tick() -> None:
        return None

    @app.handler("tock", every=3600.0, wait_for_retries=True)
    async def tock() -> None:
        return None

    apart = "{source,revision,created_at,updated_at,in_force_since,last_occurrence,retired_at}"
    sql = f"""WITH found AS (DELETE FROM pgworkd.schedules RETURNING *)
        SELECT to_jsonb(found) - '{apart}'::text[] AS it FROM found ORDER BY name"""  # noqa: S608 - ours
    async with running(app, dsn):
        wanted = await db.fetch(sql)
    async with remote_daemons(dsn, monkeypatch), running(app, dsn):
        assert await db.fetch(sql) == wanted
    assert len(wanted) == 2


async def test_the_log_tells_what_happened_and_not_each_request(
    dsn: str, db: asyncpg.Connection[Any], start: Start
) -> None:
    secret = await token(dsn, {"work": None})
    with served(dsn) as (_, url):
        command = start("run", "--app", "notes:app", "--log-format", "json", PGWORKD_REMOTE=url, PGWORKD_TOKEN=secret)
        await until(waits_for_status(db, await insert(db, "mail"), "completed"))
        command.stop()
        assert command.ends() == 0
    assert command.event("job.completed")
    assert [line for line in command.lines if '"event": "logged"' in line] == []
