"""The HTTP server of metrics: bounded against slow and many clients, and no page but its own."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from collections.abc import Iterator

import anyio
import pytest
from anyio.to_thread import run_sync

from pgworkd.core.address import Address, parse_address
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import UsageError
from pgworkd.metrics import ReportingProcess, fleet, server
from pgworkd.metrics.endpoint import MetricsPart, bound, reporting, served
from pgworkd.metrics.samples import Check
from pgworkd.metrics.server import listen
from pgworkd.process import local_sockets
from tests.kits.apps import app_of_one
from tests.kits.commands import NOWHERE
from tests.kits.daemon import quick_options
from tests.kits.metrics import FakeSource, fetch, filled

pytestmark = pytest.mark.slow("servers, and clients that misbehave")


@pytest.fixture
def address() -> Iterator[str]:
    listener = listen(Address("127.0.0.1", 0), "test")
    with served(FakeSource(filled(3, 3)), listener):
        yield str(bound(listener))


def sent(address: str, data: bytes) -> bytes:
    """What the server sends back until it closes the connection."""
    place = parse_address(address)
    with socket.create_connection(place, timeout=10) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(65536):
                answer += data
        return answer


def test_the_pages(address: str) -> None:
    assert fetch(address, "/healthz").text == "alive\n"
    assert fetch(address, "/readyz").status == 200
    assert fetch(address).headers["content-type"].startswith("text/plain; version=0.0.4")
    openmetrics = fetch(address, accept="application/openmetrics-text")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.text.endswith("# EOF\n")
    assert fetch(address, "/metrics?x=1").status == 200


@pytest.mark.parametrize("path", ["/", "/metrics/", "/snapshot", "/../metrics", "/%6detrics", "x"])
def test_other_paths_are_not_found(address: str, path: str) -> None:
    assert fetch(address, path).status == 404


def test_head_has_no_body_and_the_same_length(address: str) -> None:
    whole, head = fetch(address), fetch(address, method="HEAD")
    assert head.status == 200
    assert head.text == ""
    assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.text))


def _ours(page: bytes) -> list[bytes]:
    """Without what changes from one moment to the next."""
    return [line for line in page.splitlines() if line.startswith(b"pgworkd_")]


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        (b"gzip", True),
        (b"deflate, GZip;q=0.5", True),
        (b"*", True),
        (b"gzip;q=0", False),
        (b"gzip; q=0.00, *", False),
        (b"br", False),
        (b"", False),
    ],
)
def test_a_large_page_is_compressed_for_who_takes_that(address: str, accepted: bytes, packed: bool) -> None:
    whole = sent(address, b"GET /metrics HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")[2]
    head, _, body = sent(address, b"GET /metrics HTTP/1.0\r\nAccept-Encoding: %b\r\n\r\n" % accepted).partition(
        b"\r\n\r\n"
    )
    assert (b"Content-Encoding: gzip" in head) == packed
    assert b"Vary: Accept-Encoding" in head
    assert b"Content-Length: %d" % len(body) in head
    assert _ours(gzip.decompress(body) if packed else body) == _ours(whole)
    small = sent(address, b"GET /healthz HTTP/1.0\r\nAccept-Encoding: gzip\r\n\r\n")
    assert b"gzip" not in small
    assert small.endswith(b"alive\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_refused(address: str, method: str) -> None:
    response = fetch(address, method=method)
    assert response.status == 405
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"BREW /metrics HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nno header\r\n\r\n",
    ],
)
def test_nonsense_gets_no_page_and_the_server_goes_on(address: str, data: bytes) -> None:
    answer = sent(address, data)
    assert b"200 OK" not in answer or b"no header" in data
    assert b"<html" not in answer.lower()
    assert fetch(address, "/healthz").status == 200


def test_host_does_not_matter(address: str) -> None:
    for host in (b"", b"Host: evil.example\r\n", b"Host: a\r\nHost: b\r\n"):
        assert b" 200 OK" in sent(address, b"GET /healthz HTTP/1.1\r\n" + host + b"\r\n").splitlines()[0]


def test_a_failing_source_is_an_answer_of_500() -> None:
    class Broken(FakeSource):
        def checks(self) -> list[Check]:
            raise RuntimeError("c4n4ry")

    listener = listen(Address("127.0.0.1", 0), "test")
    with served(Broken({}), listener):
        response = fetch(str(bound(listener)), "/readyz")
        assert response.status == 500
        assert "c4n4ry" not in response.text
        assert fetch(str(bound(listener)), "/healthz").status == 200


def test_slow_clients_are_cut_off_and_take_few_threads(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SERVED_S", 0.5)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for number in range(server.CONNECTIONS * 3):  # silent, or half a request
            slow = stack.enter_context(socket.create_connection(parse_address(address)))
            slow.sendall(b"GET /met"[: number % 9])
        assert threading.active_count() <= before + server.CONNECTIONS
        began = time.monotonic()
        assert fetch(address, "/healthz").status == 200
        assert time.monotonic() - began < 3 * 1.5 + 1
    assert fetch(address, "/healthz").status == 200


def test_a_client_that_drips_is_cut_off(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SERVED_S", 0.5)
    began = time.monotonic()
    with socket.create_connection(parse_address(address)) as slow, contextlib.suppress(OSError):
        slow.sendall(b"GET /metrics HTTP/1.1\r\nA: ")
        while time.monotonic() - began < 5:
            slow.sendall(b"a")
            time.sleep(0.05)
    assert time.monotonic() - began < 3


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SERVED_S", 0.5)
    listener = listen(Address("127.0.0.1", 0), "test")
    with (
        served(FakeSource(filled(40, 100)), listener),
        contextlib.ExitStack() as stack,
    ):  # 20 MB
        for _ in range(server.CONNECTIONS):
            deaf = stack.enter_context(socket.create_connection(bound(listener)))
            deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert fetch(str(bound(listener)), "/healthz").status == 200


def test_nothing_is_left_behind() -> None:
    before = threading.active_count()
    for _ in range(20):
        listener = listen(Address("127.0.0.1", 0), "test")
        with served(FakeSource({}), listener):
            place = bound(listener)
            assert fetch(str(place), "/healthz").status == 200
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(place, timeout=1)
    deadline = time.monotonic() + 10
    while threading.active_count() > before:  # the thread of the last connection ends when it sees that it is closed
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:9464", ("::1", 9464)),
        ("localhost:0", ("localhost", 0)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),  # noqa: S104 - a text
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text", ["", "9464", ":9464", "::1:9464", "[::1]", "a:b", "a:65536", "http://a:1", "a:1/", "a b:1", "u@a:1", "a:١"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be host:port, for example 127\.0\.0\.1:9464"):
        parse_address(text)


def test_what_cannot_be_listened_on_is_named_with_its_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"x \(flag\): cannot listen on 127\.0\.0\.1:{port}: the port is in use"):
            listen(Address("127.0.0.1", port), "x (flag)")
    with pytest.raises(UsageError, match="this host has no such address"):
        listen(Address("192.0.2.1", 0), "x")
    with pytest.raises(UsageError, match="its host name is unknown"):
        listen(Address("no-such-host.invalid", 0), "x")


# Reports to a parent


def test_reports_are_gathered_and_the_frozen_left_out_in_time() -> None:
    paths = {name: local_sockets.new_name() for name in ("good", "frozen", "absent", "odd")}
    frozen = server.listen_at(paths["frozen"])
    odd = server.listen_at(paths["odd"])

    def nonsense() -> None:
        connection, _ = odd.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n{}")

    with frozen, odd, reporting(FakeSource(filled(20, 10)), paths["good"]):
        threading.Thread(target=nonsense, daemon=True).start()
        began = time.monotonic()
        answers, silent = fleet.snapshots({name: ReportingProcess(path) for name, path in paths.items()})
        assert fleet.ANSWER_S <= time.monotonic() - began < fleet.ANSWER_S + 1
        assert answers.keys() == {"good"}
        assert answers["good"][1] == filled(20, 10)
        assert silent["frozen"].startswith("did not answer within 1 s")
        assert silent["absent"] == "does not run, or is starting"
        assert silent["odd"] == "ended while it answered"


def test_a_backlog_that_is_full_does_not_hang() -> None:
    name = local_sockets.new_name()
    with server.listen_at(name) as frozen:
        for _ in range(server.BACKLOG + 2):
            fleet.ANSWER_S, before = 0.001, fleet.ANSWER_S
            _, silent = fleet.snapshots({"frozen": ReportingProcess(name)})
            fleet.ANSWER_S = before
        assert silent["frozen"].startswith("does not answer")
        assert frozen.fileno() >= 0


async def test_a_part_for_programs_of_one_s_own() -> None:
    part = MetricsPart("127.0.0.1:0")
    daemon = Daemon(app_of_one(), quick_options(NOWHERE), parts=(part,))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        response = await run_sync(fetch, str(part.address), "/readyz")
        assert response.failing["database"] == "waiting for the database"
        daemon.request_stop()
    with pytest.raises(UsageError, match="the address '9464' must be host:port"):
        MetricsPart("9464")
