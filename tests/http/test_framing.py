"""Requests as clients send them, in whatever pieces they arrive: each is answered once, whole and in order."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from typing import Any

import pytest

from pgworkd.gateway.api import server
from tests.kits.connections import answer, connected, listening

SIZES = (0, 1, 100, 70_000, 140_000, 300_000, 1_000_000)
"""Of bodies: a read takes up to 256 KiB, and a large one ends in the same read in which the next head begins."""


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with what it has got."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(0.3)
    hosts = [value.decode() for name, value in scope["headers"] if name == b"host"]
    text = json.dumps([scope["method"], scope["path"], hosts, hashlib.sha256(body).hexdigest()]).encode()
    length = (b"content-length", str(len(text)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": text, "more_body": False})


def request(chance: random.Random, number: int) -> tuple[bytes, list[Any]]:
    """A request, and what the application gets of it."""
    body = bytes([65 + number % 26]) * chance.choice(SIZES)
    method, path = chance.choice(["POST", "PUT", "GET"]), f"/{number}"
    at_target = chance.random() < 0.2
    lines = [f"{method} {'http://there:1' * at_target}{path} HTTP/1.1", "Host: here"]
    if chance.random() < 0.5:
        lines += ["Connection: Upgrade, HTTP2-Settings", f"Upgrade: {chance.choice(['h2c', 'TLS/1.3', 'websocket'])}"]
    lines += [f"X-{n}: {'y' * chance.choice([0, 10, 3000])}" for n in range(chance.randint(0, 6))]
    if chance.random() < 0.5:
        lines, sent = [*lines, "Transfer-Encoding: chunked"], chunked(chance, body)
    else:
        lines, sent = [*lines, f"Content-Length: {len(body)}"], body
    head = "\r\n".join([*lines, "", ""]).encode()
    return head + sent, [method, path, ["there:1" if at_target else "here"], hashlib.sha256(body).hexdigest()]


def chunked(chance: random.Random, body: bytes) -> bytes:
    """The body in chunks."""
    step = chance.choice([1000, 100_000])
    parts = [body[at : at + step] for at in range(0, len(body), step)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def pieces(chance: random.Random, data: bytes) -> list[bytes]:
    """The data as it may be cut on its way."""
    found = []
    while data:
        size = chance.choice([1, 20, 700, 65_000, len(data)])
        found.append(data[:size])
        data = data[size:]
        if len(found) > 300:
            return [*found, data]
    return found


@pytest.mark.parametrize("seed", range(24))
async def test_each_request_of_a_connection_is_answered(seed: int) -> None:
    """One after the other, or up to four before the first is answered; with bodies of all sizes, offers to upgrade."""
    chance = random.Random(seed)  # noqa: S311
    async with connected(echo) as (read, write):
        for first in range(0, 20, 4):
            made = [request(chance, number) for number in range(first, first + chance.choice([1, 2, 4]))]
            for piece in pieces(chance, b"".join(sent for sent, _ in made)):
                write.write(piece)
                if chance.random() < 0.1:
                    await asyncio.sleep(0.001)  # so that the pieces are read apart
            for _, got in made:
                assert json.loads(await answer(read)) == got


@pytest.mark.parametrize("before", [b"", b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "pipelined"])
@pytest.mark.parametrize("line", [b"X: " + b"y" * 900 + b"\r\n", b"y" * 900], ids=["many", "one"])
async def test_a_head_without_an_end_is_cut_off(before: bytes, line: bytes) -> None:
    async with connected(echo) as (read, write):
        write.write(before + b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        sent = 0
        try:
            while not read.at_eof():
                write.write(line)
                sent += len(line)
                await write.drain()
                assert sent < 100 * server.HEAD_BYTES_MAX
        except ConnectionError:
            pass


@pytest.mark.parametrize("before", [b"", b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "kept"])
@pytest.mark.parametrize("piece", [b"\r\n", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nX: y"])
async def test_a_head_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, before: bytes, piece: bytes
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    async with connected(echo) as (read, write):
        write.write(before)
        if before:
            await answer(read)
        write.write(piece)
        assert await read.read() == b""


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example",
        "GET / HTTP/1.1\r\nHost: evil.example\r\nHost: localhost",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3",
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4",
        "CONNECT there:1 HTTP/1.1\r\nHost: there:1",
        "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\nHost: y",
    ],
)
async def test_a_head_that_readers_may_take_for_different_ones_is_refused(head: str) -> None:
    async with connected(echo) as (read, write):
        write.write(f"{head}\r\n\r\n".encode())
        assert (await read.read()).startswith(b"HTTP/1.1 400 ")


async def test_one_client_that_is_cut_off_does_not_harm_others() -> None:
    async with listening(echo) as address:
        read, write = await asyncio.open_connection(*address)
        bad_read, bad = await asyncio.open_connection(*address)
        bad.write(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * (server.HEAD_BYTES_MAX + 1000))
        assert await bad_read.read() == b""
        write.write(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert json.loads(await answer(read))[1] == "/1"
        write.close()
        bad.close()
