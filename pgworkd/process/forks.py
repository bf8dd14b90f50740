"""What a forked child must not keep of this process: handlers may fork, by multiprocessing or libraries on top of it.

A child has copies of all descriptors, signal handlers and the wake-up descriptor of the event loop. A signal sent to
the child would reach the loop of the parent, and sessions and listening sockets would live as long as the child. So in
each child signals have their default action again, and descriptors of ours lead to /dev/null: they stay open, because
an object that still refers to one would close a number that is in use again. Programs that a process executes inherit
none of this. A fork in C code that does not call Python's hooks is not noticed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol


class HasFileno(Protocol):
    """A socket, or what a transport shows of one."""

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed."""


generation = 0
"""How many forks lie between the first process that imported this module and this one: rises in the child only."""
Descriptor = tuple[int, tuple[int, int] | None]
"""A descriptor: its number, and what it leads to (device, inode): once closed, the number may be used for another."""
_ours: dict[int, tuple[int, int]] = {}
CONNECTING, TCP_SYN_SENT = "connecting", b"\2"
_peers: set[Any] = {CONNECTING}
"""The addresses where our connections lead."""
_opening: list[set[Descriptor]] = []
"""The descriptors that were open before each connection that is being opened."""
_handlers: dict[signal.Signals, Any] = {}
"""The signals that this program handles, and the handler that does."""
_masks: dict[int, tuple[set[int | signal.Signals], Any]] = {}
"""The signal mask and the running event loop of each thread that is forking."""
_passing: ContextVar[tuple[int, ...]] = ContextVar("passing", default=())
"""The descriptors that a process that is forked in this context keeps."""


def keep_private(what: HasFileno | int | None, *, opened: bool = False) -> None:
    """Makes each child that is forked from now on find /dev/null in the place of this open socket or descriptor.

    It need not be taken back when that is closed; what is closed already, or None, is ignored. `opened`: a connection
    that was opened within `opening`.
    """
    if what is None:
        return
    descriptor = what if isinstance(what, int) else what.fileno()
    if (leads_to := _identity(descriptor)) is not None:
        _ours[descriptor] = leads_to
        if opened and (peer := _peer_of(descriptor)) is not None:
            _peers.add(peer)


@contextlib.contextmanager
def opening() -> Iterator[None]:
    """Notes that a connection is being opened, perhaps where others lead: private before `keep_private` can name it."""
    before = _open_descriptors()
    _opening.append(before)
    try:
        yield
    finally:
        _opening.remove(before)


@contextlib.contextmanager
def passing(*descriptors: int) -> Iterator[None]:
    """Lets this task execute a program, within the block, that keeps these private descriptors; other forks do not.

    For uvloop, which calls Python's hooks for the fork before an execution, as if a handler had forked.
    """
    token = _passing.set(descriptors)
    try:
        yield
    finally:
        _passing.reset(token)


def handle_signals(*numbers: signal.Signals) -> None:
    """Notes that the present handlers of these signals are ours: a child has the default action instead."""
    _handlers.update((number, signal.getsignal(number)) for number in numbers)


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Calls a function. A child that it forks, and that returns or raises in its turn, ends here; see `leave`."""
    here = generation
    try:
        result = function(**arguments)
    except BaseException as error:
        stay(here, error)
        raise
    stay(here)
    return result


def stay(here: int, error: BaseException | None = None) -> None:
    """Returns in the process whose `generation` this is; its forked children end, see `leave`."""
    if generation != here:
        leave(error)


def leave(error: BaseException | None) -> NoReturn:
    """Ends a forked child that comes back to what only its parent may go on with; the exit code is that of `error`."""
    code = error.code if isinstance(error, SystemExit) else None if error is None else 1
    try:
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whatever the streams are
        os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:  # it is closed
        return None
    return found.st_dev, found.st_ino


def _peer_of(descriptor: int) -> Any:
    """The address that a socket is connected to; CONNECTING while it is not yet, and None for any other descriptor."""
    with contextlib.suppress(OSError), contextlib.closing(_socket_of(descriptor)) as copy:
        if copy.family == socket.AF_UNIX:
            return copy.getpeername() or None
        is_connecting = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == TCP_SYN_SENT
        return CONNECTING if is_connecting else copy.getpeername()
    return None


def _socket_of(descriptor: int) -> socket.socket:
    """A copy of a socket's descriptor. Raises OSError unless it is a socket."""
    copied = os.dup(descriptor)
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise


def _open_descriptors() -> set[Descriptor]:
    try:
        numbers = map(int, os.listdir("/proc/self/fd"))  # noqa: PTH208 - their names suffice
    except OSError:  # not on Linux, or all are used up
        return set()
    return {(number, _identity(number)) for number in numbers}


def _before() -> None:
    if _handlers:  # a signal that reaches the child before it has its own action would reach the parent, too
        asyncio: Any = sys.modules.get("asyncio")
        loop = None if asyncio is None else asyncio._get_running_loop()  # noqa: SLF001 - documented
        _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, _handlers), loop


def _in_parent() -> None:
    if (kept := _masks.pop(threading.get_ident(), None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept[0])


def _in_child() -> None:
    global generation  # noqa: PLW0603 - of this process
    generation += 1
    mask, loop = _masks.get(threading.get_ident(), (None, None))
    _masks.clear()
    if _handlers:
        signal.set_wakeup_fd(-1)
    for number, handler in _handlers.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    _handlers.clear()
    for descriptor in _passing.get():
        _ours.pop(descriptor, None)
    _blank()
    if loop is not None:
        loop.call_soon(_stray)  # a copy of the loop would be a second daemon under the same registration
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _blank() -> None:
    """Makes our descriptors lead to /dev/null."""
    numbers = [number for number, leads_to in _ours.items() if _identity(number) == leads_to] + _half_open()
    _ours.clear()
    _opening.clear()
    if not numbers:
        return
    os.close(numbers[0])  # so that there is room for one more where all are used up
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
    except OSError:  # no /dev
        for number in numbers[1:]:
            os.close(number)
        return
    for number in numbers:
        if number != nothing:
            os.dup2(nothing, number, inheritable=False)
    if nothing not in numbers:
        os.close(nothing)


def _half_open() -> list[int]:
    """Connections of ours that are not finished: new ones to a place that others lead to."""
    if not _opening:
        return []
    before = set.intersection(*_opening)
    return [number for number, _ in _open_descriptors() - before if _peer_of(number) in _peers]


def _stray() -> None:
    sys.stderr.write("pgworkd: a forked child has come back to the event loop of its parent: end it by os._exit()\n")
    leave(SystemExit(1))


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
