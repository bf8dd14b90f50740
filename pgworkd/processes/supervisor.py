"""Runs several daemons for one command line: starts them, restarts those that die, and is one service to systemd.

Each is a complete `pgworkd run` in a session of its own: a terminal's Ctrl-C reaches it once, through the supervisor.
Its standard input is a pipe whose other end only the supervisor has open: it stops when the supervisor is gone, for
whatever reason. Its NOTIFY_SOCKET is the supervisor's. No file is needed for any of this.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from uuid import UUID

import anyio
from anyio.abc import Process

from pgworkd.core.registration import Registration, token_of
from pgworkd.database.connection import Connection
from pgworkd.engine.life.daemon import Daemon, DaemonOptions
from pgworkd.engine.run import liveness_pipe
from pgworkd.errors import PgworkdError
from pgworkd.log import logger as _logger
from pgworkd.metrics import REPORT_TO, ReportingProcess
from pgworkd.process import forks, local_sockets
from pgworkd.processes.process_keeper import ProcessKeeper, Worker
from pgworkd.processes.sd_notify import SystemdNotifier
from pgworkd.processes.workers import ChildProcess
from pgworkd.settings.file import NAME_CHARS_MAX

STRIKES = 4  # checks, each a tenth of the watchdog's timeout apart, that must find a process late
START_S = 90.0  # maximum time until the first ping, which comes after the import of the app
REPORT_S = 0.5  # how often a daemon checks whether its registration has changed
HURRY_S = 5.0  # how long a stop may wait until the remains of a dead process are gone
_WORKER = "X_PGWORKD_WORKER"  # systemd ignores it
SUPERVISED = "PGWORKD_SUPERVISED"  # set in a daemon whose standard input is the pipe from the supervisor
_ENVIRON, _CWD = dict(os.environ), Path.cwd()  # as at the start: importing the app may change both


def without_dsn(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """A command line without --dsn, and the value of --dsn: other users can read the command line."""
    kept: list[str] = []
    dsn: str | None = None
    words = iter(argv)
    for word in words:
        if word == "--dsn":
            dsn = next(words, None)
        elif word.startswith("--dsn="):
            dsn = word.removeprefix("--dsn=")
        else:
            kept.append(word)
    return kept, dsn


@dataclass
class _Child:
    """A running process and what it has reported."""

    name: str
    process: Process
    due_s: float  # when its next ping is due
    ready: bool = False
    reported: bool = False  # anything: only then are its signal handlers installed
    must_reload: bool = False
    strikes: int = 0  # checks in a row that found it late
    worker_id: Registration | None = None
    status: str = ""

    def send(self, number: signal.Signals) -> None:
        """Signals the process, if it is still running."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Introduction:
    """Reports a daemon's registration to its supervisor. A part of the daemon."""

    async def run(self, daemon: Daemon) -> None:
        """Reports until cancelled."""
        notifier, reported = SystemdNotifier(), None
        await daemon.ready.wait()  # it claims nothing before
        while True:
            if (worker_id := daemon.worker_id) is not reported:
                notifier.send(f"{_WORKER}={worker_id} {token_of(worker_id)}")
                reported = worker_id
            await anyio.sleep(REPORT_S)


class Supervisor:
    """Keeps `count` daemons running. Stopped like a single daemon, and one service to systemd (`Vitals`)."""

    def __init__(self, options: DaemonOptions, count: int, *, reports: bool = False) -> None:
        """`reports`: whether the daemons are to report their metrics, at the addresses that `members` returns."""
        self.options = options
        self.ready = anyio.Event()
        self._count, self._reports, self._own_name = count, reports, local_sockets.new_name()
        self._living: dict[str, _Child] = {}
        # On wrong configuration all stop as on any SIGTERM, with the same limits.
        stop_all = partial(signal.raise_signal, signal.SIGTERM)
        self._keeper = ProcessKeeper("process", self._name, self._start, stop_all)
        self._keeper.want({1})  # the first one starts alone, so that a common fault is reported once
        self.stop_requested = self._keeper.stop_requested
        systemd_s = SystemdNotifier().watchdog_s
        self._has_systemd = systemd_s > 0
        self._watchdog_s = min(filter(None, (systemd_s, options.loop_limit)), default=0.0)
        self._environ = _ENVIRON | {SUPERVISED: "1", "WATCHDOG_USEC": str(round(self._watchdog_s * 1e6))}
        for name in ("WATCHDOG_PID", REPORT_TO):
            self._environ.pop(name, None)
        self._argv, dsn = without_dsn(sys.orig_argv[1:])
        if dsn is not None:
            self._environ["PGWORKD_DSN"] = dsn

    async def run(self) -> int:
        """Runs until asked to stop, or until a daemon exits with 2 (wrong configuration); the exit code."""
        async with anyio.create_task_group() as watch:
            watch.start_soon(SystemdNotifier().run, self)
            watch.start_soon(self._watch)
            async with anyio.create_task_group() as self._tasks:
                await self._keeper.run(self._count)
            watch.cancel_scope.cancel()
        return self._keeper.exit_code

    def members(self) -> dict[str, ReportingProcess]:
        """The address of each daemon's metrics, by name, whether it runs or not. May be called from any thread."""
        return {self._name(number): ReportingProcess(self._report_to(number)) for number in range(1, self._count + 1)}

    def _report_to(self, number: int) -> str:
        return f"{self._own_name}-{number}.metrics"

    def request_stop(self, *, now: bool = False) -> None:
        """Asks all daemons to stop: gracefully, or at once."""
        self._keeper.request_stop(2 if now else 1)

    def reload(self) -> None:
        """Makes all daemons reload their settings; SIGHUP would kill one that has not installed its handler yet."""
        for child in self._living.values():
            if child.reported:
                child.send(signal.SIGHUP)
            child.must_reload = not child.reported

    def send(self, number: signal.Signals) -> None:
        """Sends all daemons a signal."""
        for child in self._living.values():
            child.send(number)

    def healthy(self) -> bool:
        """Returns False while a process that hangs has not been ended. One that is being restarted does not count."""
        return self.stop_requested.is_set() or not self._late()

    def status(self) -> str:
        """The state of all daemons in one line, for `systemctl status`."""
        if self.stop_requested.is_set():
            return f"stopping, {len(self._living)} of {self._count} left"
        ready = sum(child.ready for child in self._living.values())
        missing = self._count - ready if self.ready.is_set() else 0
        waits = next((child.status for child in self._living.values() if not child.ready and child.status), "")
        more = [f"restarting {missing}"] if missing else []
        return "; ".join([f"{ready} of {self._count} ready", *more, *([waits] if waits else [])])

    def _name(self, number: int) -> str:
        return f"{self.options.worker_name[: NAME_CHARS_MAX - 3]}-{number}"

    @contextlib.asynccontextmanager
    async def _start(self, number: int) -> AsyncIterator[Worker]:
        """Runs a daemon from start to end. Raises OSError."""
        name, address = self._name(number), f"{self._own_name}-{number}"
        # The supervisor's own command line, so that it finds the same files; the last of two equal flags counts.
        command = [sys.executable, *self._argv, "--processes=1", f"--worker-name={name}"]
        with local_sockets.bound(address, socket.SOCK_DGRAM) as notifications:
            notifications.setblocking(False)
            environ = {REPORT_TO: self._report_to(number)} if self._reports else {}
            process, end, lifeline = await self._open(command, environ | {"NOTIFY_SOCKET": address})
            with lifeline:
                async with process, anyio.create_task_group() as tasks:
                    wait_s = max(START_S, self._watchdog_s) if self._watchdog_s else math.inf
                    child = self._living[name] = _Child(name, process, anyio.current_time() + wait_s)
                    tasks.start_soon(self._receive, child, notifications)
                    yield ChildProcess(process, {"pid": process.pid})
                    del self._living[name]
                    tasks.cancel_scope.cancel()
        self._tasks.start_soon(self._take_back, child.worker_id if process.returncode else None, end)

    async def _open(self, command: Sequence[str], environ: dict[str, str]) -> tuple[Process, int, FileIO]:
        """Starts a process; a pipe that ends when it and all its handler processes are gone; one at whose end it stops.

        Raises OSError.
        """
        end, theirs = os.pipe()
        stdin, ours = os.pipe()
        lifeline = FileIO(ours, "w")
        forks.keep_private(lifeline)
        try:
            process = await anyio.open_process(
                command,
                cwd=_CWD,
                stdin=stdin,
                stdout=None,
                stderr=None,
                env=self._environ | environ | {liveness_pipe.VARIABLE: str(theirs)},
                pass_fds=(theirs,),
                start_new_session=True,
            )
        except BaseException:
            os.close(end)
            lifeline.close()
            raise
        finally:
            os.close(theirs)
            os.close(stdin)
        return process, end, lifeline

    async def _take_back(self, worker_id: Registration | None, end: int) -> None:
        """Rescues the jobs of a dead daemon as soon as none of its processes can still be running them."""
        try:
            if worker_id is None:
                return
            with anyio.move_on_after(self.options.lease_s) as limit:  # after that other workers rescue them
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._hurry, limit)
                    await liveness_pipe.gone(end)
                    await self._report_ended(worker_id)
                    tasks.cancel_scope.cancel()
        finally:
            os.close(end)

    async def _hurry(self, limit: anyio.CancelScope) -> None:
        await self.stop_requested.wait()
        limit.deadline = min(limit.deadline, anyio.current_time() + HURRY_S)

    async def _report_ended(self, worker_id: Registration) -> None:
        connection = Connection(self.options.connection, "supervisor")
        try:
            while True:
                try:
                    await connection.value("SELECT pgworkd.worker_ended($1, $2)", worker_id, token_of(worker_id))
                    return
                except PgworkdError as error:
                    _logger().warning("process.jobs_kept", worker_id=int(worker_id), error=str(error))
                await anyio.sleep(REPORT_S)
        finally:
            with anyio.CancelScope(shield=True):
                await connection.close()

    async def _receive(self, child: _Child, notifications: socket.socket) -> None:
        """Receives the notifications that a daemon sends to systemd."""
        while True:
            await anyio.wait_readable(notifications)
            if not (lines := local_sockets.received(notifications, 4096).splitlines()):
                continue
            if child.must_reload:
                child.send(signal.SIGHUP)
            child.reported, child.must_reload = True, False
            if b"WATCHDOG=1" in lines:
                child.due_s, child.strikes = anyio.current_time() + self._watchdog_s, 0
            for name, _, value in (each.decode(errors="replace").partition("=") for each in lines):
                if name == "STATUS":
                    child.status = value
                if name == _WORKER:
                    worker_id, token = value.split()
                    child.worker_id = Registration.of(int(worker_id), UUID(token))
            if b"READY=1" in lines:
                child.ready = True
                self._keeper.want(range(1, self._count + 1))
                if sum(each.ready for each in self._living.values()) == self._count:
                    self.ready.set()

    async def _watch(self) -> None:
        """Ends processes that hang: frozen, or with a loop that is blocked or whose end failed.

        Under systemd only while another has pinged since; if all hang, its watchdog decides.
        """
        tick_s = min(1.0, self._watchdog_s / 10) or math.inf
        while True:
            began_s = anyio.current_time()
            await anyio.sleep(tick_s)
            if (late_s := anyio.current_time() - began_s - tick_s) > tick_s:
                for child in self._living.values():  # the supervisor itself was suspended: pings are still unread
                    child.due_s += late_s
            dues_s = [child.due_s for child in self._living.values() if child.reported]
            pinged_s = max(dues_s, default=0.0) - self._watchdog_s
            for child in self._late() if not self.stop_requested.is_set() else ():
                if self._has_systemd and pinged_s <= child.due_s:
                    continue
                child.strikes += 1  # after a suspension of all processes some resume earlier than others
                if child.strikes == STRIKES:
                    _logger().error("process.hung", worker=child.name, pid=child.process.pid)
                    child.send(signal.SIGABRT)  # may leave a traceback or core dump
                elif child.strikes > STRIKES:
                    child.send(signal.SIGKILL)

    def _late(self) -> list[_Child]:
        return [child for child in self._living.values() if child.due_s < anyio.current_time()]
