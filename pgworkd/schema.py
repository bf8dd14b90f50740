"""Installing the schema, and refusing to work with one that does not fit."""

from __future__ import annotations

from pathlib import Path

from .errors import DatabaseUnavailable, SchemaError
from .link import Link, LinkOptions

VERSION = 1
"""The schema this program speaks: `schema_version.version` as written by `schema.sql`."""
_LOCK = (1886873445, 0)


def text() -> str:
    """The text of `schema.sql`: beside this file in an installed package, beside the package in a checkout."""
    here = Path(__file__).parent
    for path in (here / "schema.sql", here.parent / "schema.sql"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise SchemaError("schema.sql is missing from this installation: reinstall pgworkd")


async def installed_version(link: Link) -> int | None:
    """The version in the database; None if the schema is not there."""
    if await link.value("SELECT to_regclass('pgworkd.schema_version')") is None:
        return None
    found = await link.value("SELECT version FROM pgworkd.schema_version")
    return None if found is None else int(found)


async def verify(options: LinkOptions) -> None:
    """Raises SchemaError, with the remedy, unless the database has exactly our schema; DatabaseUnavailable if away."""
    link = Link(options, "verify")
    try:
        found = await installed_version(link)
    finally:
        await link.close()
    if found is None:
        raise SchemaError("this database has no pgworkd schema: run pgworkd migrate")
    if found < VERSION:
        raise SchemaError(f"the schema is at version {found}, this program needs {VERSION}: run pgworkd migrate")
    _refuse_newer(found)


async def migrate(options: LinkOptions) -> tuple[int | None, int]:
    """Installs or refreshes the schema; the version before (None: none) and after.

    One transaction; a second migration at the same time waits for the first. Raises SchemaError for a schema
    newer than this program, and DatabaseUnavailable for a server that is away or only reads.
    """
    link = Link(options, "migrate")
    try:
        if await link.value("SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean"):
            raise DatabaseUnavailable("this server only reads (a standby?): connect to the primary")
        before = await installed_version(link)
        if before is not None:
            _refuse_newer(before)
        lock = f"SELECT pg_catalog.pg_advisory_xact_lock({_LOCK[0]}, {_LOCK[1]});"
        await link.script(
            f"BEGIN; SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = '60s'; {lock}\n{text()}\nCOMMIT;"
        )
        after = await installed_version(link)
    finally:
        await link.close()
    return before, after or VERSION


def _refuse_newer(found: int) -> None:
    if found > VERSION:
        raise SchemaError(
            f"the schema is at version {found}, newer than this program ({VERSION}): upgrade pgworkd on this host"
        )
