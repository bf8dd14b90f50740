"""Starts commands from a process that has imported their libraries already: most of what a start costs.

`Popen` is subprocess.Popen. A `python -m module` that needs nothing else is a fork of this process, in which the module
runs as the main one, as Python would run it: all of pgworkd, and of the application, is imported after the fork. Any
other command is executed. A test of what a process inherits uses subprocess itself.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

LIBRARIES = (
    "anyio._backends._asyncio",
    "asyncpg",
    "cronsim",
    "pydantic_settings",
    "rich",
    "structlog",
    "typer",
    "uvloop",
)
REQUEST_BYTES = 1 << 18
_lock = threading.Lock()
_server: tuple[subprocess.Popen[bytes], socket.socket, dict[str, str]] | None = None
"""Its process, the connection to it, and its environment."""


def _of_interpreter(environ: dict[str, str]) -> dict[str, str]:
    """What Python reads before anything is imported."""
    return {name: value for name, value in environ.items() if name.startswith(("PYTHON", "LC_", "LANG", "LD_"))}


def _started() -> tuple[subprocess.Popen[bytes], socket.socket, dict[str, str]]:
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
        process = subprocess.Popen([sys.executable, __file__], stdin=theirs)  # it ends with the connection
        theirs.close()
        _server = process, ours, _of_interpreter(dict(os.environ))
        atexit.register(lambda: (ours.close(), process.wait()))
    return _server


class Popen(subprocess.Popen[Any]):
    """See the module."""

    _warm: socket.socket | None = None

    def _execute_child(self, args: Any, *rest: Any) -> None:
        (executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell, stdin, _, _, stdout, _, stderr,
         restore_signals, gid, gids, uid, umask, new_session, group) = rest  # fmt: skip
        usual = (None, None, True, (), False, True, None, None, None, -1, -1)
        given = (executable, preexec_fn, close_fds, pass_fds, shell, restore_signals, gid, gids, uid, umask, group)
        environ = dict(os.environ if env is None else env)
        with _lock:
            is_module = given == usual and list(args[:2]) == [sys.executable, "-m"]
            if not is_module or _of_interpreter(environ) != (server := _started())[2]:
                super()._execute_child(args, *rest)  # type: ignore[misc]
                return
            request = {
                "args": list(args),
                "cwd": str(Path(cwd or ".").absolute()),
                "env": environ,
                "session": new_session,
            }
            self._warm, theirs = socket.socketpair()
            with theirs:
                streams = [found if found >= 0 else number for number, found in enumerate((stdin, stdout, stderr))]
                socket.send_fds(server[1], [json.dumps(request).encode()], [theirs.fileno(), *streams])
        self._child_created = True
        self._close_pipe_fds(*rest[9:15])
        self.pid = self._received(4)

    def _received(self, size: int, flags: int = 0) -> int:
        assert self._warm is not None
        received = self._warm.recv(size, flags)
        assert received, "the parent of the command has ended"
        return int.from_bytes(received, "big")

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._warm is None:
            return super()._try_wait(flags)  # type: ignore[misc]
        try:
            status = self._received(4, socket.MSG_DONTWAIT if flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._warm.close()
        return self.pid, status

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._warm is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc]
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid and self.returncode is None:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def main() -> None:
    """Serves requests on standard input until it ends."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of commands
    while True:
        text, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 4)
        if not text:
            return None
        if os.fork() == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _parent(json.loads(text), descriptors)
        for number in descriptors:
            os.close(number)


def _parent(request: dict[str, Any], descriptors: list[int]) -> None:
    """The parent of one command: tells its process id, and how it ended."""
    status = socket.socket(fileno=descriptors[0])
    if (pid := os.fork()) == 0:
        status.detach()
        return _command(request, descriptors[1:])
    for number in (0, 1, 2, *descriptors[1:]):
        os.close(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        status.send(pid.to_bytes(4, "big"))
        status.send(os.waitpid(pid, 0)[1].to_bytes(4, "big"))
    os._exit(0)


def _command(request: dict[str, Any], streams: list[int]) -> None:
    """As `python -m` begins."""
    if request["session"]:
        os.setsid()
    for number, given in enumerate(streams):
        os.dup2(given, number)
    os.closerange(3, 1024)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        was = getattr(sys, f"__{name}__")
        by_line = not was.write_through and (number == 2 or (number == 1 and os.isatty(1)))
        raw = open(number, "wb" if number else "rb", 0 if number and was.write_through else -1, closefd=False)  # noqa: SIM115
        new = io.TextIOWrapper(raw, was.encoding, was.errors, line_buffering=by_line, write_through=was.write_through)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    sys.orig_argv[:] = request["args"]
    sys.argv[:] = request["args"][1:2] + request["args"][3:]
    sys.path[0] = request["cwd"]
    runpy.run_module(request["args"][2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
