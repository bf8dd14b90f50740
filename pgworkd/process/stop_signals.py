"""The signals that stop a program or reload its settings, from its start to its end.

SIGTERM and SIGINT stop; a service that is stopped while it starts must exit with 0. SIGHUP reloads, but stops once if
the terminal of this program is gone: then the kernel sends it, and a shell may send it again. Under nohup, which has
SIGHUP ignored, it never stops.

Free of slow imports, because these handlers must be installed before those begin.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from pgworkd.process import forks

_STOPS = (signal.SIGINT, signal.SIGTERM)
"""The signals that stop, in this order: who sees that SIGTERM is caught may send either."""
_state = {"ours": False, "asked": False, "raises": True, "terminal": False, "hung up": False}


class StopAsked(BaseException):
    """The process was asked to stop. Not an Exception, so that no handler on the way mistakes it for a failure."""


def stand_by() -> None:
    """Makes a stop signal raise StopAsked in the main thread from now on; SIGHUP, which would kill, does nothing."""
    _state["ours"] = True
    _state["terminal"] = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    _handle(_received)


def run(program: Callable[..., Awaitable[Any]], *args: object, **options: Any) -> Any:
    """Runs like anyio.run. Stop signals before `received` are kept for it; those after the program are ignored."""
    import anyio

    async def whole() -> Any:
        try:
            return await program(*args)
        finally:
            ignore()

    _state["raises"] = False
    return anyio.run(whole, **options)


def ignore() -> None:
    """Ignores stop signals from now on: they would only interrupt the exit, whose time is limited."""
    if _state["ours"]:
        _handle(signal.SIG_IGN)


@contextlib.contextmanager
def received(*, reloads: bool = False) -> Iterator[AsyncIterator[signal.Signals]]:
    """Yields the signals that arrive in an event loop while the block lasts, or came before it.

    SIGTERM or SIGINT for each request to stop, of which the loss of the terminal is one. SIGHUP, where `reloads`: to
    reload the settings; else it does nothing more.
    """
    import anyio

    with anyio.open_signal_receiver(*_STOPS, signal.SIGHUP) as signals:
        forks.handle_signals(*_STOPS, signal.SIGHUP)
        yield _Requests(signals, reloads=reloads)


class _Requests:
    def __init__(self, signals: AsyncIterator[signal.Signals], *, reloads: bool) -> None:
        self._signals, self._reloads, self._asked = signals, reloads, _state["asked"]

    def __aiter__(self) -> AsyncIterator[signal.Signals]:
        return self

    async def __anext__(self) -> signal.Signals:
        asked, self._asked = self._asked, False
        if asked:
            return signal.SIGTERM
        while True:
            meant = _meant(await anext(self._signals))
            if meant in _STOPS or (meant is not None and self._reloads):
                return meant


def _handle(handler: Any) -> None:
    for number in (*_STOPS, signal.SIGHUP):
        signal.signal(number, handler)
    forks.handle_signals(*_STOPS, signal.SIGHUP)


def _meant(number: signal.Signals) -> signal.Signals | None:
    """The request that a signal makes; None: it tells again of a terminal that was lost before."""
    if number is not signal.SIGHUP or not _state["terminal"] or _has_terminal():
        return number
    was, _state["hung up"] = _state["hung up"], True
    return None if was else signal.SIGTERM


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno not in (errno.ENXIO, errno.EIO, errno.ENOENT)
    return True


def _received(number: int, _: Any) -> None:
    if _meant(signal.Signals(number)) not in _STOPS:
        return
    again, _state["asked"] = _state["asked"], True
    if _state["raises"] and not again:  # a second one would only break off what follows the first
        raise StopAsked
