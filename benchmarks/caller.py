"""Callers of an HTTP server, as fast as they can: python -m benchmarks.caller WHAT URL CLIENTS SECONDS [TOKEN]

empty: GET /. enqueueing: create a job. single: claim one job, complete it. batched: claim a hundred, settle them in
one call. proxied-single and proxied-batched: the same by the routes of pg-boss' proxy. Prints requests, jobs and
seconds. A process of its own with a client that does little, so that the server is what is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import uvloop

BATCH = 100
QUEUE = "bench"


class Connection:
    """One connection that is kept; one request at a time."""

    def __init__(self, url: str, token: str = "") -> None:
        self._at = urlsplit(url)
        self._head = f"Host: {self._at.netloc}\r\n"
        if token:
            self._head += f"Authorization: Bearer {token}\r\n"

    async def open(self) -> Connection:
        """Connects."""
        self._read, self._write = await asyncio.open_connection(self._at.hostname, self._at.port)
        return self

    async def call(self, method: str, path: str, body: bytes = b"", head: str = "") -> bytes:
        """The body of the answer, which must be a success."""
        kind = "Content-Type: application/json\r\n" if body else ""
        lines = f"{method} {path} HTTP/1.1\r\n{self._head}{kind}{head}Content-Length: {len(body)}\r\n\r\n"
        self._write.write(lines.encode() + body)
        answer = await self._read.readuntil(b"\r\n\r\n")
        at = answer.lower().index(b"content-length:") + 15
        text = await self._read.readexactly(int(answer[at : answer.index(b"\r\n", at)]))
        if not answer.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"{method} {path}: {answer[:15].decode()} {text[:500].decode()}")
        return text


class Counts:
    """What all callers have done."""

    requests = jobs = 0


async def empty(url: str, until: float, counts: Counts, _: str) -> None:
    """Requests that do nothing."""
    connection = await Connection(url).open()
    while time.monotonic() < until:
        await connection.call("GET", "/")
        counts.requests += 1


async def single(url: str, until: float, counts: Counts, token: str) -> None:
    """One job at a time, by a worker with one slot."""
    connection = await Connection(url, token).open()
    claim, head = await _registered(connection, 1)
    while time.monotonic() < until:
        claimed = json.loads(await connection.call("POST", "/v1/claims", claim, head))["assignments"]
        counts.requests += 1
        for each in claimed:
            await connection.call("POST", f"/v1/assignments/{each['assignment']}/complete", b"{}")
            counts.requests += 1
            counts.jobs += 1


async def enqueueing(url: str, until: float, counts: Counts, token: str) -> None:
    """One job to create at a time."""
    connection = await Connection(url, token).open()
    body = json.dumps({"queue": "new", "payload": {"number": 1000000, "text": "x" * 70}}).encode()
    while time.monotonic() < until:
        await connection.call("POST", "/v1/jobs", body)
        counts.requests += 1
        counts.jobs += 1


async def batched(url: str, until: float, counts: Counts, token: str) -> None:
    """A hundred jobs at a time."""
    connection = await Connection(url, token).open()
    claim, head = await _registered(connection, BATCH)
    while time.monotonic() < until:
        claimed = json.loads(await connection.call("POST", "/v1/claims", claim, head))["assignments"]
        settles = [{"assignment": each["assignment"], "outcome": "complete"} for each in claimed]
        counts.requests += 1
        if settles:
            answer = await connection.call("POST", "/v1/settlements", json.dumps({"settlements": settles}).encode())
            done = sum(each["status"] == "completed" for each in json.loads(answer)["settlements"])
            counts.requests += 1
            counts.jobs += done


async def proxied(url: str, until: float, counts: Counts, _: str, most: int = 1) -> None:
    """Jobs of pg-boss, so many at a time."""
    connection = await Connection(url).open()
    fetch = json.dumps({"name": QUEUE, "options": {"batchSize": most}}).encode()
    while time.monotonic() < until:
        fetched = json.loads(await connection.call("POST", "/api/fetch", fetch))["result"]
        counts.requests += 1
        if fetched:
            done = {"name": QUEUE, "id": [each["id"] for each in fetched]}
            await connection.call("POST", "/api/complete", json.dumps(done).encode())
            counts.requests += 1
            counts.jobs += len(fetched)


async def _registered(connection: Connection, slots: int) -> tuple[bytes, str]:
    """The body of a claim of a new worker, and the header of its calls."""
    body = json.dumps({"name": "bench", "queues": {QUEUE: slots}, "lease_s": 3600}).encode()
    made: dict[str, Any] = json.loads(await connection.call("POST", "/v1/workers", body))
    claim = {"worker": made["worker"], "queues": [QUEUE], "max": slots, "wait_s": 1}
    return json.dumps(claim).encode(), f"Pgworkd-Secret: {made['secret']}\r\n"


async def idle(url: str, workers: int, seconds: float, token: str) -> None:
    """Workers that wait for jobs of ten queues that never come, and beat three times per lease of 30 s."""
    ready = asyncio.Event()
    opened = 0

    async def worker(number: int) -> None:
        nonlocal opened
        waits, beats = await Connection(url, token).open(), await Connection(url, token).open()
        queue = f"idle{number % 10}"
        body = json.dumps({"name": f"idle {number}", "queues": {queue: 1}, "lease_s": 30}).encode()
        made = json.loads(await beats.call("POST", "/v1/workers", body))
        head = f"Pgworkd-Secret: {made['secret']}\r\n"
        claim = json.dumps({"worker": made["worker"], "queues": [queue], "wait_s": 60}).encode()

        async def wait() -> None:
            while True:
                await waits.call("POST", "/v1/claims", claim, head)

        async def beat() -> None:
            while True:
                await asyncio.sleep(10)
                await beats.call("POST", f"/v1/workers/{made['worker']}/beat", b'{"assignments":[]}', head)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait())
            tasks.create_task(beat())
            opened += 1
            if opened == workers:
                ready.set()

    async with asyncio.TaskGroup() as tasks:
        started = []
        for number in range(workers):
            started.append(tasks.create_task(worker(number)))
            if number % 20 == 0:
                await asyncio.sleep(0.05)
        await ready.wait()
        print("ready", flush=True)
        await asyncio.sleep(seconds)
        for each in started:
            each.cancel()


async def main(what: str, url: str, clients: int, seconds: float, token: str) -> None:
    """Calls until the time is up."""
    if what == "idle":
        await idle(url, clients, seconds, token)
        return
    counts, began = Counts(), time.monotonic()
    calls = {"empty": empty, "enqueueing": enqueueing, "single": single, "batched": batched}
    calls |= {"proxied-single": proxied, "proxied-batched": partial(proxied, most=BATCH)}
    call = calls[what]
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(call(url, began + seconds, counts, token))
    print(counts.requests, counts.jobs, time.monotonic() - began)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), *(sys.argv[5:] or [""])))
