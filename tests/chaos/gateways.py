"""The gateways of a run whose workers have no database: each a process behind a proxy, always on the same port."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
from anyio.to_thread import run_sync

from tests.chaos.history import now_s
from tests.chaos.others import FOREIGN
from tests.kits.gateway import token
from tests.kits.proxy import Mode, Proxy
from tests.kits.remote_daemon import SHORT_LEASES

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet, Member

READY_S_MAX = 30.0
COMES_S_MAX = 10.0
"""How long a fault waits for a gateway to come to the point at which it kills itself."""


class Gateway:
    """One gateway: its process, its port, and the proxy to Postgres that it goes through."""

    def __init__(self, name: str, port: int, proxy: Proxy) -> None:
        self.name, self.port, self.proxy = name, port, proxy
        self.process: subprocess.Popen[bytes] | None = None
        self.expected: int | None = None
        """The exit code of a stop that was asked for."""
        self.returns = 0
        """How often it has served again after an exit."""
        self.away_s: float | None = None
        """How long it stays away after its next exit; None: for a moment."""

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Gateways:
    """All gateways of a run."""

    def __init__(self, fleet: Fleet, count: int) -> None:
        self._fleet = fleet
        self._count = count
        self._turn = 0
        self.all: list[Gateway] = []
        self.token = ""

    async def start(self) -> None:
        """Prepares the database, and starts them."""
        async with self._fleet.connection() as db:
            await db.execute(SHORT_LEASES)
        self.token = await token(self._fleet.dsn)
        for number in range(self._count):
            gateway = Gateway(f"g{number}", _free_port(), await self._fleet.new_proxy(self._fleet.dsn))
            self.all.append(gateway)
            self._spawn(gateway)
            self._fleet.tasks.start_soon(self._mind, gateway)
        for gateway in self.all:
            await self.is_serving(gateway)

    def next(self) -> Gateway:
        """The one for the next worker."""
        self._turn += 1
        return self.all[self._turn % len(self.all)]

    def any(self, dice: random.Random) -> Gateway:
        """One of them."""
        return dice.choice(self.all)

    def environment(self, proxy: Proxy) -> dict[str, str]:
        """Of a worker that goes through this proxy."""
        url = f"http://127.0.0.1:{proxy.port}"
        foreign = {"PGWORKD_URL": url, "PGWORKD_TOKEN": self.token, "PGWORKD_QUEUE": FOREIGN, "PGWORKD_LEASE_S": "3"}
        return {"PGWORKD_TESTS_REMOTE": f"{url} {self.token}", **foreign}

    def members(self, gateway: Gateway) -> list[Member]:
        """The workers that go through it."""
        return [member for member in self._fleet.members if member.gateway is gateway]

    def _spawn(self, gateway: Gateway) -> None:
        more = {"PGWORKD_DSN": gateway.proxy.dsn, "PGWORKD_LOG_LEVEL": "warning", "PGWORKD_LOG_FORMAT": "json"}
        more |= {"PGWORKD_COMMAND_TIMEOUT_S": "2", "PGWORKD_CONNECT_TIMEOUT_S": "2"}
        more |= {"PGWORKD_SHUTDOWN_S": "5", "PGWORKD_HTTP_REQUESTS_PER_S": "100000"}
        gateway.expected = None
        gateway.process = self._fleet.spawn(gateway.name, "gateway", gateway.port, more=more)
        self._fleet.note("gateway_started", name=gateway.name)

    async def _mind(self, gateway: Gateway) -> None:
        """Records each exit, restarts it as systemd would, and notes how long its workers were without it."""
        while not self._fleet.ending:
            while gateway.alive:
                await anyio.sleep(0.02)
            if gateway.process is not None and not self._fleet.ending:
                died_s, code = now_s(), gateway.process.returncode
                members = self.members(gateway)
                self._fleet.note("gateway_exit", name=gateway.name, code=code, expected=gateway.expected)
                moment_s = self._fleet.dice.uniform(0, 0.5)
                await anyio.sleep(moment_s if gateway.away_s is None else gateway.away_s)
                gateway.away_s = None
                self._spawn(gateway)
                await self.is_serving(gateway)
                self._absent(gateway, died_s, members)
                gateway.returns += 1

    async def is_serving(self, gateway: Gateway) -> None:
        """Waits until it answers, or has ended again."""
        url = f"http://127.0.0.1:{gateway.port}/healthz"
        with anyio.move_on_after(READY_S_MAX):
            while gateway.alive and not await run_sync(_answers, url):
                await anyio.sleep(0.05)

    def _absent(self, gateway: Gateway, since_s: float, members: Sequence[Member] = ()) -> None:
        """Notes that its workers, and `members`, were without it until now."""
        for name in {member.name for member in (*members, *self.members(gateway))}:
            self._fleet.note("isolated", name=name, since_s=since_s, until_s=now_s())
        self._fleet.disturb()

    async def _has_returned(self, gateway: Gateway, returns: int) -> None:
        with anyio.move_on_after(2 * READY_S_MAX):
            while gateway.returns == returns:
                await anyio.sleep(0.02)

    async def kill(self, gateway: Gateway, away_s: float | None = None) -> None:
        """SIGKILL; returns when it is there again, after a moment or after `away_s`."""
        returns, gateway.away_s = gateway.returns, away_s
        self._fleet.note("gateway_killed", name=gateway.name)
        if gateway.process is not None:
            gateway.process.kill()
        await self._has_returned(gateway, returns)

    async def kill_at(self, gateway: Gateway, point: str) -> None:
        """It kills itself when it next comes to that point, if it does so soon; returns when it is there again."""
        returns, process = gateway.returns, gateway.process
        if process is None:
            return
        self._arm(process, point)
        with anyio.move_on_after(COMES_S_MAX):
            while process.poll() is None:
                await anyio.sleep(0.02)
        self._arm(process, "")  # else it would go during a later fault, in which its workers are told to end
        if process.poll() is not None:
            await self._has_returned(gateway, returns)

    def _arm(self, process: subprocess.Popen[bytes], point: str) -> None:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has just died
                process.stdin.write(f"{point}\n".encode())
                process.stdin.flush()

    async def terminate(self, gateway: Gateway) -> None:
        """SIGTERM: it has to end with 0."""
        returns = gateway.returns
        gateway.expected = 0
        if gateway.process is not None:
            gateway.process.terminate()
        await self._has_returned(gateway, returns)

    async def freeze(self, gateway: Gateway, for_s: float) -> None:
        """SIGSTOP for a while."""
        if gateway.process is not None:
            began_s, members = now_s(), self.members(gateway)
            gateway.process.send_signal(signal.SIGSTOP)
            await anyio.sleep(for_s)
            gateway.process.send_signal(signal.SIGCONT)
            self._absent(gateway, began_s, members)

    async def isolate(self, gateway: Gateway, mode: Mode, for_s: float) -> None:
        """It cannot reach Postgres for a while."""
        began_s, members = now_s(), self.members(gateway)
        gateway.proxy.mode = mode
        await anyio.sleep(for_s)
        gateway.proxy.mode = "pass"
        self._absent(gateway, began_s, members)

    def cut(self, gateway: Gateway) -> None:
        """All its connections to Postgres are reset."""
        gateway.proxy.cut()
        self._absent(gateway, now_s())

    def stop(self) -> None:
        """At the end of the run."""
        for gateway in self.all:
            if gateway.process is not None:
                gateway.process.terminate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:  # noqa: S310
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
