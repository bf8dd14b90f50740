"""The address of a mail server as text: smtp://user:password@host:587. Never opens a connection."""

from __future__ import annotations

import ipaddress
import re
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

_PORTS = {"smtp": 587, "smtps": 465, "smtp+insecure": 25}
_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
FORM = "smtp://user:password@host:587, smtps://... or smtp+insecure://..."


class MailServer(NamedTuple):
    """Where to send mail, and how. `ca_file`: PEM file of the CAs to trust; None: the system's."""

    host: str
    port: int
    user: str
    password: str
    tls: Literal["starttls", "tls", "none"]
    ca_file: str | None

    def __repr__(self) -> str:
        return f"MailServer({self.host}:{self.port})"  # without the password


def mail_server(url: str) -> MailServer:
    """Reads `url`. TLS is required: by STARTTLS for smtp://, at once for smtps://; not by smtp+insecure://, and not
    to this host. `?cafile=FILE` names a private CA.

    ValueError, which quotes nothing of it, for anything else.
    """
    try:
        parts = urlsplit(url)
        host, port, scheme = unquote(parts.hostname or ""), parts.port, parts.scheme
    except ValueError:
        raise ValueError(
            f"has a malformed host or port: give {FORM}, with / ? # @ : in it as %2F %3F %23 %40 %3A"
        ) from None
    if scheme not in _PORTS or not host or parts.path not in ("", "/") or parts.fragment or not url.isprintable():
        raise ValueError(f"must look like {FORM}, with / ? # @ : in user and password as %2F %3F %23 %40 %3A")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.query and set(options) != {"cafile"}:
        raise ValueError("has an unknown option after the ?: only cafile=FILE is known")
    secure: Literal["starttls", "none"] = "none" if scheme == "smtp+insecure" or _is_here(host) else "starttls"
    return MailServer(
        host,
        port or _PORTS[scheme],
        unquote(parts.username or ""),
        unquote(parts.password or ""),
        "tls" if scheme == "smtps" else secure,
        options.get("cafile"),
    )


def is_mail_address(text: object) -> bool:
    """True for a plain address like ops@example.com, in ASCII."""
    return isinstance(text, str) and len(text) <= 254 and _ADDRESS.fullmatch(text) is not None


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
