"""A daemon in a process of its own that keeps a history: python -m tests.chaos.worker DSN KEY=VALUE...

CHAOS_DIR and CHAOS_NAME set the directory and the name. A line on standard input names a method of the store and
"before" or "after": the daemon kills itself at the next such call.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio

from pgworkd import log
from pgworkd.core import events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.heartbeat_store import HeartbeatStore
from pgworkd.database.store import Store
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.life.heartbeat import end_process
from pgworkd.engine.life.kill_timer import KillTimer
from pgworkd.engine.run import unknown_kinds
from pgworkd.process import output, stop_signals
from pgworkd.push.daemon.daemon import PushApp, PushDaemon
from pgworkd.remote.heartbeats import GatewayHeartbeats
from pgworkd.remote.store import GatewayStore
from tests.chaos.anyapp import app_of_run
from tests.chaos.deadly import arm, make_deadly
from tests.chaos.history import of_this_process
from tests.chaos.others import PUSHED, SORT
from tests.kits.daemon import made, quick_options

LOG = "CHAOS_LOG"
"""In the environment of a daemon: what becomes of its log."""
POINTS = ("claim", "settle", "rescue", "heartbeat")
VITALS_S = 1.0
_NOTED = {
    events.DAEMON_READY,
    events.DAEMON_STOPPED,
    events.SHUTDOWN_INCOMPLETE,
    events.LEASE_FENCED,
    events.LEASE_LOST,
    events.LEASE_RENEWED,
    events.JOB_STALE,
    events.JOB_LOST,
    events.OUTCOME_REJECTED,
    events.ORPHANS_RELEASED,
    events.MAINTENANCE_FAILED,
    events.HOOK_FAILED,
}


def vitals() -> dict[str, int]:
    """The resources that must stay flat."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_mb": pages * os.sysconf("SC_PAGE_SIZE") // (1 << 20),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
    }


class Vitals:
    """A part of the daemon that records them."""

    async def run(self, _daemon: Daemon) -> None:
        """Records them every second."""
        while True:
            of_this_process()("beat", **vitals())
            await anyio.sleep(VITALS_S)


def _noted(name: str, facts: Mapping[str, Any]) -> None:
    if name in _NOTED:
        of_this_process()(name, **facts)


def spoil_log(how: str) -> None:
    """Standard error leads to a pipe that nobody reads or that is broken, or to a full disk, from now on."""
    if how == "full":
        end = os.open("/dev/full", os.O_WRONLY)
    else:
        other, end = os.pipe()
        fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
        if how == "broken":
            os.close(other)
    os.dup2(end, 2)


def _end_process(reason: str) -> None:
    of_this_process()("dies", point=reason)  # where its log may not tell
    end_process(reason)


async def _obey(signals: AsyncIterator[signal.Signals], daemon: Daemon) -> None:
    async for _ in signals:
        daemon.request_stop(now=daemon.stop_requested.is_set())


async def main(dsn: str, level: str, changes: dict[str, float]) -> int:
    """Runs the daemon until SIGTERM; a second SIGTERM stops it at once."""
    limit_s = changes["lease_s"] / 2.2  # the same bound as for settings
    connection = ConnectionOptions(dsn, connect_timeout_s=limit_s, command_timeout_s=limit_s)
    options = quick_options(dsn, connection=connection, worker_name=os.environ["CHAOS_NAME"], **changes)
    # Half of the daemons have to do without, as some systems have, so that outcomes come late, too.
    kill_timer = KillTimer.made() if int(options.worker_name[1:]) % 2 else None
    make, app = (PushDaemon, PushApp()) if os.environ[SORT] == PUSHED else (made, app_of_run())
    daemon = make(app, options, parts=(Vitals(),), end_process=_end_process, kill_timer=kill_timer)
    daemon.events.listen(_noted)
    daemon.events.listen(log.listener(level), except_for=log.below_level(level))
    with stop_signals.received() as signals:
        of_this_process()("born")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_obey, signals, daemon)
            code = await daemon.run()
            tasks.cancel_scope.cancel()
    return code


if __name__ == "__main__":
    unknown_kinds.DELAY_S = unknown_kinds.RECHECK_S = 1.0  # the daemons of a release may be gone for a moment
    os.environ["CHAOS_PID"] = str(os.getpid())
    if is_spoilt := LOG in os.environ:
        spoil_log(os.environ[LOG])
    output.install()
    level = "debug" if is_spoilt else "warning"
    log.configure(level, "json")
    for method in POINTS:
        for owner in (HeartbeatStore, GatewayHeartbeats) if method == "heartbeat" else (Store, GatewayStore):
            if method in vars(owner) or owner is Store:
                make_deadly(owner, method)
    threading.Thread(target=arm, daemon=True).start()
    pairs = (argument.split("=") for argument in sys.argv[2:])
    sys.exit(stop_signals.run(main, sys.argv[1], level, {key: float(value) for key, value in pairs}))
