"""`Admin`: what operators read from the database and change in it, without a daemon.

Every call is one or a few short statements on one connection; each is bounded by the connection's timeouts.
"""

from __future__ import annotations

from typing import Self
from uuid import UUID

from pgworkd.admin import doctor_database
from pgworkd.admin import doctor_queries as health
from pgworkd.admin import queries as sql
from pgworkd.admin.background import BackgroundOperations
from pgworkd.admin.batches import BatchOperations
from pgworkd.admin.dead import DeadOperations
from pgworkd.admin.doctor_database import Doctor, Holder, LockWait, RefusedRows, ServerFacts, Sessions, TableSize
from pgworkd.admin.doctor_queries import Health
from pgworkd.admin.endpoints import EndpointOperations
from pgworkd.admin.jobs import JobOperations
from pgworkd.admin.keys import KeyOperations
from pgworkd.admin.queries import AuditRow, Stats, WorkerRow
from pgworkd.admin.queues import QueueOperations
from pgworkd.admin.schedules import ScheduleOperations
from pgworkd.admin.tokens import TokenOperations
from pgworkd.core import validation
from pgworkd.core.origin import READ, Origin
from pgworkd.database import schema
from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.errors import SchemaError


class Admin:
    """An operator's access to the database, on one connection that is opened at the first call.

    `jobs`, `dead`, `queues`, `batches`, `keys`, `schedules`, `tokens` and `endpoints` hold the operations on each of
    these, and `background` those on many jobs that daemons do; the methods here are about the fleet and the database.
    All of them raise DatabaseUnavailable (unreachable, or too slow), SchemaError (the schema is not installed),
    UsageError (an invalid argument, a refused login) and DatabaseError (any other error of the server).
    """

    def __init__(self, database: ConnectionOptions | Connection) -> None:
        """`database`: how to connect, or a connection that is open."""
        self._connection = connection = database if isinstance(database, Connection) else Connection(database, "admin")
        self.jobs = JobOperations(connection)
        self.dead = DeadOperations(connection)
        self.queues = QueueOperations(connection)
        self.batches = BatchOperations(connection)
        self.keys = KeyOperations(connection)
        self.schedules = ScheduleOperations(connection)
        self.tokens = TokenOperations(connection)
        self.endpoints = EndpointOperations(connection)
        self.background = BackgroundOperations(connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()

    async def workers(self) -> list[WorkerRow]:
        """Every worker that has not signed off."""
        return [sql.read(WorkerRow, row) for row in await self._connection.fetch(sql.WORKERS)]

    async def ask_worker(self, worker_id: int, what: str | None) -> bool:
        """Asks a remote worker to claim nothing more (quiet), to end (stop), or to go on (None).

        It learns that with its next beat. False: it is not remote, has signed off, or is presumed dead.
        """
        return bool(await self._connection.value("SELECT pgworkd.ask_worker($1, $2)", worker_id, what))

    async def stats(self, queue: str | None = None) -> Stats:
        """Counts of live jobs, in one queue or all; zeros for an unknown queue. Reads all live jobs of the queue."""
        return Stats(*(await self._connection.fetch(sql.STATS, validation.name(queue)))[0])

    async def audit(
        self, job_id: UUID | None = None, queue: str | None = None, limit: int = 20, *, before: int | None = None
    ) -> list[AuditRow]:
        """The newest audit entries, at most `limit` (1 to ROWS_MAX), of one job, one queue or all.

        `before`: only entries whose ids are below that.
        """
        validation.bounded(limit)
        rows = await self._connection.fetch(sql.AUDIT, job_id, validation.name(queue), limit, before)
        return [sql.read(AuditRow, row) for row in rows]

    async def note_debug(self, what: str, gateway: str) -> None:
        """Notes in the audit that somebody looks into the process of a gateway; `what`: stacks or profile."""
        await self._connection.fetch(sql.NOTE_DEBUG, what, gateway)

    async def server(self) -> ServerFacts:
        """Facts about the server that need no schema."""
        return ServerFacts(*(await self._connection.fetch(doctor_database.SERVER))[0])

    async def tables(self) -> list[TableSize]:
        """The tables of the schema, the largest first; nothing is counted."""
        found = [TableSize(*row) for row in await self._connection.fetch(doctor_database.TABLES)]
        return sorted(found, key=lambda each: -each.size)

    async def holders(self) -> list[Holder]:
        """Who holds back vacuum, the oldest first, at most five."""
        return [Holder(*row) for row in await self._connection.fetch(doctor_database.HOLDERS)]

    async def locks(self) -> list[LockWait]:
        """What sessions have waited for, for more than a second, of locks on all of a table or queue."""
        return [LockWait(*row) for row in await self._connection.fetch(doctor_database.LOCKS)]

    async def sessions(self) -> Sessions:
        """The tightest limit of sessions that holds for this user."""
        return Sessions(*(await self._connection.fetch(doctor_database.SESSIONS))[0])

    async def verify(self) -> None:
        """Raises SchemaError, with the remedy, unless the database has exactly the schema of this version."""
        if (fault := schema.version_fault(await schema.installed_version(self._connection))) is not None:
            raise SchemaError(fault)

    async def schema_version(self) -> int | None:
        """The version of the schema in the database; None: there is none."""
        return await schema.installed_version(self._connection)

    async def pending_migration(self) -> str | None:
        """Why `pgworkd migrate` is needed, or another pgworkd; None if the schema is up to date. Changes nothing."""
        return await schema.pending(self._connection)

    async def origin(self, environment: str | None) -> Origin | None:
        """Where the jobs of this database are to run, for `environment`; None before its first worker has started."""
        rows = await self._connection.fetch(READ, environment)
        return Origin(*rows[0]) if rows else None

    async def adopt(self, environment: str | None) -> None:
        """From now on its jobs run in this database, for workers of this environment (None: they name none)."""
        await self._connection.value("SELECT pgworkd.adopt($1)", environment)

    async def doctor(self) -> Doctor:
        """Facts about the database that need the schema. Dead jobs are counted up to health.DEAD_MAX."""
        return Doctor(*(await self._connection.fetch(doctor_database.DOCTOR, health.DEAD_MAX))[0])

    async def health(self, *, standby: bool = False) -> Health:
        """What keeps jobs from running, for at most health.QUEUES_MAX queues, at a cost independent of their jobs.

        On a `standby` queues and kinds are empty: it does not know which worker serves which queue.
        """
        fetch = self._connection.fetch
        queues, kinds, long_runs, refused = [], [], [], []
        if not standby:
            refused = await fetch(doctor_database.REFUSED, health.DEAD_MAX)
            names = [row[0] for row in await fetch(health.QUEUES, health.QUEUES_MAX)]
            queues = await fetch(health.HEALTH, names, health.PRIORITIES_MAX)
            kinds = await fetch(health.UNKNOWN_KINDS, names, health.KINDS_ROWS)
            long = (health.LONG_ROWS, health.LONG_KINDS, health.LONG_S, health.LONG_FACTOR, health.LONG_UNKNOWN_S)
            long_runs = await fetch(health.LONG_RUNS, *long)
        return Health(
            [health.QueueHealth(*row) for row in queues],
            [health.UnknownKind(*row) for row in kinds],
            [health.HeldEndpoint(*row) for row in await fetch(health.ENDPOINTS)],
            [health.DroppedResult(*row) for row in await fetch(health.DROPPED, health.DROPPED_S)],
            [health.BrokenSchedule(*row) for row in await fetch(health.SCHEDULES)],
            [health.StuckDependency(*row) for row in await fetch(health.STUCK_DEPENDENCIES, health.DEAD_MAX)],
            health.PendingEffects(*(await fetch(health.EFFECTS, health.DEAD_MAX))[0]),
            [health.DifferingSchedule(*row) for row in await fetch(health.DIFFERING)],
            [health.BlockedWorker(*row) for row in await fetch(health.BLOCKED_WORKERS)],
            [health.LongRun(*row) for row in long_runs],
            [RefusedRows(*row) for row in refused],
            (await fetch(doctor_database.OF_NO_DAY, health.DEAD_MAX))[0][0],
            (await fetch(doctor_database.POLICIES))[0][0],
        )
