"""What our own server notes of a request and its caller in its scope; below another server these are not there.

Both spare a request the cancel scope that asking the server needs: of a claim, the tenth part of all its time.
"""

from __future__ import annotations

from contextvars import ContextVar

from fastapi import Request

IS_CLOSING = "pgworkd.is_closing"
"""The key of a function: whether the connection is closed, or about to be."""
ON_CLOSING = "pgworkd.on_closing"
"""The key of a list of functions that are called when the caller says that it sends no more, or has gone."""
FROM_PROXY = "pgworkd.from_proxy"
"""The key that is there if a proxy that we trust has sent the request: its headers say who calls."""
HAS_ARRIVED = "pgworkd.has_arrived"
"""The key that is there if the whole body is: `receive` returns it at once."""

IS_HEAD = "pgworkd.is_head"
"""The key that is there if only the headers of the answer are wanted: nothing may be used up by that."""
CALLER = ContextVar("caller", default="")
"""The name of the token by which the request of this task was allowed."""


async def is_gone(request: Request) -> bool:
    """Whether the caller has hung up."""
    is_closing = request.scope.get(IS_CLOSING)
    return await request.is_disconnected() if is_closing is None else bool(is_closing())
