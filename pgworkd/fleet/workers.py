"""The workers of autoscale, numbered from 1: processes of its own, or instances of a systemd unit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from subprocess import DEVNULL, PIPE  # nosec B404 # constants
from typing import Protocol

import anyio
from anyio.abc import Process

from pgworkd.errors import UsageError
from pgworkd.fleet import parent_guard
from pgworkd.fleet.process_keeper import Worker
from pgworkd.metrics import REPORT_TO
from pgworkd.settings.file import NAME_CHARS_MAX

STOPPING_POLL_S = 0.5
"""How often, in seconds, the state of a stopping unit is polled."""
_ACTIVE = {"active", "activating", "reloading"}
_ENDED = {"inactive", "failed"}
_UNUSABLE = {"not-found", "bad-setting", "error", "masked"}
_EXITED = "1"  # CLD_EXITED; otherwise the status is the number of a signal


class WorkerBackend(Protocol):
    """Starts and finds workers."""

    def name(self, number: int) -> str:
        """The worker's name."""

    async def alive(self, most: int) -> set[int]:
        """Which of the workers 1 to `most` are already running."""

    def start(self, number: int) -> contextlib.AbstractAsyncContextManager[Worker]:
        """Starts it. Raises OSError."""


class Processes:
    """Each worker is a process of `command`, which must exit on SIGTERM, under a parent-death guard."""

    def __init__(
        self,
        command: Sequence[str],
        worker_name: str,
        environ: Mapping[str, str],
        report_to: Callable[[int], str] | None = None,
    ) -> None:
        """`report_to`: where the worker of that number is to report its metrics."""
        self._command = [sys.executable, "-I", "-S", parent_guard.__file__, str(os.getpid()), *command]
        self._environ = dict(environ)
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", REPORT_TO):  # for this process, not for workers
            self._environ.pop(name, None)
        self._report_to = report_to
        self._worker_name = worker_name[: NAME_CHARS_MAX - 4]

    def name(self, number: int) -> str:
        """The worker's name in `pgworkd workers`."""
        return f"{self._worker_name}-{number}"

    async def alive(self, most: int) -> set[int]:
        """The empty set: no worker outlives the autoscale that started it."""
        return set()

    @contextlib.asynccontextmanager
    async def start(self, number: int) -> AsyncIterator[Worker]:
        """Starts the process. Raises OSError."""
        environ = self._environ | {"PGWORKD_WORKER_NAME": self.name(number)}
        if self._report_to is not None:
            environ |= {REPORT_TO: self._report_to(number)}
        process = await anyio.open_process(
            self._command, env=environ, stdin=DEVNULL, stdout=None, stderr=None, start_new_session=True
        )
        async with process:
            yield ChildProcess(process)


class ChildProcess:
    """A process that leads a session of its own."""

    def __init__(self, process: Process, end_facts: Mapping[str, object] = {}) -> None:
        self._process = process
        self.facts: Mapping[str, object] = {"pid": process.pid}
        self.end_facts = end_facts

    async def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        return await self._process.wait()

    async def send(self, number: signal.Signals) -> None:
        """Sends it a signal, if it is still running; SIGKILL to its children, too."""
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:  # to the first process only, which stops its own children
                self._process.send_signal(number)


class SystemdBackend:
    """Each worker is an instance of a unit; `pattern` has %d for its number. Units outlive autoscale and are found."""

    def __init__(self, pattern: str, every_s: float) -> None:
        """`every_s`: how often, in seconds, the state of a unit is polled."""
        self._pattern = pattern
        self._every_s = every_s

    def name(self, number: int) -> str:
        """The unit's name."""
        return self._pattern.replace("%d", str(number))

    async def alive(self, most: int) -> set[int]:
        """The instances that are active. UsageError if systemctl does not answer."""
        numbers = range(1, most + 1)
        _, output = await _systemctl("is-active", *(self.name(number) for number in numbers))
        states = output.split()
        if len(states) != most:
            raise UsageError("--unit: systemctl does not answer; run autoscale on a host that systemd manages")
        return {number for number, state in zip(numbers, states, strict=True) if state in _ACTIVE}

    @contextlib.asynccontextmanager
    async def start(self, number: int) -> AsyncIterator[Worker]:
        """Returns at once: `wait` starts the unit, because that may take long."""
        yield _Unit(self.name(number), self._every_s)


class _Unit:
    def __init__(self, name: str, every_s: float) -> None:
        self.facts: Mapping[str, object] = {}
        self.end_facts: Mapping[str, object] = {}
        self._name = name
        self._every_s = every_s
        self._stopping = anyio.Event()

    async def wait(self) -> int:
        refused, _ = await _systemctl("start", self._name)
        if self._stopping.is_set():  # the stop cancelled the start, or systemd received it before the start
            refused = 0
            await self._stop()
        while True:
            poll_s = STOPPING_POLL_S if self._stopping.is_set() else self._every_s
            code, output = await _systemctl("show", "--property=LoadState,ActiveState,ExecMainCode,ExecMainStatus",
                                          self._name)  # fmt: skip
            facts = dict(line.partition("=")[::2] for line in output.splitlines())
            if code == 0 and facts.get("ActiveState") in _ENDED:
                break
            with anyio.move_on_after(poll_s):
                await (anyio.sleep_forever() if self._stopping.is_set() else self._stopping.wait())
        if refused and facts.get("LoadState") in _UNUSABLE:
            return 2
        status = int(facts.get("ExecMainStatus") or 0)
        return (status if facts.get("ExecMainCode") == _EXITED else -status) or min(refused, 1)

    async def send(self, number: signal.Signals) -> None:
        self._stopping.set()
        if number is signal.SIGTERM:
            await self._stop()
        elif number is signal.SIGKILL:
            await _systemctl("kill", "--signal=SIGKILL", self._name)
        else:
            await _systemctl("kill", "--kill-who=main", f"--signal={number.name}", self._name)

    async def _stop(self) -> None:
        await _systemctl("stop", "--no-block", self._name)


async def _systemctl(*args: str) -> tuple[int, str]:
    """Runs systemctl; its exit code and standard output. Its errors go to standard error."""
    try:
        done = await anyio.run_process(["systemctl", *args], stdin=DEVNULL, stdout=PIPE, stderr=None, check=False)
    except OSError:  # no memory, too many processes
        return 127, ""
    return done.returncode, done.stdout.decode(errors="replace")
