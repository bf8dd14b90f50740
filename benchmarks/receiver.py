"""A service that jobs are pushed to, and that does nothing: python -m benchmarks.receiver PORT

POST /hang is never answered, any other POST with 204. GET /report tells how many came, from when to when (seconds on
the monotonic clock of this process), and how long after they were due; GET /reset forgets them.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from datetime import datetime

import uvloop

DONE = b"HTTP/1.1 204 No Content\r\n\r\n"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: (\d+)")
_DUE = re.compile(rb'"run_at":"([^"]+)"')


class Receiver:
    """What has come."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets it."""
        self.arrivals: list[float] = []
        self.waits_ms: list[float] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                writer.write(await self.answer(head, body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, head: bytes, body: bytes) -> bytes:
        """The answer to one request."""
        if head.startswith(b"POST /hang"):
            await asyncio.sleep(3600)
        if head.startswith(b"POST"):
            self.arrivals.append(time.monotonic())
            if due := _DUE.search(body):
                self.waits_ms.append((time.time() - datetime.fromisoformat(due[1].decode()).timestamp()) * 1000)
            return DONE
        text = json.dumps(self.report()).encode()
        if head.startswith(b"GET /reset"):
            self.reset()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text

    def report(self) -> dict[str, float]:
        """As `GET /report` tells it."""
        waits = sorted(self.waits_ms) or [0.0]
        first, last = (self.arrivals[0], self.arrivals[-1]) if self.arrivals else (0.0, 0.0)
        percentiles = {f"p{at}": waits[min(len(waits) - 1, len(waits) * at // 100)] for at in (50, 99)}
        return {"count": len(self.arrivals), "took_s": last - first, **percentiles}


async def main(port: int) -> None:
    """Until killed."""
    server = await asyncio.start_server(Receiver().serve, "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
