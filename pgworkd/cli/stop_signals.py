"""SIGTERM and SIGINT during the start: a service that is stopped while it starts must exit with 0.

Free of imports, because these handlers must be installed before the slow imports begin.
"""

from __future__ import annotations

import signal
from typing import Any

_STOPS = (signal.SIGINT, signal.SIGTERM)
"""In this order: who sees that SIGTERM is caught may send either."""
_state = {"asked": False, "raises": True}


class StopAsked(BaseException):
    """The process was asked to stop. Not an Exception, so that no handler on the way mistakes it for a failure."""


def stand_by() -> None:
    """From now on a stop signal raises StopAsked in the main thread, and SIGHUP, which would kill, does nothing."""
    for number in _STOPS:
        signal.signal(number, _received)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def hold() -> None:
    """From now on a stop signal is only recorded, for `asked`, until other handlers are installed."""
    _state["raises"] = False


def asked() -> bool:
    """True if a stop signal has been received."""
    return _state["asked"]


def ignore() -> None:
    """From now on stop signals are ignored: they would only interrupt the exit."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)


def _received(*_: Any) -> None:
    _state["asked"] = True
    if _state["raises"]:
        raise StopAsked
