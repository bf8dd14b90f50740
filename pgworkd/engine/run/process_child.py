"""The program of a handler process: one handler call after another, each answered by plain values.

Run by `process_pool`. Requests come on standard input, answers go to standard output, each as a length and that many
bytes; what handlers print goes to standard error. A frame is read completely before it is decoded, and each is answered
by exactly one (after any progress), so that no answer can be taken for another job's. Nothing that a handler raises
crosses the pipe as an object: an exception that cannot be pickled, or whose class the parent cannot import, would look
like a crash.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import pickle  # nosec B403 # between a daemon and its children only, never what comes from the database
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from pgworkd.core.decorated import explained
from pgworkd.core.error_report import describe_error
from pgworkd.core.job import Job
from pgworkd.core.payload import encode_result
from pgworkd.core.traces import Carrier, current, ids_of
from pgworkd.engine.run import child_stacks, liveness_pipe
from pgworkd.errors import PermanentError, RetryAfter, Snooze
from pgworkd.process import forks, output
from pgworkd.process.redaction import hide

if TYPE_CHECKING:
    from pgworkd import log

LENGTH = struct.Struct("!I")
PROGRESS_EVERY_S = 0.2
_PR_SET_PDEATHSIG = 1


class Request(NamedTuple):
    """A call of a handler. `payload` is pickled separately: unpickling it may need the handler's module."""

    module: str
    qualname: str
    payload_parameter: str | None
    payload: bytes
    job_parameter: str | None
    job_fields: Mapping[str, Any]
    trace: Carrier | None = None
    """The trace context of the attempt."""


class ChildAnswer(NamedTuple):
    """How a call ended: `ending` is result, snooze, retry_after, permanent or error."""

    ending: str
    result: str | None = None
    delay_s: float = 0.0
    error: Mapping[str, str] | None = None


class ProgressReport(NamedTuple):
    """Progress that a handler reports before its answer."""

    done: float
    message: str


class _CurrentCall:
    """The running call, named by log lines that are written meanwhile."""

    def __init__(self) -> None:
        self.attempt: log.LoggedAttempt | None = None
        self.fields: Mapping[str, Any] = {}
        self.trace: Carrier | None = None

    def facts(self) -> dict[str, object]:
        """The facts of the call's attempt, for log lines."""
        facts = {"job_id": str(self.fields["id"])} | {name: self.fields[name] for name in ("queue", "kind", "attempt")}
        return facts if self.trace is None else {**facts, **ids_of(self.trace)}


def _log_as(current: _CurrentCall, level: str, form: str, worker: str) -> Callable[[], None]:
    """Configures logging as in the daemon; returns what to call when the app, which may configure it, is loaded."""
    from pgworkd import log  # takes 0.2 s, so only where it is needed

    log.configure(level, cast("log.Form", form), worker)
    log.RUNNING.set(current)
    return log.include_job


class _Pipe:
    """Answers to the daemon; threads of a handler may write, too."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.descriptor = stream, stream.fileno()
        self._lock = threading.Lock()
        self._asked = False
        self._noted_at_s = -math.inf

    def begin(self) -> None:
        """Notes that a request has been received."""
        with self._lock:
            self._asked = True

    def note(self, done: float, message: str) -> None:
        """Sends progress, at most every PROGRESS_EVERY_S, until the answer is sent."""
        with self._lock:
            if self._asked and (now := time.monotonic()) - self._noted_at_s >= PROGRESS_EVERY_S:
                self._noted_at_s = now
                self._write(ProgressReport(done, message))

    def answer(self, answer: ChildAnswer) -> None:
        """Sends the answer to the request."""
        with self._lock:
            self._asked = False
            self._write(answer)

    def _write(self, what: ProgressReport | ChildAnswer) -> None:
        frame = pickle.dumps(tuple(what))
        self._stream.write(LENGTH.pack(len(frame)) + frame)
        self._stream.flush()


def call(
    request: Request, note: Callable[[float, str], None] | None = None, loaded: Callable[[], None] = lambda: None
) -> ChildAnswer:
    """Calls a handler; never raises. `loaded`: called before it, when its module is there."""
    function: Any = None
    try:
        function = importlib.import_module(request.module)
        for name in request.qualname.split("."):
            function = getattr(function, name)
        loaded()
        arguments: dict[str, Any] = {}
        if request.payload_parameter is not None:
            arguments[request.payload_parameter] = pickle.loads(request.payload)  # noqa: S301 # nosec B301 # as below
        if request.job_parameter is not None:
            arguments[request.job_parameter] = Job(**request.job_fields, on_progress=note)
        with current(request.trace):
            return ChildAnswer("result", result=encode_result(forks.call(function, arguments)))
    except Snooze as error:
        return ChildAnswer("snooze", delay_s=error.delay_s)
    except RetryAfter as error:
        return ChildAnswer("retry_after", delay_s=error.delay_s, error=asdict(describe_error(error)))
    except PermanentError as error:
        return ChildAnswer("permanent", error=asdict(describe_error(error)))
    except BaseException as error:  # noqa: BLE001 - also a SystemExit ends the attempt, not the process
        return ChildAnswer("error", error=asdict(describe_error(explained(function, error))))


def main() -> None:
    """Answers requests until the pipe is closed.

    When the daemon is gone the kernel sends SIGKILL: a thread that waits for the end of the pipe, as in daemons under a
    supervisor, could not end a handler that holds the GIL.
    """
    output.open_missing()
    parent_pid = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides when this process ends
    forks.handle_signals(signal.SIGINT)
    liveness_pipe.hold()
    hide(os.environ.get("PGWORKD_DSN", ""))  # errors are redacted and truncated here
    if sys.platform == "linux":
        # A handler must not outlive the daemon, whose lease protects it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            return  # it died before prctl took effect
    requests, pipe = os.fdopen(os.dup(0), "rb"), _Pipe(os.fdopen(os.dup(1), "wb"))
    for descriptor in (requests.fileno(), pipe.descriptor):
        forks.keep_private(descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    output.install()
    child_stacks.answer_from(int(sys.argv[3]))
    running = _CurrentCall()
    loaded = _log_as(running, *sys.argv[4:7]) if len(sys.argv) > 4 else lambda: None
    _import_as_the_daemon(sys.argv[2].split(os.pathsep))
    while (frame := _read(requests)) is not None:
        pipe.begin()
        request = Request(*pickle.loads(frame))  # noqa: S301 # nosec B301 # from our own parent
        running.fields, running.trace, running.attempt = request.job_fields, request.trace, running
        answer = call(request, pipe.note, loaded)
        output.end_lines()
        pipe.answer(answer)
        running.attempt = None


def _import_as_the_daemon(path: list[str]) -> None:
    """Sets the import path of the daemon, which had loaded its own modules, and those that they need, before."""
    import pgworkd.engine.registry  # noqa: F401

    sys.path[:] = path


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    body = stream.read(size)
    return body if len(body) == size else None
