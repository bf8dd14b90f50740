"""Addresses that do not serve as they should, on loopback: what stands beside the right one in a list of hosts.

refused   nobody listens
silent    packets are dropped: a listener whose backlog is full, so that no connection is made
frozen    connections are accepted, and nothing is answered
standby   a server that only reads: the right one, with sessions that cannot write
closing   connections are accepted, and closed
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.kits.server import free_port

WRONG = ("refused", "silent", "frozen", "closing", "standby")
_READ_ONLY = b"default_transaction_read_only\0on\0"


@contextlib.contextmanager
def silent(port: int = 0, host: str = "127.0.0.1") -> Iterator[int]:
    """A port that drops what is sent to it."""
    with contextlib.ExitStack() as opened:
        listening = opened.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(0)
        there = listening.getsockname()
        for _ in range(4):
            filling = opened.enter_context(socket.socket(listening.family))
            filling.setblocking(False)
            filling.connect_ex(there)
        yield int(there[1])


class Wrong:
    """All of them, beside the server at `dsn`; `at` has where each is, as in a DSN."""

    def __init__(self, dsn: str) -> None:
        url = urlsplit(dsn)
        self._right, self.dsn = (url.hostname or "", url.port or 0), dsn
        self.at = {"right": f"{url.hostname}:{url.port}"}
        self.asked: list[str] = []
        """The kinds of those to which a connection was made, in order."""
        self._writers: list[asyncio.StreamWriter] = []

    def of(self, *kinds: str, query: str = "") -> str:
        """A DSN with these kinds as its hosts."""
        url = urlsplit(self.dsn)
        hosts = ",".join(self.at[kind] for kind in kinds)
        return f"postgresql://{url.username}:{url.password}@{hosts}{url.path}?{query}".rstrip("?")

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Wrong]:
        self.at["refused"] = f"127.0.0.1:{free_port()}"
        servers = {kind: getattr(self, f"_{kind}") for kind in ("frozen", "closing", "standby")}
        async with contextlib.AsyncExitStack() as opened:
            self.at["silent"] = f"127.0.0.1:{opened.enter_context(silent())}"
            for kind, serve in servers.items():
                server = await asyncio.start_server(serve, "127.0.0.1", 0)
                opened.callback(server.close)
                self.at[kind] = "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
            try:
                yield self
            finally:
                for writer in self._writers:
                    writer.transport.abort()

    async def _frozen(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append("frozen")
        self._writers.append(writer)

    async def _closing(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append("closing")
        await reader.read(1)
        writer.close()

    async def _standby(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append("standby")
        self._writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            (length,) = struct.unpack("!I", await reader.readexactly(4))
            startup = await reader.readexactly(length - 4)
            if len(startup) == 4:  # SSLRequest
                writer.write(b"N")
                (length,) = struct.unpack("!I", await reader.readexactly(4))
                startup = await reader.readexactly(length - 4)
            answers, back = await asyncio.open_connection(*self._right)
            self._writers.append(back)
            changed = startup[:-1] + _READ_ONLY + startup[-1:]
            back.write(struct.pack("!I", len(changed) + 4) + changed)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, back))
                both.create_task(_pump(answers, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


def name_resolves(monkeypatch: pytest.MonkeyPatch, **names: list[str]) -> None:
    """Names below .example have these addresses, in this process."""
    real = socket.getaddrinfo

    def ours(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        found = names.get(str(host).removesuffix(".example"))
        if found is None or not str(host).endswith(".example"):
            return real(host, port, *args, **options)
        return [each for address in found for each in real(address, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", ours)
