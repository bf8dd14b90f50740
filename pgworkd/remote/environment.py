"""What the environment says about the way to a gateway: a proxy, and the certificates that are trusted.

Read as curl reads it, and only where it concerns the gateway's address.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from pgworkd.errors import UsageError
from pgworkd.process.redaction import redact

_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def client(url: str, **options: Any) -> httpx.AsyncClient:
    """A client for calls of that address. Raises UsageError, which names the variable that cannot be used."""
    name, proxy = proxy_for(url)
    verify: ssl.SSLContext | bool = False  # without TLS there is nothing to verify, and nothing to read
    if "https" in (urlsplit(url).scheme, urlsplit(proxy or "").scheme):
        try:
            verify = httpx.create_ssl_context()
        except OSError as error:
            named = " or ".join(each for each in _CERTIFICATES if each in os.environ)
            raise UsageError(f"the certificates that {named} names cannot be read: {error}") from None
    try:
        return httpx.AsyncClient(proxy=proxy, verify=verify, trust_env=False, **options)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        said = redact(str(error)).partition("\n")[0]
        raise UsageError(
            f"the proxy that {name} names cannot be used: {said}; correct it, or add the gateway's host to NO_PROXY"
        ) from None


def through(url: str) -> str:
    """What to say of the way to that address, where a call has failed."""
    name, _ = proxy_for(url)
    return f", through the proxy that {name} names" if name else ""


def proxy_for(url: str) -> tuple[str, str | None]:
    """The variable that names a proxy for this address, and the proxy; ("", None): there is none."""
    at = urlsplit(url)
    if _is_excepted(at.hostname or ""):
        return "", None
    for variable in (f"{at.scheme}_proxy", "all_proxy"):
        for name in (variable, variable.upper()):
            if value := os.environ.get(name):
                return name, value if "://" in value else f"http://{value}"
    return "", None


def _is_excepted(host: str) -> bool:
    excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if urllib.request.proxy_bypass_environment(host, {"no": excepted}):  # type: ignore[attr-defined]
        return True
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return any(address in network for network in map(_network, excepted.split(",")) if network is not None)
    return False


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    with suppress(ValueError):
        return ipaddress.ip_network(text.strip().replace("[", "").replace("]", ""), strict=False)
    return None
