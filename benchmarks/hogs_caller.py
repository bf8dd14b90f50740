"""Callers of a gateway, some of whom are hostile: python -m benchmarks.hogs_caller WHAT URL COUNT SECONDS TOKEN

fair: so many clients that create jobs 20 times a second, + so many workers that beat twice a second; prints the 99th
percentile of either in ms, and ends with 1 if any call is refused. drip: streams of jobs, a row each 0.1 s. flood: the
same as fast as the gateway takes them. none: nothing. follow: so many that follow all lists. These print ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from functools import partial
from urllib.parse import urlsplit

import uvloop

from .caller import Connection

ROW = json.dumps({"queue": "hostile", "payload": {"text": "x" * 70}}).encode() + b"\n"
CREATES_S, BEATS_S = 0.05, 0.5


async def _timed(connection: Connection, every_s: float, until: float, times_s: list[float], call: partial) -> None:  # type: ignore[type-arg]
    due = time.monotonic()
    while due < until:
        began = time.monotonic()
        await call(connection)
        times_s.append(time.monotonic() - began)
        due += every_s
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def fair(url: str, count: str, seconds: float, token: str) -> None:
    """Clients and workers that keep to their pace."""
    clients, workers = map(int, count.split("+"))
    created: list[float] = []
    beaten: list[float] = []
    body = json.dumps({"queue": "new", "payload": {"text": "x" * 70}}).encode()
    async with asyncio.TaskGroup() as registering:
        registered = [registering.create_task(_register(url, token, number)) for number in range(workers)]
    calls = [(each.result()[0], BEATS_S, beaten, each.result()[1]) for each in registered]
    create = partial(_create, body=body)
    calls += [(await Connection(url, token).open(), CREATES_S, created, create) for _ in range(clients)]
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        for number, (connection, every_s, times_s, call) in enumerate(calls):
            await asyncio.sleep(BEATS_S / len(calls) if number % 8 == 0 else 0)
            tasks.create_task(_timed(connection, every_s, until, times_s, call))
    print(*(1000 * sorted(each)[int(0.99 * len(each))] for each in (created, beaten)))


async def _register(url: str, token: str, number: int) -> tuple[Connection, partial]:  # type: ignore[type-arg]
    """The connection of a new worker, and the beat that it sends there."""
    connection = await Connection(url, token).open()
    wanted = {"name": f"w{number}", "queues": {"idle": 1}, "lease_s": 30}
    made = json.loads(await connection.call("POST", "/v1/workers", json.dumps(wanted).encode()))
    head = f"Pgworkd-Secret: {made['secret']}\r\n"
    return connection, partial(_beat, path=f"/v1/workers/{made['worker']}/beat", head=head)


async def _create(connection: Connection, body: bytes) -> None:
    await connection.call("POST", "/v1/jobs", body)


async def _beat(connection: Connection, path: str, head: str) -> None:
    await connection.call("POST", path, b'{"assignments":[]}', head)


async def stream(url: str, token: str, pause_s: float) -> None:
    """One stream of jobs after the other; a refused one is tried again at once."""
    at = urlsplit(url)
    head = f"POST /v1/jobs/stream HTTP/1.1\r\nHost: {at.netloc}\r\nAuthorization: Bearer {token}\r\n"
    head += "Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
    rows = ROW if pause_s else ROW * 100
    chunk = f"{len(rows):x}\r\n".encode() + rows + b"\r\n"

    async def send(write: asyncio.StreamWriter) -> None:
        write.write(head.encode())
        while True:
            write.write(chunk)
            await write.drain()
            await asyncio.sleep(pause_s)

    while True:
        read, write = await asyncio.open_connection(at.hostname, at.port)
        with contextlib.suppress(ExceptionGroup):  # the connection is closed
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(send(write))
                await read.read(1)
                sending.cancel()
        write.close()
        await asyncio.sleep(0.1)


async def follow(url: str, token: str) -> None:
    """Follows all lists for ever."""
    at = urlsplit(url)
    read, write = await asyncio.open_connection(at.hostname, at.port)
    head = f"GET /v1/events?of=queues&of=audit HTTP/1.1\r\nHost: {at.netloc}\r\nAuthorization: Bearer {token}\r\n\r\n"
    write.write(head.encode())
    if not (await read.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200"):
        raise RuntimeError("the lists cannot be followed")
    while await read.read(1 << 16):
        pass
    raise RuntimeError("the stream of lists has ended")


async def main(what: str, url: str, count: str, seconds: float, token: str) -> None:
    """Calls until the time is up."""
    if what == "fair":
        await fair(url, count, seconds, token)
        return
    calls = {"drip": partial(stream, pause_s=0.1), "flood": partial(stream, pause_s=0.0), "follow": follow}
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(calls[what](url, token)) for _ in range(int(count)) if what in calls]
        await asyncio.sleep(2)
        print("ready", flush=True)
        await asyncio.sleep(seconds)
        for each in started:
            each.cancel()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5]))
