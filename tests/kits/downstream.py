"""A server that jobs are sent to: it records each request, and answers as a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def answer_of(status: int, content: object = None, **headers: str) -> bytes:
    """The bytes of an answer; `content`: bytes, or a value as JSON; in names of headers, _ stands for -."""
    body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
    kind = {} if content is None or isinstance(content, bytes) else {"content_type": "application/json"}
    given = {**kind, **headers, "content_length": str(len(body))}
    lines = [f"HTTP/1.1 {status} x", *(f"{name.replace('_', '-')}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def headers_of(request: bytes) -> dict[str, str]:
    """The headers of a request, by their names in lower case."""
    head = request.partition(b"\r\n\r\n")[0].decode("latin-1")
    pairs = [line.partition(":") for line in head.split("\r\n")[1:]]
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def message_of(request: bytes) -> dict[str, Any]:
    """The JSON of a request."""
    found: dict[str, Any] = json.loads(request.partition(b"\r\n\r\n")[2])
    return found


class Downstream:
    """A server that answers each request with the same bytes, or as `act` says."""

    def __init__(
        self,
        answer: bytes | Callable[[bytes], bytes | Awaitable[bytes]] = OK,
        act: Callable[[Writer], Awaitable[None]] | None = None,
    ) -> None:
        """`answer`: what to answer, or what says so of a request; `act`: does something else, and ends."""
        self.answer, self.act = answer, act
        self.requests: list[bytes] = []
        self.connections = 0
        self.port = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.writers: list[Writer] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}/jobs"

    def accept(self, reader: Reader, writer: Writer) -> None:
        """One connection more."""
        self.writers.append(writer)
        self.tasks.add(asyncio.get_running_loop().create_task(self.serve(reader, writer)))

    async def serve(self, reader: Reader, writer: Writer) -> None:
        """One connection."""
        self.connections += 1
        with (
            contextlib.closing(writer),
            contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError),
        ):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                if self.act is not None:
                    await self.act(writer)
                    break
                answer = self.answer if isinstance(self.answer, bytes) else self.answer(self.requests[-1])
                writer.write(answer if isinstance(answer, bytes) else await answer)
                await writer.drain()


@contextlib.asynccontextmanager
async def serving(down: Downstream, tls: ssl.SSLContext | None = None) -> AsyncIterator[Downstream]:
    """It listens."""
    server = await asyncio.start_server(down.accept, "127.0.0.1", 0, ssl=tls)
    down.port = server.sockets[0].getsockname()[1]
    try:
        yield down
    finally:
        server.close()
        for task in down.tasks:
            task.cancel()
        if down.tasks:
            await asyncio.wait(down.tasks)
        for writer in down.writers:  # a task that had not begun has not closed its own
            writer.close()
