"""What runs in a worker process: one handler call, whatever it does, answered by plain values.

Nothing that the handler raises crosses the pipe as an object: an exception that cannot be pickled, or whose
class the parent cannot import, would otherwise look like a crash.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from .errors import PermanentError, RetryAfter, Snooze
from .failure import describe_error
from .job import Job
from .payload import encode

_PR_SET_PDEATHSIG = 1


class Answer(NamedTuple):
    """How a call in a child ended: `ending` is result, snooze, retry_after, permanent or error."""

    ending: str
    result: str | None = None
    delay_s: float = 0.0
    error: Mapping[str, str] | None = None


def call(
    parent_pid: int,
    function: Callable[..., Any],
    payload_parameter: str | None,
    payload: Any,
    job_parameter: str | None,
    job_fields: Mapping[str, Any],
) -> Answer:
    """Calls a handler; never raises."""
    _die_with(parent_pid)
    arguments: dict[str, Any] = {}
    if payload_parameter is not None:
        arguments[payload_parameter] = payload
    if job_parameter is not None:
        arguments[job_parameter] = Job(**job_fields)
    try:
        return Answer("result", result=encode(function(**arguments), "result", object_only=False))
    except Snooze as error:
        return Answer("snooze", delay_s=error.delay_s)
    except RetryAfter as error:
        return Answer("retry_after", delay_s=error.delay_s, error=asdict(describe_error(error)))
    except PermanentError as error:
        return Answer("permanent", error=asdict(describe_error(error)))
    except BaseException as error:  # noqa: BLE001 - also SystemExit and KeyboardInterrupt end the attempt, not the child
        return Answer("error", error=asdict(describe_error(error)))


def _die_with(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its daemon dies (Linux): a handler must not outlive the lease."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches us too; the daemon decides
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)  # it died before the line above
