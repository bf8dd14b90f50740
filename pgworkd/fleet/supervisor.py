"""Several daemons for one command line: starts them, restarts what dies, and is one service to systemd.

Each is a whole `pgworkd run` in a session of its own: a terminal's Ctrl-C reaches it once, through us. Its standard
input is a pipe whose other end only we hold: it stops when we are gone, whatever ended us. Its NOTIFY_SOCKET is ours.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE  # nosec B404 # a constant
from typing import cast
from uuid import UUID

import anyio
import structlog
from anyio.abc import Process, TaskGroup

from pgworkd.database.connection import Connection
from pgworkd.engine.life.daemon import Daemon, Options
from pgworkd.engine.run import liveness_pipe
from pgworkd.errors import PgworkdError
from pgworkd.fleet.sd_notify import SystemdNotifier
from pgworkd.settings.file import NAME_CHARS_MAX
from pgworkd.words.backoff import Backoff
from pgworkd.words.registration import Registration, token_of

STEADY_S = 60.0  # one that ends after so long is restarted at once; one that keeps dying waits longer and longer
STRIKES = 4  # looks, each a tenth of the watchdog's limit after the last, that must find a process late
START_S = 90.0  # until its first ping, which comes after the app's import, a process may be silent for so long
LOOK_S = 0.5  # so often a daemon looks whether it has registered anew
HURRY_S = 5.0  # how long a stop may wait for what is left of a process that has died
_WORKER = "X_PGWORKD_WORKER"  # systemd would pass over it
SUPERVISED = "PGWORKD_SUPERVISED"  # tells a daemon that its standard input is the pipe to us
_ENVIRON, _CWD = dict(os.environ), Path.cwd()  # as we were started: importing the app may change both
_BACKOFF = Backoff(base_s=1, factor=2, cap_s=24, jitter=0.25)  # at most 30 s
_logger = partial(structlog.get_logger, "pgworkd")  # one made before a reload would log as before


def restart_delay_s(deaths: int) -> float:
    """How long to wait after so many deaths in a row: after the first not at all, then up to 30 s."""
    return 0.0 if deaths == 1 else _BACKOFF.delay_s(deaths - 1)


def without_dsn(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """A command line without --dsn, and its last value: anybody can read the first, only our user the environment."""
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
    """A living process, and what it has said of itself."""

    name: str
    process: Process
    due_s: float  # when it is called hung, unless it pings before
    ready: bool = False
    spoke: bool = False  # only then do its handlers of signals stand
    must_reload: bool = False
    strikes: int = 0  # looks at it that found it hung
    worker_id: Registration | None = None

    def send(self, number: signal.Signals) -> None:
        """Signals it, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class Introduction:
    """Tells the supervisor of a daemon under which registration that works. A part of the daemon."""

    async def run(self, daemon: Daemon) -> None:
        """Until cancelled."""
        line, told = SystemdNotifier(), None
        await daemon.ready.wait()  # before, it claims nothing
        while True:
            if (worker_id := daemon.worker_id) is not told:
                line.send(f"{_WORKER}={worker_id} {token_of(worker_id)}")
                told = worker_id
            await anyio.sleep(LOOK_S)


class Supervisor:
    """Keeps `count` daemons running. Is stopped as one daemon is, and tells systemd of all as of one (`Vitals`)."""

    def __init__(self, options: Options, count: int) -> None:
        self.options = options
        self.ready = anyio.Event()
        self.stop_requested = anyio.Event()
        self._names = [f"{options.worker_name[: NAME_CHARS_MAX - 3]}-{n}" for n in range(1, count + 1)]
        self._living: dict[str, _Child] = {}
        self._go = anyio.Event()
        self._exit_code = 0
        self._tasks: TaskGroup | None = None
        self._watchdog_s = SystemdNotifier().watchdog_s
        self._environ = _ENVIRON | {SUPERVISED: "1", "WATCHDOG_USEC": str(round(self._watchdog_s * 1e6))}
        self._environ.pop("WATCHDOG_PID", None)
        self._argv, dsn = without_dsn(sys.orig_argv[1:])
        if dsn is not None:
            self._environ["PGWORKD_DSN"] = dsn

    async def run(self) -> int:
        """Until asked to stop, or until a daemon says that it can never work; the exit code."""
        with tempfile.TemporaryDirectory(prefix="pgworkd-") as directory:  # 0700
            async with anyio.create_task_group() as watch:
                watch.start_soon(SystemdNotifier().run, self)
                watch.start_soon(self._watch)
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    for number, name in enumerate(self._names):
                        tasks.start_soon(self._keep, name, Path(directory, str(number)), name=name)
                watch.cancel_scope.cancel()
        return self._exit_code

    def request_stop(self, *, now: bool = False) -> None:
        """Asks all for a stop: gracefully, or at once."""
        if now or not self.stop_requested.is_set():
            # Two signals of one kind that come close together would be heard as one.
            self.send(signal.SIGINT if now else signal.SIGTERM)
        self.stop_requested.set()
        self._go.set()

    def reload(self) -> None:
        """Lets all read their settings again; SIGHUP would kill one that has no handler for it yet."""
        for child in self._living.values():
            if child.spoke:
                child.send(signal.SIGHUP)
            child.must_reload = not child.spoke

    def send(self, number: signal.Signals) -> None:
        """Signals all."""
        for child in self._living.values():
            child.send(number)

    def healthy(self) -> bool:
        """False while a process hangs and has not been ended. One that is being restarted does not count."""
        return self.stop_requested.is_set() or not self._late()

    def status(self) -> str:
        """One line for people."""
        if self.stop_requested.is_set():
            return f"stopping, {len(self._living)} of {len(self._names)} left"
        ready = sum(child.ready for child in self._living.values())
        missing = len(self._names) - ready if self.ready.is_set() else 0
        return f"{ready} of {len(self._names)} ready" + (f"; restarting {missing}" if missing else "")

    async def _keep(self, name: str, address: Path) -> None:
        """One of the daemons: its process, and the next one whenever that ends unasked."""
        if name != self._names[0]:
            await self._go.wait()  # the first goes ahead: what is wrong for one is wrong for all, and said once
        deaths = 0
        while not self.stop_requested.is_set():
            began_s = anyio.current_time()
            code, facts = await self._live(name, address)
            if self.stop_requested.is_set():
                # SIGTERM kills only who has not begun yet.
                self._exit_code = max(self._exit_code, int(code not in (0, -signal.SIGTERM)))
                _logger().info("process.ended", **facts)
            elif code == 2:
                _logger().error("process.ended", **facts)  # it has said what is wrong
                if self._exit_code != 2:
                    self._exit_code = 2
                    signal.raise_signal(signal.SIGTERM)  # a stop like any other, with the same limits
                await self.stop_requested.wait()
            else:
                deaths = 1 if anyio.current_time() - began_s >= STEADY_S else deaths + 1
                delay_s = restart_delay_s(deaths)
                _logger().warning("process.ended", **facts, restart_in_s=round(delay_s, 3))
                with anyio.move_on_after(delay_s):
                    await self.stop_requested.wait()

    async def _live(self, name: str, address: Path) -> tuple[int, dict[str, object]]:
        """One process, from start to end: its exit code (minus the signal that ended it), and the facts of its end."""
        # As we were started ourselves, so that it finds what we found; the last of two flags counts.
        command = [sys.executable, *self._argv, "--processes=1", f"--worker-name={name}"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as line:
            try:
                address.unlink(missing_ok=True)  # noqa: ASYNC240 - it takes no time
                line.bind(str(address))
                process, end = await self._start(command, {"NOTIFY_SOCKET": str(address)})
            except OSError as error:  # no memory, too many processes, a full disk
                return 1, {"worker": name, "error": str(error)}
            async with process, anyio.create_task_group() as tasks:
                first_due_s = anyio.current_time() + max(START_S, self._watchdog_s) if self._watchdog_s else math.inf
                child = self._living[name] = _Child(name, process, first_due_s)
                _logger().info("process.started", worker=name, pid=process.pid)
                if self.stop_requested.is_set():  # while it was being started
                    child.send(signal.SIGTERM)
                tasks.start_soon(self._hear, child, line)
                code = await process.wait()
                del self._living[name]
                tasks.cancel_scope.cancel()
        cast("TaskGroup", self._tasks).start_soon(self._take_back, child.worker_id if code else None, end)
        how = {"signal": signal.Signals(-code).name} if -code in set(signal.Signals) else {"exit_code": code}
        return code, {"worker": name, "pid": process.pid, **how}

    async def _start(self, command: Sequence[str], environ: dict[str, str]) -> tuple[Process, int]:
        """The process, and where to read that it and all in which it runs handlers are gone. Raises OSError."""
        end, theirs = os.pipe()
        try:
            process = await anyio.open_process(
                command,
                cwd=_CWD,
                stdin=PIPE,
                stdout=None,
                stderr=None,
                env=self._environ | environ | {liveness_pipe.VARIABLE: str(theirs)},
                pass_fds=(theirs,),
                start_new_session=True,
            )
        except BaseException:
            os.close(end)
            raise
        finally:
            os.close(theirs)
        return process, end

    async def _take_back(self, worker_id: Registration | None, end: int) -> None:
        """Lets the jobs of a daemon that has died run again, as soon as nothing of it is left that may run them."""
        try:
            if worker_id is None:
                return
            with anyio.move_on_after(self.options.lease_s) as limit:  # then the others do so by themselves
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._hurry, limit)
                    await liveness_pipe.gone(end)
                    await self._say_ended(worker_id)
                    tasks.cancel_scope.cancel()
        finally:
            os.close(end)

    async def _hurry(self, limit: anyio.CancelScope) -> None:
        await self.stop_requested.wait()
        limit.deadline = min(limit.deadline, anyio.current_time() + HURRY_S)

    async def _say_ended(self, worker_id: Registration) -> None:
        connection = Connection(self.options.connection, "supervisor")
        try:
            while True:
                try:
                    await connection.value("SELECT pgworkd.worker_ended($1, $2)", worker_id, token_of(worker_id))
                    return
                except PgworkdError as error:
                    _logger().warning("process.jobs_kept", worker_id=int(worker_id), error=str(error))
                await anyio.sleep(LOOK_S)
        finally:
            with anyio.CancelScope(shield=True):
                await connection.close()

    async def _hear(self, child: _Child, line: socket.socket) -> None:
        """What a daemon would tell systemd."""
        while True:
            await anyio.wait_readable(line)
            said = line.recv(4096).splitlines()
            if child.must_reload:
                child.send(signal.SIGHUP)
            child.spoke, child.must_reload = True, False
            if b"WATCHDOG=1" in said:
                child.due_s, child.strikes = anyio.current_time() + self._watchdog_s, 0
            for name, _, value in (each.decode(errors="replace").partition("=") for each in said):
                if name == _WORKER:
                    worker_id, token = value.split()
                    child.worker_id = Registration.of(int(worker_id), UUID(token))
            if b"READY=1" in said:
                child.ready = True
                self._go.set()
                if sum(each.ready for each in self._living.values()) == len(self._names):
                    self.ready.set()

    async def _watch(self) -> None:
        """Ends processes that hang, once another has pinged later: if all do, systemd decides."""
        tick_s = min(1.0, self._watchdog_s / 10) or math.inf
        while True:
            began_s = anyio.current_time()
            await anyio.sleep(tick_s)
            if (over_s := anyio.current_time() - began_s - tick_s) > tick_s:
                for child in self._living.values():  # it is we who stood still: their pings are yet unread
                    child.due_s += over_s
            dues_s = [child.due_s for child in self._living.values() if child.spoke]
            pinged_s = max(dues_s, default=0.0) - self._watchdog_s
            for child in self._late() if not self.stop_requested.is_set() else ():
                if pinged_s <= child.due_s:
                    continue
                child.strikes += 1  # at first all may just be thawing, and the others have been quicker
                if child.strikes == STRIKES:
                    _logger().error("process.hung", worker=child.name, pid=child.process.pid)
                    child.send(signal.SIGABRT)  # may leave a trace of where it hangs
                elif child.strikes > STRIKES:
                    child.send(signal.SIGKILL)

    def _late(self) -> list[_Child]:
        return [child for child in self._living.values() if child.due_s < anyio.current_time()]
