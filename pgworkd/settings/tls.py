"""TLS to the database: sslmode=verify-full by default for every host other than this one.

The driver's default, as libpq's, is to use TLS only if the server offers it, and to accept any certificate. It does not
support `sslrootcert=system` either; where no CA is named the system's are meant, so that context is made here.
"""

from __future__ import annotations

import configparser
import ipaddress
import os
import ssl
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from pgworkd.errors import UsageError
from pgworkd.settings.file import quoted
from pgworkd.words.dsn import for_driver

_FULL: Final = "verify-full"
_MODES = ("disable", "allow", "prefer", "require", "verify-ca", _FULL)
_VERIFYING = ("verify-ca", _FULL)
_ENVIRONMENT = {
    "sslmode": "PGSSLMODE",
    "sslrootcert": "PGSSLROOTCERT",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
    "sslcrl": "PGSSLCRL",
    "ssl_min_protocol_version": "PGSSLMINPROTOCOLVERSION",
    "ssl_max_protocol_version": "PGSSLMAXPROTOCOLVERSION",
}


KEPT_S = 300.0
"""How long, in seconds, the contents of certificate files are cached. Reading the system's CAs blocks the event loop
for 40 ms, and a daemon opens a dozen connections at its start and after each outage.
"""


class _Address(NamedTuple):
    """The hosts and options that the driver reads from a DSN, its service file and the environment, in that order."""

    hosts: list[str]
    options: dict[str, str]
    mode_origin: str
    """What gave the sslmode; "" if it is the DSN itself."""

    @property
    def mode(self) -> str | None:
        """The sslmode, if one is given; the driver also accepts it with underscores."""
        mode = self.options.get("sslmode")
        return None if mode is None else mode.replace("_", "-")

    @property
    def remote(self) -> list[str]:
        """The hosts that are not this one."""
        return [host for host in self.hosts if not _is_local(host)]


def driver_arguments(dsn: str) -> dict[str, Any]:
    """The driver's `dsn`, `ssl` and `service`, so that it connects to the hosts that are judged here.

    By itself it reads PGSERVICE too late to use it. Raises as `verification` does.
    """
    named = None if "service" in dict(parse_qsl(urlsplit(for_driver(dsn)).query)) else os.environ.get("PGSERVICE")
    return {"dsn": for_driver(dsn), "ssl": verification(dsn), "service": named}


def verification(dsn: str) -> Literal["verify-full"] | ssl.SSLContext | None:
    """The driver's `ssl` argument; None leaves it to the DSN and the environment.

    Raises OSError for missing files, and UsageError for an unknown sslmode and for options that contradict each other.
    """
    if (fault := mode_fault(dsn)) is not None:
        raise UsageError(fault)
    address = _address(dsn)
    given = address.mode
    mode = given or (_FULL if address.remote else None)
    root = address.options.get("sslrootcert")
    if root == "system" and mode not in (None, _FULL):
        raise UsageError(f"sslrootcert=system requires sslmode=verify-full, not {mode}: public CAs sign for anyone")
    if root != "system" and (mode not in _VERIFYING or root or _dot("root.crt")):
        return None if given == mode else _FULL
    options = {name: value for name, value in address.options.items() if name.startswith("ssl")}
    options |= {name: path for name, path in _own_files().items() if not options.get(name)}
    now = int(time.monotonic() // KEPT_S)
    return _context(mode or _FULL, frozenset(options.items()), ssl.get_default_verify_paths(), now)


def mode_fault(dsn: str, dsn_origin: str = "") -> str | None:
    """What is wrong with the sslmode: where it was given and what is accepted; None if it is well-formed.

    The driver's own error does not say which of the DSN, the service file and the environment it is about.
    """
    address = _address(dsn)
    if address.mode is None or address.mode in _MODES:
        return None
    given = quoted(address.options["sslmode"])
    source = dsn_origin and f" ({dsn_origin})"
    where = f" ({address.mode_origin})" if address.mode_origin else f" in the DSN{source}"
    return f"sslmode{where}: must be one of {', '.join(_MODES)}, not {given}"


def weakness(dsn: str) -> str | None:
    """Why a connection to this address, of another host, is not safe, and the remedy; None if it is."""
    address = _address(dsn)
    if not address.remote or address.mode in (None, _FULL):
        return None
    return (
        f"sslmode={address.mode} to {', '.join(address.remote)} does not verify the server's identity: "
        f"set sslmode={_FULL}, with sslrootcert=FILE for a private CA"
    )


def remedy(error: OSError) -> str | None:
    """The error of TLS and the remedy; None for any other error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the server's certificate could not be verified ({error.verify_message}): name its CA with "
            f"sslrootcert=FILE, connect by a name in the certificate, or, in a trusted network, set sslmode=require"
        )
    if isinstance(error, ssl.SSLError):
        return f"TLS to the database failed ({error}): check sslmode, sslrootcert, sslcert and sslkey"
    if "rejected SSL upgrade" in str(error):
        return f"{error}: the server offers no TLS. Turn it on there or, in a trusted network, set sslmode=disable"
    return None


def _address(dsn: str) -> _Address:
    url = urlsplit(for_driver(dsn))
    options = {name: value for name, value in parse_qsl(url.query) if value}
    environment = {name: os.environ[key] for name, key in _ENVIRONMENT.items() if os.environ.get(key)}
    service = options.get("service") or os.environ.get("PGSERVICE")
    of_service = _service(service)
    mode_origin = f"service {service!r}" if "sslmode" in of_service else f"environment {_ENVIRONMENT['sslmode']}"
    mode_origin = "" if "sslmode" in options else mode_origin
    options = of_service | options
    if named := url.netloc.rpartition("@")[2]:
        hosts = [unquote(spec.partition(":")[0]) for spec in named.split(",")]
    else:
        hosts = [_host(spec) for spec in (options.get("host") or os.environ.get("PGHOST", "")).split(",")]
    return _Address(hosts, environment | options, mode_origin)


def _service(name: str | None) -> dict[str, str]:
    """The options of that service in the service file."""
    path = os.environ.get("PGSERVICEFILE") or _home(".pg_service.conf")
    if name is None or path is None:
        return {}
    services = configparser.ConfigParser()  # as the driver reads it: % is special
    try:
        services.read(path)
        return dict(services[name]) if services.has_section(name) else {}
    except configparser.Error:  # its text, and the driver's, quotes the line, which may contain a password
        remedy = "give each service a [section] of name=value lines, and write % as %%"
        raise UsageError(f"{path} cannot be read: {remedy}") from None


def _host(spec: str) -> str:
    if spec.startswith("/"):
        return spec
    return spec[1:].partition("]")[0] if spec.startswith("[") else spec.partition(":")[0]


def _is_local(host: str) -> bool:
    if host in ("", "localhost") or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _dot(name: str) -> str | None:
    """The path of a file in ~/.postgresql, which the driver reads, too; None if there is none."""
    return _home(f".postgresql/{name}")


def _home(name: str) -> str | None:
    try:
        path = Path.home() / name
        return str(path) if path.is_file() else None
    except (RuntimeError, KeyError, OSError):  # no home directory, or an inaccessible one
        return None


def _own_files() -> dict[str, str]:
    """The files that the driver would read from ~/.postgresql."""
    names = {"sslcrl": "root.crl", "sslcert": "postgresql.crt", "sslkey": "postgresql.key"}
    return {option: path for option, name in names.items() if (path := _dot(name))}


@lru_cache(maxsize=4)
def _context(mode: str, given: frozenset[tuple[str, str]], _authorities: object, _now: int) -> ssl.SSLContext:
    """A context with the system's CAs and the DSN's other options, which the driver ignores when given a context."""
    options = dict(given)
    context = ssl.create_default_context()
    context.check_hostname = mode == _FULL
    for bound in ("min", "max"):
        if version := options.get(f"ssl_{bound}_protocol_version"):
            try:
                setattr(context, f"{bound}imum_version", ssl.TLSVersion[version.replace(".", "_")])
            except KeyError:
                raise UsageError(
                    f"ssl_{bound}_protocol_version must be TLSv1.2 or TLSv1.3, not {version[:20]!r}"
                ) from None
    if revoked := options.get("sslcrl"):
        context.load_verify_locations(cafile=revoked)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN
    if certificate := options.get("sslcert"):
        context.load_cert_chain(certificate, options.get("sslkey"), options.get("sslpassword", ""))
    context.set_alpn_protocols(["postgresql"])
    return context
