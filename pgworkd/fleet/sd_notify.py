"""Telling systemd how we are: READY, STATUS, STOPPING and the watchdog (sd_notify(3)).

A watchdog ping says that the loop turns (it is sent from there), that the database answers and that the
lease is fresh. While the database is away the pings go on as long as the heartbeat keeps asking for it: the
daemon waits, and a restart would not bring the database back. They stop when the heartbeat is stuck. For the same
reason a start that waits for the database asks systemd for more time, again and again, until it is ready.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Protocol

import anyio

from pgworkd.words.payload import clean_text
from pgworkd.words.redaction import escaped

STATUS_BYTES_MAX = 1000
"""Of the status line: systemd drops a message of more than 4,096 bytes, READY and WATCHDOG with it."""
STATUS_S = 5.0
"""How often the status line is renewed when no watchdog asks for more."""
EXTENDED_START_S = 60.0
"""While the database is away, systemd's limit for a start (TimeoutStartSec=, 90 s) is moved so far ahead each time."""


class Vitals(Protocol):
    """What systemd is told of."""

    @property
    def ready(self) -> anyio.Event:
        """Set when the daemon claims."""

    @property
    def stop_requested(self) -> anyio.Event:
        """Set when it has been asked to stop."""

    def healthy(self) -> bool:
        """False when a restart would help."""

    def status(self) -> str:
        """One line for `systemctl status`."""


class SystemdNotifier:
    """Sends the daemon's state to the socket that systemd names in NOTIFY_SOCKET; does nothing without one."""

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
            # sd_watchdog_enabled(3) recommends half the limit; but pings are left out for half of it while a supervisor
            # makes sure that one of its processes hangs, and those around must still be in time.
            every_s = min(STATUS_S, self.watchdog_s / 8) if self.watchdog_s else STATUS_S
            told_ready = False
            while True:
                lines = [f"STATUS={clean_text(escaped(daemon.status()), STATUS_BYTES_MAX)}"]
                if daemon.ready.is_set() and not told_ready:
                    told_ready = True
                    lines.append("READY=1")
                if daemon.healthy():
                    if not told_ready:
                        lines.append(f"EXTEND_TIMEOUT_USEC={EXTENDED_START_S * 1e6:.0f}")
                    if self.watchdog_s:
                        lines.append("WATCHDOG=1")
                self.send("\n".join(lines))
                with anyio.move_on_after(every_s):
                    await (anyio.sleep_forever() if told_ready else daemon.ready.wait())

    async def _announce_stop(self, daemon: Vitals) -> None:
        await daemon.stop_requested.wait()
        self.send("STOPPING=1")

    def send(self, message: str) -> None:
        """Sends lines of NAME=value; whether anybody reads them is not known."""
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        # systemd not listening is systemd's business; the daemon works on.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            line.connect(address)
            line.sendall(message.encode())
