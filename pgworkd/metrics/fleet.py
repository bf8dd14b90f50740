"""Several processes of one host as one source: each reports on a Unix socket of its own, and the parent asks them all.

A process that does not answer within ANSWER_S is left out and reported; what it had counted stays counted, and so does
what a process had counted that is gone: totals never go backwards. Lost is only what a process counted between the last
scrape and its end.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Set

from pgworkd.metrics import ReportingProcess
from pgworkd.metrics.endpoint import SNAPSHOT
from pgworkd.metrics.samples import Check, Samples, bounded, counted, loaded, merged
from pgworkd.process import local_sockets

ANSWER_S = 1.0
"""How long all processes together have to answer, in seconds."""
SHARED_S = 0.25
"""Scrapes that come within this many seconds share one answer."""
_REQUEST = f"GET {SNAPSHOT} HTTP/1.0\r\n\r\n".encode()

Snapshot = tuple[str, Samples, list[Check]]


class FleetSource:
    """Shows the processes whose sockets `members` returns, by name. It may be called from any thread."""

    def __init__(self, members: Callable[[], Mapping[str, ReportingProcess]]) -> None:
        self._members = members
        self._lock = threading.Lock()
        self._gone: Samples = {}  # what processes had counted that are gone
        self._last: dict[str, tuple[str, Samples]] = {}  # by name: the last answer, of this identity
        self._asked_at = -SHARED_S
        self._shown: tuple[Samples, list[Check]] = {}, []

    def samples(self) -> Samples:
        """The values of all processes as one."""
        return self._ask()[0]

    def checks(self) -> list[Check]:
        """The conditions of all processes; in the names of those that fail is the process."""
        return self._ask()[1]

    def sick(self) -> str:
        """Returns "": the parent restarts processes that hang."""
        return ""

    def _ask(self) -> tuple[Samples, list[Check]]:
        with self._lock:
            if time.monotonic() - self._asked_at >= SHARED_S:
                members = dict(self._members())
                self._shown = self.show({n for n, each in members.items() if each.wanted}, *snapshots(members))
                self._asked_at = time.monotonic()
            return self._shown

    def show(
        self, wanted: Set[str], answers: Mapping[str, Snapshot], silent: Mapping[str, str]
    ) -> tuple[Samples, list[Check]]:
        """The values after these answers. `silent`: why the other processes did not answer, by name.

        `wanted`: the names of those that have to be ready.
        """
        for name, (identity, samples, _) in answers.items():
            before = self._last.get(name)
            if before is not None and before[0] != identity:
                self._gone = bounded(merged([self._gone, before[1]]))
            self._last[name] = identity, counted(samples)
        absent = [samples for name, (_, samples) in self._last.items() if name not in answers]
        total = merged([self._gone, *absent, *(samples for _, samples, _ in answers.values())])
        total["pgworkd_processes"] = {("wanted",): len(wanted), ("answering",): len(answers)}
        judged = {name: answer for name, answer in answers.items() if name in wanted}
        return total, _judged(judged, {name: why for name, why in silent.items() if name in wanted})


def _judged(answers: Mapping[str, Snapshot], silent: Mapping[str, str]) -> list[Check]:
    checks = [
        Check("processes", bool(answers) and not silent, f"{len(answers)} of {len(answers) + len(silent)} answer")
    ]
    checks += [Check(f"{name}: answers", ok=False, says=why) for name, why in silent.items()]
    says = {check.name: check.says for _, _, found in reversed(list(answers.values())) for check in found}
    for name, well in says.items():
        failing = [
            Check(f"{member}: {name}", ok, why)
            for member, (_, _, found) in answers.items()
            for at, ok, why in found
            if at == name and not ok
        ]
        checks += failing or [Check(name, ok=True, says=well)]
    return checks


def snapshots(members: Mapping[str, ReportingProcess]) -> tuple[dict[str, Snapshot], dict[str, str]]:
    """The answers by name; and why there is none of the others, within ANSWER_S."""
    answers: dict[str, Snapshot] = {}
    silent: dict[str, str] = {}
    received: dict[str, bytearray] = {}
    until = time.monotonic() + ANSWER_S
    with selectors.DefaultSelector() as selector:
        for name, (address, _) in members.items():
            try:
                selector.register(_asked(address), selectors.EVENT_READ, name)
            except BlockingIOError:
                silent[name] = "does not answer: its process is frozen, or busy without a pause"
            except OSError:
                silent[name] = "does not run, or is starting"
        while selector.get_map() and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                if not _receive(key.fileobj, received.setdefault(key.data, bytearray())):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            silent[key.data] = f"did not answer within {ANSWER_S:g} s: its process is frozen, or busy without a pause"
            key.fileobj.close()  # type: ignore[union-attr]
    for name, data in received.items():
        if name not in silent:
            try:
                answers[name] = loaded(bytes(data).partition(b"\r\n\r\n")[2])
            except (ValueError, KeyError, TypeError):
                silent[name] = "ended while it answered"
    return answers, {name: silent[name] for name in members if name in silent}


def _asked(name: str) -> socket.socket:
    """A connection with the request under way; OSError if there is nobody, BlockingIOError if nobody accepts."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(local_sockets.address(name))
        if not local_sockets.is_trusted(connection):
            raise PermissionError(name)
        connection.send(_REQUEST)
    except OSError:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, into: bytearray) -> bool:
    """Adds what has arrived; False at the end."""
    try:
        data = connection.recv(1 << 20)
    except BlockingIOError:
        return True
    except OSError:
        return False
    into += data
    return bool(data)
