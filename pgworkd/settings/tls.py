"""How sure a connection is of the server: verify-full to any host that is not this one, unless told otherwise.

The driver, as libpq, would go without TLS where the server says so, and take any certificate. It also knows no
`sslrootcert=system`: where nobody names a CA those of the system are meant, so such a context is made here.
"""

from __future__ import annotations

import configparser
import ipaddress
import os
import ssl
import time
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from pgworkd.errors import UsageError

_FULL: Final = "verify-full"
_VERIFYING = ("verify-ca", _FULL)
_ENVIRONMENT = {
    "sslmode": "PGSSLMODE",
    "sslrootcert": "PGSSLROOTCERT",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
    "sslcrl": "PGSSLCRL",
    "ssl_min_protocol_version": "PGSSLMINPROTOCOLVERSION",
    "ssl_max_protocol_version": "PGSSLMAXPROTOCOLVERSION",
    "service": "PGSERVICE",
}


KEPT_S = 300.0
"""So long what was read from certificate files is used. To read the system's CAs takes 40 ms of the loop's time,
and a daemon makes a dozen connections at its start and after each outage.
"""


class _Address(NamedTuple):
    """What the driver would read from a DSN, its service file and the environment, in that order."""

    hosts: list[str]
    options: dict[str, str]

    @property
    def mode(self) -> str | None:
        """The sslmode, if one is given; the driver takes it with underscores, too."""
        mode = self.options.get("sslmode")
        return None if mode is None else mode.replace("_", "-")

    @property
    def remote(self) -> list[str]:
        """Those hosts that are not this one."""
        return [host for host in self.hosts if not _is_local(host)]


def verification(dsn: str) -> Literal["verify-full"] | ssl.SSLContext | None:
    """What to tell the driver about TLS; None: it goes by the DSN and the environment.

    Raises OSError for files that are not there, and UsageError for contradictions.
    """
    address = _address(dsn)
    given = address.mode
    mode = given or (_FULL if address.remote else None)
    root = address.options.get("sslrootcert")
    if root == "system" and mode not in (None, _FULL):
        raise UsageError(f"sslmode={mode} and sslrootcert=system contradict each other: such CAs sign for anyone")
    if root != "system" and (mode not in _VERIFYING or root or _dot("root.crt")):
        return None if given == mode else _FULL
    options = {name: value for name, value in address.options.items() if name.startswith("ssl")}
    options |= {name: path for name, path in _own_files().items() if not options.get(name)}
    now = int(time.monotonic() // KEPT_S)
    return _context(mode or _FULL, frozenset(options.items()), ssl.get_default_verify_paths(), now)


def weakness(dsn: str) -> str | None:
    """Why this address, which is another host's, is not safe, and the remedy; None if it is."""
    address = _address(dsn)
    if not address.remote or address.mode in (None, _FULL):
        return None
    return (
        f"sslmode={address.mode} to {', '.join(address.remote)} does not make sure who answers: "
        f"say sslmode={_FULL}, with sslrootcert=FILE if its CA is your own"
    )


def remedy(error: OSError) -> str | None:
    """What went wrong with TLS, and what to do; None if the error is about something else."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the server's certificate was refused ({error.verify_message}): name its CA with sslrootcert=FILE, "
            f"connect by a name that it holds, or, if nobody can stand between, say sslmode=require"
        )
    if isinstance(error, ssl.SSLError):
        return f"TLS to the database failed ({error}): check sslmode, sslrootcert, sslcert and sslkey"
    if "rejected SSL upgrade" in str(error):
        return (
            f"{error}: the server offers no TLS. Turn it on there or, if nobody can stand between, say sslmode=disable"
        )
    return None


def _address(dsn: str) -> _Address:
    url = urlsplit(dsn)
    options = {name: value for name, value in parse_qsl(url.query) if value}
    login, at, hosts = url.netloc.partition("@")
    hosts = unquote(hosts if at else login)
    environment = {name: os.environ[key] for name, key in _ENVIRONMENT.items() if os.environ.get(key)}
    options = _service(options.get("service") or environment.get("service")) | options
    hosts = hosts or options.get("host") or os.environ.get("PGHOST", "")
    return _Address([_host(spec) for spec in hosts.split(",")], environment | options)


def _service(name: str | None) -> dict[str, str]:
    """What the service file says of it."""
    path = os.environ.get("PGSERVICEFILE") or _home(".pg_service.conf")
    if name is None or path is None:
        return {}
    services = configparser.ConfigParser(interpolation=None)
    try:
        services.read(path)
    except configparser.Error:  # which quotes the line
        raise UsageError(f"{path} cannot be read: give each service a [section] of name=value lines") from None
    return dict(services[name]) if services.has_section(name) else {}


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
    """The file of that name in ~/.postgresql, where the driver looks, too; None if there is none."""
    return _home(f".postgresql/{name}")


def _home(name: str) -> str | None:
    try:
        path = Path.home() / name
        return str(path) if path.is_file() else None
    except (RuntimeError, KeyError, OSError):  # a user without a home, or one that cannot be entered
        return None


def _own_files() -> dict[str, str]:
    """Those that the driver, too, would take from ~/.postgresql."""
    names = {"sslcrl": "root.crl", "sslcert": "postgresql.crt", "sslkey": "postgresql.key"}
    return {option: path for option, name in names.items() if (path := _dot(name))}


@lru_cache(maxsize=4)
def _context(mode: str, given: frozenset[tuple[str, str]], _authorities: object, _now: int) -> ssl.SSLContext:
    """The system's CAs, and all else as the DSN says: the driver looks at none of that when it is given a context."""
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
