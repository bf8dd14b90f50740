"""Operations of applications and operators for the sweep: every way to enqueue, and installing the schema."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable
from typing import Any, ClassVar

import asyncpg
import psycopg

from pgworkd.admin import Admin
from pgworkd.client import NewJob, enqueue, enqueue_many
from pgworkd.database import schema
from tests.chaos.wire_kit import Operation, Told, differs, told_by
from tests.kits.daemon import insert

LOST = (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError, psycopg.OperationalError)
"""What the drivers raise when there is no reply."""


class Enqueue(Operation):
    """Jobs with keys, on the caller's own, already open connection."""

    name = "enqueue, in autocommit (asyncpg)"
    cuts_min: ClassVar[tuple[int, int]] = (5, 5)
    keys: ClassVar[tuple[str, ...]] = ("k",)

    async def prepare(self) -> None:
        self.connection: Any = await asyncpg.connect(self.scene.proxy.dsn)

    async def attempt(self) -> Told:
        return await self._told(self.put(self.connection))

    async def put(self, connection: Any) -> None:
        await enqueue(connection, self.queue, dedupe_key="k")

    async def put_again(self, connection: Any) -> None:
        """Retries like a caller that does not know the outcome."""
        await enqueue(connection, self.queue, dedupe_key="k", on_duplicate="skip")

    async def _told(self, call: Awaitable[None]) -> Told:
        try:
            await call
        except LOST:
            return "unknown"
        return "done"

    async def stored(self) -> list[str]:
        found = await self.db.fetch("SELECT dedupe_key FROM pgworkd.jobs WHERE queue = $1 ORDER BY 1", self.queue)
        return [row[0] for row in found]

    async def done(self) -> bool:
        found = await self.stored()
        assert found in ([], [*self.keys]), f"some of them: {found}"
        return found != []

    async def carry_on(self) -> None:
        connection = await asyncpg.connect(self.scene.proxy.dsn)
        await self.put_again(connection)
        await connection.close()

    async def faults(self) -> list[str]:
        return differs("keys in the database", await self.stored(), [*self.keys])

    async def close(self) -> None:
        self.connection.terminate()


class EnqueueInTransaction(Enqueue):
    """An error before the COMMIT means that nothing is stored; at the COMMIT, that the outcome is unknown."""

    name = "enqueue, in the caller's transaction (asyncpg)"
    cuts_min = (7, 9)

    async def attempt(self) -> Told:
        committing = False
        try:
            async with self.connection.transaction():
                await self.put(self.connection)
                committing = True
        except LOST:
            return "unknown" if committing else "not done"
        return "done"


class EnqueueOnPool(Enqueue):
    """The pool connects on demand; its errors do not reveal whether it was connected."""

    name = "enqueue, on a pool (asyncpg)"
    stride = 3  # most cut points are alike
    cuts_min = (8, 15)

    async def prepare(self) -> None:
        self.connection = asyncpg.create_pool(self.scene.proxy.dsn, min_size=0, max_size=1)
        await self.connection


class EnqueueMany(Enqueue):
    """Several statements, in autocommit mode in a transaction of their own: all or none."""

    name = "enqueue_many, in autocommit (asyncpg)"
    cuts_min = (13, 15)
    keys = ("first", "second", "third")

    async def prepare(self) -> None:
        await super().prepare()
        self.before = await insert(self.db, f"{self.queue} before")

    async def put(self, connection: Any) -> None:
        await enqueue_many(connection, [NewJob(self.queue, dedupe_key=key, after=[self.before]) for key in self.keys])

    async def put_again(self, connection: Any) -> None:
        if not await self.stored():
            await self.put(connection)


class EnqueueByPsycopg(Enqueue):
    """psycopg, with the same rule."""

    name = "enqueue, in autocommit (psycopg)"
    cuts_min = (4, 4)

    async def prepare(self) -> None:
        self.connection = await psycopg.AsyncConnection.connect(self.scene.proxy.dsn, autocommit=True)

    async def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            await self.connection.close()


class EnqueueByAdmin(Enqueue):
    """Like `pgworkd enqueue`: its error says whether the operation may have taken effect."""

    name = "enqueue, by an operator"
    cuts_min = (9, 20)

    async def prepare(self) -> None:
        self.connection = Admin(self.scene.options)

    async def attempt(self) -> Told:
        return await told_by(self.connection.jobs.enqueue(self.queue, dedupe_key="k"))

    async def carry_on(self) -> None:
        await self.connection.jobs.enqueue(self.queue, dedupe_key="k")

    async def close(self) -> None:
        await self.connection.close()


class Migrate(Operation):
    """`pgworkd migrate` on an empty database."""

    name = "migrate, the first time"
    cuts_min = (25, 150)
    stride = 9  # each statement of the script has a reply

    async def prepare(self) -> None:
        self.whole = self.scene.memory.setdefault("whole", await self._inventory())  # of the tests' template, at first
        await self.db.execute("DROP SCHEMA pgworkd CASCADE")

    async def attempt(self) -> Told:
        return await told_by(schema.migrate(self.scene.options))

    async def done(self) -> bool:
        found = await self._inventory()
        assert found in (_NOTHING, self.whole), "half a schema"
        return found != _NOTHING

    async def carry_on(self) -> None:
        await schema.migrate(self.scene.options)

    async def faults(self) -> list[str]:
        return differs("what is in the schema", await self._inventory(), self.whole)

    async def _inventory(self) -> list[str]:
        return [row[0] for row in await self.db.fetch(_INVENTORY)]


_NOTHING: list[str] = []
# days without their dates: the template may have been made before midnight
_INVENTORY = """
    SELECT p.oid::regprocedure::text || md5(p.prosrc) AS one
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'pgworkd'
    UNION ALL SELECT concat(regexp_replace(c.relname, '_[0-9]{8}', '_day'), c.relkind, c.relnatts)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'pgworkd'
    UNION ALL SELECT concat(c.relname, ' ', t.tgname)
    FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'pgworkd' AND NOT t.tgisinternal
    ORDER BY 1"""
