"""Where the handler in a handler process is: asked by its daemon over a socket of its own, answered by a thread.

So it is answered while the handler is in an endless loop, and while the daemon's own loop is blocked. In a process
whose handler holds Python's interpreter lock no thread runs, and nothing is answered.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time

from pgworkd.core.error_report import describe_stack
from pgworkd.process import forks

LIMIT_S = 2.0
"""How long a process may take to answer."""
_BYTES_MAX = 64 * 1024
"""The longest message: a stack has 16 KiB at most."""


class StackLine:
    """The daemon's end. `theirs`: the descriptor for the process, until it has been started."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # a message is whole, or lost
        self._numbers, self._asking = itertools.count(), threading.Lock()
        for each in (self._ours, self._theirs):
            forks.keep_private(each)
        self.theirs = self._theirs.fileno()

    def started(self) -> None:
        """Notes that the process has its end."""
        self._theirs.close()

    def close(self) -> None:
        """Ends the line."""
        self._theirs.close()
        self._ours.close()

    def ask(self) -> str:
        """Where the process is, or why it does not say. Called from any thread; takes LIMIT_S at most."""
        until = time.monotonic() + LIMIT_S
        if not self._asking.acquire(timeout=LIMIT_S):
            return "it is being asked already\n"
        try:
            number = b"%d " % next(self._numbers)
            self._ours.settimeout(LIMIT_S)
            self._ours.send(number)
            while True:
                self._ours.settimeout(max(0.001, until - time.monotonic()))
                answer = self._ours.recv(_BYTES_MAX)
                if answer.startswith(number):  # else that of a question which took too long
                    return answer.removeprefix(number).decode(errors="replace")
        except TimeoutError:
            return (
                f"it does not answer within {LIMIT_S:g} s: it is starting, or stopped, or in code that holds Python's "
                "interpreter lock, such as a C extension or one long regular expression\n"
            )
        except OSError as error:
            return f"it cannot be asked: {error.strerror or error}\n"
        finally:
            self._asking.release()


def answer_from(descriptor: int) -> None:
    """Answers, from a thread, where the thread that calls this is: in a process that has just begun."""
    os.set_inheritable(descriptor, False)
    forks.keep_private(descriptor)
    line = socket.socket(fileno=descriptor)
    arguments = (line, threading.get_ident())
    threading.Thread(target=_answer, args=arguments, name="pgworkd stacks", daemon=True).start()


def _answer(line: socket.socket, thread_id: int) -> None:
    while True:
        try:
            number = line.recv(_BYTES_MAX)
            frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - the only way
            text = "" if frame is None else describe_stack(frame, in_loop=False)
            line.send(number + text.encode())
        except OSError:  # the daemon has ended, or a handler has closed all descriptors
            return
