"""The demo's downstream: a small, unreliable HTTP/1.1 server, and the client that calls it.

Both use real sockets and implement just enough of HTTP for a POST with a length: no chunks, no TLS, one
request per connection.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream, TaskStatus
from anyio.streams.buffered import BufferedByteReceiveStream

HOST = "127.0.0.1"
HEAD_MAX = 8 * 1024
BODY_MAX = 64 * 1024
REQUEST_S_MAX = 5.0
SLOW_S = 3.0
"""How long, in seconds, a slow answer takes: longer than the demo's timeout."""
RETRY_AFTER_S = 1
KEYS_MAX = 100_000
_MOODS = ("ok",) * 14 + ("busy",) * 2 + ("broken",) * 2 + ("slow",) * 2
_WORDS = {200: "OK", 400: "Bad Request", 429: "Too Many Requests", 500: "Internal Server Error"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A response; the names of `headers` are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def moods(seed: int = 7) -> Iterator[str]:
    """Endless: "ok" 70 %, "busy" (429), "broken" (500) and "slow" 10 % each."""
    rng = random.Random(seed)  # noqa: S311 # nosec B311 # bad luck is no secret
    while True:
        yield rng.choice(_MOODS)


class Downstream:
    """Accepts notices with an Idempotency-Key and counts its answers."""

    def __init__(self, mood: Iterator[str] | None = None, slow_s: float = SLOW_S) -> None:
        self.port = 0
        self.answered: Counter[str] = Counter()
        """By mood; "slow" are calls that timed out before the answer, "bad" are unreadable requests."""
        self.accepted: set[str] = set()
        """The keys of the accepted notices, each once however often it was sent."""
        self._mood = mood or moods()
        self._slow_s = slow_s

    async def serve(self, *, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listens on a free port of the loopback until cancelled; passes the port to `task_status`."""
        async with await anyio.create_tcp_listener(local_host=HOST, local_port=0) as listener:
            self.port = int(listener.extra_attributes[SocketAttribute.local_port]())
            task_status.started(self.port)
            await listener.serve(self._talk)

    async def _talk(self, stream: SocketStream) -> None:
        async with stream:
            try:
                with anyio.fail_after(REQUEST_S_MAX):
                    buffered = BufferedByteReceiveStream(stream)
                    _, headers, _ = await _receive(buffered)
                    key = headers["idempotency-key"]
                await self._respond(stream, buffered, key)
            except (KeyError, ValueError, anyio.DelimiterNotFound):
                self.answered["bad"] += 1
                await _send_answer(stream, 400)
            except (TimeoutError, anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
                self.answered["bad"] += 1  # the caller is gone, or sent nothing

    async def _respond(self, stream: ByteStream, buffered: BufferedByteReceiveStream, key: str) -> None:
        mood = next(self._mood)
        if mood == "slow":
            with anyio.move_on_after(self._slow_s):
                try:
                    await buffered.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    self.answered["slow"] += 1  # the caller timed out: nothing was accepted
                    return
            mood = "ok"
        self.answered[mood] += 1
        if mood == "busy":
            await _send_answer(stream, 429, f"Retry-After: {RETRY_AFTER_S}\r\n")
        elif mood == "broken":
            await _send_answer(stream, 500)
        else:
            if len(self.accepted) < KEYS_MAX:
                self.accepted.add(key)
            await _send_answer(stream, 200)


async def post(port: int, path: str, body: bytes, key: str) -> Answer:
    """Sends one POST to the loopback and returns the answer; ConnectionError if there is none.

    It has no timeout of its own: callers set one.
    """
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nIdempotency-Key: {key}\r\nConnection: close\r\n\r\n"
    )
    try:
        async with await anyio.connect_tcp(HOST, port) as stream:
            await stream.send(head.encode("ascii") + body)
            first, headers, content = await _receive(BufferedByteReceiveStream(stream))
            return Answer(int(first.split(" ")[1]), headers, content)
    except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
        raise ConnectionError("the downstream closed the connection") from error
    except (IndexError, ValueError, anyio.DelimiterNotFound) as error:
        raise ConnectionError("the downstream does not speak HTTP") from error


async def _receive(buffered: BufferedByteReceiveStream) -> tuple[str, dict[str, str], bytes]:
    """The first line, headers and body of a message; ValueError if it is malformed or too long."""
    first, *lines = (await buffered.receive_until(b"\r\n\r\n", HEAD_MAX)).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if " HTTP/1." not in f" {first}":
        raise ValueError("not HTTP/1")
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= BODY_MAX:
        raise ValueError("the body is too large")
    return first, headers, await buffered.receive_exactly(length)


async def _send_answer(stream: ByteStream, status: int, more: str = "") -> None:
    head = f"HTTP/1.1 {status} {_WORDS[status]}\r\nContent-Length: 0\r\nConnection: close\r\n{more}\r\n"
    try:
        await stream.send(head.encode("ascii"))
    except anyio.BrokenResourceError:
        return  # the caller is gone
