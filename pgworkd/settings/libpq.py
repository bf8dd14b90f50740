"""The parameters of libpq, and what becomes of each here.

The driver is given what it knows. What it does not know is obeyed here, has no effect, or is refused where that would
be less safe than it asks for. docs/connecting.md lists them.
"""

from __future__ import annotations

from typing import Final

VERIFY_FULL: Final = "verify-full"
VERIFYING: Final = ("verify-ca", VERIFY_FULL)

DRIVER = {
    "user": "PGUSER",
    "password": "PGPASSWORD",  # nosec B105 # the name of a variable
    "dbname": "PGDATABASE",
    "passfile": "PGPASSFILE",
    "sslmode": "PGSSLMODE",
    "sslnegotiation": "PGSSLNEGOTIATION",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
    "sslpassword": None,
    "sslrootcert": "PGSSLROOTCERT",
    "sslcrl": "PGSSLCRL",
    "ssl_min_protocol_version": "PGSSLMINPROTOCOLVERSION",
    "ssl_max_protocol_version": "PGSSLMAXPROTOCOLVERSION",
    "krbsrvname": "PGKRBSRVNAME",
    "gsslib": "PGGSSLIB",
    "options": "PGOPTIONS",
}
"""Parameters that the driver obeys, and the variable of each in the environment."""
OURS = {
    "service": "PGSERVICE",
    "servicefile": "PGSERVICEFILE",
    "host": "PGHOST",
    "hostaddr": "PGHOSTADDR",
    "port": "PGPORT",
    "application_name": "PGAPPNAME",
    "fallback_application_name": None,
    "connect_timeout": "PGCONNECT_TIMEOUT",
    "keepalives": None,
    "keepalives_idle": None,
    "keepalives_interval": None,
    "keepalives_count": None,
    "tcp_user_timeout": None,
    "load_balance_hosts": "PGLOADBALANCEHOSTS",
    "target_session_attrs": "PGTARGETSESSIONATTRS",
    "channel_binding": "PGCHANNELBINDING",
    "gssencmode": "PGGSSENCMODE",
    "require_auth": "PGREQUIREAUTH",
}
"""Parameters that are obeyed here."""
WITHOUT_EFFECT = {
    "client_encoding": ("PGCLIENTENCODING", "utf8 utf-8 auto unicode", "text is always UTF-8"),
    "sslcompression": ("PGSSLCOMPRESSION", "0", "TLS compression is never used"),
    "sslsni": ("PGSSLSNI", "1", "the name of the host is always sent"),
    "sslkeylogfile": (None, "", "no keys are written"),
    "sslcertmode": ("PGSSLCERTMODE", "allow", "a certificate that is there is sent if the server asks"),
    "gssdelegation": ("PGGSSDELEGATION", "0", "no credentials are delegated"),
    "min_protocol_version": ("PGMINPROTOCOLVERSION", "3.0", "the protocol is 3.0"),
    "max_protocol_version": ("PGMAXPROTOCOLVERSION", "3.0 latest", "the protocol is 3.0"),
    "replication": (None, "false off no 0", "these are ordinary sessions"),
    "oauth_issuer": (None, "", "the driver does not know OAuth"),
    "oauth_client_id": (None, "", "the driver does not know OAuth"),
    "oauth_client_secret": (None, "", "the driver does not know OAuth"),
    "oauth_scope": (None, "", "the driver does not know OAuth"),
    "authtype": (None, "", "Postgres has given it up"),
    "tty": (None, "", "Postgres has given it up"),
}
"""Parameters without effect: the variable, the values that ask for nothing else, and what is done in their place."""
UNSAFE = {
    "sslcrldir": ("PGSSLCRLDIR", "revoked certificates would be accepted: name a file with sslcrl"),
    "requirepeer": ("PGREQUIREPEER", "nobody would check whose server it is: protect the folder of the socket instead"),
    "scram_client_key": (None, "the driver logs in with a password only: give password or passfile"),
    "scram_server_key": (None, "the driver logs in with a password only: give password or passfile"),
}
"""Parameters that are refused, as they would not be obeyed: the variable, and why."""
VARIABLES = {
    **DRIVER,
    **OURS,
    **{name: variable for name, (variable, *_) in WITHOUT_EFFECT.items()},
    **{name: variable for name, (variable, _) in UNSAFE.items()},
}
"""All parameters of libpq, and the variable of each in the environment, if it has one."""

CHOICES = {
    "sslmode": ("disable", "allow", "prefer", "require", *VERIFYING),
    "channel_binding": ("disable", "prefer", "require"),
    "gssencmode": ("disable", "prefer", "require"),
    "load_balance_hosts": ("disable", "random"),
    "target_session_attrs": ("any", "read-write", "read-only", "primary", "standby", "prefer-standby"),
    "sslnegotiation": ("postgres", "direct"),
    "sslcertmode": ("disable", "allow", "require"),
}
STANDBYS = ("read-only", "standby", "prefer-standby")
MEANT = {
    "ssl": "sslmode",
    "database": "dbname",
    "username": "user",
    "pass": "password",  # nosec B105 # the name of a parameter
    "sslca": "sslrootcert",
    "sslidentity": "sslcert",
    "timeout": "connect_timeout",
}
"""Names of other programs for some of the parameters."""
NUMBERS = (
    "connect_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
)
