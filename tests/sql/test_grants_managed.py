"""`pgworkd grants` as on managed servers (RDS, Cloud SQL, Azure): by who may create roles, and is no superuser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import asyncpg
import pytest

from pgworkd.database import grants, schema
from pgworkd.database.connection import ConnectionOptions
from tests.kits.schema import Roles, denied, with_login
from tests.kits.server import database_name


class Managed(NamedTuple):
    """A database of a managed server: what its first user, the master, is called, and how to log in as it."""

    master: str
    dsn: str
    roles: Roles

    async def run(self, *scripts: str) -> None:
        """As the master."""
        connection = await asyncpg.connect(self.dsn)
        try:
            for each in scripts:
                await connection.execute(each)
        finally:
            await connection.close()


@pytest.fixture(params=["owns the database", "may create in the database"])
async def managed(request: pytest.FixtureRequest, empty_dsn: str) -> AsyncIterator[Managed]:
    admin = await asyncpg.connect(empty_dsn)
    database = database_name(empty_dsn)
    master = f"master_{database[-12:]}"
    await admin.execute(f"CREATE ROLE {master} LOGIN CREATEROLE CREATEDB PASSWORD 'secret'")
    owns = request.param == "owns the database"
    may = f"ALTER DATABASE {database} OWNER TO {master}" if owns else f"GRANT CREATE ON DATABASE {database} TO {master}"
    await admin.execute(may)
    roles = Roles(empty_dsn)
    try:
        yield Managed(master, with_login(empty_dsn, master, "secret"), roles)
    finally:
        for name in (*map(roles.name, grants.ROLES), master):
            if await admin.fetchval("SELECT to_regrole($1)", name) is not None:
                await admin.execute(f"REASSIGN OWNED BY {name} TO CURRENT_USER; DROP OWNED BY {name} CASCADE")
                await admin.execute(f"DROP ROLE {name}")
        await admin.close()


async def migrated(managed: Managed, *, force: bool = False) -> None:
    await schema.migrate(ConnectionOptions(managed.dsn), force=force)


async def test_the_master_installs_grants_and_upgrades(managed: Managed) -> None:
    await migrated(managed)
    await managed.run(managed.roles.sql)
    for role in grants.ROLES:
        await managed.run(f"ALTER ROLE {managed.roles.name(role)} LOGIN PASSWORD 'secret'")
    async with managed.roles.session("worker") as worker, managed.roles.session("enqueuer") as enqueuer:
        await enqueuer.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('q')")
        await denied(enqueuer, "SELECT payload FROM pgworkd.jobs")
        assert await worker.fetchval("SELECT count(*) FROM pgworkd.jobs") == 1
    async with managed.roles.session("gateway") as gateway:
        await gateway.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('q')")
        await gateway.fetch("SELECT * FROM pgworkd.tokens")
    # An upgrade: the master migrates what is the owner's now, and new objects are the owner's after the grants.
    await migrated(managed, force=True)
    await managed.run("CREATE VIEW pgworkd.made AS SELECT 1 AS one", managed.roles.sql, managed.roles.sql)
    async with managed.roles.session("owner") as owner:
        assert await owner.fetchval("SELECT one FROM pgworkd.made") == 1
    await migrated(managed, force=True)


async def test_the_owner_itself_migrates_from_then_on(managed: Managed) -> None:
    await migrated(managed)
    await managed.run(managed.roles.sql, f"ALTER ROLE {managed.roles.name('owner')} LOGIN PASSWORD 'secret'")
    options = ConnectionOptions(managed.roles.dsn("owner"))
    assert await schema.migrate(options, force=True) == (schema.VERSION, schema.VERSION)
    async with managed.roles.session("owner") as owner:
        await owner.execute(managed.roles.sql)


async def test_the_master_gets_no_more_than_membership_of_the_owner(managed: Managed) -> None:
    await migrated(managed)
    await managed.run(managed.roles.sql)
    connection = await asyncpg.connect(managed.dsn)
    try:
        for role in grants.ROLES:
            is_member = await connection.fetchval("SELECT pg_has_role($1, 'USAGE')", managed.roles.names[role])
            assert is_member == (role == "owner")
        assert not await connection.fetchval("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
    finally:
        await connection.close()


async def test_roles_that_somebody_else_has_made_need_the_admin_option(managed: Managed, server_dsn: str) -> None:
    admin = await asyncpg.connect(server_dsn)
    try:
        for role in grants.ROLES:
            await admin.execute(f"CREATE ROLE {managed.roles.name(role)}")
        await migrated(managed)
        if admin.get_server_version().major < 16:
            await managed.run(managed.roles.sql)  # there, who may create roles may grant any of them
            return
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match=managed.roles.names["owner"]) as caught:
            await managed.run(managed.roles.sql)
        assert "ADMIN option" in (caught.value.detail or "")
        for role in grants.ROLES:
            await admin.execute(f"GRANT {managed.roles.name(role)} TO {managed.master} WITH ADMIN TRUE")
        await managed.run(managed.roles.sql)
    finally:
        await admin.close()
