"""The processes of a chaos run: a server, daemons behind proxies, producers; and the operations on them.

Everything that could explain a lost attempt is recorded: `exit` and `paused`, `isolated` of one daemon, with its span.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import anyio
import asyncpg
from anyio.abc import TaskGroup
from anyio.to_thread import run_sync

from pgworkd.client import NewJob, enqueue_many
from pgworkd.database import schema
from pgworkd.embedded import EmbeddedPostgres
from tests.chaos import clocks, others, workload
from tests.chaos.gateways import Gateway, Gateways
from tests.chaos.history import AWAY, History, load, now_s
from tests.chaos.taken_back import see_taken_back
from tests.kits.proxy import Mode, Proxy
from tests.kits.server import TEST_SETTINGS, create_database, create_template

TIMES = {"lease_s": 3.0, "heartbeat_s": 0.5, "poll_s": 0.5, "shutdown_s": 3.0, "cancel_grace_s": 2.0}
RESCUE_S = 0.1
"""Interval between rescues; see tests.kits.daemon.quick_options."""
MARGIN_S = TIMES["lease_s"] / 6
"""Seconds before its lease expires at which a daemon that cannot renew it fences itself."""
BEARABLE_S = TIMES["lease_s"] - TIMES["heartbeat_s"] - MARGIN_S
"""A pause or an outage shorter than this costs no daemon its lease."""
EXIT_S_MAX = TIMES["shutdown_s"] + TIMES["cancel_grace_s"] + 10.0 + 5.0
"""From SIGTERM to the exit, with FLUSH_GRACE_S for an unresponsive database, and a margin for a busy machine."""

LOGS = {3: "stuck", 5: "broken", 7: "full"}
"""What becomes of the log of some daemons, by their number modulo 8."""
OURS = dict.fromkeys(("statement_timeout", "lock_timeout", "idle_session_timeout"), "0") | {
    "default_transaction_read_only": "off"
}
"""Settings of the driver's own sessions, which its faults must not affect."""


class Member:
    """One daemon: its process, and the proxy it goes through."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], proxy: Proxy, gateway: Gateway | None = None
    ) -> None:
        self.name, self.process, self.proxy, self.gateway = name, process, proxy, gateway
        self.expected: int | None = None
        """The expected exit code; None: any, and the daemon is started again."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class Producer(NamedTuple):
    """One producer, and the number of jobs that it inserts."""

    name: str
    process: subprocess.Popen[bytes]
    jobs: int
    until_s: float


class Fleet:
    """All processes of a run, operated by one driver; `dice` makes every random choice."""

    def __init__(self, server: EmbeddedPostgres, dsn: str, directory: Path, tasks: TaskGroup, dice: random.Random):
        self.server, self.dsn, self.directory = server, dsn, directory
        self.dice = dice
        self.tasks = tasks
        self.members: list[Member] = []
        self.producers: list[Producer] = []
        self.calm_since_s = now_s()
        """When the last fault ended; infinity during a fault."""
        self.disturbed_s = now_s()
        """When the last fault that hit the database, or all daemons, ended."""
        self.too_many = 0
        """The number of daemons whose exit is not followed by a restart."""
        self.ending = False
        self.environment: dict[str, str] = {}
        """Additional environment of daemons and producers."""
        self.releases, self.new_kinds = list[str](), list[str]()
        """Of the application: each new daemon gets the next release, what replaces it the same; kinds not in all."""
        self.gateways: Gateways | None = None
        """Through which the daemons work; None: they have the database."""
        self._gateway_of: dict[Proxy, Gateway] = {}
        self._sort_of: dict[Proxy, str] = {}
        self._release_of: dict[Proxy, str] = {}
        self.note = History(directory, "driver").note
        self._named = 0
        self._spawned: list[subprocess.Popen[bytes]] = []

    # Processes.

    def _environment(self, name: str) -> dict[str, str]:
        clock = clocks.environment(self.directory / f"{name}.clock")
        return {**os.environ, **clock, **self.environment, "CHAOS_DIR": str(self.directory), "CHAOS_NAME": name}

    def spawn(
        self, name: str, module: str, *arguments: object, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a module of ours as a process; `more`: environment of its own."""
        return self._spawn(name, [sys.executable, "-m", f"tests.chaos.{module}", *map(str, arguments)], more or {})

    def _spawn(self, name: str, command: list[str], more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        environment = {**self._environment(name), **more}
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        self._spawned.append(process)
        return process

    async def start_member(self, proxy: Proxy | None = None, sort: str = "daemon") -> Member:
        """Starts a member of that sort (see `others`), behind a proxy of its own or of the one that it replaces."""
        if proxy is None:
            proxy = await self._way(sort)
        gateway, sort = self._gateway_of.get(proxy), self._sort_of[proxy]
        more = self.gateways.environment(proxy) if self.gateways is not None and gateway is not None else {}
        if self.releases and sort == "daemon":
            nth = self.releases[len(self._release_of) % len(self.releases)]
            more |= {"CHAOS_RELEASE": self._release_of.setdefault(proxy, nth)}
        self._named += 1
        name = f"d{self._named}"
        more |= {"CHAOS_LOG": LOGS[self._named % 8]} if self._named % 8 in LOGS else {}
        options = [f"{key}={value}" for key, value in TIMES.items()]
        if sort == others.FOREIGN:
            process = self._spawn(name, others.foreign_worker(self.directory), more)
        else:
            process = self.spawn(name, "worker", proxy.dsn, *options, more=more | {others.SORT: sort})
        member = Member(name, process, proxy, gateway)
        self.members.append(member)
        self.note("started", name=name, pid=member.process.pid)
        self.tasks.start_soon(self._mind, member)
        return member

    async def _way(self, sort: str) -> Proxy:
        """A proxy for a new member, to Postgres or to a gateway."""
        if self.gateways is None or sort == others.PUSHED:
            proxy = await self.new_proxy(self.dsn)
        else:
            gateway = self.gateways.next()
            proxy = await self.new_proxy(f"postgresql://gateway@127.0.0.1:{gateway.port}/none")
            self._gateway_of[proxy] = gateway
        self._sort_of[proxy] = sort
        return proxy

    async def new_proxy(self, dsn: str) -> Proxy:
        """A proxy in front of that address, until the end of the run."""
        proxy = Proxy(dsn)
        await self.tasks.start(self._keep, proxy)
        return proxy

    async def _keep(self, proxy: Proxy, *, task_status: Any) -> None:
        async with proxy:
            task_status.started()
            await anyio.sleep_forever()

    async def _mind(self, member: Member) -> None:
        """Records its exit, and restarts it as systemd would."""
        while member.alive:
            await anyio.sleep(0.02)
        code = member.process.returncode
        self.members.remove(member)
        self.note("exit", name=member.name, code=code, expected=member.expected)
        clocks.sweep(member.process.pid)
        self.tasks.start_soon(see_taken_back, self, member.name, now_s(), TIMES["lease_s"])
        if self.too_many:
            self.too_many -= 1
        elif not self.ending:
            await anyio.sleep(self.dice.uniform(0, 0.5))
            member.proxy.mode = "pass"
            if not self.ending:
                await self.start_member(member.proxy)

    async def start_producer(self, jobs: int, for_s: float) -> None:
        """Starts a producer."""
        self._named += 1
        name = f"p{self._named}"
        process = self.spawn(name, "producer", self.dsn, jobs, for_s, self.dice.getrandbits(32))
        self.producers.append(Producer(name, process, jobs, now_s() + for_s))

    async def kill_producer(self) -> None:
        """SIGKILL of a producer that has not finished; another one inserts the rest."""
        busy = [producer for producer in self.producers if producer.process.poll() is None]
        for producer in self.dice.sample(busy, min(1, len(busy))):
            producer.process.kill()
            producer.process.wait()
            self.producers.remove(producer)
            left = await run_sync(still_to_do, self.directory, producer.name, producer.jobs)  # the proxies run here
            await self.start_producer(left, max(0.0, producer.until_s - now_s()))

    def kill(self, member: Member) -> None:
        """SIGKILL."""
        self.note("killed", name=member.name)
        member.process.send_signal(signal.SIGKILL)

    async def freeze(self, member: Member, for_s: float) -> None:
        """SIGSTOP for a while, then SIGCONT."""
        began_s = now_s()
        member.process.send_signal(signal.SIGSTOP)
        await anyio.sleep(for_s)
        member.process.send_signal(signal.SIGCONT)
        self.note("paused", name=member.name, since_s=began_s, until_s=now_s())

    async def isolate(self, member: Member, mode: Mode, for_s: float) -> None:
        """The network of a daemon fails for a while."""
        began_s, member.proxy.mode = now_s(), mode
        await anyio.sleep(for_s)
        member.proxy.mode = "pass"
        self.note("isolated", name=member.name, since_s=began_s, until_s=now_s())

    def any(self, count: int = 1) -> list[Member]:
        """Some daemons that are alive."""
        living = [member for member in self.members if member.alive]
        return self.dice.sample(living, min(count, len(living)))

    async def stop(self) -> None:
        """SIGTERM to all at the end of the run: they must exit with 0."""
        self.ending = True
        for member in self.members:
            member.expected = 0
        for member in list(self.members):
            await self.is_born(member)
            member.process.terminate()
        with anyio.move_on_after(EXIT_S_MAX):
            while self.members:
                await anyio.sleep(0.02)
        for member in self.members:
            self.note("hangs", name=member.name)
            member.process.kill()
        if self.gateways is not None:
            self.gateways.stop()

    async def is_born(self, member: Member) -> None:
        """Waits until it has a handler for SIGTERM: before that, the signal kills Python."""
        with anyio.move_on_after(30):
            while member.alive and not self.has_noted(member.name):
                await anyio.sleep(0.01)

    def end_all(self) -> None:
        """Cleans up, whatever happened."""
        for process in self._spawned:
            process.kill()
            process.communicate()  # closes its pipe, too

    def has_noted(self, name: str, event: str = "born") -> bool:
        """Whether a process has recorded this event."""
        path = self.directory / f"{name}.jsonl"
        return path.exists() and f'"{event}"' in path.read_text(encoding="utf-8")

    # The database.

    def start_server(self) -> None:
        """Starts the server, with a clock of its own."""
        with clocks.inherited(self.directory / "server.clock"):
            self.server.start()

    def restart_server(self) -> None:
        """As an administrator would."""
        with clocks.inherited(self.directory / "server.clock"):
            self.server.restart("fast")

    def disturb(self) -> None:
        """Marks the end of a fault that hit all daemons."""
        self.disturbed_s = now_s()

    async def insert(self, queue: str, payload: dict[str, Any], *, count: int = 1, **options: Any) -> list[UUID]:
        """Inserts jobs of the driver's own; they are committed when it returns."""
        jobs = [NewJob(queue, payload, delay=options.get("delay_s"), kind=options.get("kind"))] * count
        while True:
            try:
                async with self.connection(120) as db:
                    return await enqueue_many(db, jobs)
            except AWAY:
                await anyio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def connection(
        self, limit_s: float = 30.0, command_s: float = 20.0
    ) -> AsyncIterator[asyncpg.Connection[Any]]:
        """A direct connection, as soon as the server accepts one."""
        with anyio.fail_after(limit_s):
            while True:
                try:
                    connection = await asyncpg.connect(
                        self.dsn, timeout=5, command_timeout=command_s, server_settings=OURS
                    )
                    break
                except AWAY:
                    await anyio.sleep(0.02)
        try:
            yield connection
        finally:
            connection.terminate()


def server_for(pg_bin: Path | None, data_dir: Path | None) -> EmbeddedPostgres:
    """A server of the run's own, which will be killed and frozen."""
    settings = {**TEST_SETTINGS, "max_connections": "100", "max_wal_size": "256MB"}
    return EmbeddedPostgres(data_dir, settings=settings, bin_dir=pg_bin)


async def prepared(server: EmbeddedPostgres) -> str:
    """The DSN of a database with the schema and the tables of the run."""
    await create_template(server.dsn(), schema.text())
    dsn = await create_database(server.dsn(), "chaos")
    connection = await asyncpg.connect(dsn)
    await connection.execute(workload.AUDIT)
    await connection.close()
    return dsn


def still_to_do(directory: Path, name: str, jobs: int) -> int:
    """The number of jobs that a killed producer leaves to its successor."""
    notes = load(directory, name)
    calls = {note.facts["call"]: len(note.facts["tokens"]) for note in notes if note.event == "invoked"}
    return jobs - sum(calls[note.facts["call"]] for note in notes if note.event == "acknowledged")
