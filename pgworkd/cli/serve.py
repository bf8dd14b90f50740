"""Running a daemon, or a supervisor of several, as a process: settings and app, log, signals, exit code."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgworkd import log
from pgworkd.cli import listening
from pgworkd.cli.programs import Program, check_queues, program
from pgworkd.cli.running import STUCK_S, run_until_stopped
from pgworkd.core import events, traces
from pgworkd.core.events import Events, Listener
from pgworkd.engine.life.daemon import Daemon, DaemonOptions, Part
from pgworkd.engine.life.heartbeat import end_process
from pgworkd.engine.life.kill_timer import KillTimer
from pgworkd.engine.life.shutdown import FLUSH_GRACE_S
from pgworkd.engine.run import liveness_pipe
from pgworkd.errors import UsageError
from pgworkd.options import daemon_options
from pgworkd.process import forks, output, stop_signals
from pgworkd.processes.sd_notify import SystemdNotifier
from pgworkd.processes.supervisor import SUPERVISED, Introduction, Supervisor
from pgworkd.settings.config import Settings, load

if TYPE_CHECKING:
    from pgworkd.metrics.samples import Source

RELOADED = ("log_level", "log_format", "queues")
"""The settings that a reload applies to a running daemon; others need a restart."""
GC_DEFAULTS = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0))  # of Python 3.11 and 3.12, 3.13, 3.14
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
THREADS_S = 0.5
"""How long idle threads may take to end once the loop is gone."""


def serve(flags: Mapping[str, object], *, push: bool = False, requests: bool = False, bodies: bool = False) -> int:
    """Runs the daemon, or daemons, with these flags and the settings; the exit code. Raises PgworkdError.

    `push`: one that sends jobs, and has no application; `requests`, `bodies`: what it logs of what it sends.
    """
    settings = load(**flags)
    is_child = _follow_parent(_stop_s(daemon_options(settings)) + 2 * STUCK_S)
    found = program(settings, push=push, requests=requests, bodies=bodies)
    spare_collector()
    notes = () if is_child else [*settings.notes, *_stop_notes(settings), *_mail_notes(settings, mails=found.app.mails)]
    service = _Service(settings, flags, found, notes, is_child=is_child)
    return _left(stop_signals.run(service.run, backend_options={"use_uvloop": has_uvloop()}))


class _Service:
    """One daemon, or the supervisor of several, with its signal handling."""

    def __init__(
        self,
        settings: Settings,
        flags: Mapping[str, object],
        found: Program,
        notes: Sequence[str] = (),
        *,
        is_child: bool = False,
    ) -> None:
        self._settings = settings
        self._flags = flags
        self._notes = notes
        self._parts = (SystemdNotifier(), Introduction()) if is_child else (SystemdNotifier(),)
        self._events: Events | None = None
        self._listener: Listener
        self._app, self._make = found
        self._log_with(settings)

    async def run(self) -> int:
        """Runs it; the exit code. Raises the daemon's errors."""
        self._daemon = daemon = self._make_supervisor() if self._settings.processes > 1 else self._make_daemon()
        if isinstance(daemon, Daemon):  # those of a supervisor tell of themselves
            listening.observe(lambda: _source(daemon))
        runs, source = _Runs(daemon), lambda: _source(daemon)
        return await run_until_stopped(runs, self._settings, self._notes, source=source, reload=self._reload)

    def _make_daemon(self) -> Daemon:
        queues = self._settings.queues or None
        parts = (*self._parts, *_tracing())
        ends = {"end_process": end_process, "kill_timer": KillTimer.made()}
        daemon = self._make(self._app, daemon_options(self._settings), queues=queues, parts=parts, **ends)
        self._events = daemon.events
        self._events.listen(self._listener, except_for=log.below_level(self._settings.log_level))
        notifier = SystemdNotifier()

        def tell(*_: object) -> None:  # as its loop cannot
            notifier.send_status(daemon.loop_watch.text())

        self._events.listen(tell, except_for=events.names() - {events.LOOP_BLOCKED, events.LOOP_STUCK})
        return daemon

    def _make_supervisor(self) -> Supervisor:
        self._app.slots(self._settings.queues or None)  # invalid settings are reported once, before any daemon starts
        reports = listening.wanted(self._settings)
        return Supervisor(daemon_options(self._settings), self._settings.processes, reports=reports)

    def _reload(self) -> None:
        try:
            fresh = load(**self._flags)
            check_queues(fresh, self._app)
        except UsageError as error:
            _logger().error("reload.rejected", error=str(error))
        else:
            self._apply(fresh)
        if isinstance(self._daemon, Supervisor):
            self._daemon.reload()

    def _apply(self, fresh: Settings) -> None:
        now = self._settings
        changed = [name for name in Settings.model_fields if getattr(fresh, name) != getattr(now, name)]
        applied = {name: getattr(fresh, name) for name in changed if name in RELOADED}
        if applied:
            self._settings = now.model_copy(update=applied)
            self._log_with(self._settings)
        if "queues" in applied and isinstance(self._daemon, Daemon):  # a supervisor's daemons reload on their own
            self._daemon.serve(fresh.queues or None)
        waiting = [name for name in changed if name not in applied]
        _logger().info("settings.reloaded", applied=applied, after_restart=waiting)

    def _log_with(self, settings: Settings) -> None:
        # A supervisor is not a worker; its daemons are, each with its own name.
        log.configure(settings.log_level, settings.log_format, settings.worker_name if settings.processes == 1 else "")
        fresh = log.listener(settings.log_level)
        if self._events is not None:
            self._events.unlisten(self._listener)
            self._events.listen(fresh, except_for=log.below_level(settings.log_level))
        self._listener = fresh


class _Runs:
    """A daemon, or a supervisor of several, and how long its stop may take."""

    def __init__(self, daemon: Daemon | Supervisor) -> None:
        self._daemon = daemon
        self.run = daemon.run

    def stop(self, requests: int) -> float | None:
        """Stops the daemon or the supervisor; number 3 kills the processes of a supervisor."""
        daemon, supervises = self._daemon, isinstance(self._daemon, Supervisor)
        if requests > 2:
            if isinstance(daemon, Supervisor):
                daemon.send(signal.SIGKILL)
            return None
        daemon.request_stop(now=requests == 2)
        # The daemons of a supervisor have the same limit, and report better what is stuck.
        return _stop_s(daemon.options, now=requests == 2) + (STUCK_S if supervises else 0.0)


def _source(daemon: Daemon | Supervisor) -> Source:
    """The source of metrics and health; imported only if they are on."""
    from pgworkd.metrics.daemon import DaemonSource
    from pgworkd.metrics.fleet import FleetSource

    return DaemonSource(daemon) if isinstance(daemon, Daemon) else FleetSource(daemon.members)


def _stop_s(options: DaemonOptions, *, now: bool = False) -> float:
    """How long a stop may take, in seconds, by the daemon's own limits."""
    return (0.0 if now else options.shutdown_s) + options.cancel_grace_s + FLUSH_GRACE_S


def _stop_notes(settings: Settings) -> list[str]:
    """A warning in a container whose default stop timeout is shorter, unless shutdown_s is set explicitly.

    None on a terminal: who sits there stops it with Ctrl-C.
    """
    if settings.origin("shutdown_s") != "default" or (sys.stderr is not None and sys.stderr.isatty()):
        return []
    took_s, shutdown_s = _stop_s(daemon_options(settings)), settings.shutdown_s
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        killed, remedy = "Kubernetes kills after 30 s", f"set terminationGracePeriodSeconds to {took_s + STUCK_S:.0f}"
    elif any(path.exists() for path in CONTAINER_MARKS):
        killed, remedy = "docker stop kills after 10 s", f"pass --stop-timeout {took_s + STUCK_S:.0f} to docker run"
    else:
        return []
    finding = f"a stop may take {took_s:.0f} s (shutdown_s is {shutdown_s:g}), but by default {killed}"
    return [f"{finding}: {remedy}, or set shutdown_s, which also silences this warning"]


def _mail_notes(settings: Settings, *, mails: bool) -> list[str]:
    """A warning where alerts or digests go by mail, and there is no server for it."""
    if not mails or settings.smtp_url is not None:
        return []
    return ["alerts or digests go by mail, and no server is given: they fail until PGWORKD_SMTP_URL is set"]


def _follow_parent(limit_s: float) -> bool:
    """True in a process started by a supervisor, which stops when the supervisor is gone, within `limit_s` seconds.

    A guard process between the two (`fleet.parent_guard`) could not replace the pipe: the supervisor's watchdog must
    be able to kill the daemon itself, and a guard killed in its place would leave a daemon that hangs.
    """
    if os.environ.pop(SUPERVISED, None) is None:
        return False
    liveness_pipe.hold()
    pipe, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    forks.keep_private(pipe)
    os.dup2(nothing, 0)  # handlers, and their children, must not wait for input here
    os.close(nothing)
    threading.Thread(target=_follow, args=(pipe, limit_s), name="pgworkd parent", daemon=True).start()
    return True


def _follow(pipe: int, limit_s: float) -> None:
    os.read(pipe, 1)  # nothing is ever written: it returns at the end of the pipe
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    log.tell(events.SUPERVISOR_GONE)
    time.sleep(limit_s)
    end_process("the supervisor is gone, and the stop takes too long")


def _left(code: int) -> int:
    """Ends the process if handlers in threads would keep it alive; else returns its exit code."""
    deadline = time.monotonic() + THREADS_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                output.drain()
                os._exit(code)
    return code


def spare_collector() -> None:
    """Excludes the objects loaded so far from garbage collection, and collects less often than every 700 new objects.

    Saves a fifth of the CPU time at full speed. An app that has set its own thresholds keeps them.
    """
    if gc.get_threshold() in GC_DEFAULTS:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 50, 20)


def _tracing() -> tuple[Part, ...]:
    """The part of the daemon that traces, if the application, which has been loaded, has imported OpenTelemetry."""
    if traces.api() is None:
        return ()
    from pgworkd.tracing import Tracing

    return (Tracing(),)


def has_uvloop() -> bool:
    """True if the faster event loop is installed."""
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True


def _logger() -> Any:
    return log.logger()
