"""An address to listen on, as text: `127.0.0.1:9464`, `[::1]:9464`, `localhost:0`."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import urlsplit

_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[^\s:\[\]/@]+)):(?P<port>\d{1,5})", re.ASCII)
PORT_MAX, URL_CHARS_MAX = 65_535, 2000
_URL = re.compile(r"[!#-;=?-\[\]_a-z~%]+", re.ASCII)
"""What an address can have in it; other characters are sent as %XX."""


class Address(NamedTuple):
    """A host, by name or number, and a port; port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only programs on this host reach it; for a host that is a number."""
        return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback


def parse_address(text: str) -> Address:
    """The address; ValueError, which says what to write, if the text is none."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > PORT_MAX:
        raise ValueError("must be host:port, for example 127.0.0.1:9464, [::1]:9464, or 0.0.0.0:9464 for all hosts")
    return Address(found["six"] or found["host"], int(found["port"]))


_HOST = re.compile(r"\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)


def listed(text: str) -> tuple[str, ...]:
    """The values of a list that is separated by commas."""
    return tuple(filter(None, (each.strip() for each in text.split(","))))


def is_host(text: str) -> bool:
    """Whether this is the name or number of a host as the header Host has it, without a port; or `*`."""
    return _HOST.fullmatch(text) is not None


def is_network(text: str) -> bool:
    """Whether this is an IP address, or a network as 10.0.0.0/8."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def url_fault(text: str) -> str:
    """What is wrong with the address of a gateway, and what to write; "": nothing."""
    try:
        parts = urlsplit(text)
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        return "must be an address, for example https://jobs.example.com"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_right or not text.isprintable():
        return "must be an address, for example https://jobs.example.com"
    if parts.username is not None or parts.password is not None:
        return "must not contain a password: the token is a setting of its own"
    if parts.query or parts.fragment:
        return "must end with the path under which the gateway is mounted, without ? or #"
    return ""


def frame_origin(url: str) -> str:
    """The origin of a page to embed, as a policy of content names it. ValueError, which says what to write."""
    said = "must be the address of a page to embed, for example https://grafana.example.com/d-solo/jobs"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(said) from None
    host = parts.hostname or ""
    is_named = _HOST.fullmatch(host) is not None and host != "*" and port != 0
    if parts.scheme not in ("http", "https") or not is_named or len(url) > URL_CHARS_MAX or not _URL.fullmatch(url):
        raise ValueError(said)
    if parts.username is not None:
        raise ValueError("must not contain a password: each page would show it")
    return f"{parts.scheme}://{host}" + ("" if port is None else f":{port}")


def is_open_to_others(url: str) -> bool:
    """Whether calls of this address leave this host without encryption."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.hostname == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        return True
