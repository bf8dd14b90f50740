"""`run --remote` and the proxies of the environment: what does not concern the gateway is not read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pgworkd.errors import DatabaseUnavailable, UsageError
from pgworkd.remote.client import GatewayAddress, GatewayClient
from pgworkd.remote.environment import proxy_for

PROXY = "http://proxy.example.com:3128"
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{"ok": true} '
HARMLESS = (
    {"NO_PROXY": "localhost,127.0.0.1,::1,fd00::/8"},
    {"NO_PROXY": "localhost,127.0.0.1,[::1]"},
    {"NO_PROXY": "10.0.0.0/8, .example.com,*.internal"},
    {"ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "127.0.0.1"},
    {"ALL_PROXY": "socks://127.0.0.1:9", "NO_PROXY": "127.0.0.0/8"},
    {"HTTPS_PROXY": "socks5://127.0.0.1:9"},
    {"http_proxy": "http://127.0.0.1:9", "no_proxy": "*"},
    {"SSL_CERT_FILE": "/gone/ca.pem", "SSL_CERT_DIR": "/gone"},
)
"""Environments of which none concerns a gateway at http://127.0.0.1."""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("SSL_CERT"):
            monkeypatch.delenv(name)


@asynccontextmanager
async def server() -> AsyncIterator[tuple[str, list[str]]]:
    """A server that answers everything, and the first lines of what it was sent."""
    lines: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append((await reader.readuntil(b"\r\n\r\n")).decode().partition("\r\n")[0])
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", lines


async def called(url: str) -> object:
    """The answer of a gateway."""
    client = GatewayClient(GatewayAddress(url, "pgw_token"))
    try:
        return await client.call("GET", "/v1/x")
    finally:
        await client.close()


@pytest.mark.parametrize("environ", HARMLESS, ids=str)
async def test_what_does_not_concern_the_gateway_is_not_read(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    async with server() as (url, lines):
        assert await called(url) == {"ok": True}
        assert lines == ["GET /v1/x HTTP/1.1"]


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
async def test_a_proxy_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with server() as (proxy, lines):
        monkeypatch.setenv(name, proxy.removeprefix("http://"))
        monkeypatch.setenv("NO_PROXY", "example.org,10.1.0.0/16")
        assert await called("http://gateway.example.com/jobs") == {"ok": True}
        assert lines == ["GET http://gateway.example.com/jobs/v1/x HTTP/1.1"]


async def test_a_proxy_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(DatabaseUnavailable, match="gateway, through the proxy that http_proxy names"):
        await called("http://10.0.0.1")


@pytest.mark.parametrize(
    ("environ", "url", "said"),
    [
        ({"ALL_PROXY": "socks5://127.0.0.1:9"}, "http://10.0.0.1", "the proxy that ALL_PROXY names cannot be used"),
        ({"http_proxy": "socks://127.0.0.1:9"}, "http://10.0.0.1", "the proxy that http_proxy names cannot be used"),
        ({"HTTP_PROXY": "http://127.0.0.1:port"}, "http://10.0.0.1", "the proxy that HTTP_PROXY names cannot be used"),
        ({"SSL_CERT_FILE": "/gone/ca.pem"}, "https://10.0.0.1", "the certificates that SSL_CERT_FILE names cannot be"),
    ],
)
async def test_what_cannot_be_used_is_named(
    environ: dict[str, str], url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        await called(url)


@pytest.mark.parametrize(
    ("url", "no_proxy", "proxy"),
    [
        ("https://gw.example.com", "", PROXY),
        ("https://gw.example.com", "example.com", None),
        ("https://gw.example.com", ".example.com", None),
        ("https://gwexample.com", "example.com", PROXY),
        ("https://10.2.3.4", "10.0.0.0/8", None),
        ("https://11.2.3.4", "10.0.0.0/8", PROXY),
        ("https://[fd00::1]:8443", "fd00::/8", None),
        ("https://[fd00::1]:8443", "[fd00::1]", None),
        ("https://gw.example.com", "*", None),
    ],
)
def test_no_proxy_excepts_names_addresses_and_networks(
    url: str, no_proxy: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert proxy_for(url)[1] == proxy
