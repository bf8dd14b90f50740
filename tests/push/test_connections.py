"""Connections that are kept: none of them mixes answers, or is used when its receiver may be closing it."""

from __future__ import annotations

import asyncio
import contextlib

import anyio
import pytest

from pgworkd.push.guard import check_url
from tests.kits.downstream import OK, Downstream, Writer, headers_of, serving
from tests.kits.sending import post, sending

pytestmark = pytest.mark.slow("services that answer in parts")


async def test_connections_are_kept_and_closed_when_they_are_idle_for_long() -> None:
    async with serving(Downstream()) as down, sending() as sender:
        for _ in range(10):
            await post(sender, down.port)
        assert down.connections == 1
        async with asyncio.TaskGroup() as tasks:
            for _ in range(10):
                tasks.create_task(post(sender, down.port, 30))
        before = down.connections
        assert before <= 11
        kept = [each for idle in sender._connections._idle.values() for each in idle]
        assert len(kept) == before
        sender.sweep()
        assert sum(map(len, sender._connections._idle.values())) == before, "they are not that old"
        for each in kept:
            each.expires_at = 0.0
        sender.sweep()
        assert not any(sender._connections._idle.values())
        with anyio.fail_after(5):
            await asyncio.wait(down.tasks)  # each has seen its end


def numbered(request: bytes) -> bytes:
    """An answer that names the request's number."""
    number = headers_of(request)["webhook-id"].encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(number), number)


SURPLUS = {
    "a second answer": lambda whole: whole + whole.replace(b"\r\n\r\n", b"\r\nX: stolen\r\n\r\n"),
    "a length counted in characters": lambda whole: whole + b"}",
    "a line end": lambda whole: whole + b"\r\n",
    "a 204 and another": lambda whole: b"HTTP/1.1 204 x\r\n\r\n" + whole,
    "an interim answer behind": lambda whole: whole + b"HTTP/1.1 100 Continue\r\n\r\n",
}


@pytest.mark.parametrize("delay_s", [0.0, 0.05], ids=["in one piece", "a little later"])
@pytest.mark.parametrize("case", SURPLUS)
async def test_no_byte_of_an_answer_is_taken_for_anothers(case: str, delay_s: float) -> None:
    def act(request: bytes) -> bytes:
        return SURPLUS[case](numbered(request))

    async def later(writer: Writer) -> None:
        whole = numbered(down.requests[-1])
        surplus = SURPLUS[case](whole)
        first = b"HTTP/1.1 204 x\r\n\r\n" if not surplus.startswith(whole) else whole
        writer.write(first)
        await writer.drain()
        await asyncio.sleep(delay_s)
        writer.write(surplus[len(first) :])
        await writer.drain()
        await asyncio.sleep(5)

    down = Downstream(act) if not delay_s else Downstream(act=later)
    async with serving(down), sending() as sender:
        for number in range(5):
            answer = await post(sender, down.port, **{"webhook-id": str(number)})
            assert answer.content in (str(number).encode(), b""), "its own, or none"
            assert "x" not in answer.headers
            await asyncio.sleep(2 * delay_s)
        assert down.connections == 5


async def test_a_receiver_may_answer_before_it_has_read_all() -> None:
    """A body that is too large for it: it says so at once, and reads on or not."""
    answer, over = b"HTTP/1.1 413 x\r\nContent-Length: 0\r\n\r\n", asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        await asyncio.sleep(0.2)  # else the reset may be faster than the answer
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        over.set()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server, sending() as sender:
        url = check_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", allow_private=True)
        assert (await sender.post(url, {}, b" " * 20_000_000, 5)).status == 413
        assert not any(sender._connections._idle.values()), "the rest of the body would begin the next request"
        await over.wait()


@pytest.mark.parametrize(("told", "connections"), [("timeout=1", 3), ("timeout=60", 1), ("max=100, timeout=0", 3)])
async def test_a_connection_is_not_used_when_its_receiver_is_about_to_close_it(told: str, connections: int) -> None:
    kept = OK.replace(b"\r\n\r\n", f"\r\nKeep-Alive: {told}\r\n\r\n".encode())
    async with serving(Downstream(kept)) as down, sending() as sender:
        for _ in range(3):
            await post(sender, down.port)
        assert down.connections == connections


async def test_what_may_be_done_once_has_a_connection_of_its_own() -> None:
    """Whether a receiver that closes a kept connection has read the request cannot be known."""
    async with serving(Downstream()) as down, sending() as sender:
        url = check_url(down.url, allow_private=True)
        for once in (False, True, True, False):
            await sender.post(url, {}, b"{}", 5, once=once)
        assert down.connections == 3


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize(
    "how", ["content-length: 2\r\n\r\n{}", "transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
async def test_a_body_where_none_may_be_does_not_begin_the_next_answer(status: int, how: str) -> None:
    async with serving(Downstream(f"HTTP/1.1 {status} x\r\n{how}".encode())) as down, sending() as sender:
        for _ in range(3):
            assert (await post(sender, down.port)).status == status
        assert down.connections == 3


async def test_a_connection_that_the_other_side_has_closed_is_not_used_again() -> None:
    once = OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: timeout=1\r\n\r\n")
    async with serving(Downstream(once)) as down, sending() as sender:
        await post(sender, down.port)
        for task in down.tasks:
            task.cancel()  # it closes the connection, without a word
        await asyncio.wait(down.tasks)
        assert (await post(sender, down.port)).status == 200
        assert (down.connections, len(down.requests)) == (2, 2)
