"""Installing the schema, and refusing to work with one that does not fit."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio

from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.database.driver_errors import sqlstate_of
from pgworkd.errors import DatabaseUnavailable, PgworkdError, SchemaAwaited, SchemaError

VERSION = 15
"""The schema this program speaks: `schema_version.version` as written by `99_finish.sql`.

A schema that has landed never changes without a new number. To change one: edit it in `schema.sql` and its chapters;
bring databases of the version before there in `migrations/NNNN_name.sql`, included by `schema.sql`; raise the number
here, in `00_begin.sql` and in `99_finish.sql`. When it lands, its script and grants are added to `tests/sql/versions`.
Daemons of that version settle what they run beside the new schema: what they call keeps its name, arguments and answer
for one version; a new function that it calls gets, in the migration, the rights of an old one (see `0003_names.sql`),
as the grants may not be applied again for a while.
"""
PATIENCE_S = 300.0
"""How long `migrate` tries to get its locks, beside transactions that hold them."""
_PAUSE_S, _PAUSE_S_MAX = 0.5, 5.0
_LOCK = (1886873445, 0)
"""The advisory lock of a migration."""
_IN_THE_WAY = {"55P03", "40P01", "42P06"}
_CHAPTER = re.compile(r"\\ir pgworkd/sql/((?:migrations/)?[0-9a-z_]+\.sql)")
# The script's first step locks all that a second run changes, in the lock order, before it does any work: writers to
# these tables wait behind it for 200 ms at most, and then for the script. Day partitions are not locked.
_BEGIN = """
BEGIN;
SET LOCAL statement_timeout = 0;
SET LOCAL lock_timeout = '5s';
SELECT pg_catalog.pg_advisory_xact_lock(1886873445, 0);
SET LOCAL lock_timeout = '200ms';
"""
_END = "UPDATE pgworkd.schema_version SET script = 'MARK'; COMMIT;"
_HOLDERS = """
    SELECT a.pid, a.application_name, extract(epoch FROM clock_timestamp() - a.xact_start)::int, h.surely
    FROM pg_catalog.pg_stat_activity a
    CROSS JOIN LATERAL (
        SELECT EXISTS (SELECT FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_class c ON c.oid = l.relation
                       WHERE l.pid = a.pid AND l.granted
                         AND (c.relnamespace = to_regnamespace('pgworkd')
                              OR l.locktype = 'advisory' AND (l.classid, l.objid) = (1886873445, 0))) AS surely) h
    WHERE a.datname = current_database() AND a.pid <> pg_catalog.pg_backend_pid() AND a.xact_start IS NOT NULL
      AND (h.surely OR to_regnamespace('pgworkd') IS NULL AND a.backend_xid IS NOT NULL)
    ORDER BY h.surely DESC, a.xact_start LIMIT 1"""
# A schema that its creator has not committed is visible to nobody else, and no lock names it: where there is none, the
# oldest transaction that has written is the likeliest to have it.


def text() -> str:
    """The whole schema as SQL for one transaction: `schema.sql` with each chapter in the place of its `\\ir` line."""
    package = Path(__file__).parents[1]
    for path in (package / "schema.sql", package.parent / "schema.sql"):
        if path.is_file():
            return "".join(_lines(path, package / "sql"))
    raise SchemaError("schema.sql is missing from this installation: reinstall pgworkd")


def script() -> str:
    """The whole schema as SQL with BEGIN and COMMIT, for psql or any other client."""
    return f"BEGIN;\n{text()}COMMIT;\n"


def _lines(contract: Path, chapters: Path) -> Iterator[str]:
    """The lines that psql would send, without its transaction; only `\\ir` of a chapter and `\\set` may stand."""
    for number, line in enumerate(contract.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        command = line.strip()
        if found := _CHAPTER.fullmatch(command):
            yield _chapter(chapters / found[1])
        elif command.startswith("\\") and not command.startswith("\\set "):
            raise SchemaError(f"{contract.name}, line {number}: {command.split()[0]} is no command of a schema")
        elif not command.startswith("\\set ") and command not in ("BEGIN;", "COMMIT;"):
            yield line


def _chapter(path: Path) -> str:
    """The text of a chapter; SchemaError if it is missing, or holds a command of psql, which no server knows."""
    if not path.is_file():
        raise SchemaError(f"{path.name}, a part of the schema, is missing from this installation: reinstall pgworkd")
    sql = path.read_text(encoding="utf-8")
    if found := re.search(r"^\s*(\\\w*)", sql, re.M):
        raise SchemaError(f"{path.name}: {found[1]} is no command of a schema")
    return sql


async def installed_version(connection: Connection) -> int | None:
    """The version in the database; None if the schema is not there."""
    if await connection.value("SELECT to_regclass('pgworkd.schema_version')") is None:
        return None
    found = await connection.value("SELECT version FROM pgworkd.schema_version")
    return None if found is None else int(found)


async def verify(options: ConnectionOptions) -> None:
    """Raises SchemaError, with the remedy, unless the database has exactly our schema and the encoding UTF8.

    DatabaseUnavailable if it is away.
    A SchemaAwaited if the schema is missing or older: `pgworkd migrate` mends that.
    """
    connection = Connection(options, "verify")
    try:
        await _refuse_encoding(connection)
        found = await installed_version(connection)
    finally:
        await connection.close()
    if (fault := version_fault(found)) is not None:
        raise (SchemaAwaited if found is None or found < VERSION else SchemaError)(fault)


def version_fault(found: int | None) -> str | None:
    """What is wrong with a schema of this version (None: there is none), and the remedy; None if it is ours."""
    if found is None:
        return "this database has no pgworkd schema: run pgworkd migrate"
    if found < VERSION:
        return f"the schema is at version {found}, this program needs {VERSION}: run pgworkd migrate"
    if found > VERSION:
        return f"the schema is at version {found}, newer than this program ({VERSION}): upgrade pgworkd on this host"
    return None


async def pending(connection: Connection) -> str | None:
    """What keeps the schema from being up to date, and the remedy; None if `migrate` has nothing to do. Only reads.

    Where it was not `migrate` that ran the script, the version alone tells.
    """
    found = await installed_version(connection)
    mark = await _last_run(connection) if found == VERSION else None
    if mark is not None and mark != await _mark(connection, text()):
        another = "by another build of pgworkd, or for another version of Postgres"
        return f"the schema is at version {found}, but was installed {another}: run pgworkd migrate"
    return version_fault(found)


async def migrate(
    options: ConnectionOptions,
    *,
    force: bool = False,
    patience_s: float = PATIENCE_S,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[int | None, int]:
    """Installs or refreshes the schema; the version before (None: none) and after.

    Where this very script has been run, nothing is done and nothing locked, unless `force`. Otherwise it is one
    transaction, which tries for `patience_s` seconds to get its locks, and holds up no writer for longer than 200 ms
    while it does not; a second migration at the same time waits for the first. `say` is told what it waits for. Raises
    SchemaError for a schema newer than this program or a database whose encoding is not UTF8, and DatabaseUnavailable
    for a server that is away, only reads, or whose transactions stay in the way.
    """
    connection = Connection(options, "migrate")
    try:
        if await connection.value("SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean"):
            raise DatabaseUnavailable("this server only reads (a standby?): connect to the primary")
        await _refuse_encoding(connection)
        before = await installed_version(connection)
        if before is not None and before > VERSION:
            raise SchemaError(str(version_fault(before)))
        script = text()
        mark = await _mark(connection, script)
        if before == VERSION and not force and await _last_run(connection) == mark:
            await connection.value(
                "SELECT pgworkd.mend_sequences()"
            )  # the rows may have come by logical replication since
            say("the schema is installed and current, as after pgworkd dev or an earlier migrate: nothing to do")
            return before, VERSION
        await _run(connection, "\n".join((_BEGIN, script, _END.replace("MARK", mark))), patience_s, say)
        after = await installed_version(connection)
    finally:
        await connection.close()
    return before, after or VERSION


async def _run(connection: Connection, script: str, patience_s: float, say: Callable[[str], None]) -> None:
    """Runs the script in one transaction, tried until it gets its locks."""
    until, pause_s, told = anyio.current_time() + patience_s, _PAUSE_S, None
    while True:
        try:
            await connection.script(script)
        except PgworkdError as error:
            # Another transaction may just have committed a schema of this name: the next attempt sees it.
            created = "pg_namespace_nspname_index" in str(error)
            if not created and sqlstate_of(error.__cause__ or error) not in _IN_THE_WAY:
                raise
            await connection.close()  # the transaction has failed
            holder, reason = await _in_the_way(connection)
            if anyio.current_time() + pause_s > until:
                raise DatabaseUnavailable(
                    f"the schema or its tables were locked for {patience_s:g} s, nothing was changed; {reason}: end "
                    "that transaction and run pgworkd migrate again"
                ) from error
            if holder not in (told, None):
                told = holder
                say(f"waiting for locks: {reason}")
        else:
            return
        await anyio.sleep(pause_s)
        pause_s = min(_PAUSE_S_MAX, pause_s * 2)


async def _in_the_way(connection: Connection) -> tuple[int | None, str]:
    """The oldest transaction that holds locks of ours: its pid, and a description."""
    rows = await connection.fetch(_HOLDERS)
    if not rows:
        return None, "what held them has ended by now"
    pid, name, age_s, surely = rows[0]
    guess = "" if surely else "another transaction creates a schema pgworkd and has not committed it; probably "
    return pid, f"{guess}pid {pid} ({name or 'no application_name'}), in a transaction for {age_s} s"


async def _mark(connection: Connection, script: str) -> str:
    """A digest of the script on this server: it defines some things otherwise on newer ones."""
    major = await connection.value("SELECT current_setting('server_version_num')::int / 10000")
    return hashlib.sha256(f"{major}\n{script}".encode()).hexdigest()


async def _last_run(connection: Connection) -> str | None:
    """The mark of the script that was run last; None where it was not `migrate` that ran it."""
    known = """SELECT 1 FROM pg_catalog.pg_attribute
        WHERE attrelid = 'pgworkd.schema_version'::regclass AND attname = 'script' AND NOT attisdropped"""
    if await connection.value(known) is None:
        return None
    found = await connection.value("SELECT script FROM pgworkd.schema_version")
    return None if found is None else str(found)


async def _refuse_encoding(connection: Connection) -> None:
    """Raises SchemaError unless the encoding is UTF8: no other stores every text, and SQL_ASCII keeps bytes."""
    database, encoding = (await connection.fetch("SELECT current_database(), current_setting('server_encoding')"))[0]
    if encoding != "UTF8":
        raise SchemaError(
            f"the database {database!r} has the encoding {encoding}, pgworkd needs UTF8: make one with CREATE DATABASE "
            "... ENCODING 'UTF8' TEMPLATE template0, and name it in the dsn (PGWORKD_DSN)"
        )
