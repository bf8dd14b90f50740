"""Requests to servers of this host, sent as jobs are pushed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from pgworkd.push.answer import EndpointAnswer
from pgworkd.push.guard import check_url
from pgworkd.push.sender import Sender


@contextlib.asynccontextmanager
async def sending(**options: Any) -> AsyncIterator[Sender]:
    """A sender that may reach this host."""
    sender = Sender(**{"allow_private": True} | options)
    try:
        yield sender
    finally:
        sender.close()


async def post(
    sender: Sender, port: int, limit_s: float = 5.0, *, scheme: str = "http", host: str = "127.0.0.1", **headers: str
) -> EndpointAnswer:
    """Posts a little JSON."""
    return await sender.post(check_url(f"{scheme}://{host}:{port}/in?a=b", allow_private=True), headers, b"{}", limit_s)
