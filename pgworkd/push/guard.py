"""Where requests may go: to addresses of the public internet, unless an operator says otherwise.

A name is looked up once, each address is judged, and the connection goes to an address that was judged: so a name
server that answers differently the second time gains nothing (DNS rebinding), nor does 2130706433 for 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any
from urllib.parse import SplitResult, urlsplit

import anyio

from pgworkd.core.look_up import look_up
from pgworkd.core.race import AllFailed, Failed, first
from pgworkd.errors import UsageError
from pgworkd.process import forks

URL_CHARS_MAX = 2000
PORTS = {"http": 80, "https": 443}
PRIVILEGED_BELOW = 1024
"""Ports below that are of other services (mail, SSH, databases' neighbours): only the two of HTTP are allowed."""
CONNECT_S_MAX = 10.0
ADDRESSES_MAX = 8
"""Addresses of one name that are tried."""
STAGGER_S = 0.25
"""An address that has not answered within this many seconds is joined by the next one (RFC 8305, 5)."""
_UNICAST = ipaddress.ip_network("2000::/3")
"""The network that is routed as IPv6 at all: https://www.iana.org/assignments/ipv6-address-space."""
_TUNNELS = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
"""IPv6 that carries an IPv4 address, which may be any: NAT64 (RFC 6052, 8215), 6to4 (RFC 3056), Teredo (RFC 4380)."""

Resolve = Callable[[str], Awaitable[Iterable[str]]]
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


class ConnectionFailed(Exception):  # noqa: N818 - what happened
    """There is no connection to a receiver: nothing was sent."""


class Network:
    """Connections to allowed addresses."""

    def __init__(self, *, allow_private: bool = False, resolve: Resolve = look_up) -> None:
        self._allow_private, self._resolve = allow_private, resolve

    async def connect(self, host: str, port: int) -> socket.socket:
        """A socket that is connected to one of the host's addresses. Raises AddressRefused or ConnectionFailed."""
        until = anyio.current_time() + CONNECT_S_MAX
        with anyio.move_on_after(CONNECT_S_MAX):
            addresses = _in_turns(await self._judged(host))[:ADDRESSES_MAX]
            attempts = [partial(_connected, address, port) for address in addresses]
            try:
                return await first(attempts, until - anyio.current_time(), socket.socket.close, STAGGER_S)
            except AllFailed as failed:
                raise ConnectionFailed(str(failed.failed[-1])) from failed
        raise ConnectionFailed(f"no connection to {host} within {CONNECT_S_MAX:g} s")

    async def _judged(self, host: str) -> list[str]:
        try:
            addresses = list(await self._resolve(host))
        except (OSError, UnicodeError) as error:
            raise ConnectionFailed(f"the name {host} cannot be looked up: {error}") from error
        if not addresses:
            raise ConnectionFailed(f"the name {host} has no address")
        wrong = [] if self._allow_private else [each for each in addresses if not is_public(each)]
        if wrong:  # one is enough: which of them answers is up to others
            raise AddressRefused(
                f"{host} has the address {wrong[0]}, which is not of the public internet: an operator may allow_private"
            )
        return addresses


def _in_turns(addresses: Sequence[str]) -> list[str]:
    """Addresses of IPv6 and IPv4 in turns: a network may know one of them only (RFC 8305, 4)."""
    first_kind = ":" in addresses[0]
    kinds = [[each for each in addresses if (":" in each) is kind] for kind in (first_kind, not first_kind)]
    return [each for pair in zip_longest(*kinds) for each in pair if each is not None]


async def _connected(address: str, port: int) -> socket.socket:
    """A socket that is connected to this address. Raises Failed."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        forks.keep_private(made)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, (address, port))
    except OSError as error:
        made.close()
        raise Failed(f"{address} port {port}: {error.strerror or error}") from error
    except BaseException:
        made.close()
        raise
    return made
