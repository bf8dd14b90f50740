"""TLS to the database: sslmode=verify-full by default for every host other than this one.

The driver's default, as libpq's, is to use TLS only if the server offers it, and to accept any certificate. It does not
support `sslrootcert=system` either; where no CA is named the system's are meant, so that context is made here.
"""

from __future__ import annotations

import ssl
import time
from functools import lru_cache
from typing import Literal

from pgworkd.errors import UsageError
from pgworkd.settings.conninfo import Conninfo, home_file
from pgworkd.settings.libpq import VERIFY_FULL, VERIFYING

KEPT_S = 300.0
"""How long, in seconds, the contents of certificate files are cached. Reading the system's CAs blocks the event loop
for 40 ms, and a daemon opens a dozen connections at its start and after each outage.
"""


def verification(told: Conninfo) -> Literal["verify-full"] | ssl.SSLContext | None:
    """The driver's `ssl` argument; None leaves it to the parameters.

    Raises OSError for missing files, and UsageError for options that contradict each other.
    """
    given = told.sslmode
    mode = given or (VERIFY_FULL if told.remote else None)
    root = told.parameters.get("sslrootcert")
    if root == "system" and mode not in (None, VERIFY_FULL):
        raise UsageError(f"sslrootcert=system requires sslmode=verify-full, not {mode}: public CAs sign for anyone")
    if root != "system" and (mode not in VERIFYING or root or _dot("root.crt")):
        return None if given == mode else VERIFY_FULL
    options = {name: value for name, value in told.parameters.items() if name.startswith("ssl")}
    options |= {name: path for name, path in _own_files().items() if not options.get(name)}
    now = int(time.monotonic() // KEPT_S)
    return _context(mode or VERIFY_FULL, frozenset(options.items()), ssl.get_default_verify_paths(), now)


def weakness(told: Conninfo) -> str | None:
    """Why a connection to this address, of another host, is not safe, and the remedy; None if it is."""
    if not told.remote or told.sslmode in (None, VERIFY_FULL):
        return None
    return (
        f"sslmode={told.sslmode} to {', '.join(told.remote)} does not verify the server's identity: "
        f"set sslmode={VERIFY_FULL}, with sslrootcert=FILE for a private CA"
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


def _dot(name: str) -> str | None:
    """The path of a file in ~/.postgresql, which the driver reads, too; None if there is none."""
    return home_file(f".postgresql/{name}")


def _own_files() -> dict[str, str]:
    """The files that the driver would read from ~/.postgresql."""
    names = {"sslcrl": "root.crl", "sslcert": "postgresql.crt", "sslkey": "postgresql.key"}
    return {option: path for option, name in names.items() if (path := _dot(name))}


@lru_cache(maxsize=4)
def _context(mode: str, given: frozenset[tuple[str, str]], _authorities: object, _now: int) -> ssl.SSLContext:
    """A context with the system's CAs and the DSN's other options, which the driver ignores when given a context."""
    options = dict(given)
    context = ssl.create_default_context()
    context.check_hostname = mode == VERIFY_FULL
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
