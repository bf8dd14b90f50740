"""Translates the driver's errors to the project's own.

`DatabaseUnavailable`: try again (`OutcomeUnknown`: the call may have taken effect; `DatabaseBusy`: the server answered
that it did not). `WorkerLost`, `SchemaError`, `DatabaseError`, `UsageError`: do not. Texts have the remedy, never a
password.
"""

from __future__ import annotations

import os

import asyncpg

from pgworkd.database import grants
from pgworkd.database.session import NOT_PREPARED, REFUSED, SHARED
from pgworkd.errors import (
    SQLSTATES,
    AccessRefused,
    DatabaseBusy,
    DatabaseError,
    DatabaseUnavailable,
    OutcomeUnknown,
    SchemaError,
    UsageError,
)
from pgworkd.settings import tls
from pgworkd.settings.conninfo import WrongDsn

# SQLSTATEs (https://www.postgresql.org/docs/current/errcodes-appendix.html) that mean that the server or the session
# is gone, or does not accept us: another connection is needed.
TOO_MANY = "53300"
"""Too many connections: of the server, the database or the role."""
_UNAVAILABLE = {"25006", "25P03", TOO_MANY, "57P01", "57P02", "57P03", "57P04", "57P05"}
# Those after which the same call may succeed on the same connection: deadlock, serialization failure, insufficient
# resources, a lock or statement time-out, a system error.
_BUSY_CLASSES = ("40", "53", "57", "58")
_PROTOCOL = "08P01"
_BUSY = {"55P03", "XX000"}
_SCHEMA_MISSING = {"42P01", "42883", "3F000", "42703"}
BROKEN = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""The errors of a connection that can no longer be used."""
FORBIDDEN = "42501"
_CREDENTIALS = {"28P01", "28000", "3D000", FORBIDDEN}
# A session that ends with these may have committed before.
_UNDECIDED = {"57P01", "57P02"}
_WAITED = "; perhaps another transaction holds a lock: pg_blocking_pids() names its process"
# After these the session is dropped: a standby, a server that shuts down, a statement that timed out.
DROP_SESSION = {"25006", "57P03", "57014", "25P03"}


class Unreachable(OSError):  # noqa: N818 - a state
    """No address answered as it should; the text has each, and what it did."""


def translate(error: BaseException) -> Exception:
    """The project's error for one of asyncpg's; its text has the remedy and no password."""
    _forget_frames(error)
    if isinstance(error, asyncpg.PostgresError):
        return _translate_server_error(error)
    if isinstance(error, TimeoutError):
        return DatabaseUnavailable("the database did not answer in time")
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return DatabaseUnavailable(said(error))
    if isinstance(error, WrongDsn):
        return UsageError(f"the DSN cannot be used: {error}")
    if isinstance(error, UsageError):
        return UsageError(str(error))  # a new one: no error may be its own cause
    if isinstance(error, asyncpg.ClientConfigurationError):
        return UsageError(f"the DSN cannot be used: {error}{_read_besides()}")
    if isinstance(error, ValueError):
        return DatabaseError(str(error), sqlstate="22000")  # an argument that the driver cannot encode
    if isinstance(error, (OSError, asyncpg.InterfaceError)):
        return DatabaseUnavailable(f"no connection to the database: {said(error)}")
    return DatabaseUnavailable(f"{type(error).__name__}: {error}")


def is_judgement(error: Exception) -> bool:
    """True if the server that was asked for a session has judged who we are, or what we want: no other need be asked.

    So it is for libpq, too. False: this address cannot serve us, and another one might.
    """
    code = sqlstate_of(error)
    if isinstance(error, asyncpg.PostgresError):
        return code == _PROTOCOL or not (code in _UNAVAILABLE or code[:2] in ("08", *_BUSY_CLASSES))
    return not isinstance(error, (OSError, asyncpg.TargetServerAttributeNotMatched))


def said(error: Exception) -> str:
    """What an address answered, in a few words, and the remedy if there is one."""
    if isinstance(error, TimeoutError):
        return "did not answer in time"
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "this server only reads (a standby?): connect to the primary"
    if isinstance(error, OSError) and not isinstance(error, Unreachable):
        number = error.errno or 0  # negative: of getaddrinfo(); with a file's name the text is better
        known = os.strerror(number) if number > 0 and error.filename is None else ""
        return tls.remedy(error) or known or error.strerror or str(error) or type(error).__name__
    code = sqlstate_of(error)
    return f"{error} ({code})" if code else str(error)


def sqlstate_of(error: BaseException) -> str:
    """The SQLSTATE of an error, five characters; "" if there is none."""
    return str(getattr(error, "sqlstate", "") or "")


def is_answer(error: BaseException) -> bool:
    """True for the server's answer that a call took no effect; asyncpg's own errors have a SQLSTATE, too."""
    code = sqlstate_of(error)
    return isinstance(error, asyncpg.PostgresError) and code not in _UNDECIDED and not code.startswith("08")


def unanswered(error: BaseException) -> Exception:
    """The project's error for one in place of an answer: the call may have taken effect."""
    translated = translate(error)
    if not isinstance(translated, DatabaseUnavailable):
        return translated
    return OutcomeUnknown(f"{translated}; the call may have taken effect")


def _forget_frames(error: BaseException | None) -> None:
    """Drops the driver's frames: a printer of local variables would print the DSN and its password."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _read_besides() -> str:
    """Environment variables that the driver reads besides the DSN, and that may be at fault."""
    names = sorted(name for name in os.environ if name.startswith("PG") and not name.startswith("PGWORKD_"))
    return f" (the driver also reads {', '.join(names)} from the environment)" if names else ""


def _translate_server_error(error: asyncpg.PostgresError) -> Exception:
    code = sqlstate_of(error)
    text = str(error)
    if code in SQLSTATES and (exception := SQLSTATES[code].exception) is not DatabaseError:
        return exception(". ".join(map(str.strip, text.split("\nHINT:"))))
    if code in NOT_PREPARED:
        return UsageError(SHARED.format(f" ({text.splitlines()[0]})"))
    if REFUSED in text:  # what stands in the DSN itself; ours are made otherwise
        remedy = "remove it from the DSN or the environment, or allow it there"
        return UsageError(f"the DSN cannot be used: the pooler says: {text}; {remedy}")
    if code in _SCHEMA_MISSING:
        return SchemaError(f"{text}: is the schema installed and current? Run: pgworkd migrate")
    if code in _UNAVAILABLE or code[:2] == "08":
        return DatabaseUnavailable(f"{text} ({code})")
    if code in _BUSY or code[:2] in _BUSY_CLASSES:
        hint = _WAITED if code in ("57014", "55P03") else ""
        return DatabaseBusy(f"{text} ({code}){hint}", sqlstate=code)
    if code == "42704" and "configuration parameter" in text:  # each that the driver does not know is one of a session
        return UsageError(f"the DSN cannot be used: {text}; correct this name, or remove it{_read_besides()}")
    if code in _CREDENTIALS:
        groups = grants.groups_that_may(text) if code == FORBIDDEN else ""
        return AccessRefused(
            f"the database refused us: {text} ({code}); check user, password, database and grants{groups}"
        )
    return DatabaseError(text, sqlstate=code, constraint=getattr(error, "constraint_name", None))
