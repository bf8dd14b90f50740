"""What libpq's parameters say, in a DSN, a service file and the environment. Never opens a connection."""

from __future__ import annotations

import configparser
import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

from pgworkd.core.dsn import PORT_MAX, dsn_fault, parameters
from pgworkd.core.validation import closest
from pgworkd.errors import UsageError
from pgworkd.process.redaction import passwords
from pgworkd.settings.file import quoted
from pgworkd.settings.libpq import (
    CHOICES,
    DRIVER,
    MEANT,
    NUMBERS,
    STANDBYS,
    UNSAFE,
    VARIABLES,
    VERIFY_FULL,
    VERIFYING,
    WITHOUT_EFFECT,
)

SOCKETS = ("/run/postgresql", "/var/run/postgresql", "/tmp", "/private/tmp")  # noqa: S108 # nosec B108 # Postgres' own
"""Where Postgres listens on this host; without a host each is tried, and then localhost, as the driver does."""
SERVICE_FILE = ".pg_service.conf"
PORT = 5432

_NUMBER = re.compile(r"-?\d{1,9}", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,62}", re.ASCII)


class WrongDsn(UsageError, ValueError):  # noqa: N818 - a state, not an error's name
    """What is wrong with a DSN, or with what it is completed from, and the remedy."""


class Host(NamedTuple):
    """A host of the list: its name, or the folder of its socket; `address`: given with it, so that no name is asked."""

    name: str
    port: int
    address: str = ""

    @property
    def is_socket(self) -> bool:
        """Whether this is a folder with a Unix socket."""
        return self.name.startswith("/")


class Conninfo(NamedTuple):
    """The parameters of a connection."""

    hosts: tuple[Host, ...]
    parameters: dict[str, str]
    """All parameters that are given, by libpq's names."""
    origins: dict[str, str]
    """The source of each parameter that is not in the DSN itself."""
    has_secret_in_query: bool = False
    """True if the DSN's query has a secret: an unknown parameter may be a part of it."""

    def __repr__(self) -> str:
        return f"Conninfo({self.hosts})"  # a password is among the parameters

    @property
    def remote(self) -> list[str]:
        """The hosts that are not this one."""
        return [host.name for host in self.hosts if not (is_local(host.name) and is_local(host.address))]

    @property
    def sslmode(self) -> str | None:
        """The sslmode in force, if one is given. The server must prove who it is where channel_binding says so."""
        mode = self.parameters.get("sslmode")
        if self.is_bound and mode not in VERIFYING and not all(host.is_socket for host in self.hosts):
            return VERIFY_FULL
        return mode

    @property
    def is_bound(self) -> bool:
        """Whether the login must be bound to the TLS channel."""
        return self.parameters.get("channel_binding") == "require"

    @property
    def prefers_standby(self) -> bool:
        """Whether programs that only read should ask a server that only reads."""
        return self.parameters.get("target_session_attrs") in STANDBYS

    @property
    def is_balanced(self) -> bool:
        """Whether hosts and addresses are to be tried in random order."""
        return self.parameters.get("load_balance_hosts") == "random"

    @property
    def application_name(self) -> str:
        """The name by which the application wants to be known; "" if there is none."""
        return self.parameters.get("application_name") or self.parameters.get("fallback_application_name", "")

    @property
    def for_driver(self) -> str:
        """A DSN of what the driver obeys, without hosts."""
        given = self.parameters if self.sslmode is None else self.parameters | {"sslmode": self.sslmode}
        return f"postgresql://?{urlencode({name: given[name] for name in DRIVER if name in given})}"

    def number(self, name: str) -> int | None:
        """A parameter that is a number; None if it is not given, or negative."""
        number = int(self.parameters.get(name, "-1"))
        return None if number < 0 else number

    def where(self, name: str) -> str:
        """A parameter, and what gave it."""
        return f"{name} ({self.origins.get(name, 'in the DSN')})"


def conninfo(dsn: str) -> Conninfo:
    """The parameters of the DSN and, where it has none, of the service and the environment.

    Raises WrongDsn, which names the parameter and what gave it, for what is malformed, unknown or unsafe.
    """
    if fault := dsn_fault(dsn):
        raise WrongDsn(fault)
    # What is empty is not given.
    given = {name: value for name, value in parameters(dsn).items() if value.strip(",") or name not in VARIABLES}
    if given.get("ssl") == "true":  # as in JDBC's
        given = {"sslmode": VERIFY_FULL} | {name: value for name, value in given.items() if name != "ssl"}
    variables = {name: variable for name, variable in VARIABLES.items() if variable}
    environment = {name: os.environ[variable] for name, variable in variables.items() if os.environ.get(variable)}
    service = {name: value for name, value in _service(environment | given).items() if value}
    origins = {name: f"environment {variables[name]}" for name in environment}
    origins |= dict.fromkeys(service, f"service {(environment | given).get('service')!r}")
    found = environment | service | given
    if "sslmode" in found:
        found["sslmode"] = found["sslmode"].replace("_", "-")  # as the driver accepts it, too
    told = Conninfo((), found, {name: origins[name] for name in origins if name not in given})
    told = told._replace(has_secret_in_query=len(passwords(dsn)) > 1)
    told = told._replace(hosts=tuple(_hosts(told)))
    if (fault := next(_faults(told), None)) is not None:
        raise WrongDsn(fault)
    return told


def notes(told: Conninfo) -> list[str]:
    """What is not done as the parameters say, one line each."""
    given, found = told.parameters, []
    for name, (_, same, instead) in WITHOUT_EFFECT.items():
        if name in given and given[name].lower() not in same.split():
            found.append(f"{told.where(name)} has no effect: {instead}")
    if told.is_bound and given.get("sslmode", VERIFY_FULL) not in VERIFYING:
        found.append(
            f"{told.where('channel_binding')}: sslmode is {told.sslmode} instead of {given['sslmode']}, as the driver "
            "cannot bind the login to the channel; both make sure who the server is"
        )
    if "require_auth" in given:
        found.append(f"{told.where('require_auth')} has no effect: the driver answers what the server asks for")
    if told.prefers_standby:
        found.append(f"{told.where('target_session_attrs')} holds for what only reads: daemons need a server to write")
    return found


def _faults(told: Conninfo) -> Iterator[str]:
    """The faults of the parameters, and the remedies."""
    given = told.parameters
    for name, value in given.items():
        where = told.where(name)
        if name not in VARIABLES:
            yield _unknown(told, name)
        elif name in UNSAFE:
            yield f"{where} is not supported: {UNSAFE[name][1]}"
        elif name in CHOICES and value not in CHOICES[name]:
            yield f"{where}: must be one of {', '.join(CHOICES[name])}, not {quoted(value)}"
        elif name in NUMBERS and not _NUMBER.fullmatch(value):
            yield f"{where}: must be a whole number, not {quoted(value)}"
    if given.get("gssencmode") == "require":
        yield f"{told.where('gssencmode')} is not supported: the driver encrypts by TLS only, as sslmode says"
    if given.get("sslcertmode") == "require":
        yield f"{told.where('sslcertmode')} is not supported: a server that asks for no certificate would be accepted"
    if told.is_bound and given.get("sslmode") == "disable":
        yield f"{told.where('channel_binding')} needs TLS: it contradicts {told.where('sslmode')}, which is disable"
    if "require_auth" in given and told.remote and told.sslmode not in (None, *VERIFYING):
        yield (
            f"{told.where('require_auth')} is not supported with sslmode={told.sslmode}: the driver gives any server "
            f"what it asks for, so it must prove who it is: set sslmode={VERIFY_FULL}"
        )


def _unknown(told: Conninfo, name: str) -> str:
    if told.has_secret_in_query and name not in told.origins:
        return "the DSN has an unknown parameter: if it is part of a password, write the & before it as %26"
    if not _NAME.fullmatch(name):
        return "the DSN has a parameter whose name is malformed: correct it, or remove it"
    meant = MEANT.get(name.lower()) or closest(name.lower(), VARIABLES, likeness=0.8)
    remedy = f"did you mean {meant}?" if meant else "remove it; a setting of the server is options=-c%20NAME=VALUE"
    return f"{told.where(name)} is no parameter of Postgres (libpq): {remedy}"


def _hosts(told: Conninfo) -> Iterator[Host]:
    """The hosts of the list, each with its port."""
    names, addresses, ports = (
        [each.strip() for each in told.parameters.get(name, "").split(",")] for name in ("host", "hostaddr", "port")
    )
    if names == [""]:
        names = [*SOCKETS, "localhost"] if addresses == [""] else addresses
    if addresses == [""]:
        addresses = addresses * len(names)
    if len(ports) == 1:
        ports = ports * len(names)
    for name, listed in (("hostaddr", addresses), ("port", ports)):
        if len(listed) != len(names):
            raise WrongDsn(f"{told.where(name)}: there are {len(listed)} for {len(names)} hosts: give one for each")
    for name, address, port in zip(names, addresses, ports, strict=True):
        if address and not is_address(address):
            raise WrongDsn(f"{told.where('hostaddr')}: {quoted(address)} is no IP address: a name is a host")
        if not name and not address:
            raise WrongDsn(f"{told.where('host')}: has an empty host in its list: name each, or leave it out")
        yield _host(told, name or address, address, port)


def _host(told: Conninfo, name: str, address: str, port: str) -> Host:
    where = "port"
    if name.startswith("["):
        name, _, of_name = name[1:].partition("]")
        port, where = (of_name[1:], "host") if of_name else (port, where)
    elif not name.startswith("/") and not is_address(name) and ":" in name:
        name, _, port = name.partition(":")
        where = "host"
    if port and not (port.isascii() and port.isdecimal() and len(port) < 6 and 1 <= int(port) <= PORT_MAX):
        raise WrongDsn(f"{told.where(where)}: a port must be a number from 1 to {PORT_MAX}, not {quoted(port)}")
    return Host(name, int(port or PORT), address)


def _service(given: dict[str, str]) -> dict[str, str]:
    """The parameters of the service in the service file. WrongDsn if it is not there, as in libpq."""
    if (name := given.get("service")) is None:
        return {}
    path = given.get("servicefile") or home_file(SERVICE_FILE) or f"~/{SERVICE_FILE}"
    services = configparser.ConfigParser()  # as the driver reads it: % is special
    try:
        services.read(path)
        if services.has_section(name):
            return dict(services[name])
    except configparser.Error:  # its text, and the driver's, quotes the line, which may contain a password
        remedy = "give each service a [section] of name=value lines, and write % as %%"
        raise WrongDsn(f"{path} cannot be read: {remedy}") from None
    raise WrongDsn(f"service {quoted(name)} is not in {path}: correct its name, or name its file in PGSERVICEFILE")


def is_local(host: str) -> bool:
    """Whether a host is this one."""
    if host in ("", "localhost") or host.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(text: str) -> bool:
    """Whether this is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def home_file(name: str) -> str | None:
    """The path of a file in the home directory; None if there is none."""
    try:
        path = Path.home() / name
        return str(path) if path.is_file() else None
    except (RuntimeError, KeyError, OSError):  # no home directory, or an inaccessible one
        return None
