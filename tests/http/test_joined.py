"""Our server's answers over real connections, whatever pieces an application writes them in: whole, and in order."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import anyio.lowlevel
import pytest

from pgworkd.gateway.api.app import asgi
from pgworkd.gateway.api.request.access import anyone
from pgworkd.gateway.api.server import _Joined
from tests.kits.connections import answer, connected

SEEDS = range(40)


class _Pieces:
    """An application that answers the path /SEED by pieces of random sizes, with and without pauses between them."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        pieces, pauses, has_length = planned(int(scope["path"][1:]))
        length = [(b"content-length", str(sum(map(len, pieces))).encode())] if has_length else []
        await send({"type": "http.response.start", "status": 200, "headers": length})
        for piece, pause in zip(pieces, pauses, strict=True):
            await asyncio.sleep(pause) if pause is not None else None
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def planned(seed: int) -> tuple[list[bytes], list[float | None], bool]:
    """The pieces of an answer, the pause before each (None: in the same turn), and whether its length is declared."""
    chance = random.Random(seed)  # noqa: S311
    sizes = [chance.choice([0, 1, 100, 70_000, 3_000_000]) for _ in range(chance.randint(0, 5))]
    pieces = [bytes([65 + seed % 26]) * size for size in sizes]
    return pieces, [chance.choice([None, None, 0, 0.001]) for _ in pieces], chance.random() < 0.6


@pytest.mark.parametrize("at_once", [1, 5])
async def test_each_answer_arrives_whole_and_in_order(at_once: int) -> None:
    """One by one, and with requests that are sent before the answers of those before them."""
    async with connected(_Pieces()) as (read, write):
        for first in range(0, len(SEEDS), at_once):
            seeds = SEEDS[first : first + at_once]
            write.write(b"".join(f"GET /{seed} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for seed in seeds))
            for seed in seeds:
                assert await answer(read) == b"".join(planned(seed)[0])


@pytest.mark.parametrize("seed", SEEDS[:12])
async def test_an_answer_is_sent_before_its_connection_is_closed(seed: int) -> None:
    async with connected(_Pieces()) as (read, write):
        write.write(f"GET /{seed} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert await answer(read) == b"".join(planned(seed)[0])
        assert await read.read() == b""


async def test_a_head_without_a_body_is_sent() -> None:
    async with connected(_Pieces()) as (read, write):
        for seed in SEEDS[:12]:
            write.write(f"HEAD /{seed} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await read.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(dsn: str) -> None:
    async with connected(asgi(dsn, authorize=anyone)) as (read, write):
        body = b'{"queue": "q"}'
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n"
        write.write(f"{head}Content-Type: application/json\r\n\r\n".encode())
        assert (await read.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        write.write(body)
        assert (await read.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 201")


async def test_what_is_written_in_one_turn_is_sent_in_one_piece() -> None:
    sent: list[bytes] = []

    class Recorder:
        write = staticmethod(sent.append)
        is_closing = staticmethod(bool)

        def writelines(self, pieces: tuple[bytes, ...]) -> None:
            sent.append(b"".join(pieces))

    joined = _Joined(Recorder(), asyncio.get_running_loop())
    joined.write(b"head")
    joined.write(b"body")
    assert sent == [b"headbody"]
    joined.write(b"alone")
    await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()
    assert sent == [b"headbody", b"alone"]
