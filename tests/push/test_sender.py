"""Requests to real servers: whatever they answer, or do not, within bounds of time, size and place."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trustme

from pgworkd.core.job import Ending
from pgworkd.core.race import Failed
from pgworkd.push import guard
from pgworkd.push.answer import EndpointAnswer, verdict
from pgworkd.push.guard import check_url
from pgworkd.push.sender import NotDelivered, PerhapsDelivered, Sender
from tests.kits.downstream import Downstream, Writer, serving
from tests.kits.name_server import naming
from tests.kits.sending import post, sending

pytestmark = pytest.mark.slow("services that hang, or answer one byte a second")


async def test_a_request_arrives_whole_and_its_answer_comes_back() -> None:
    async with serving(Downstream()) as down, sending() as sender:
        for _ in range(3):
            answer = await post(sender, down.port, **{"webhook-id": "7"})
            assert (answer.status, answer.content, answer.is_whole) == (200, b"{}", True)
            assert answer.headers["content-type"] == "application/json"
        head, _, content = down.requests[0].partition(b"\r\n\r\n")
        assert head.split(b"\r\n")[0] == b"POST /in?a=b HTTP/1.1"
        assert {b"webhook-id: 7", f"host: 127.0.0.1:{down.port}".encode()} <= set(head.split(b"\r\n")[1:])
        assert content == b"{}"
        assert down.connections == 1, "it is kept open"


async def test_no_redirect_is_followed_no_cookie_kept_no_proxy_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Downstream()) as other, sending() as sender:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{other.port}")
        for status in (301, 302, 303, 307, 308):
            moved = f"HTTP/1.1 {status} Moved\r\nLocation: http://127.0.0.1:{other.port}/\r\nSet-Cookie: a=b\r\n"
            async with serving(Downstream(moved.encode() + b"Content-Length: 0\r\n\r\n")) as down:
                for _ in range(2):
                    answer = await post(sender, down.port)
                    assert verdict(answer, may_accept=True).ending is Ending.FAILED
                assert b"cookie" not in b"".join(down.requests).lower()
        assert other.requests == []


async def flood(writer: Writer) -> None:
    """An answer of a gibibyte."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1073741824\r\n\r\n")
    for _ in range(1024):
        writer.write(b"x" * 2**20)
        await writer.drain()


async def test_of_an_answer_a_mebibyte_is_read() -> None:
    async with serving(Downstream(act=flood)) as down, sending() as sender:
        began = time.monotonic()
        answer = await post(sender, down.port, 30)
        assert (len(answer.content), answer.is_whole) == (2**20, False)
        assert time.monotonic() - began < 10
        assert verdict(answer, may_accept=False, strict_results=True).permanent


async def test_an_answer_of_zeros_is_not_unpacked() -> None:
    packed = gzip.compress(bytes(2**28))
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}"
    )
    async with serving(Downstream(head.encode() + b"\r\n\r\n" + packed)) as down, sending() as sender:
        answer = await post(sender, down.port)
        assert answer.content == packed
        assert "gzip" in verdict(answer, may_accept=False).message


async def trickle(writer: Writer) -> None:
    """A byte now and then."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def silence(writer: Writer) -> None:
    """No answer."""
    await asyncio.sleep(30)


@pytest.mark.parametrize("act", [trickle, silence])
async def test_what_takes_too_long_may_have_been_done(act: Callable[[Writer], Awaitable[None]]) -> None:
    async with serving(Downstream(act=act)) as down, sending() as sender:
        with pytest.raises(PerhapsDelivered, match=r"no answer within 0\.3 s; it may have been done"):
            await post(sender, down.port, 0.3)
        assert (await _again(sender)).status == 200, "the sender is as good as before"


async def _again(sender: Sender) -> EndpointAnswer:
    async with serving(Downstream()) as down:
        return await post(sender, down.port)


BROKEN = {
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "short": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
    "no length": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\nabc",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "broken chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    "cut chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10\r\nabc",
    "status": b"HTTP/1.1 9999 OK\r\n\r\n",
    "head without end": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 500_000,
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_answer_may_have_been_done(case: str) -> None:
    async def act(writer: Writer) -> None:
        writer.write(BROKEN[case])
        await writer.drain()

    async with serving(Downstream(act=act)) as down, sending() as sender:
        with pytest.raises(PerhapsDelivered, match=r"it may have been done$"):
            await post(sender, down.port)
        assert len(down.requests) == 1, "and is not sent twice"


async def test_nobody_there_is_not_delivered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with sending() as sender:
        with pytest.raises(NotDelivered, match="the connection failed"):
            await post(sender, port)
        with pytest.raises(NotDelivered, match=r"nowhere\.invalid cannot be looked up"):
            await post(sender, port, 30, host="nowhere.invalid")


async def test_where_it_may_not_go_nothing_arrives() -> None:
    async with serving(Downstream()) as down, sending(allow_private=False) as sender:
        for host in ("127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]"):
            with pytest.raises(NotDelivered, match="not of the public internet"):
                await post(sender, down.port, host=host)
        assert down.connections == 0


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\x00b"])
async def test_a_header_cannot_be_split(value: str) -> None:
    async with serving(Downstream()) as down, sending() as sender:
        with pytest.raises(NotDelivered):
            await post(sender, down.port, authorization=value)
        assert not any(b"X-Other" in each for each in down.requests)


def certified(authority: trustme.CA, name: str, **options: Any) -> ssl.SSLContext:
    """The context of a server of that name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name, **options).configure_cert(context)
    return context


async def test_a_certificate_is_for_the_name_and_valid() -> None:
    ours, theirs = trustme.CA(), trustme.CA()
    trusting = ssl.create_default_context()
    ours.configure_trust(trusting)

    async def resolve(host: str) -> list[str]:
        return ["127.0.0.1"]

    past = datetime.now(UTC) - timedelta(days=1)
    wrong = {
        "another name": certified(ours, "evil.example.com"),
        "the address": certified(ours, "127.0.0.1"),
        "expired": certified(ours, "good.example.com", not_after=past),
        "another authority": certified(theirs, "good.example.com"),
    }
    async with sending(tls=trusting, resolve=resolve) as sender:
        async with serving(Downstream(), certified(ours, "good.example.com")) as down:
            assert (await post(sender, down.port, scheme="https", host="good.example.com")).status == 200
        for case, context in wrong.items():
            async with serving(Downstream(), context) as down:
                with pytest.raises(NotDelivered, match=r"the connection failed: .*CERTIFICATE_VERIFY_FAILED"):
                    await post(sender, down.port, scheme="https", host="good.example.com")
                assert down.requests == [], case


async def test_a_hundred_at_once_share_the_connections_of_one_sender() -> None:
    async with serving(Downstream()) as down, sending() as sender, asyncio.TaskGroup() as tasks:
        done = [tasks.create_task(post(sender, down.port, 30)) for _ in range(100)]
    assert {each.result().status for each in done} == {200}
    assert len(down.requests) == 100


async def test_a_silent_name_server_holds_up_its_own_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty names that nobody answers, and each look-up takes a thread for as long."""
    over, real = threading.Event(), socket.getaddrinfo

    def answered(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("silent"):
            over.wait(30)
            raise OSError("no answer")
        return real("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answered)
    try:
        async with serving(Downstream()) as down, sending() as sender, asyncio.TaskGroup() as tasks:
            silent = [
                tasks.create_task(lost(sender, f"http://silent{number}.example.com:{down.port}/"))
                for number in range(20)
            ]
            await asyncio.sleep(0.1)
            for _ in range(5):
                answer = await post(sender, down.port, 2, host="fast.example.com")
                assert answer.status == 200
            over.set()
        assert {each.result() for each in silent} == {"the name cannot be looked up"}
    finally:
        over.set()


async def lost(sender: Sender, url: str) -> str:
    """Why a request was not delivered."""
    with pytest.raises(NotDelivered) as error:
        await sender.post(check_url(url), {}, b"{}", 20)
    return "the name cannot be looked up" if "cannot be looked up" in str(error.value) else str(error.value)


HERE, ELSEWHERE = "127.0.0.1", "93.184.215.14"


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_name_server_that_changes_its_mind_gains_nothing(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """It says public first, private then: there is one look-up for a connection, which goes where that one says."""
    called: list[str] = []

    async def refused(address: str, _: int) -> Any:
        called.append(address)  # no packet leaves this host
        raise Failed("refused")

    monkeypatch.setattr(guard, "_connected", refused)
    async with (
        naming(*[[ELSEWHERE]] * times, [HERE]) as names,
        sending(allow_private=False, resolve=names.look_up) as sender,
    ):
        url = check_url("http://rebind.example.com:8080/")
        for asked in range(1, times + 1):
            with pytest.raises(NotDelivered, match="connection failed"):
                await sender.post(url, {}, b"{}", 5)
            assert (names.server.queries, called) == (asked, [ELSEWHERE] * asked)
        with pytest.raises(NotDelivered, match=r"127\.0\.0\.1, which is not of the public internet"):
            await sender.post(url, {}, b"{}", 5)
    assert called == [ELSEWHERE] * times


@pytest.mark.parametrize("addresses", [[HERE], [ELSEWHERE, HERE], [HERE, ELSEWHERE], ["10.0.0.7"]])
async def test_a_name_with_a_private_address_is_refused_wherever_that_stands(addresses: list[str]) -> None:
    async with serving(Downstream()) as down, naming(addresses) as names:
        async with sending(allow_private=False, resolve=names.look_up) as sender:
            with pytest.raises(NotDelivered, match="which is not of the public internet"):
                await sender.post(check_url(f"http://mixed.example.com:{down.port}/"), {}, b"{}", 5)
        assert down.connections == 0
        async with sending(resolve=names.look_up) as sender:  # where an operator allows it, it is the same name
            if addresses == [HERE]:
                answer = await sender.post(check_url(f"http://mixed.example.com:{down.port}/"), {}, b"{}", 5)
                assert answer.status == 200
