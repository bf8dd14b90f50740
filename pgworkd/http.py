"""The gateway as an ASGI application, for a server or below another application: `asgi`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgworkd.gateway.api.app import asgi

__all__ = ["asgi"]


def __getattr__(name: str) -> Any:
    """Imports `asgi` when it is first used."""
    if name != "asgi":
        raise AttributeError(f"module 'pgworkd.http' has no attribute {name!r}")
    from pgworkd.gateway.api.app import asgi

    return asgi


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
