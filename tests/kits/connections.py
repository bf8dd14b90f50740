"""Connections to our own server of an application, and the answers that come over them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import anyio

from pgworkd.gateway.api.server import server
from tests.kits.daemon import LIMIT_S

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(application: Any) -> AsyncIterator[Streams]:
    """One connection to the application."""
    async with listening(application) as address:
        read, write = await asyncio.open_connection(*address)
        with anyio.fail_after(LIMIT_S):
            yield read, write
        write.close()


@contextlib.asynccontextmanager
async def listening(application: Any) -> AsyncIterator[tuple[str, int]]:
    """The address at which the application is served."""
    found = server(application, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(found.serve, [listener])
            yield listener.getsockname()
            found.request_stop()


async def answer(read: asyncio.StreamReader) -> bytes:
    """The body of the next answer."""
    head = (await read.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" not in head:
        return await read.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
    body = b""
    while size := int(await read.readline(), 16):
        body += await read.readexactly(size)
        assert await read.readline() == b"\r\n"
    assert await read.readline() == b"\r\n"
    return body
