"""Unix sockets without files: only our own user, and root, is at the other end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pgworkd.metrics import ReportingProcess, fleet
from pgworkd.metrics.endpoint import reporting
from pgworkd.process import local_sockets
from pgworkd.processes.sd_notify import SystemdNotifier
from tests.kits.metrics import FakeSource, filled


def test_a_datagram_of_our_own_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    name = local_sockets.new_name()
    with local_sockets.bound(name, socket.SOCK_DGRAM) as receiver:
        SystemdNotifier({"NOTIFY_SOCKET": name}).send("READY=1")
        assert local_sockets.received(receiver, 100) == b"READY=1"
        monkeypatch.setattr(local_sockets, "_is_trusted", lambda uid: uid != os.getuid())
        SystemdNotifier({"NOTIFY_SOCKET": name}).send("WATCHDOG=1")
        assert local_sockets.received(receiver, 100) == b"", "of a stranger"


def test_names_are_used_once_and_leave_nothing_behind() -> None:
    name = local_sockets.new_name()
    assert name != local_sockets.new_name()
    with local_sockets.bound(name, socket.SOCK_DGRAM), pytest.raises(OSError, match="in use"):
        local_sockets.bound(name, socket.SOCK_DGRAM)
    local_sockets.bound(name, socket.SOCK_DGRAM).close()
    assert local_sockets.address(str(Path("/run/systemd/notify"))) == "/run/systemd/notify"


@pytest.mark.parametrize("stranger", ["nobody", "asks", "listens"])
def test_a_report_goes_to_nobody_else_and_comes_from_nobody_else(
    stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = local_sockets.new_name()
    with reporting(FakeSource(filled(3, 3)), name):
        if stranger == "asks":
            monkeypatch.setattr(
                "pgworkd.metrics.server.local_sockets.is_trusted", lambda each: each.getsockname() == ""
            )
        if stranger == "listens":
            monkeypatch.setattr("pgworkd.metrics.fleet.local_sockets.is_trusted", lambda each: each.getsockname() != "")
        answers, silent = fleet.snapshots({"one": ReportingProcess(name)})
    assert (list(answers), list(silent)) == ((["one"], []) if stranger == "nobody" else ([], ["one"]))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_datagram_of_another_user_is_dropped() -> None:
    name = local_sockets.new_name()
    with local_sockets.bound(name, socket.SOCK_DGRAM) as receiver:
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            SystemdNotifier({"NOTIFY_SOCKET": name}).send("READY=1")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert local_sockets.received(receiver, 100) == b""
