"""Standard output and error of a program that must not wait for whoever reads them, nor end because nobody does.

The reader may be gone (a closed terminal, a broken pipe), stuck (a log shipper that hangs) or a full disk. So what is
written goes into a bounded buffer, and a thread takes it from there. What does not fit is dropped, line by line, and
counted; the count is told once the reader takes lines again.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import os
import select
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from pgworkd.process import forks

BUFFER_BYTES = 1024 * 1024
PIECE_BYTES = 4096
"""PIPE_BUF: pieces of this size are written as a whole, however many processes share a pipe that is full."""
EMPTY_BYTES = 16 * 1024
"""Bytes for a pipe or socket that is empty; it has room for several processes that do this at once."""
GATHER_S = 0.02
"""Time between two writes, so that lines share one: each costs the event loop a switch of threads."""
AGAIN_S = 0.5
"""Time between two attempts where writing fails."""
LAST_S = 1.0
"""How long the end of the process waits until what is buffered has been written."""

on_recovery: Callable[[str, int], None] | None = None
"""Called in the writing thread with the stream's name and the count of dropped lines, once lines are taken again."""
_sinks: dict[str, _Sink] = {}
_streams: dict[str, io.TextIOWrapper] = {}
_writing: dict[tuple[int, int], threading.Lock] = {}
"""By device and inode of a stream, as two may be the same pipe: held from when a thread takes lines until they are
written."""


def open_missing() -> None:
    """Opens those of the descriptors 0 to 2 that are closed, on /dev/null: a socket would get the number otherwise."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            os.dup2(nothing, number)  # which makes it inheritable; it is the same number where those below are open
            if nothing != number:
                os.close(nothing)
            else:
                os.set_inheritable(number, True)


def install(*names: str) -> None:
    """Makes these streams of `sys`, stdout and stderr by default, never block and never fail."""
    for name in names or ("stdout", "stderr"):
        before = getattr(sys, name)
        if before is not None:
            with contextlib.suppress(OSError, ValueError):
                before.flush()
        sink = _sinks[name] = _Sink(name)
        encoding = getattr(before, "encoding", None) or "utf-8"
        made = io.TextIOWrapper(cast("Any", sink), encoding=encoding, errors="backslashreplace", line_buffering=True)
        _streams[name] = made
        setattr(sys, name, made)
    atexit.register(_finish)  # among the first, so that it is called after those of the application


def stderr() -> Any:
    """Standard error for the log, also while the application has replaced or removed `sys.stderr`."""
    return _streams.get("stderr") or sys.stderr


def line_writer() -> Callable[[str], object] | None:
    """A function that writes one log line to standard error, for a third of its text stream's cost, or None."""
    if "stderr" not in _sinks:
        return None
    write, encoding = _sinks["stderr"].add, _streams["stderr"].encoding
    return lambda line: write(f"{line}\n".encode(encoding, "backslashreplace"))


def end_lines() -> None:
    """Ends lines that were begun, so that what comes next, from here or another process, has lines of its own."""
    for name, stream in _streams.items():
        with contextlib.suppress(Exception):  # the application may have closed it
            stream.flush()
        _sinks[name].release(b"\n")


def drain(limit_s: float = LAST_S) -> None:
    """Ends lines that were begun, and waits until all has reached the descriptors: not longer, nor where that fails."""
    until = time.monotonic() + limit_s
    end_lines()
    for sink in _sinks.values():
        sink.drain(until)


def write_directly(patience_s: float) -> None:
    """Has whoever prints write from now on, and wait this long for a slow reader; first what is buffered."""
    for sink in _sinks.values():
        sink.write_directly(patience_s)


def say(text: str) -> None:
    """Writes to standard error, whatever becomes of it; where it is not one of `install`, waits for LAST_S at most."""
    if "stderr" in _sinks:
        _sinks["stderr"].add(text.encode(errors="backslashreplace"))
        return
    with contextlib.suppress(OSError):
        if _is_writable(2, LAST_S):
            os.write(2, text.encode(errors="backslashreplace"))


def _finish() -> None:
    drain()
    write_directly(0.0)  # what is printed from now on: no thread runs any more
    for name, stream in _streams.items():
        # Python exits with 120 where it cannot flush what the application has left here
        with contextlib.suppress(Exception):
            getattr(sys, name).flush()
        setattr(sys, name, stream)


def _in_child() -> None:
    for sink in _sinks.values():
        sink.begin_anew()


def is_broken(name: str) -> bool:
    """True if this stream cannot be written: its reader is gone, or a disk is full."""
    return name in _sinks and _sinks[name].fails


class _Sink(io.RawIOBase):
    """The raw stream below a text stream."""

    def __init__(self, name: str) -> None:
        self.name, self._number = name, {"stdout": 1, "stderr": 2}[name]
        self._fd = os.dup(self._number)  # the application may close its own, whose number is used again then
        forks.keep_private(self._fd)
        file = os.fstat(self._fd)
        self._is_terminal = os.isatty(self._fd)
        self._is_shared = stat.S_IFMT(file.st_mode) in (stat.S_IFIFO, stat.S_IFSOCK) or self._is_terminal
        self._begun = bytearray()  # a line without its end: the log and other processes write lines beside it
        self._pieces: list[bytes] = []
        self._size = 0  # of all pieces, in bytes
        self._dropped = 0  # lines
        self._lock = threading.RLock()  # a finaliser may print in the middle of a write
        self._writing = _writing.setdefault((file.st_dev, file.st_ino), threading.Lock())
        self._filled = threading.Event()
        self._awake = False
        self._thread: threading.Thread | None = None
        self._patience_s: float | None = None
        """How long a write may wait, without a thread. None: with a thread."""
        self.fails = False
        """The last attempt to write failed."""

    # For the text stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def flush(self) -> None:
        """Does nothing: the thread is at it."""

    def close(self) -> None:
        """Does nothing: the log goes here, too."""

    def write(self, data: Any) -> int:
        """Takes what was printed, and for any but a terminal keeps the last line until it ends; returns at once."""
        piece = bytes(data)
        with self._lock:
            self._begun += piece
            end = self._begun.rfind(b"\n", -len(piece) or None) + 1
            if self._is_terminal or self._patience_s is not None or len(self._begun) > BUFFER_BYTES:
                end = len(self._begun)
            whole = bytes(self._begun[:end])
            del self._begun[:end]
        if whole:
            self.add(whole)
        return len(piece)

    def release(self, end: bytes = b"") -> None:
        """Takes the line that was begun, with this end."""
        with self._lock:
            begun = bytes(self._begun)
            self._begun.clear()
        if begun:
            self.add(begun + end)

    def add(self, piece: bytes) -> None:
        """Takes a piece, or drops it; returns at once."""
        with self._lock:
            patience_s = self._patience_s
            if patience_s is None:
                if self._size + len(piece) > BUFFER_BYTES and self._size:
                    self._dropped += max(1, piece.count(b"\n"))
                    return
                self._pieces.append(piece)
                self._size += len(piece)
                if self._awake:
                    return
                self._awake = True
        if patience_s is not None:
            self._write_now(piece, patience_s)
            return
        self._filled.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"pgworkd {self.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many, or the interpreter is ending
            self.write_directly(LAST_S)

    # Without a thread

    def begin_anew(self) -> None:
        """Empties the buffer in a forked child: its parent writes that; the child may have redirected its streams."""
        self._lock, self._fd, self._pieces, self._size, self._dropped = threading.RLock(), self._number, [], 0, 0
        self._writing, self._begun = threading.Lock(), bytearray()
        self.write_directly(LAST_S)

    def write_directly(self, patience_s: float) -> None:
        """Makes each write wait this long from now on, if the reader does not take more, and drop the rest."""
        with self._lock:  # what others print comes either into the buffer before, or is written by them
            self._patience_s = patience_s
        if not self._writing.acquire(timeout=patience_s):
            self._patience_s = 0.0
            return  # the thread waits for the reader, with what came before
        try:
            with self._lock:
                left, self._pieces = [*self._pieces, bytes(self._begun)], []
                self._begun.clear()
            for piece in left:
                self._write_now(piece, self._patience_s)
        finally:
            self._writing.release()

    def _write_now(self, piece: bytes, patience_s: float) -> None:
        for start in range(0, len(piece), PIECE_BYTES):
            try:
                if not _is_writable(self._fd, patience_s):
                    self._patience_s = 0.0
                    return
                os.write(self._fd, piece[start : start + PIECE_BYTES])
            except OSError:
                return

    @property
    def is_half_full(self) -> bool:
        return self._size >= BUFFER_BYTES // 2

    def drain(self, until: float) -> None:
        """Waits until all is written, or the time has come."""
        while self._size and not self.fails and self._patience_s is None and time.monotonic() < until:
            time.sleep(GATHER_S / 4)

    # In the thread

    def _run(self) -> None:
        while True:
            self._filled.wait()
            self._filled.clear()
            while self._take():
                time.sleep(AGAIN_S if self.fails else GATHER_S)

    def _take(self) -> bool:
        """Writes the buffer; False if there was nothing."""
        with self._writing:
            with self._lock:
                if not self._pieces and not self._dropped:
                    self._awake = False
                    return False
                data, self._pieces = b"".join(self._pieces), []
            rest = self._write_all(memoryview(data))
            with self._lock:
                self._size -= len(data) - len(rest)
                if rest:
                    self._pieces.insert(0, bytes(rest))
                # the log would drop the count itself
                dropped = 0 if self.fails or ("stderr" in _sinks and _sinks["stderr"].is_half_full) else self._dropped
                self._dropped -= dropped
        if dropped and on_recovery is not None:
            with contextlib.suppress(Exception):  # from a log that the application has configured
                on_recovery(self.name, dropped)
        return True

    def _write_all(self, data: memoryview) -> memoryview:
        """Writes a piece until writing fails; what is left."""
        while data:
            try:
                data = data[os.write(self._fd, self._piece(data)) :]
            except BlockingIOError:  # another program has set O_NONBLOCK for all that share it
                _is_writable(self._fd, AGAIN_S)
            except OSError:
                self.fails = True
                return data
            self.fails = False
        return data

    def _piece(self, data: memoryview) -> memoryview:
        """The first part to write: lines as a whole, or the first line."""
        most = self._room() if self._is_shared else len(data)  # others take all at once
        if len(data) <= most:
            return data
        end = bytes(data[:most]).rfind(b"\n") + 1
        return data[: end or (bytes(data).find(b"\n") + 1 or len(data))]

    def _room(self) -> int:
        """How much can be written without waiting in the middle of it, where other processes write, too."""
        try:
            size = fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ)
            request = termios.FIONREAD
        except OSError:  # a socket, as those of the journal, or a terminal
            size, request = EMPTY_BYTES * 4, termios.TIOCOUTQ
        with contextlib.suppress(OSError):
            if struct.unpack("i", fcntl.ioctl(self._fd, request, b"\0" * 4))[0] == 0:
                return max(PIECE_BYTES, min(EMPTY_BYTES, size // 4))
        return PIECE_BYTES


def _is_writable(descriptor: int, within_s: float) -> bool:
    """Whether a small write would not wait; waits for that. Raises OSError."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(within_s * 1000))


os.register_at_fork(after_in_child=_in_child)
