"""Handler processes for `run_in="process"`: reused, one call at a time each, killed when a call must end."""

from __future__ import annotations

import contextlib
import math
import os
import pickle  # nosec B403 # between a daemon and its children only
import signal
import sys
from collections.abc import Callable
from subprocess import PIPE  # nosec B404 # a constant
from types import TracebackType
from typing import Self, cast

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from pgworkd import log
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.run import liveness_pipe
from pgworkd.engine.run.child_stacks import StackLine
from pgworkd.engine.run.process_child import LENGTH, ChildAnswer, ProgressReport, Request

IDLE_S_MAX = 300.0
"""A process that was idle for longer than this is ended, within a tenth of it."""
EXIT_S = 1.0
"""Idle processes that are no longer needed have this long to write what their handlers have left, and end."""
ANSWER_BYTES_MAX = 8 * 1024 * 1024
_START = """
import os, sys
sys.path += [each for each in sys.argv[2].split(os.pathsep) if each not in sys.path]
from pgworkd.engine.run.process_child import main
main()
"""
"""The app's import path comes last at first: a module in it may have the name of one of the standard library."""
EXIT_POLL_S = 0.2
"""How often to check, during a call, that the process is alive."""
_BROKEN = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError)
Progress = Callable[[float, str], None]


class ChildDied(Exception):  # noqa: N818
    """The process ended in the middle of a call: crashed, was killed, or ran out of memory."""


class _HandlerProcess:
    """One process and the pipe to it."""

    def __init__(self, process: Process, line: StackLine) -> None:
        self.process, self._line = process, line
        self.idle_since = 0.0
        self._requests = cast("ByteSendStream", process.stdin)  # both were asked for
        self._answers = BufferedByteReceiveStream(cast("ByteReceiveStream", process.stdout))

    async def ask(self, request: Request, progress: Progress) -> ChildAnswer:
        """Sends a request and waits for its answer; passes progress on. Raises ChildDied."""
        frame = pickle.dumps(tuple(request))
        answer: ChildAnswer | ProgressReport | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, tasks.cancel_scope)
            with contextlib.suppress(*_BROKEN):
                await self._requests.send(LENGTH.pack(len(frame)) + frame)
                while isinstance(answer := await self._receive(), ProgressReport):
                    progress(answer.done, answer.message)
            tasks.cancel_scope.cancel()
        if answer is None or isinstance(answer, ProgressReport):
            raise ChildDied(await self._fate())
        return answer

    async def _watch(self, call: anyio.CancelScope) -> None:
        """Ends a call whose process has ended: a fork of it may hold the pipe open."""
        while self.process.returncode is None:
            await anyio.sleep(EXIT_POLL_S)
        await anyio.sleep(EXIT_POLL_S)  # meanwhile an answer that was written before is read
        call.cancel()

    async def _receive(self) -> ChildAnswer | ProgressReport:
        size = LENGTH.unpack(await self._answers.receive_exactly(LENGTH.size))[0]
        if size > ANSWER_BYTES_MAX:
            raise anyio.BrokenResourceError  # something else than an answer was written to the pipe
        fields = pickle.loads(await self._answers.receive_exactly(size))  # noqa: S301 # nosec B301 # our own child
        return ProgressReport(*fields) if len(fields) == len(ProgressReport._fields) else ChildAnswer(*fields)

    async def _fate(self) -> str:
        with anyio.move_on_after(2):
            while (code := self.process.returncode) is None:
                await anyio.sleep(0.01)
            if code >= 0:
                return f"the process that ran the handler ended with exit code {code}"
            name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
            return f"the process that ran the handler was killed by {name}"
        return "the process that ran the handler closed its pipe"

    def stack(self) -> str:
        """Where the handler is, or why that is not known. Called from any thread; takes up to 2 s."""
        return f"in process {self.process.pid}:\n{self._line.ask()}"

    async def ask_to_end(self) -> None:
        """Tells the process that no request will come: it writes what handlers have left to write, and ends."""
        await self._requests.aclose()

    async def kill(self) -> None:
        """Kills the process, and waits for its end."""
        self._line.close()
        with anyio.CancelScope(shield=True):
            if self.process.returncode is None:
                self.process.kill()
            await self.process.aclose()


class Processes:
    """The pool of handler processes; its size is bounded by the slots of the queues."""

    def __init__(self) -> None:
        self._idle: list[_HandlerProcess] = []

    async def call(self, request: Request, progress: Progress, attempt: Attempt) -> ChildAnswer:
        """Runs one call in a process; `progress` is called with what the handler reports meanwhile.

        Raises ChildDied. Cancelled: the process is killed before this returns.
        """
        child = await self._take()
        attempt.stack = child.stack
        try:
            answer = await child.ask(request, progress)
        except BaseException:
            await child.kill()
            raise
        finally:
            attempt.stack = None
        child.idle_since = anyio.current_time()
        self._idle.append(child)
        return answer

    async def _take(self) -> _HandlerProcess:
        while self._idle:
            child = self._idle.pop()  # the one used last, so that the others may time out
            if child.process.returncode is None:
                return child
            await child.kill()
        line, paths = StackLine(), os.pathsep.join(sys.path)
        arguments = (str(os.getpid()), paths, str(line.theirs), *(log.configured or ()))
        with contextlib.ExitStack() as undone, liveness_pipe.passed_on(line.theirs) as more:
            undone.callback(line.close)
            process = await anyio.open_process(
                # The daemon's import path is the app's: it holds the directory the app was found in.
                [sys.executable, "-P", "-c", _START, *arguments],
                stdin=PIPE,
                stdout=PIPE,
                stderr=None,
                start_new_session=True,  # a Ctrl-C in the terminal must reach the daemon only
                **more,
            )
            undone.pop_all()
        line.started()
        return _HandlerProcess(process, line)

    async def tend(self) -> None:
        """Ends processes that have been idle for too long, beside the calls. Does not return."""
        while True:
            await anyio.sleep(IDLE_S_MAX / 10)
            await self._end_idle(older_than_s=IDLE_S_MAX)

    async def _end_idle(self, older_than_s: float) -> None:
        now = anyio.current_time()
        old = [child for child in self._idle if now - child.idle_since >= older_than_s]
        self._idle = [child for child in self._idle if now - child.idle_since < older_than_s]
        with anyio.move_on_after(EXIT_S, shield=True):
            for child in old:
                await child.ask_to_end()
            for child in old:
                await child.process.wait()
        for child in old:
            await child.kill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end_idle(older_than_s=-math.inf)
