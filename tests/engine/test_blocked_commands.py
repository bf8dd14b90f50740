"""Blocked and frozen daemons as an operator meets them: health, lists, doctor, log, exit codes and restarts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import asyncpg
import pytest
from anyio.to_thread import run_sync

from pgworkd import App
from pgworkd.cli import gateway, serve
from pgworkd.cli.programs import program
from pgworkd.core import events as names
from pgworkd.core.registration import Registration
from pgworkd.engine.life.daemon import Daemon
from pgworkd.gateway.api.app import Application
from pgworkd.gateway.api.request.gateway import Gateway
from pgworkd.processes.supervisor import Supervisor
from pgworkd.remote.assignments import Assignments
from pgworkd.remote.client import GatewayAddress
from pgworkd.remote.heartbeats import GatewayHeartbeats
from pgworkd.settings.config import load
from tests.kits.commands import NOWHERE, Start, Systemd, events, logged, start, systemd, waits_until
from tests.kits.daemon import Recorder, insert, quick_options, running, until
from tests.kits.metrics import address_of, fetch
from tests.kits.watched import APP, LISTEN, ready

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["start", "systemd"]  # fixtures

BLOCKS = """
import threading

@app.handler("forever")
async def forever() -> None:
    threading.Event().wait()
"""
QUICK = {"PGWORKD_LEASE_S": "5", "PGWORKD_HEARTBEAT_S": "1", "PGWORKD_COMMAND_TIMEOUT_S": "2"}


async def test_a_blocked_daemon_from_the_first_second_to_its_end(
    start: Start, systemd: Systemd, dsn: str, db: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    (tmp_path / "watched.py").write_text(APP + BLOCKS)
    env = QUICK | {"PGWORKD_DSN": dsn, "PGWORKD_LOG_FORMAT": "json", "PGWORKD_LOOP_LIMIT_S": "9"}
    run = start("run", "--app=watched:app", "--worker-name=w", *LISTEN, **env, **systemd.environ)
    url = await run_sync(address_of, run)
    await run_sync(waits_until, lambda: ready(url))
    job_id = await insert(db, "forever")
    await run_sync(waits_until, lambda: not ready(url))
    failing = (await run_sync(fetch, url, "/readyz")).failing
    assert failing.keys() == {"loop"}
    assert (await run_sync(fetch, url, "/healthz")).status == 200, "a third of the limit is not over"
    await run_sync(waits_until, lambda: "'forever' in queue 'forever'" in str(fetch(url, "/readyz").failing))
    (blocked,) = await logged(run, names.LOOP_BLOCKED)
    assert (blocked["job_id"], blocked["kind"]) == (str(job_id), "forever")
    assert blocked["stack"].splitlines()[0].endswith(", in forever")
    await systemd.receives("STATUS=the event loop has been blocked for 1.")
    await run_sync(waits_until, lambda: fetch(url, "/healthz").status == 503)
    await until(lambda: db.fetchval("SELECT state = 'blocked' FROM pgworkd.worker_stats WHERE name = 'w'"))
    with (tmp_path / "doctor").open("w") as said:
        assert await run_sync(start("doctor", "--json", stdout=said, PGWORKD_DSN=dsn).ends) == 1
    (bad,) = [each for each in json.loads((tmp_path / "doctor").read_text()) if each["level"] == "bad"]
    assert bad["finding"].startswith("the event loop of worker 'w'")
    assert await run_sync(run.ends) == 1
    assert len(events(run, names.LOOP_BLOCKED)) == len(events(run, names.LOOP_STUCK)) == 1
    (aborted,) = events(run, names.DAEMON_ABORTED)
    assert aborted["reason"].startswith("the event loop has been blocked for 9.")
    assert aborted["reason"].endswith(" by a job of kind 'forever' in queue 'forever'")


@pytest.mark.parametrize("both", [False, True], ids=["one of two", "both"])
async def test_a_frozen_process_is_restarted_without_systemd(
    start: Start, dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, *, both: bool
) -> None:
    (tmp_path / "watched.py").write_text(APP)
    env = QUICK | {"PGWORKD_DSN": dsn, "PGWORKD_LOG_FORMAT": "json", "PGWORKD_LOOP_LIMIT_S": "3"}
    run = start("run", "--app=watched:app", "--processes=2", **env)
    await logged(run, names.DAEMON_READY, 2)
    frozen = {facts["pid"] for facts in events(run, "process.started")[: 1 + both]}
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        await logged(run, names.DAEMON_READY, 3 + both)
    finally:
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert {facts["pid"] for facts in events(run, "process.hung")} == frozen
    run.stop()
    assert await run_sync(run.ends) == 0


async def test_a_blocked_process_ends_itself_and_is_restarted(
    start: Start, dsn: str, db: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    (tmp_path / "watched.py").write_text(APP + BLOCKS)
    env = QUICK | {"PGWORKD_DSN": dsn, "PGWORKD_LOG_FORMAT": "json", "PGWORKD_LOOP_LIMIT_S": "3"}
    run = start("run", "--app=watched:app", "--processes=2", **env)
    await logged(run, names.DAEMON_READY, 2)
    await insert(db, "forever", max_attempts=1)
    (end,) = await logged(run, "process.ended")
    assert end["exit_code"] == 1
    await logged(run, names.DAEMON_READY, 3)
    assert events(run, "process.hung") == []
    run.stop()
    assert await run_sync(run.ends) == 0


async def test_an_embedded_daemon_gives_up_its_lease(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Its host is not ended: the lease is not renewed any more, so that another daemon takes the job over."""
    blocked, let_go, codes = App(), threading.Event(), list[int]()

    @blocked.handler("q")
    async def block() -> None:
        let_go.wait(30)

    seen = Recorder()

    def host() -> None:
        async def main() -> None:
            daemon = Daemon(blocked, quick_options(dsn, lease_s=1.5, loop_limit_s=1.5))
            daemon.events.listen(seen)
            codes.append(await daemon.run())

        anyio.run(main)

    thread = threading.Thread(target=host, daemon=True)
    thread.start()
    try:
        await until(lambda: db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.pools)"))
        await insert(db, "q")
        await until(lambda: seen.all(names.LOOP_STUCK, process_ends=False))
        other = App()
        other.handler("q")(anyio.lowlevel.checkpoint)
        async with running(other, dsn, lease_s=1.5) as (_, beside):
            await beside.wait(names.JOB_LOST)
            await beside.wait(names.JOB_COMPLETED)
    finally:
        let_go.set()
    await run_sync(thread.join, 20)
    assert codes == [1]
    await until(lambda: seen.all(names.LOOP_RESUMED))
    assert await db.fetchval("SELECT attempts FROM pgworkd.finished_jobs") == 2


# The setting.


@contextlib.contextmanager
def listener() -> Iterator[socket.socket]:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as found:
        yield found


def limit_of(name: str) -> float:
    """The limit that a program goes by, with the settings of the environment."""
    settings = load(
        dsn=NOWHERE, app="watched:app", **{"remote": "https://gw", "token": "pgw_x"} if name == "remote" else {}
    )
    if name == "serve":
        with listener() as at:
            app = gateway._application(settings, at, requests=False, bodies=False)
        assert isinstance(app, Application)
        assert isinstance(app.gateway, Gateway)
        assert app.gateway.options.end_process is not None
        assert app.gateway.remote.owner._lease.loop_watch is app.gateway._loop_watch
        return app.gateway._loop_watch.limit_s
    found = program(settings, push=name == "push")
    service = serve._Service(settings, {}, found)
    if name == "processes":
        supervisor = service._make_supervisor()
        assert isinstance(supervisor, Supervisor)
        return supervisor._watchdog_s
    daemon = service._make_daemon()
    assert daemon.loop_watch._end_process is not None
    assert daemon.worker._lease.loop_watch is daemon.loop_watch
    assert daemon.worker._lease.kill_timer is TIMER
    return daemon.loop_watch.limit_s


TIMER = object()
PROGRAMS = ("run", "remote", "push", "serve", "processes")


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("given", "limit_s"), [("", 21), ("7.5", 7.5), ("0", 0)])
def test_every_program_reads_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, given: str, limit_s: float
) -> None:
    (tmp_path / "watched.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("pgworkd.engine.life.kill_timer.KillTimer.made", lambda: TIMER)
    for variable, value in {
        "LEASE_S": "7",
        "HEARTBEAT_S": "1",
        "COMMAND_TIMEOUT_S": "2",
        "LOOP_LIMIT_S": given,
    }.items():
        monkeypatch.setenv(f"PGWORKD_{variable}", value)
    if name == "remote":
        monkeypatch.setenv("PGWORKD_LEASE_S", "10")
    if name in ("remote", "serve") and given == "":
        limit_s = 30  # the lease of a gateway is 10 s
    assert limit_of(name) == limit_s


async def test_a_gateway_of_any_release_takes_the_beats_of_a_blocked_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones know two states, and would refuse the renewal of a lease with another."""
    beats, states = GatewayHeartbeats(GatewayAddress("http://127.0.0.1:1", "pgw_x"), 1.0, Assignments()), list[str]()

    async def call(_method: str, _path: str, body: Any, **_: Any) -> None:
        states.append(body["state"])

    monkeypatch.setattr(beats._http, "call", call)
    for state in ("running", "blocked", "stopping"):
        assert await beats.heartbeat(Registration.of(1, uuid4()), state)
    assert states == ["running", "running", "stopping"]
