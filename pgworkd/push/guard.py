"""Where requests may go: to addresses of the public internet, unless an operator says otherwise.

A name is looked up once, each address is judged, and the connection goes to an address that was judged: so a name
server that answers differently the second time gains nothing (DNS rebinding), nor does 2130706433 for 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import SplitResult, urlsplit

import anyio
import httpcore

from pgworkd.errors import UsageError
from pgworkd.process import forks

URL_CHARS_MAX = 2000
PORTS = {"http": 80, "https": 443}
PRIVILEGED_BELOW = 1024
"""Ports below that are of other services (mail, SSH, databases' neighbours): only the two of HTTP are allowed."""
CONNECT_S_MAX = 10.0
ADDRESSES_MAX = 8
"""Addresses of one name that are tried."""
_UNICAST = ipaddress.ip_network("2000::/3")
"""The network that is routed as IPv6 at all: https://www.iana.org/assignments/ipv6-address-space."""
_TUNNELS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
"""IPv6 that carries an IPv4 address, which may be any: NAT64 (RFC 6052, 8215), 6to4 (RFC 3056), Teredo (RFC 4380)."""

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]
"""The addresses of a name."""


class AddressRefused(Exception):  # noqa: N818 - what happened, not a fault of ours
    """A request would have gone where none may go: nothing was sent."""


def is_public(address: str) -> bool:
    """True for an address of the public internet; False for anything else, also for what is no address."""
    try:
        found: Any = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    found = getattr(found, "ipv4_mapped", None) or found
    if found.version == 6 and (found not in _UNICAST or any(found in each for each in _TUNNELS)):
        return False
    return bool(found.is_global and not found.is_multicast and not found.is_reserved)


def check_url(url: str, *, allow_private: bool = False) -> SplitResult:
    """The parts of a URL that requests may be sent to. UsageError says what is wrong; names are looked up later."""
    parts = _parts(url)
    if parts.scheme in PORTS and not url.startswith(f"{parts.scheme}://"):
        raise UsageError(f"the URL begins with {url[:8]!r}: write {parts.scheme}:// in lower case")
    if parts.scheme not in PORTS:
        raise UsageError(f"the URL begins with {parts.scheme[:20]!r}: https:// is needed, or http://")
    if parts.username is not None or parts.password is not None:
        raise UsageError("the URL has a user or password in it: sign the requests with a secret instead")
    if not parts.hostname:
        raise UsageError("the URL has no host")
    if parts.fragment or "#" in url:
        raise UsageError("the URL has a fragment (#...), which is never sent: leave it out")
    port = PORTS[parts.scheme] if parts.port is None else parts.port
    if not allow_private and port < PRIVILEGED_BELOW and port not in PORTS.values():
        raise UsageError(f"port {port} is of another service: 80, 443 and those from {PRIVILEGED_BELOW} are allowed")
    if not allow_private and _is_private(parts.hostname):
        raise UsageError(
            f"{parts.hostname[:100]} is not of the public internet: give another host, or say allow_private "
            "(--allow-private)"
        )
    return parts


def _is_private(host: str) -> bool:
    """Whether a host is private, as far as that is seen without a look-up: an address in any spelling, or this host."""
    host = host.rstrip(".")
    if f".{host}".endswith(".localhost"):
        return True
    with contextlib.suppress(OSError):
        host = socket.inet_ntoa(socket.inet_aton(host))  # also of 127.1, 0x7f000001, 2130706433
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return not is_public(host)
    return False


def _parts(url: str) -> SplitResult:
    if len(url) > URL_CHARS_MAX or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        said = "printable ASCII without spaces and backslashes; write others as %20, names of hosts as xn--..."
        raise UsageError(f"the URL must have at most {URL_CHARS_MAX:,} characters, all of them {said}")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises if it is none
    except ValueError as error:
        raise UsageError(f"the URL cannot be read: {error}") from None
    return parts


async def look_up(host: str, port: int) -> list[str]:
    """The addresses of a name, in the system's order. OSError if there is none."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Connections to allowed addresses, for httpcore; certificates are still checked for the name."""

    def __init__(self, *, allow_private: bool = False, resolve: Resolve = look_up) -> None:
        self._allow_private, self._resolve = allow_private, resolve
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """A connection to the first address that answers. Raises AddressRefused, httpcore.ConnectError or -Timeout."""
        limit_s = CONNECT_S_MAX if timeout is None else min(timeout, CONNECT_S_MAX)
        with anyio.move_on_after(limit_s):
            return await self._connected(host, port, local_address, socket_options)
        raise httpcore.ConnectTimeout(f"no connection to {host} within {limit_s:g} s")

    async def _connected(
        self, host: str, port: int, local_address: str | None, socket_options: Iterable[Any] | None
    ) -> httpcore.AsyncNetworkStream:
        last: Exception = httpcore.ConnectError(f"the name {host} has no address")
        for address in (await self._judged(host, port))[:ADDRESSES_MAX]:
            try:
                stream = await self._network.connect_tcp(address, port, None, local_address, socket_options)
                forks.keep_private(stream.get_extra_info("socket"))
                return stream
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
        raise last

    async def _judged(self, host: str, port: int) -> list[str]:
        try:
            addresses = list(await self._resolve(host, port))
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"the name {host} cannot be looked up: {error}") from error
        wrong = [] if self._allow_private else [each for each in addresses if not is_public(each)]
        if wrong:  # one is enough: which of them answers is up to others
            raise AddressRefused(
                f"{host} has the address {wrong[0]}, which is not of the public internet: an operator may allow_private"
            )
        return addresses

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises AddressRefused, always."""
        raise AddressRefused(f"the socket {path} is not of the public internet")

    async def sleep(self, seconds: float) -> None:
        """Sleeps, as httpcore asks for between attempts."""
        await anyio.sleep(seconds)
