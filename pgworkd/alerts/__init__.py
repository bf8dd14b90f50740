"""Messages about dead jobs: alerts at once, and digests; by mail, or to a function of the application.

alert    Alert: a group of errors that is new, or of which many jobs died      recipient  who gets a message
digest   Digest: all that is wrong in the database, on a schedule              mail       SMTP, with TLS
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgworkd.alerts.alert import Alert
    from pgworkd.alerts.digest import Digest

__all__ = ["Alert", "Digest"]


def __getattr__(name: str) -> Any:
    """Imports what is asked for: an application without alerts needs none of it."""
    if name == "Alert":
        from pgworkd.alerts.alert import Alert

        return Alert
    if name == "Digest":
        from pgworkd.alerts.digest import Digest

        return Digest
    raise AttributeError(f"module 'pgworkd.alerts' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
