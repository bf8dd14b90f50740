"""The daemon as a process: its settings and app, its log, its signals, its exit code."""

from __future__ import annotations

import difflib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import structlog

from . import cli_signals, log
from .app import App
from .chores import Periods
from .config import Settings, load
from .daemon import FLUSH_GRACE_S, Daemon, Options
from .errors import PgworkdError, UsageError
from .events import Listener
from .lease import end_process
from .link import LinkOptions
from .loader import load_app
from .systemd import SystemdNotifier

STUCK_S = 5.0
"""How much longer than its own limits a stop may take before the process is ended."""
THREADS_S = 0.5
"""How long idle threads may take to end once the loop is gone."""


def serve(flags: Mapping[str, object]) -> int:
    """Runs the daemon that flags and settings describe; the exit code. Raises PgworkdError when it cannot."""
    settings = load(**flags)
    settings.dsn_required()
    if settings.app is None:
        raise UsageError("no app given: set PGWORKD_APP, or pass --app module:attribute")
    app = load_app(settings.app)
    _check_queues(settings, app)
    cli_signals.hold()
    service = _Service(settings, flags)
    code = anyio.run(service.run, app, backend_options={"use_uvloop": _has_uvloop()})
    cli_signals.ignore()
    return _left(code)


class _Service:
    """One daemon under its signals."""

    def __init__(self, settings: Settings, flags: Mapping[str, object]) -> None:
        self._settings = settings
        self._flags = flags
        self._listener: Listener
        self._log_with(settings)

    async def run(self, app: App) -> int:
        """The daemon's exit code. Raises what it raises."""
        for line in self._settings.notes:
            _logger().warning("settings.note", note=line)
        daemon = Daemon(app, options(self._settings), queues=self._settings.queues or None, parts=(SystemdNotifier(),))
        daemon.events.listen(self._log)
        code, problem = 1, None
        # Before the first await: a stop that comes while we wait for the database must be heard.
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            if cli_signals.asked():
                daemon.request_stop()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._obey, signals, daemon)
                try:
                    code = await daemon.run()
                except PgworkdError as error:
                    problem = error  # kept out of the task group, which would wrap it
                tasks.cancel_scope.cancel()
        if problem is not None:
            raise problem
        return code

    async def _obey(self, signals: AsyncIterator[signal.Signals], daemon: Daemon) -> None:
        """First stop signal: gracefully; second: at once; third, or a stop that takes too long: the process ends."""
        requests, patience = int(cli_signals.asked()), math.inf
        while True:
            with anyio.CancelScope(deadline=patience):
                if await anext(signals) is signal.SIGHUP:
                    self._reload()
                    continue
                requests += 1
                if requests <= 2:
                    daemon.request_stop(now=requests == 2)
                    own_limit_s = daemon.options.cancel_grace_s + FLUSH_GRACE_S
                    if requests == 1:
                        own_limit_s += self._settings.shutdown_s
                    patience = anyio.current_time() + own_limit_s + STUCK_S
                    continue
            end_process("the stop was asked for a third time" if requests > 2 else "the stop takes too long")

    def _log(self, name: str, facts: Mapping[str, Any]) -> None:
        self._listener(name, facts)  # the one of now: a reload replaces it

    def _reload(self) -> None:
        try:
            fresh = load(**self._flags)
        except UsageError as error:
            _logger().error("settings.kept", error=str(error))
            return
        now = self._settings
        changed = [name for name in Settings.model_fields if getattr(fresh, name) != getattr(now, name)]
        applied = {name: getattr(fresh, name) for name in changed if name in ("log_level", "log_format")}
        if applied:
            self._settings = now.model_copy(update=applied)
            self._log_with(self._settings)
        waiting = [name for name in changed if name not in applied]
        _logger().info("settings.reloaded", applied=applied, after_restart=waiting)

    def _log_with(self, settings: Settings) -> None:
        log.configure(settings.log_level, settings.log_format)
        self._listener = log.listener(settings.log_level)


def options(settings: Settings) -> Options:
    """What the daemon needs of the settings."""
    return Options(
        LinkOptions(settings.dsn_required(), settings.connect_timeout_s, settings.command_timeout_s),
        worker_name=settings.worker_name,
        lease_s=settings.lease_s,
        heartbeat_s=settings.heartbeat_s,
        poll_s=settings.poll_s,
        shutdown_s=settings.shutdown_s,
        transactions_max=settings.transactions_max,
        slow_min_s=settings.slow_min_s,
        slow_factor=settings.slow_factor,
        periods=Periods(keep_days=settings.keep_days, keep_dead_days=settings.keep_dead_days),
    )


def _check_queues(settings: Settings, app: App) -> None:
    known = app.queues()
    for queue in settings.queues if known else ():
        if queue not in known:
            close = difflib.get_close_matches(queue, known, 1, 0.6)
            hint = f": did you mean {close[0]!r}?" if close else f"; the app knows: {', '.join(sorted(known))}"
            raise UsageError(f"queues ({settings.origin('queues')}): no handler serves queue {queue!r}{hint}")


def _left(code: int) -> int:
    """The exit code; or ends the process here, when handlers in threads would keep it from ending."""
    deadline = time.monotonic() + THREADS_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    return code


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True


def _logger() -> Any:
    return structlog.get_logger("pgworkd")
