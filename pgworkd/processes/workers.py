"""The workers of autoscale, numbered from 1: processes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from subprocess import DEVNULL  # nosec B404 # a constant

import anyio
from anyio.abc import Process

from pgworkd.metrics import REPORT_TO
from pgworkd.processes import parent_guard
from pgworkd.processes.process_keeper import Worker
from pgworkd.settings.file import NAME_CHARS_MAX


class WorkerProcesses:
    """The workers of autoscale: each a process of `command`, which must exit on SIGTERM, under a parent-death guard."""

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
        """Waits for the end of the process; its exit code, or minus the signal that ended it."""
        return await self._process.wait()

    async def send(self, number: signal.Signals) -> None:
        """Signals the process, if it is still running; SIGKILL reaches its children, too."""
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:  # to the first process only, which stops its own children
                self._process.send_signal(number)
