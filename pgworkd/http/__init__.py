"""The gateway: HTTP for producers, workers and operators. Each route is a few lines over a verb.

server    uvicorn, with limits on what it reads        request   what each request goes through
app       asgi: the application, for a server or       routes    jobs bulk batches operate queues schedules fleet
          below another application                              events tokens workers assignments service
                                                       models    what requests and answers look like
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgworkd.http.app import asgi

__all__ = ["asgi"]


def __getattr__(name: str) -> Any:
    """Imports `asgi` when it is first used."""
    if name != "asgi":
        raise AttributeError(f"module 'pgworkd.http' has no attribute {name!r}")
    from pgworkd.http.app import asgi

    return asgi


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
