"""The four roles of `pgworkd grants` in a test's database, each of which can log in."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from pgworkd.database import grants
from tests.kits.verbs import Db

DENIED = "42501"


class Roles:
    """Their names (which are unique to the database, as roles belong to the whole server), and how to log in."""

    def __init__(self, dsn: str, template: str | None = None) -> None:
        self._dsn = dsn
        self._template = template
        tail = urlsplit(dsn).path[-12:]
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
        url = urlsplit(self._dsn)
        user = self.names[role].replace(" ", "%20").replace('"', "%22")
        return urlunsplit(url._replace(netloc=f"{user}:secret@{url.netloc.rpartition('@')[2]}"))

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
            await db.execute(f"ALTER ROLE {roles.name(role)} LOGIN PASSWORD 'secret'")
        yield roles
    finally:
        await db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = ANY ($1)", [*roles.names.values()]
        )
        await db.execute(f"DROP OWNED BY {everyone} CASCADE; DROP ROLE {everyone}")


async def refused(db: Db, sql: str, *args: object) -> None:
    """Fails unless Postgres refuses the statement with insufficient_privilege."""
    try:
        await db.execute(sql, *args)
    except asyncpg.PostgresError as error:
        assert error.sqlstate == DENIED, f"{sql}: {error}"  # noqa: PT017 - so that the message names the statement
    else:
        pytest.fail(f"allowed: {sql}")
