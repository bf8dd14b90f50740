"""The calls of a gateway on behalf of remote workers, one method each, with Python's types on both sides.

As `Store`'s, all may be repeated, and raise `DatabaseUnavailable` when they can be retried. Beats, claims and settles
have connections of their own, so that none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple
from uuid import UUID, uuid4

from pgworkd.core.claims import ClaimedJob, ClaimOrder, Claims
from pgworkd.core.fence import Fence
from pgworkd.core.registration import Registration, token_of
from pgworkd.database.claim_connections import ClaimConnections
from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.database.maintenance_store import Rescued
from pgworkd.database.settles import LOCK_TIMEOUT_S, SettleStore, fence_columns

_REGISTER = "SELECT pgworkd.register($1, 0, $2, $3, $4, NULL, $5)"
_HEARTBEATS = "SELECT worker, outcome, lease_s, requested FROM pgworkd.heartbeats($1, $2, $3)"
_WORKER = """SELECT w.token, w.lease_s, w.requested, w.name,
    ARRAY(SELECT p.queue::text FROM pgworkd.pools p WHERE p.worker_id = w.id ORDER BY p.queue),
    ARRAY(SELECT p.concurrency FROM pgworkd.pools p WHERE p.worker_id = w.id ORDER BY p.queue)
    FROM pgworkd.workers w WHERE w.id = $1 AND w.kind IN ('remote', 'standing') AND w.lost_at IS NULL"""
_REQUESTED = "SELECT w.id, w.requested FROM pgworkd.workers w WHERE w.id = ANY ($1) AND w.lost_at IS NULL"
_SET_POOLS = """SELECT pgworkd.set_pool($1, u.queue, u.slots, false, NULL, NULL, $2)
    FROM unnest($3::text[], $4::int[]) AS u (queue, slots)
    UNION ALL SELECT pgworkd.drop_pool($1, u.queue, $2) FROM unnest($5::text[]) AS u (queue)"""
_NEWS = """SELECT j.worker_id, j.id, j.attempts, true FROM pgworkd.jobs j
    WHERE j.worker_id = ANY ($1) AND j.worker_id IS NOT NULL AND j.cancel_requested_at IS NOT NULL
    UNION ALL
    SELECT u.worker, u.id, u.attempt, false
    FROM unnest($2::uuid[], $3::int[], $4::int[], pgworkd.fenced($2, $3, $4, $5, $6))
        AS u (id, attempt, worker, found) WHERE u.found <> u.attempt"""
_ATTEMPTS = """SELECT j.worker_id, j.id, j.attempts, j.queue::text, j.claim_id
    FROM pgworkd.jobs j WHERE j.worker_id = ANY ($1) AND j.status = 'running'"""
_WORK = """SELECT p.worker_id, NULL, p.concurrency, p.queue::text, NULL
    FROM pgworkd.pools p WHERE p.worker_id = ANY ($1)
    UNION ALL SELECT j.worker_id, j.id, j.attempts, j.queue::text, j.claim_id FROM pgworkd.jobs j
    WHERE j.worker_id = ANY ($1) AND j.status = 'running'"""
_LIST_HELD = "SELECT pgworkd.list_held($1, pgworkd.fenced($1, $2, $3, $4, $5))"
_TAKE_BACK = """SELECT id, queue, kind, attempt, status, worker_id, worker, error
    FROM pgworkd.take_back($1, pgworkd.fenced($1, $2, $3, $4, $5))"""
_PROGRESS = "SELECT pgworkd.report_progress($1, pgworkd.fenced($1, $2, $5, $6, $7), $3, $4)"
_CLAIM_FOR = """SELECT worker, COLUMNS
    FROM pgworkd.claim_for(CASE WHEN NOT $17 OR pgworkd.carefully() THEN $1::int[] END, $2, $3, $4, $5, $6, $7, $8, $9,
        $10, $11, $12, $13, $14, $15, $16, $18)""".replace("COLUMNS", ", ".join(ClaimedJob._fields))  # nosec B608 # names of ours
_CLAIM_ONE = """SELECT why, again_s, waits_for, COLUMNS
    FROM pgworkd.claim_one($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)""".replace("COLUMNS", ", ".join(ClaimedJob._fields))  # nosec B608 # as above
_EXTEND = """SELECT e.id, e.left_s, EXISTS (SELECT FROM pgworkd.jobs j
        WHERE j.id = e.id AND j.cancel_requested_at IS NOT NULL)
    FROM pgworkd.extend($1, pgworkd.fenced($1, $2, $4, $5, $6), $3) e"""
_STORED = {name: f"j.{name}" for name in ClaimedJob._fields} | {
    "kind": "coalesce(j.kind, j.queue)::text",
    "payload": "''",
    "attempt": "j.attempts",
    "max_attempts": "coalesce(j.max_attempts, 3)::int",
    "timeout_s": "j.timeout_s::real",
    "run_at": "extract(epoch FROM j.run_at)::float8",
    "created_at": "extract(epoch FROM j.created_at)::float8",
    "occurrence": "extract(epoch FROM j.occurrence)::float8",
    "meta": "NULL::text",
}
"""What was claimed of a running job, by the job's row."""
_CLAIMED = """SELECT j.queue::text, greatest(extract(epoch FROM pgworkd.clock() - j.started_at), 0)::float8, COLUMNS
    FROM unnest($1::uuid[], $2::int[]) AS u (id, attempt) JOIN pgworkd.jobs j ON j.id = u.id AND j.attempts = u.attempt
    WHERE j.id = ANY ($1) AND j.worker_id IS NOT NULL""".replace("COLUMNS", ", ".join(_STORED.values()))  # nosec B608 # as above
ASSIGNMENTS = "assignments"
"""The name of the standing worker of attempts that remote workers claim with a lease of their own."""
_FIND_STANDING = "SELECT w.id, w.token FROM pgworkd.workers w WHERE w.kind = 'standing' AND w.name = $1"
RENEWED, LOST, LOCKED = "renewed", "lost", "locked"


class Beat(NamedTuple):
    """What became of one worker's beat: RENEWED, LOST, or LOCKED (send it again); what an operator requests of it."""

    worker_id: int
    outcome: str
    lease_s: float | None
    requested: str | None


class StoredWorker(NamedTuple):
    """A worker's registration, as the database has it; `slots`: how many jobs of each queue it may run at once."""

    registration: Registration
    name: str
    lease_s: float
    requested: str | None
    slots: dict[str, int]


class RunningAttempt(NamedTuple):
    """An attempt that a remote worker runs, by the database; `claim_id`: the number of the claim that took it."""

    worker_id: int
    job_id: UUID
    attempt: int
    queue: str
    claim_id: int | None


class News(NamedTuple):
    """What concerns workers' attempts, each as (worker, id, attempt): to be cancelled; theirs no more."""

    cancels: list[tuple[int, UUID, int]]
    gone: list[tuple[int, UUID, int]]


class ClaimWaiter(NamedTuple):
    """One claim that waits: up to `limit` jobs for a worker; with `lease_s`, each under a lease of its own.

    `claim_id`: the worker's number for it.
    """

    worker_id: int
    limit: int
    lease_s: float | None = None
    claim_id: int | None = None


class ClaimsForWorkers(NamedTuple):
    """What a claim took: `workers` has the worker of each of `claims`, in their order."""

    claims: Claims
    workers: Sequence[int]
    lost: Sequence[int]
    """Workers that were presumed dead: they get nothing."""


class NotClaimed(NamedTuple):
    """Why a job was not claimed, as claim_one() says."""

    why: str
    again_s: float | None = None
    """In how many seconds to ask again, if that is known."""
    waits_for: Sequence[UUID] | None = None
    """Jobs that must end before."""


class RemoteStore(SettleStore):
    """A gateway's calls to the database."""

    _of_several_workers = True

    def __init__(self, options: ConnectionOptions, queues: Callable[[], int]) -> None:
        """`queues` returns the number of queues to claim from."""
        self._beats = Connection(replace(options, lock_timeout_s=LOCK_TIMEOUT_S), "beat")
        self._claims = ClaimConnections(options, queues)
        self._settles = Connection(replace(options, lock_timeout_s=LOCK_TIMEOUT_S), "settle")

    async def close(self) -> None:
        """Closes all connections."""
        for part in (self._beats, self._claims, self._settles):
            await part.close()

    async def close_idle(self) -> None:
        """Closes connections for claims that are no longer used, until cancelled."""
        await self._claims.close_idle()

    async def register(self, name: str, version: str, lease_s: float, kind: str = "remote") -> Registration:
        """Registers a worker of that kind under a new id and token."""
        token = uuid4()
        return Registration.of(await self._beats.value(_REGISTER, name, version, lease_s, token, kind), token)

    async def standing_worker(self, name: str = ASSIGNMENTS) -> Registration:
        """The standing worker of that name, under which attempts with a lease of their own run."""
        ((worker_id, token),) = await self._beats.fetch("SELECT id, token FROM pgworkd.standing_worker($1)", name)
        return Registration.of(worker_id, token)

    async def find_standing(self, name: str) -> Registration | None:
        """The standing worker of that name, if it is there already."""
        rows = await self._beats.fetch(_FIND_STANDING, name)
        return Registration.of(*rows[0]) if rows else None

    async def worker(self, worker_id: int) -> StoredWorker | None:
        """A remote or the standing worker; None: there is none of that id, or it is presumed dead."""
        rows = await self._beats.fetch(_WORKER, worker_id)
        if not rows:
            return None
        token, lease_s, requested, name, queues, slots = rows[0]
        registration = Registration.of(worker_id, token)
        return StoredWorker(registration, name, lease_s, requested, dict(zip(queues, slots, strict=True)))

    async def set_slots(self, worker_id: int, slots: Mapping[str, int], gone: Sequence[str] = ()) -> None:
        """Stores how many jobs of each queue a worker may run at once; `gone`: queues that it serves no more."""
        args = (worker_id, token_of(worker_id), list(slots), list(slots.values()), gone)
        await self._beats.fetch(_SET_POOLS, *args)

    async def heartbeats(self, states: Mapping[int, str]) -> list[Beat]:
        """Renews the leases of workers (registrations), and stores the state of each: running or stopping."""
        args = (list(states), [token_of(each) for each in states], list(states.values()))
        return [Beat(*row) for row in await self._beats.fetch(_HEARTBEATS, *args)]

    async def requested(self, workers: Sequence[int]) -> dict[int, str | None]:
        """What operators request of the workers among these that are not presumed dead."""
        return {row[0]: row[1] for row in await self._beats.fetch(_REQUESTED, workers)}

    async def news(self, workers: Sequence[int], held: Sequence[Fence] = ()) -> News:
        """Which attempts of these workers are to be cancelled, and which of those they hold run no more."""
        rows = await self._beats.fetch(_NEWS, workers, *fence_columns(held))
        cancels = [(row[0], row[1], row[2]) for row in rows if row[3]]
        return News(cancels, [(row[0], row[1], row[2]) for row in rows if not row[3]])

    async def attempts_of(self, workers: Sequence[int]) -> list[RunningAttempt]:
        """What these workers run, by the database."""
        return [RunningAttempt(*row) for row in await self._beats.fetch(_ATTEMPTS, workers)]

    async def work_of(self, workers: Sequence[int]) -> tuple[dict[int, dict[str, int]], list[RunningAttempt]]:
        """By worker, how many jobs of each queue it may run at once; and what they run."""
        slots, running = dict[int, dict[str, int]](), list[RunningAttempt]()
        for row in await self._beats.fetch(_WORK, workers):
            if row[1] is None:
                slots.setdefault(row[0], {})[row[3]] = row[2]
            else:
                running.append(RunningAttempt(*row))
        return slots, running

    async def list_held(self, fences: Sequence[Fence]) -> set[UUID]:
        """Notes that these attempts have begun, as their workers list them; the jobs of those that are locked."""
        return set(await self._beats.value(_LIST_HELD, *fence_columns(fences)) or ())

    async def take_back(self, fences: Sequence[Fence]) -> list[Rescued]:
        """Takes back attempts that their workers do not list: `pending` those never listed, the others as lost."""
        return [Rescued(*row) for row in await self._settles.fetch(_TAKE_BACK, *fence_columns(fences))]

    async def report_progress(self, held: Sequence[Fence], done: Sequence[float], messages: Sequence[str]) -> None:
        """Stores the progress (0 to 1) of attempts that still run."""
        ids, attempts, *fence = fence_columns(held)
        await self._beats.value(_PROGRESS, ids, attempts, done, messages, *fence)

    async def abandon(self, worker_id: int, claim_id: int | None = None) -> list[UUID] | None:
        """Ends a worker's registration; the jobs that go back, or (`max_attempts` of 1) are dead. None: it is lost.

        `claim_id`: what claims up to that number have taken, and it has never listed, has not begun.
        """
        sql = "SELECT pgworkd.abandon($1, $2, $3)"
        found: list[UUID] | None = await self._settles.value(sql, worker_id, token_of(worker_id), claim_id)
        return found

    async def claim_for(
        self, waiters: Sequence[ClaimWaiter], order: ClaimOrder, standing: int, nonce: UUID
    ) -> ClaimsForWorkers:
        """Claims for workers that wait, the first of them first. Of `order`, worker and limit are not used.

        Attempts with a lease of their own run under `standing` and `nonce`.
        """
        rows = await self._claims.fetch(
            _CLAIM_FOR,
            [each.worker_id for each in waiters],
            [token_of(each.worker_id) for each in waiters],
            [each.limit for each in waiters],
            [each.lease_s for each in waiters],
            standing,
            nonce,
            *order[1:2],
            *order[5:8],
            *order[9:13],
            *order[3:5],
            order.careful,
            [each.claim_id for each in waiters],
        )
        by_job = {row[1]: row[0] for row in rows if row[1] is not None}
        claims = Claims.read(
            [row[1:] for row in rows if row[1] is not None] + [row[1:] for row in rows if row[0] is None]
        )
        lost = [row[0] for row in rows if row[1] is None and row[0] is not None]
        return ClaimsForWorkers(claims, [by_job[each.id] for each in claims], lost)

    async def claim_one(
        self, waiter: ClaimWaiter, order: ClaimOrder, job_id: UUID, standing: int, nonce: UUID
    ) -> ClaimedJob | NotClaimed:
        """Claims that job of the order's queue. Of `order`, only the queue, `kinds` and `budgets` are used.

        An attempt with a lease of its own runs under `standing` and `nonce`.
        """
        rows = await self._claims.fetch(
            _CLAIM_ONE,
            waiter.worker_id,
            token_of(waiter.worker_id),
            order.queue,
            job_id,
            *order[3:5],
            waiter.claim_id,
            waiter.lease_s,
            standing,
            nonce,
        )
        (row,) = rows
        return ClaimedJob(*row[3:]) if row[0] is None else NotClaimed(*row[:3])

    async def extend(
        self, held: Sequence[Fence], leases_s: Sequence[float | None]
    ) -> dict[UUID, tuple[float | None, bool]]:
        """Renews leases of single attempts; by id the seconds left (None: leased with its worker), and if it is to end.

        An attempt that no longer runs is missing, as is one whose row is locked: see `running`.
        """
        ids, attempts, *fence = fence_columns(held)
        rows = await self._settles.fetch(_EXTEND, ids, attempts, leases_s, *fence)
        return {row[0]: (row[1], row[2]) for row in rows}

    async def claimed(self, held: Sequence[Fence]) -> list[tuple[str, float, ClaimedJob]]:
        """The attempts among these that run: queue, seconds since the claim, and what was claimed, without payload."""
        rows = await self._settles.fetch(_CLAIMED, [each.job_id for each in held], [each.attempt for each in held])
        return [(row[0], row[1], ClaimedJob(*row[2:])) for row in rows]
