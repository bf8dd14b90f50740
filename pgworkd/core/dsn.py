"""A DSN as text: what is wrong with it, and what it says. Never opens a connection."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from urllib.parse import unquote

_HOST = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[^:\[\]]*)(:\d{1,5})?")
PORT_MAX = 65_535
QUOTED = "is in quotes: remove them; docker's --env-file, unlike a shell, keeps them"


def dsn_fault(dsn: str) -> str | None:
    """What is wrong with `dsn` and how to correct it, without quoting any of it; None when it is well-formed.

    Strict where parsers guess: with an unescaped `/`, `?`, `#` or `@` in a password, they take the rest of it for a
    host or a port, resolve it by DNS, and print it in their error. (So does pydantic's PostgresDsn, which also rejects
    addresses without a host.)
    """
    location, _, query = dsn.partition("?")
    scheme, _, rest = location.partition("://")
    authority, _, path = rest.partition("/")
    hosts = authority.rpartition("@")[2].split(",")
    if dsn[:1] in ("'", '"'):
        return QUOTED
    if scheme.partition("+")[0] not in ("postgresql", "postgres") or "://" not in location:
        return "must look like postgresql://user:password@host:5432/database"
    if not dsn.isprintable():
        return "contains a line break or control character: remove it, or percent-encode it if it is intended"
    if "\0" in unquote(dsn):
        return "contains %00, a NUL, which Postgres accepts nowhere: remove it"
    if "#" in dsn or "@" in path + query or authority.count("@") > 1 or not all(map(_is_host, hosts)):
        return (
            "has a malformed host or port: percent-encode / ? # @ : [ ] in user and password "
            "(%2F %3F %23 %40 %3A %5B %5D), and letters beyond ASCII; put an IPv6 address in brackets"
        )
    if len(hosts) > 1 and not all(host.partition(":")[0] for host in hosts):
        return "has an empty host in its list of hosts: name each, or leave it out"
    if query and not all("=" in pair for pair in query.split("&")):
        return "must have name=value pairs joined by & after the ?, and ? in a password written as %3F"
    return None


def parameters(dsn: str) -> dict[str, str]:
    """What a well-formed DSN says, by the names of libpq's parameters, as libpq reads it.

    `host` and `port` are lists, separated by commas. What stands after the ? wins over what stands before it.
    """
    location, _, query = dsn.partition("?")
    authority, _, database = location.partition("://")[2].partition("/")
    login, _, listed = authority.rpartition("@")
    user, _, password = login.partition(":")
    hosts = [_HOST.fullmatch(each) for each in listed.split(",")]
    found = {
        "user": unquote(user),
        "password": unquote(password),
        "host": ",".join(unquote(host[1]).strip("[]") for host in hosts if host),
        "port": ",".join((host[2] or "")[1:] for host in hosts if host),
        "dbname": unquote(database),
    }
    pairs = [pair.partition("=") for pair in query.split("&") if query]
    return found | {unquote(name): unquote(value) for name, _, value in pairs}


def _is_host(text: str) -> bool:
    match = _HOST.fullmatch(text)
    if match is None or not 1 <= int((match[2] or ":1")[1:]) <= PORT_MAX:
        return False
    name = unquote(match[1])
    try:
        if match[1].startswith("["):
            return IPv6Address(match[1][1:-1]) is not None
        return name.startswith("/") or name.encode("idna") is not None  # as the driver will write it
    except ValueError:  # of either
        return False
