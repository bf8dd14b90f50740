"""Notifications to systemd: READY only when the daemon claims, STOPPING at once, WATCHDOG only while it works."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import anyio
import pytest

from pgworkd import App
from pgworkd.engine.life.daemon import Daemon
from pgworkd.processes.sd_notify import EXTENDED_START_S, STATUS_BYTES_MAX, STATUS_S, SystemdNotifier
from tests.kits.commands import Systemd, systemd
from tests.kits.daemon import LIMIT_S, quick_options

__all__ = ["systemd"]  # a fixture

NOBODY = "postgresql://nobody@127.0.0.1:1/nothing"


@contextlib.asynccontextmanager
async def reporting(dsn: str, environ: dict[str, str]) -> AsyncIterator[Daemon]:
    app = App()

    @app.handler("q")
    async def handle() -> None: ...

    daemon = Daemon(app, quick_options(dsn), parts=(SystemdNotifier(environ),))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        try:
            yield daemon
        finally:
            daemon.request_stop()


async def test_a_daemon_reports_startup_ready_watchdog_and_stopping(dsn: str, systemd: Systemd) -> None:
    async with reporting(dsn, systemd.environ | {"WATCHDOG_USEC": "100000"}) as daemon:
        assert await systemd.receives("STATUS=") == "STATUS=waiting for the database"
        await systemd.receives("READY=1")
        assert daemon.ready.is_set()
        assert await systemd.receives("STATUS=working") == "STATUS=working, 0 running, queues: q"
        for _ in range(3):  # it is repeated
            await systemd.receives("WATCHDOG=1", after=len(systemd.received))
        assert "STOPPING=1" not in systemd.received
        daemon.request_stop()
        await systemd.receives("STOPPING=1")
    assert systemd.received.count("READY=1") == 1
    assert systemd.received.count("STOPPING=1") == 1


async def test_a_daemon_without_a_database_is_alive_but_not_ready(systemd: Systemd) -> None:
    async with reporting(NOBODY, systemd.environ | {"WATCHDOG_USEC": "50000"}):
        for _ in range(3):
            await systemd.receives("WATCHDOG=1", after=len(systemd.received))
        assert "READY=1" not in systemd.received
        assert systemd.received[-3] == "STATUS=waiting for the database"


async def test_a_start_that_waits_for_the_database_extends_its_timeout(
    dsn: str, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise systemd would kill it after TimeoutStartSec=, repeatedly while the database is unavailable."""
    assert EXTENDED_START_S > 3 * STATUS_S  # the timeout is extended before it expires
    monkeypatch.setattr("pgworkd.processes.sd_notify.STATUS_S", 0.02)
    more = f"EXTEND_TIMEOUT_USEC={EXTENDED_START_S * 1e6:.0f}"
    async with reporting(NOBODY, systemd.environ):
        for _ in range(3):
            await systemd.receives(more, after=len(systemd.received))
        assert "READY=1" not in systemd.received
    before = len(systemd.received)
    async with reporting(dsn, systemd.environ):
        await systemd.receives("READY=1")
        after_ready = len(systemd.received)
        for _ in range(3):
            await systemd.receives("STATUS=working", after=len(systemd.received))
    assert before < after_ready
    assert more not in systemd.received[after_ready:]


class Late:
    """A supervisor whose processes hang before they are ready."""

    def __init__(self) -> None:
        self.ready = anyio.Event()
        self.stop_requested = anyio.Event()

    def healthy(self) -> bool:
        return False

    def status(self) -> str:
        return "late"


async def test_a_start_that_hangs_does_not_extend_its_timeout(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.processes.sd_notify.STATUS_S", 0.02)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(SystemdNotifier(systemd.environ).run, Late())
        for _ in range(3):
            await systemd.receives("STATUS=late", after=len(systemd.received))
        tasks.cancel_scope.cancel()
    assert not [line for line in systemd.received if line.startswith("EXTEND")]


class Stuck:
    """A daemon whose heartbeat hangs."""

    def __init__(self) -> None:
        self.ready = anyio.Event()
        self.stop_requested = anyio.Event()
        self.looks = 0
        self.ready.set()

    def healthy(self) -> bool:
        return False

    def status(self) -> str:
        self.looks += 1
        return f"stuck {self.looks}"


async def test_a_stuck_daemon_sends_no_watchdog_keepalive(systemd: Systemd) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(SystemdNotifier(systemd.environ | {"WATCHDOG_USEC": "20000"}).run, Stuck())
        await systemd.receives("STATUS=stuck 5")
        tasks.cancel_scope.cancel()
    assert "WATCHDOG=1" not in systemd.received


async def test_the_watchdog_of_another_process_is_ignored(systemd: Systemd) -> None:
    other = {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid() + 1)}
    assert SystemdNotifier(systemd.environ | other).watchdog_s == 0
    assert SystemdNotifier(systemd.environ | other | {"WATCHDOG_PID": str(os.getpid())}).watchdog_s == 0.02


async def test_an_abstract_socket_address_works(dsn: str) -> None:
    systemd = Systemd(f"@pgworkd-test-{os.getpid()}")
    async with reporting(dsn, systemd.environ):
        await systemd.receives("READY=1")
    systemd.close()


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "50000"}])
async def test_a_daemon_works_without_systemd(dsn: str, environ: dict[str, str]) -> None:
    async with reporting(dsn, environ) as daemon:
        with anyio.fail_after(LIMIT_S):
            await daemon.ready.wait()


class Named:
    """A daemon whose status contains text of others."""

    def __init__(self, status: str) -> None:
        self.ready = anyio.Event()
        self.ready.set()
        self.stop_requested = anyio.Event()
        self._status = status

    def healthy(self) -> bool:
        return False

    def status(self) -> str:
        return self._status


@pytest.mark.parametrize("name", ["q\nWATCHDOG=1\rSTOPPING=1\0\x1b[2J", "\ud800", "\u2028MAINPID=1\u202e"])
async def test_a_name_cannot_inject_assignments_for_systemd(systemd: Systemd, name: str) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(SystemdNotifier(systemd.environ).run, Named(f"working, queues: {name}"))
        await systemd.receives("READY=1")
        tasks.cancel_scope.cancel()
    received = [line for line in systemd.received if not line.startswith("STATUS=")]
    assert received == ["READY=1"]
    assert any(line.startswith("STATUS=working, queues: ") for line in systemd.received)


async def test_a_long_status_does_not_suppress_ready_and_the_watchdog(dsn: str, systemd: Systemd) -> None:
    """systemd ignores messages of more than 4,096 bytes; our own supervisor reads no more than that."""
    app = App()
    for number in range(50):
        app.handler(f"{number}{'ü' * 190}")(_nothing)
    daemon = Daemon(app, quick_options(dsn), parts=(SystemdNotifier(systemd.environ),))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        await systemd.receives("READY=1")
        daemon.request_stop()
    assert max(len(line.encode()) for line in systemd.received) <= len("STATUS=") + STATUS_BYTES_MAX


async def _nothing() -> None: ...
