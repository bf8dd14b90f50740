"""What autoscale starts and stops: processes of its own, or instances of a systemd unit; numbered from 1."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from subprocess import DEVNULL, PIPE  # nosec B404 # constants
from typing import Protocol

import anyio
from anyio.abc import Process

from pgworkd.errors import UsageError
from pgworkd.fleet import parent_guard
from pgworkd.settings.file import NAME_CHARS_MAX

STOPPING_LOOK_S = 0.5
"""Between looks at a unit that is to stop."""
_ACTIVE = {"active", "activating", "reloading"}
_OVER = {"inactive", "failed"}
_UNUSABLE = {"not-found", "bad-setting", "error", "masked"}
_EXITED = "1"  # CLD_EXITED; otherwise the status is the number of a signal


class Worker(Protocol):
    """One that has been started; `facts` for the log."""

    facts: dict[str, object]

    async def wait(self) -> int:
        """Until it has ended; its exit code, or minus the signal that ended it."""

    async def send(self, number: signal.Signals) -> None:
        """SIGTERM: stop gracefully; SIGINT: at once; SIGKILL: all that belongs to it."""


class WorkerBackend(Protocol):
    """Where workers come from."""

    def name(self, number: int) -> str:
        """What the worker is called."""

    async def alive(self, most: int) -> set[int]:
        """Which of the workers 1 to `most` are there already."""

    def start(self, number: int) -> contextlib.AbstractAsyncContextManager[Worker]:
        """Starts it. Raises OSError."""


class Processes:
    """Each worker runs `command`, which must end on SIGTERM, on a leash: it ends when we end, whatever ends us."""

    def __init__(self, command: Sequence[str], worker_name: str, environ: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-I", "-S", parent_guard.__file__, str(os.getpid()), *command]
        self._environ = dict(environ)
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):  # systemd knows us, not them
            self._environ.pop(name, None)
        self._worker_name = worker_name[: NAME_CHARS_MAX - 4]

    def name(self, number: int) -> str:
        """As the worker shows up in `pgworkd workers`."""
        return f"{self._worker_name}-{number}"

    async def alive(self, most: int) -> set[int]:
        """None: no process outlives the autoscale that started it."""
        return set()

    @contextlib.asynccontextmanager
    async def start(self, number: int) -> AsyncIterator[Worker]:
        """Starts the process. Raises OSError."""
        environ = self._environ | {"PGWORKD_WORKER_NAME": self.name(number)}
        process = await anyio.open_process(
            self._command, env=environ, stdin=DEVNULL, stdout=None, stderr=None, start_new_session=True
        )
        async with process:
            yield _Child(process)


class _Child:
    def __init__(self, process: Process) -> None:
        self._process = process
        self.facts: dict[str, object] = {"pid": process.pid}

    async def wait(self) -> int:
        return await self._process.wait()

    async def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:  # to the first process only: what it has started, it stops itself
                self._process.send_signal(number)


class SystemdBackend:
    """Each worker is an instance of a unit; `pattern` holds %d for its number. They outlive us, and are found again."""

    def __init__(self, pattern: str, every_s: float) -> None:
        """`every_s` is the time between two looks at a unit."""
        self._pattern = pattern
        self._every_s = every_s

    def name(self, number: int) -> str:
        """The unit."""
        return self._pattern.replace("%d", str(number))

    async def alive(self, most: int) -> set[int]:
        """The instances that are active. UsageError when there is no systemd to ask."""
        numbers = range(1, most + 1)
        _, said = await _systemctl("is-active", *(self.name(number) for number in numbers))
        states = said.split()
        if len(states) != most:
            raise UsageError("--unit: systemctl does not answer; run autoscale on a host that systemd manages")
        return {number for number, state in zip(numbers, states, strict=True) if state in _ACTIVE}

    @contextlib.asynccontextmanager
    async def start(self, number: int) -> AsyncIterator[Worker]:
        """Leaves the start itself to `wait`, because it may take long."""
        yield _Unit(self.name(number), self._every_s)


class _Unit:
    def __init__(self, name: str, every_s: float) -> None:
        self.facts: dict[str, object] = {}
        self._name = name
        self._every_s = every_s
        self._stopping = anyio.Event()

    async def wait(self) -> int:
        refused, _ = await _systemctl("start", self._name)
        if self._stopping.is_set():  # the stop cancels a start under way; or systemd heard of it before the start
            refused = 0
            await self._stop()
        while True:
            look_s = STOPPING_LOOK_S if self._stopping.is_set() else self._every_s
            code, said = await _systemctl("show", "--property=LoadState,ActiveState,ExecMainCode,ExecMainStatus",
                                          self._name)  # fmt: skip
            facts = dict(line.partition("=")[::2] for line in said.splitlines())
            if code == 0 and facts.get("ActiveState") in _OVER:
                break
            with anyio.move_on_after(look_s):
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
    """Its exit code and what it prints; what it complains of goes to our own standard error."""
    try:
        done = await anyio.run_process(["systemctl", *args], stdin=DEVNULL, stdout=PIPE, stderr=None, check=False)
    except OSError:  # no memory, too many processes
        return 127, ""
    return done.returncode, done.stdout.decode(errors="replace")
