"""The schema `pgworkd` in a database: its contents, for comparing installations; and roles and their passwords."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import pytest

from pgworkd.database import grants
from tests.kits.server import database_name
from tests.kits.verbs import Db

Catalog = dict[str, dict[str, str]]
"""For each kind of object: its name, and everything that defines it."""

_OURS = "n.nspname = 'pgworkd'"
_DAY = r"'^finished_jobs_[0-9]{8}'"
_QUERIES = {
    "functions": """
        SELECT p.oid::regprocedure,
               concat_ws(E'\\n', pg_get_functiondef(p.oid), p.proacl, obj_description(p.oid, 'pg_proc'))
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE OURS""",
    "settings of functions": """
        SELECT p.oid::regprocedure, p.proconfig
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE OURS""",
    "relations": """
        SELECT c.relname, concat_ws(' ', c.relkind, c.relpersistence, c.reloptions, c.relreplident, c.relacl,
                                    pg_get_expr(c.relpartbound, c.oid), obj_description(c.oid, 'pg_class'))
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE OURS AND c.relname !~ DAY""",
    "columns": """
        SELECT c.relname || '.' || a.attname,
               concat_ws(' ', format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity, a.attgenerated,
                         pg_get_expr(d.adbin, d.adrelid), a.attacl, col_description(c.oid, a.attnum))
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE OURS AND c.relname !~ DAY AND c.relkind NOT IN ('i', 'I') AND a.attnum > 0 AND NOT a.attisdropped""",
    "indexes": """
        SELECT c.relname, pg_get_indexdef(c.oid)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE OURS AND c.relname !~ DAY AND c.relkind IN ('i', 'I')""",
    "constraints": """
        SELECT concat_ws('.', nullif(k.conrelid, 0)::regclass, nullif(k.contypid, 0)::regtype, k.conname),
               pg_get_constraintdef(k.oid)
        FROM pg_constraint k JOIN pg_namespace n ON n.oid = k.connamespace LEFT JOIN pg_class c ON c.oid = k.conrelid
        WHERE OURS AND coalesce(c.relname, '') !~ DAY""",
    "triggers": """
        SELECT c.relname || '.' || t.tgname, pg_get_triggerdef(t.oid) || ' ' || t.tgenabled::text
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE OURS AND NOT t.tgisinternal AND c.relname !~ DAY""",
    "views": """
        SELECT c.relname, pg_get_viewdef(c.oid)
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE OURS AND c.relkind = 'v'""",
    "types": """
        SELECT t.typname, concat_ws(' ', t.typtype, format_type(t.typbasetype, t.typtypmod), t.typnotnull, t.typacl,
               (SELECT string_agg(e.enumlabel, ',' ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = t.oid))
        FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
        WHERE OURS AND t.typname !~ '_?finished_jobs_[0-9]'""",
    "sequences": """
        SELECT s.sequencename, concat_ws(' ', s.data_type, s.min_value, s.max_value, s.increment_by, s.cycle)
        FROM pg_sequences s WHERE s.schemaname = 'pgworkd'""",
    "schema": "SELECT n.nspname, n.nspacl FROM pg_namespace n WHERE OURS",
    # counted from the first one: the other database may have been made before midnight
    "days": """
        SELECT 'day ' || day - min(day) OVER (),
               replace(replace(bound, day::text, 'its day'), (day + 1)::text, 'the next')
        FROM (SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day, pg_get_expr(c.relpartbound, c.oid) AS bound
              FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
              WHERE OURS AND c.relname ~ DAY AND c.relkind = 'r') d""",
    "version": "SELECT 'version', v.version FROM pgworkd.schema_version v",
}


async def catalog(db: Db) -> Catalog:
    """The whole catalog."""
    found: Catalog = {}
    async with db.transaction():
        await db.execute("SET LOCAL search_path = pg_catalog")  # names are printed with their schema
        for kind, query in _QUERIES.items():
            rows = await db.fetch(query.replace("OURS", _OURS).replace("DAY", _DAY))
            found[kind] = {str(row[0]): str(row[1]) for row in rows}
    return found


def differences(ours: Catalog, theirs: Catalog) -> list[str]:
    """Objects that exist in only one of the two or are not the same in both."""
    return [
        f"{kind}: {name}\n  {ours[kind].get(name)}\n  {theirs[kind].get(name)}"
        for kind in ours
        for name in sorted(ours[kind].keys() | theirs[kind].keys())
        if ours[kind].get(name) != theirs[kind].get(name)
    ]


DENIED = "42501"


# Roles


def with_login(dsn: str, user: str, password: str) -> str:
    """The DSN of the same database for another user; `password` as written there."""
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{parts.netloc.rpartition('@')[2]}"))


class Roles:
    """Their names (which are unique to the database, as roles belong to the whole server), and how to log in."""

    def __init__(self, dsn: str, template: str | None = None) -> None:
        self._dsn = dsn
        self._template = template
        tail = database_name(dsn)[-12:]
        self.names = {role: f'{role} "{tail}"' for role in grants.ROLES}

    @property
    def sql(self) -> str:
        """What `pgworkd grants` prints for these names; or the template, with them."""
        if self._template is None:
            return grants.text(self.names)
        return self._template.format(**{role: self.name(role) for role in grants.ROLES})

    def name(self, role: str) -> str:
        """The role's name, quoted."""
        return '"' + self.names[role].replace('"', '""') + '"'

    def dsn(self, role: str) -> str:
        """The DSN with which to log in as the role."""
        return with_login(self._dsn, quote(self.names[role], safe=""), "secret")

    @contextlib.asynccontextmanager
    async def session(self, role: str) -> AsyncIterator[Db]:
        """A connection as the role."""
        connection = await asyncpg.connect(self.dsn(role))
        try:
            yield connection
        finally:
            connection.terminate()

    @contextlib.asynccontextmanager
    async def acting(self, role: str) -> AsyncIterator[Db]:
        """The same privileges, but in a superuser's session, which may set the clock."""
        connection = await asyncpg.connect(self._dsn)
        try:
            await connection.execute(f"SET ROLE {self.name(role)}")
            yield connection
        finally:
            connection.terminate()


@contextlib.asynccontextmanager
async def granted(dsn: str, db: Db, template: str | None = None) -> AsyncIterator[Roles]:
    """Creates the roles, with privileges and a password; dropped at the end, with the schema.

    `template`: the grants.sql of an older version.
    """
    roles = Roles(dsn, template)
    everyone = ", ".join(map(roles.name, grants.ROLES))
    try:
        await db.execute(roles.sql)
        for role in grants.ROLES:
            if not await db.fetchval("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", roles.names[role]):
                await db.execute(f"CREATE ROLE {roles.name(role)}")  # older grants knew fewer
            await db.execute(f"ALTER ROLE {roles.name(role)} LOGIN PASSWORD 'secret'")
        yield roles
    finally:
        await db.execute(
            "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE usename = ANY ($1)",
            [*roles.names.values()],
        )
        await db.execute(f"DROP OWNED BY {everyone} CASCADE; DROP ROLE {everyone}")


async def denied(db: Db, sql: str, *args: object) -> None:
    """Fails unless Postgres refuses the statement with insufficient_privilege."""
    try:
        await db.execute(sql, *args)
    except asyncpg.PostgresError as error:
        assert error.sqlstate == DENIED, f"{sql}: {error}"  # noqa: PT017 - so that the message names the statement
    else:
        pytest.fail(f"allowed: {sql}")


@contextlib.asynccontextmanager
async def plain_user(dsn: str, db: asyncpg.Connection[Any], *, granted: bool = True) -> AsyncIterator[str]:
    """The DSN of a user who is no superuser, with or without the grants that a worker needs."""
    user = f"u_{database_name(dsn)[-12:]}"
    await db.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'right'")
    try:
        await db.execute(f"GRANT USAGE ON SCHEMA pgworkd TO {user}; GRANT SELECT ON pgworkd.schema_version TO {user}")
        if granted:
            await db.execute(f"ALTER SCHEMA pgworkd OWNER TO {user}")
            await db.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA pgworkd TO {user}")
            await db.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pgworkd TO {user}")
        yield with_login(dsn, user, "right")
    finally:
        await db.execute("SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE usename = $1", user)
        await db.execute(f"DROP OWNED BY {user} CASCADE; DROP ROLE {user}")


@contextlib.asynccontextmanager
async def granted_login(dsn: str, db: asyncpg.Connection[Any]) -> AsyncIterator[str]:
    """The DSN of a user who has what a worker needs of each table and function, and owns nothing."""
    user = f"w_{database_name(dsn)[-12:]}"
    await db.execute(f"""
        CREATE ROLE {user} LOGIN PASSWORD 'right';
        GRANT USAGE ON SCHEMA pgworkd TO {user};
        GRANT ALL ON ALL TABLES IN SCHEMA pgworkd TO {user};
        GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pgworkd TO {user}""")
    try:
        yield with_login(dsn, user, "right")
    finally:
        await db.execute("SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE usename = $1", user)
        await db.execute(f"DROP OWNED BY {user} CASCADE; DROP ROLE {user}")


# A password that must appear nowhere: how to set it up, and how to find it in any encoding

MARKS = ("c4n4ry", "t41l")
"""No encoding changes them; the second shows where only the first part was recognized as the password."""
PASSWORDS = {"encoded": quote("c4n4ry@:/?#%t41l", safe=""), "raw": "c4n4ry:%t41l"}
"""As they are written in a DSN."""


def leaks(*texts: object) -> list[str]:
    """Those of the texts that show (a part of) the password."""
    return [str(text) for text in texts if any(mark in str(text) for mark in MARKS)]


@pytest.fixture(params=PASSWORDS)
async def secret_dsn(request: pytest.FixtureRequest, dsn: str, db: asyncpg.Connection[Any]) -> AsyncIterator[str]:
    """A DSN of the test's database, with a superuser of its own who has the password."""
    user = f"canary_{uuid.uuid4().hex[:12]}"
    plain = "c4n4ry@:/?#%t41l" if request.param == "encoded" else PASSWORDS["raw"]
    await db.execute(f"CREATE ROLE {user} LOGIN SUPERUSER PASSWORD '{plain}'")
    yield with_login(dsn, user, PASSWORDS[request.param])
    await db.execute(f"REASSIGN OWNED BY {user} TO CURRENT_USER; DROP OWNED BY {user}; DROP ROLE {user}")
