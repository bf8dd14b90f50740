"""SIGTERM and SIGINT that come before anyone is ready for them: a service told to stop while it starts has not failed.

Kept free of imports, because these handlers must stand before the slow ones begin.
"""

from __future__ import annotations

import signal
from typing import Any

_STOPS = (signal.SIGTERM, signal.SIGINT)
_state = {"asked": False, "raises": True}


class StopAsked(BaseException):
    """The process was asked to stop; no Exception, so that nothing on the way takes it for a failure."""


def stand_by() -> None:
    """From now on a stop signal raises StopAsked in the main thread, and SIGHUP, which would kill, does nothing."""
    for number in _STOPS:
        signal.signal(number, _heard)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def hold() -> None:
    """From now on a stop signal is only remembered, for `asked`, until someone else handles it."""
    _state["raises"] = False


def asked() -> bool:
    """True if a stop signal has come."""
    return _state["asked"]


def ignore() -> None:
    """From now on nothing interrupts what is left to do."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)


def _heard(*_: Any) -> None:
    _state["asked"] = True
    if _state["raises"]:
        raise StopAsked
