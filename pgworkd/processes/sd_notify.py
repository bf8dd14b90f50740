"""Notifying systemd of the daemon's state: READY, STATUS, STOPPING and the watchdog (sd_notify(3)).

A watchdog ping means that the event loop is running (it sends the ping), that the database answers and that the lease
is being renewed. While the database is unavailable, pings continue as long as the heartbeat keeps trying: a restart
would not bring the database back. They stop when the heartbeat is stuck. For the same reason a start that waits for the
database extends its timeout repeatedly until it is ready.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Protocol

import anyio

from pgworkd.core.payload import clean_text
from pgworkd.process import local_sockets
from pgworkd.process.redaction import escaped

STATUS_BYTES_MAX = 1000
"""Maximum length of the status line: systemd drops messages of more than 4,096 bytes, with their READY and WATCHDOG."""
STATUS_S = 5.0
"""How often, in seconds, the status line is sent if the watchdog does not require more."""
EXTENDED_START_S = 60.0
"""Extension of the start timeout (TimeoutStartSec=, 90 s) each time while the database is unavailable."""


class Vitals(Protocol):
    """The state of a daemon, as systemd gets it."""

    @property
    def ready(self) -> anyio.Event:
        """Set when the daemon claims."""

    @property
    def stop_requested(self) -> anyio.Event:
        """Set when a stop has been requested."""

    def healthy(self) -> bool:
        """Returns False if a restart would help."""

    def status(self) -> str:
        """The state in one line, for `systemctl status`."""


class SystemdNotifier:
    """Sends the daemon's state to the socket in NOTIFY_SOCKET; does nothing without one."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        environ = dict(os.environ) if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "")
        usec = environ.get("WATCHDOG_USEC", "")
        watchdog_us = int(usec) if usec.isdecimal() else 0
        ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = watchdog_us / 1e6 if ours else 0.0

    async def run(self, daemon: Vitals) -> None:
        """Reports until cancelled."""
        if not self._address:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._announce_stop, daemon)
            self.send("STATUS=waiting for the database")
            # sd_watchdog_enabled(3) recommends half the timeout. But a supervisor omits pings for half of it while it
            # checks whether one of its processes hangs, and the pings before and after must still be in time.
            every_s = min(STATUS_S, self.watchdog_s / 8) if self.watchdog_s else STATUS_S
            sent_ready = False
            while True:
                lines = [_status(daemon.status())]
                if daemon.ready.is_set() and not sent_ready:
                    sent_ready = True
                    lines.append("READY=1")
                if daemon.healthy():
                    if not sent_ready:
                        lines.append(f"EXTEND_TIMEOUT_USEC={EXTENDED_START_S * 1e6:.0f}")
                    if self.watchdog_s:
                        lines.append("WATCHDOG=1")
                self.send("\n".join(lines))
                with anyio.move_on_after(every_s):
                    await (anyio.sleep_forever() if sent_ready else daemon.ready.wait())

    async def _announce_stop(self, daemon: Vitals) -> None:
        await daemon.stop_requested.wait()
        self.send("STOPPING=1")

    def send_status(self, text: str) -> None:
        """Sends what the daemon does, in one line. May be called from any thread."""
        if self._address:
            self.send(_status(text))

    def send(self, message: str) -> None:
        """Sends lines of NAME=value, without confirmation."""
        # If systemd does not listen, the daemon continues without it.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.setblocking(False)
            connection.connect(local_sockets.address(self._address))
            connection.sendall(message.encode())


def _status(text: str) -> str:
    return f"STATUS={clean_text(escaped(text), STATUS_BYTES_MAX)}"
