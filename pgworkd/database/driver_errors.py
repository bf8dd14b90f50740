"""What the driver's errors mean, as the project's own.

`DatabaseUnavailable` (try again; `OutcomeUnknown`: it may have been done; `DatabaseBusy`: the server answered that it
was not), `WorkerLost`, `SchemaError`, `DatabaseError` (do not), `UsageError`; with the remedy and no password.
"""

from __future__ import annotations

import os

import asyncpg

from pgworkd.errors import (
    SQLSTATES,
    DatabaseBusy,
    DatabaseError,
    DatabaseUnavailable,
    OutcomeUnknown,
    SchemaError,
    UsageError,
)
from pgworkd.settings import tls

# SQLSTATEs (https://www.postgresql.org/docs/current/errcodes-appendix.html) by which the server says that it or the
# session is gone, or does not take us: another connection is needed.
_AWAY = {"25006", "25P03", "53300", "57P01", "57P02", "57P03", "57P04", "57P05"}
# Those after which the same call may succeed, on the same connection: deadlock, serialization, resources short, a lock
# or statement time-out, an error of the system.
_BUSY_CLASSES = ("40", "53", "57", "58")
_BUSY = {"55P03", "XX000"}
_SCHEMA_MISSING = {"42P01", "42883", "3F000", "42703"}
BROKEN = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What a connection raises that cannot be used any more."""
_CREDENTIALS = {"28P01", "28000", "3D000", "42501"}
# A session that ends by these may have committed before.
_UNDECIDED = {"57P01", "57P02"}
# What a pooler in transaction mode makes of our settings, or of statements that another of its clients prepared.
_POOLED = {"42P05", "26000"}
_POOLED_TEXT = "unsupported startup parameter"
# After these the session itself is suspect: a standby, a server going down, a statement cut off.
DROP_SESSION = {"25006", "57P03", "57014", "25P03"}


def translate(error: BaseException) -> Exception:
    """The project's error for one of asyncpg's, with the remedy in its text and no password."""
    _forget_frames(error)
    if isinstance(error, asyncpg.PostgresError):
        return _translate_server_error(error)
    if isinstance(error, TimeoutError):
        return DatabaseUnavailable("the database did not answer in time")
    if isinstance(error, OSError) and (text := tls.remedy(error)) is not None:
        return DatabaseUnavailable(text)
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return DatabaseUnavailable("this server only reads (a standby?): connect to the primary")
    if isinstance(error, UsageError):
        return error
    if isinstance(error, asyncpg.ClientConfigurationError):
        return UsageError(f"the DSN cannot be used: {error}{_read_besides()}")
    if isinstance(error, ValueError):
        return DatabaseError(str(error), sqlstate="22000")  # an argument that the driver cannot encode
    if isinstance(error, (OSError, asyncpg.InterfaceError)):
        return DatabaseUnavailable(f"no connection to the database: {error}")
    return DatabaseUnavailable(f"{type(error).__name__}: {error}")


def sqlstate_of(error: BaseException) -> str:
    """Five characters; "" for what has none."""
    return str(getattr(error, "sqlstate", "") or "")


def is_answer(error: BaseException) -> bool:
    """True if the server says by it that what was asked of it is not done; asyncpg's own have a SQLSTATE, too."""
    code = sqlstate_of(error)
    return isinstance(error, asyncpg.PostgresError) and code not in _UNDECIDED and not code.startswith("08")


def unanswered(error: BaseException) -> Exception:
    """As `translate`, for what came in place of an answer."""
    translated = translate(error)
    if not isinstance(translated, DatabaseUnavailable):
        return translated
    return OutcomeUnknown(f"{translated}; what was asked of it may have been done")


def _forget_frames(error: BaseException | None) -> None:
    """The driver's frames hold the address and the password: whatever prints local variables would print them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _read_besides() -> str:
    """The variables that may be at fault in place of the DSN."""
    names = sorted(name for name in os.environ if name.startswith("PG") and not name.startswith("PGWORKD_"))
    return f" (the driver also reads {', '.join(names)} from the environment)" if names else ""


def _translate_server_error(error: asyncpg.PostgresError) -> Exception:
    code = sqlstate_of(error)
    text = str(error)
    if code in SQLSTATES and (exception := SQLSTATES[code].exception) is not DatabaseError:
        return exception(". ".join(map(str.strip, text.split("\nHINT:"))))
    if code in _POOLED or _POOLED_TEXT in text:
        return UsageError(
            f"a connection pooler stands before the database ({text.splitlines()[0]}): daemons and commands need "
            "sessions of their own, so give them the address of Postgres itself; applications may insert through it"
        )
    if code in _SCHEMA_MISSING:
        return SchemaError(f"{text}: is the schema installed and current? Run: pgworkd migrate")
    if code in _AWAY or code[:2] == "08":
        return DatabaseUnavailable(f"{text} ({code})")
    if code in _BUSY or code[:2] in _BUSY_CLASSES:
        return DatabaseBusy(f"{text} ({code})", sqlstate=code)
    if code in _CREDENTIALS:
        return UsageError(f"the database refused us: {text} ({code}); check user, password, database and grants")
    return DatabaseError(text, sqlstate=code, constraint=getattr(error, "constraint_name", None))
