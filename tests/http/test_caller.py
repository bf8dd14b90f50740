"""What our own server knows of a caller, over real connections: that it has hung up, and that its body is there."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, TypeAlias

import anyio
import asyncpg
import pytest
from anyio.abc import SocketStream

from pgworkd.gateway.api.app import asgi
from pgworkd.gateway.api.request import bodies, gateway
from pgworkd.gateway.api.request.access import anyone
from pgworkd.gateway.api.server import Server, server
from tests.http.test_worker_faults import HELD_BACK, WAITS
from tests.http.test_workers import insert
from tests.kits.daemon import LIMIT_S, until

Db: TypeAlias = "asyncpg.Connection[Any]"


class Serving(NamedTuple):
    server: Server
    port: int

    async def connect(self) -> SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)


@contextlib.asynccontextmanager
async def serving(dsn: str, proxies: tuple[str, ...] = ()) -> AsyncIterator[Serving]:
    found = server(asgi(dsn, authorize=anyone), 1.0, proxies)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(found.serve, [listener])
            yield Serving(found, listener.getsockname()[1])
            found.request_stop()


def post(path: str, body: bytes, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{headers}\r\n".encode() + body


async def answer(stream: SocketStream) -> tuple[int, Any]:
    """Status and body of the next answer."""
    found = b""
    with anyio.fail_after(LIMIT_S):
        while b"\r\n\r\n" not in found or not found.endswith(b"}"):
            found += await stream.receive()
    head, _, body = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def registered(stream: SocketStream) -> tuple[int, str]:
    await stream.send(post("/v1/workers", b'{"name": "w", "queues": {"q": 1}}'))
    _, made = await answer(stream)
    return made["worker"], f"Pgworkd-Secret: {made['secret']}\r\n"


async def test_a_claim_that_ends_when_its_caller_has_just_hung_up_is_given_back(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "WATCHED_AFTER_S", 3600.0)  # so that only the look before the answer can tell
    (job_id,) = await insert(db)
    await db.execute(HELD_BACK)
    async with serving(dsn) as gate, await gate.connect() as stream:
        worker, secret = await registered(stream)
        claim = post("/v1/claims", json.dumps({"worker": worker, "queues": ["q"], "wait_s": 30}).encode(), secret)
        await db.execute("SELECT pg_advisory_lock(7)")
        await stream.send(claim)
        await until(lambda: db.fetchval(WAITS))
        await stream.aclose()
        await until(lambda: gate.connections == 0)
        await db.execute("SELECT pg_advisory_unlock(7)")
        released = "SELECT attempts = 1 AND status = 'pending' FROM pgworkd.jobs WHERE id = $1"
        await until(lambda: db.fetchval(released, job_id))


@pytest.mark.parametrize("pieces", [1, 2, 3])
async def test_a_body_is_read_in_as_many_pieces_as_it_comes_in(dsn: str, pieces: int) -> None:
    text = post("/v1/jobs", b'{"queue": "q", "payload": {"n": 1}}')
    begins = [0, text.index(b"payload"), text.rindex(b"1")][:pieces]
    async with serving(dsn) as gate, await gate.connect() as stream:
        for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
            await stream.send(text[begin:end])
            await anyio.sleep(0.01)  # so that they do not arrive as one: either way the answer is the same
        assert (await answer(stream))[0] == 201


async def test_a_body_that_stops_coming_is_given_up(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.1)
    async with serving(dsn) as gate, await gate.connect() as stream:
        await stream.send(post("/v1/jobs", b'{"queue": "q"}')[:-1])
        status, problem = await answer(stream)
        assert (status, problem["type"].rpartition("/")[2]) == (408, "body-too-slow")


async def test_a_caller_that_sends_no_more_is_answered(dsn: str) -> None:
    """As `nc -N` does; and some clients of one request."""
    async with serving(dsn) as gate, await gate.connect() as stream:
        await stream.send(post("/v1/jobs", b'{"queue": "q"}'))
        await stream.send_eof()
        assert (await answer(stream))[0] == 201
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        await until(lambda: gate.connections == 0)


async def test_a_wait_ends_when_its_caller_sends_no_more(dsn: str, db: Db) -> None:
    """It may as well have gone: a job would be given to nobody."""
    async with serving(dsn) as gate, await gate.connect() as stream:
        worker, secret = await registered(stream)
        claim = post("/v1/claims", json.dumps({"worker": worker, "queues": ["q"], "wait_s": 30}).encode(), secret)
        await stream.send(claim)
        await anyio.sleep(0.3)
        began = anyio.current_time()
        await stream.send_eof()
        assert (await answer(stream))[1]["assignments"] == []
        assert anyio.current_time() - began < 5
        (job_id,) = await insert(db)
        assert await db.fetchval("SELECT status FROM pgworkd.jobs WHERE id = $1", job_id) == "pending"


@pytest.mark.parametrize(
    ("trusted", "prefix", "below"),
    [
        ("127.0.0.1", "/jobs", "/jobs"),
        ("127.0.0.1", "/a/jobs/", "/a/jobs"),
        ("10.0.0.1", "/jobs", ""),
        ("127.0.0.1", "//evil.example", ""),
        ("127.0.0.1", "/", ""),
    ],
)
async def test_links_lead_to_where_a_proxy_serves_the_gateway(dsn: str, trusted: str, prefix: str, below: str) -> None:
    told = f"X-Forwarded-Prefix: {prefix}\r\n"
    async with serving(dsn, (trusted,)) as gate, await gate.connect() as stream:
        for _ in range(2):
            await stream.send(post("/v1/jobs", b'{"queue": ""}', told))
            assert (await answer(stream))[1]["type"] == f"{below}/v1/problems/invalid"
            await stream.send(post("/v1/queues/q/pause?create=true", b"{}", told))
            assert (await answer(stream))[0] == 200
            await stream.send(post("/v1/jobs", b'{"queue": ""}'))
            assert (await answer(stream))[1]["type"] == "/v1/problems/invalid"


@pytest.mark.parametrize("lines", [5, 5_000])
@pytest.mark.parametrize("delay_s", [0.0, 0.3])
async def test_a_stream_of_a_caller_that_sends_no_more_is_whole_or_no_success(
    dsn: str, db: Db, lines: int, delay_s: float
) -> None:
    body = b'{"queue": "q"}\n' * lines
    head = (
        f"POST /v1/jobs/stream HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\nContent-Length: {len(body)}"
    )
    async with serving(dsn) as gate, await gate.connect() as stream:
        await stream.send(f"{head}\r\n\r\n".encode() + body[:-1])
        await anyio.sleep(delay_s)
        await stream.send(body[-1:])
        await stream.send_eof()
        assert await answer(stream) == (201, {"created": lines})
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == lines


async def test_a_claim_of_a_caller_that_sends_no_more_gets_nothing(dsn: str, db: Db) -> None:
    (job_id,) = await insert(db)
    async with serving(dsn) as gate, await gate.connect() as stream:
        worker, secret = await registered(stream)
        await stream.send(post("/v1/claims", json.dumps({"worker": worker, "queues": ["q"]}).encode(), secret))
        await stream.send_eof()
        status, found = await answer(stream)
        assert (status, found["assignments"]) == (200, [])
        await until(lambda: db.fetchval("SELECT status = 'pending' FROM pgworkd.jobs WHERE id = $1", job_id))


async def test_the_rest_of_a_body_that_was_answered_is_not_read_for_ever(dsn: str) -> None:
    async with serving(dsn) as gate, await gate.connect() as stream:
        await stream.send(b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert (await answer(stream))[0] == 404
        with anyio.fail_after(LIMIT_S), contextlib.suppress(anyio.BrokenResourceError):
            while True:
                await stream.send(b"1\r\nx\r\n")
                await anyio.sleep(0.05)
        await until(lambda: gate.connections == 0)


async def test_two_headers_of_which_readers_may_take_different_ones_are_refused(dsn: str) -> None:
    for name in ("Host", "Authorization", "Pgworkd-Secret"):
        async with serving(dsn) as gate, await gate.connect() as stream:
            await stream.send(f"GET /healthz HTTP/1.1\r\nHost: x\r\n{name}: y\r\n{name}: z\r\n\r\n".encode())
            assert (await stream.receive()).startswith(b"HTTP/1.1 400")
