"""The engine's functions of `schema.sql`, one method each, with Python's types on both sides.

Claims, settles, maintenance and large payloads have connections of their own, so that none waits for another.
All calls may be repeated: every method raises `DatabaseUnavailable` when it can be retried, because the call had no
effect or its outcome is unknown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from uuid import UUID, uuid4

from pgworkd.core.claims import ClaimedJob, ClaimOrder, Claims
from pgworkd.core.fence import Fence
from pgworkd.core.job import Ending
from pgworkd.core.origin import READ, Origin
from pgworkd.core.registration import SESSIONS_MIN, Registration, token_of
from pgworkd.core.source import Payload
from pgworkd.database import schema
from pgworkd.database.claim_connections import ClaimConnections
from pgworkd.database.connection import Connection, ConnectionOptions, Listener
from pgworkd.database.driver_errors import TOO_MANY, sqlstate_of
from pgworkd.database.heartbeat_store import HeartbeatStore
from pgworkd.database.maintenance_store import MaintenanceStore, fence
from pgworkd.database.maintenance_store import Rescued as Rescued
from pgworkd.database.own_transaction import OwnTransaction
from pgworkd.database.settles import LOCK_TIMEOUT_S, SettleStore
from pgworkd.database.signal_store import SignalStore
from pgworkd.database.transactions import TransactionPool
from pgworkd.errors import DatabaseUnavailable, NotAdopted, PgworkdError

CHANNEL = "pgworkd"
_COLUMNS = ", ".join(ClaimedJob._fields)
CLAIM = """SELECT COLUMNS FROM pgworkd.claim(CASE WHEN NOT $14 OR pgworkd.carefully() THEN $1::int END,
        $2, $3, $4, $5, $6, $7, $8, $15, $9, $10, $11, $12, $13)""".replace("COLUMNS", _COLUMNS)  # nosec B608 # names of ours
"""The statement of a claim. Its arguments are a `ClaimOrder` and the worker's token."""
_CLAIM_OPEN = CLAIM.replace("SELECT ", "SELECT pgworkd.may_stay_open(id), ", 1)
_CLAIM_AGAIN = """SELECT attempt FROM pgworkd.claim(CASE WHEN pgworkd.carefully(ARRAY(
        SELECT j.id FROM pgworkd.jobs j WHERE j.id = $3 AND j.attempts = $4 - 1 AND j.status IN ('pending', 'failed')
        FOR UPDATE)::text) THEN $1::int END, $2, 0, $6, $7, p_token => $5)"""
REFUSE_CLAIMS = "SELECT pgworkd.refuse_claims($1, $2, $3, $4, $5, $6, $7, $12, $8, $9, $10, $11, $13, $14)"

_PAYLOADS = "SELECT id, payload, meta, expired FROM pgworkd.payloads($1, $2, $3, $4, $5, $6)"


class Store(SettleStore, MaintenanceStore):
    """The daemon's calls to the database."""

    def __init__(
        self,
        options: ConnectionOptions,
        queues: Callable[[], int] = lambda: 1,
        transactions_max: int = 20,
        environment: str | None = None,
    ) -> None:
        """`queues` returns the number of queues to claim from; `transactions_max`: see `TransactionPool`.

        `environment`: that of this process, which the database must belong to.
        """
        self.options = options
        self._environment = environment
        self._claims = ClaimConnections(options, queues)
        self._settles = Connection(replace(options, lock_timeout_s=LOCK_TIMEOUT_S), "settle")
        self._maintenance = Connection(replace(options, lock_timeout_s=LOCK_TIMEOUT_S), "maintenance")
        self._reads = Connection(options, "payloads")  # connected only if there are large ones
        self.listener = Listener(options)
        self.signals = SignalStore(options)
        self.transactions = TransactionPool(options, transactions_max)

    async def verify(self) -> None:
        """Raises SchemaError unless the schema is of this program's version; NotAdopted if the database is a copy."""
        await schema.verify(self.options)
        await self._belong()

    async def _belong(self) -> None:
        if not await self._maintenance.value("SELECT pgworkd.belong($1)", self._environment):
            found = Origin(*(await self._maintenance.fetch(READ, self._environment))[0])
            raise NotAdopted(": ".join(found.fault(self._environment)))

    def heartbeats(self, limit_s: float) -> HeartbeatStore:
        """The calls of a heartbeat thread, each of which takes `limit_s` at most, on a connection of their own."""
        connect_s, command_s = self.options.connect_timeout_s, self.options.command_timeout_s
        return HeartbeatStore(ConnectionOptions(self.options.dsn, min(connect_s, limit_s), min(command_s, limit_s)))

    async def close(self) -> None:
        """Closes all connections."""
        for part in (self.transactions, self._claims, self._settles, self._maintenance, self._reads, self.signals):
            await part.close()

    @property
    def answers(self) -> int:
        """How many calls of maintenance the server has answered."""
        return self._maintenance.answers + self.signals.answers

    async def open_sessions(self) -> None:
        """Opens as many sessions as a daemon has at least, all at a time; raises DatabaseUnavailable if it cannot."""
        others = [Connection(self.options, name) for name in ("listen", "lease")]
        open_now = 0
        try:
            ours = (self._maintenance.value, self._settles.value, self._claims.value)
            for ask in (*ours, *(connection.value for connection in others)):
                await ask("SELECT 1")
                open_now += 1
        except PgworkdError as error:
            if sqlstate_of(error.__cause__ or error) != TOO_MANY:
                raise
            needs = f"it needs {SESSIONS_MIN} sessions, and has {open_now}"
            raise DatabaseUnavailable(f"{error}: {needs}; raise the limit, or end other sessions") from error
        finally:
            for connection in others:
                await connection.close()

    # Workers and pools

    async def register(
        self, name: str, pid: int, version: str, lease_s: float, kinds: Sequence[str] | None = None, kind: str = ""
    ) -> Registration:
        """Registers a worker of that kind under a new id and token; `kinds`: those it has handlers for.

        Raises NotAdopted if the database is a copy: the server may be another one than at the start.
        """
        await self._belong()
        args = (name, pid, version, lease_s, token := uuid4(), kinds, kind or "daemon")
        worker_id = await self._maintenance.value("SELECT pgworkd.register($1, $2, $3, $4, $5, $6, $7)", *args)
        return Registration.of(worker_id, token)

    async def set_pool(
        self, worker_id: int, queue: str, slots: int, *, idle: bool, code: tuple[int | None, str | None] = (None, None)
    ) -> None:
        """Announces a pool. `idle`: inserts must NOTIFY it; `code`: concurrency without overrides, and its source."""
        args = (worker_id, queue, slots, idle, *code, token_of(worker_id))
        await self._claims.value("SELECT pgworkd.set_pool($1, $2, $3, $4, $5, $6, $7)", *args)

    async def drop_pool(self, worker_id: int, queue: str) -> None:
        """Removes the pool of a queue that this worker no longer serves."""
        await self._claims.value("SELECT pgworkd.drop_pool($1, $2, $3)", worker_id, queue, token_of(worker_id))

    async def sign_off(self, worker_id: int) -> bool:
        """Ends the registration, if it has not ended; False if the worker still has running jobs."""
        return bool(await self._maintenance.value("SELECT pgworkd.sign_off($1, $2)", worker_id, token_of(worker_id)))

    async def tend_connections(self, worker_id: int) -> None:
        """Plans the hot statements, which takes tens of milliseconds, before there is a job.

        Then, until cancelled, closes idle connections.
        """
        with contextlib.suppress(PgworkdError):  # reported by the parts that need these connections
            await self.claim(ClaimOrder(worker_id, "", 0))
            await self.settle(Ending.COMPLETED, [])
        await self._claims.close_idle()

    # Claim

    async def claim(self, order: ClaimOrder) -> Claims:
        """Claims jobs: they are now running under this worker. Raises `WorkerLost` without a lease."""
        return Claims.read(await self._claims.fetch(CLAIM, *order, token_of(order.worker_id)))

    async def claim_open(self, order: ClaimOrder) -> Claims:
        """Claims one job at most, in a transaction of `transactions` that stays open: `Claims.own`.

        None: it was committed, because the job has to be claimed before it runs. Raises as `claim` does.
        """
        own = await OwnTransaction.begun(self.transactions)
        try:
            rows = await own.fetch(_CLAIM_OPEN, *order, token_of(order.worker_id))
            claims = Claims.read([tuple(row)[1:] for row in rows])
            if not claims:
                await own.leave()
            elif rows[0][0] and claims[0].payload is not None:
                claims.own = own
            else:
                await own.commit()
        except BaseException:
            own.abandon()
            raise
        return claims

    async def claim_again(self, fence: Fence, queue: str, kind: str, max_attempts: int) -> None:
        """Claims the attempt again, if its claim was rolled back and nobody else has claimed the job since."""
        of_attempt = (fence.worker_id, queue, fence.job_id, fence.attempt, fence.token)
        await self._settles.fetch(_CLAIM_AGAIN, *of_attempt, [kind], [max_attempts])

    async def refuse_claims(self, order: ClaimOrder, error: PgworkdError | None = None) -> int | None:
        """Sets aside the job that this claim takes first if it is refused, and those that follow it; how many.

        With the error of that claim the first is set aside without a trial. None: a lock on all jobs holds up claims.
        """
        code = None if error is None else sqlstate_of(error.__cause__ or error)
        args = (*order[:2], *order[3:12], token_of(order.worker_id), code, None if error is None else str(error))
        found: int | None = await self._claims.value(REFUSE_CLAIMS, *args)
        return found

    async def payloads(
        self,
        ids: Sequence[UUID],
        attempts: Sequence[int],
        bytes_max: int,
        worker_id: int | None = None,
        begin: int | None = None,
    ) -> list[Payload]:
        """Reads payloads of attempts, as (id, payload, meta, expired) in order, up to `bytes_max`.

        The first `begin` (None: all) are about to begin, after which they cannot expire. A payload of None: the
        attempt no longer runs, or its job has `expired` before it began. The answer ends before any other job that can
        expire.
        """
        args = (ids, attempts, bytes_max, *fence(worker_id), begin)
        return list(map(tuple, await self._reads.fetch(_PAYLOADS, *args)))

    async def kinds_elsewhere(self, worker_id: int, queue: str, kinds: Sequence[str]) -> set[str]:
        """The kinds among these for which another live worker of the queue has a handler."""
        return set(await self._claims.value("SELECT pgworkd.kinds_elsewhere($1, $2, $3)", worker_id, queue, kinds))

    async def next_due(
        self, queues: Sequence[str], ages_s: Sequence[float | None], priorities: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        """Seconds until the next job is due, by queue (negative: overdue); queues with no waiting job are missing.

        `ages_s`: how many seconds overdue at most (None: any); `priorities`: descending, those with finished jobs.
        """
        known = [f"{{{','.join(map(str, each))}}}" for each in priorities]
        rows = await self._claims.fetch(
            "SELECT queue, due_in_s FROM pgworkd.next_due($1, $2, $3)", queues, ages_s, known
        )
        return {row[0]: row[1] for row in rows}
