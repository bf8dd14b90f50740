"""What runs in a worker process: one handler call after another, each answered by plain values.

Run as `python -m pgworkd.child` by `processes`. Requests come on standard input, answers go to standard output,
each as a length and that many bytes; what handlers print goes to standard error. A frame is read whole before
anything in it is looked at, and each is answered by exactly one, so that no answer can meet another's job.
Nothing that a handler raises crosses the pipe as an object: an exception that cannot be pickled, or whose class
the parent cannot import, would look like a crash.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, BinaryIO, NamedTuple

from .errors import PermanentError, RetryAfter, Snooze
from .failure import describe_error
from .job import Job
from .payload import encode

LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1


class Request(NamedTuple):
    """One call. `payload` is pickled by itself: it may need the handler's module to be read."""

    module: str
    qualname: str
    payload_parameter: str | None
    payload: bytes
    job_parameter: str | None
    job_fields: Mapping[str, Any]


class Answer(NamedTuple):
    """How a call ended: `ending` is result, snooze, retry_after, permanent or error."""

    ending: str
    result: str | None = None
    delay_s: float = 0.0
    error: Mapping[str, str] | None = None


def call(request: Request) -> Answer:
    """Calls a handler; never raises."""
    try:
        function: Any = importlib.import_module(request.module)
        for name in request.qualname.split("."):
            function = getattr(function, name)
        arguments: dict[str, Any] = {}
        if request.payload_parameter is not None:
            arguments[request.payload_parameter] = pickle.loads(request.payload)  # noqa: S301 - from our own parent
        if request.job_parameter is not None:
            arguments[request.job_parameter] = Job(**request.job_fields)
        return Answer("result", result=encode(function(**arguments), "result", object_only=False))
    except Snooze as error:
        return Answer("snooze", delay_s=error.delay_s)
    except RetryAfter as error:
        return Answer("retry_after", delay_s=error.delay_s, error=asdict(describe_error(error)))
    except PermanentError as error:
        return Answer("permanent", error=asdict(describe_error(error)))
    except BaseException as error:  # noqa: BLE001 - also SystemExit ends the attempt, not the process
        return Answer("error", error=asdict(describe_error(error)))


def main() -> None:
    """Answers requests until the pipe is closed."""
    parent_pid, sys.path[:] = int(sys.argv[1]), sys.argv[2].split(os.pathsep)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides when we end
    if sys.platform == "linux":
        # A handler must not outlive the daemon, whose lease protects it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            return  # it died before the line above
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    while (frame := _read(requests)) is not None:
        answer = pickle.dumps(tuple(call(Request(*pickle.loads(frame)))))  # noqa: S301 - from our own parent
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    body = stream.read(size)
    return body if len(body) == size else None


if __name__ == "__main__":
    main()
