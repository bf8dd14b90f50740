"""A DSN as text: what is wrong with it, and how to show it. Never opens a connection."""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from urllib.parse import unquote, urlsplit

_HOST = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[^:\[\]]*)(:\d{1,5})?")
PORT_MAX = 65_535
_SECRET_NAME = re.compile(r"pass|secret|token", re.IGNORECASE)


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
    if scheme not in ("postgresql", "postgres") or "://" not in location:
        return "must look like postgresql://user:password@host:5432/database"
    if not dsn.isprintable():
        return "contains a line break or control character: remove it, or percent-encode it if it is intended"
    if "\0" in unquote(dsn):
        return "contains %00, a NUL, which Postgres accepts nowhere: remove it"
    misplaced = "#" in dsn or "@" in path + query or authority.count("@") > 1
    if misplaced or not all(map(_is_host, hosts)) or not _can_be_split(location):
        return (
            "has a malformed host or port: percent-encode / ? # @ : [ ] in user and password "
            "(%2F %3F %23 %40 %3A %5B %5D), and letters beyond ASCII; put an IPv6 address in brackets"
        )
    if len(hosts) > 1 and not all(host.partition(":")[0] for host in hosts):
        return "has an empty host in its list of hosts: name each, or leave it out"
    named = [value for name, _, value in (pair.partition("=") for pair in query.split("&")) if name == "host"]
    if any(unquote(host).count(":") > 1 and "[" not in unquote(host) for host in ",".join(named).split(",")):
        return "has an IPv6 address without brackets after host=: write [::1]"
    if query and not all("=" in pair for pair in query.split("&")):
        return "must have name=value pairs joined by & after the ?, and ? in a password written as %3F"
    return None


def for_driver(dsn: str) -> str:
    """The same address without brackets: the colons of IPv6 addresses are percent-encoded.

    Python's parser, which the driver uses, rejects brackets behind a comma (since 3.11.4, and where distributions have
    taken over its repair, CVE-2024-11168).
    """
    scheme, slashes, rest = dsn.partition("://")
    authority = re.split("[/?]", rest, maxsplit=1)[0]
    login, at, hosts = authority.rpartition("@")
    hosts = re.sub(r"\[(.*?)\]", lambda found: found[1].replace(":", "%3A"), hosts)
    return f"{scheme}{slashes}{login}{at}{hosts}{rest[len(authority) :]}"


def redacted(dsn: str) -> str:
    """`dsn` with *** for its password, and for query parameters with names like a secret's."""
    location, mark, query = dsn.partition("?")
    scheme, slashes, rest = location.partition("://")
    authority, slash, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    user, colon, _ = login.partition(":")
    pairs = [pair.partition("=") for pair in query.split("&")]
    shown = "&".join(name + sign + ("***" if _is_secret(name) else value) for name, sign, value in pairs)
    password = ":***" if colon else ""
    return f"{scheme}{slashes}{user}{password}{at}{hosts}{slash}{path}{mark}{shown}"


def passwords(dsn: str) -> list[str]:
    """The secrets that `redacted` hides, as spelled in the DSN."""
    location, _, query = dsn.partition("?")
    login = location.partition("://")[2].partition("/")[0].rpartition("@")[0]
    pairs = [pair.partition("=") for pair in query.split("&")]
    return [login.partition(":")[2], *(value for name, _, value in pairs if _is_secret(name))]


def _is_host(text: str) -> bool:
    match = _HOST.fullmatch(text)
    if match is None or int((match[2] or ":0")[1:]) > PORT_MAX:
        return False
    name = unquote(match[1])
    try:
        if match[1].startswith("["):
            return IPv6Address(match[1][1:-1]) is not None
        return name.startswith("/") or name.encode("idna") is not None  # as the driver will write it
    except ValueError:  # of either
        return False


def _can_be_split(location: str) -> bool:
    """True if the driver's parser accepts it: its errors quote the password (one with a letter like \u2100)."""
    try:
        urlsplit(for_driver(location))
    except ValueError:
        return False
    return True


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(unquote(name)) is not None
