"""An in-memory model of the schema for the simulation: what its functions guarantee to a daemon, and nothing more.

It is no second implementation: no keys, batches, dependencies, rates or history. The rest follows `schema.sql`:
(id, attempt) is the fence, attempts rise at each claim, two losses make a suspect, idle pools are notified, others
poll. The tests of `schema.sql` itself are in tests/sql and need Postgres.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from pgworkd.core.claims import ClaimedJob, ClaimOrder, Claims
from pgworkd.core.fence import Fence
from pgworkd.core.job import Ending, Outcome
from pgworkd.errors import DatabaseBusy, WorkerLost

EPOCH_S = 1_700_000_000.0
"""The database's clock when the loop's clock is at 0."""
LOSSES_MAX = 3
WAITING = ("pending", "failed")
_NOWHERE = (-float("inf"), UUID(int=0))


@dataclass(eq=False, slots=True)
class Row:
    """One row of `jobs`; finished when its status is completed, dead or cancelled."""

    id: UUID
    queue: str
    priority: int
    run_at: float
    max_attempts: int
    timeout_s: float | None
    status: str = "pending"
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    worker_id: int | None = None
    started_at: float = 0.0
    cancel_requested: bool = False
    late: bool = False
    """Was committed after it was due, behind jobs that had been claimed by then."""

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "dead", "cancelled")

    def claimed(self) -> ClaimedJob:
        columns = (
            self.id,
            self.queue,
            "{}",
            self.attempt,
            self.failures,
            self.max_attempts,
            self.timeout_s,
            self.priority,
        )
        return ClaimedJob(*columns, self.losses, self.run_at, self.run_at, None, None, None)


@dataclass(slots=True)
class Worker:
    """One row of `workers`."""

    lease_s: float
    lease_until: float
    lost: bool = False


@dataclass(slots=True)
class Queue:
    """One row of `queues`."""

    paused: bool = False
    concurrency: int | None = None
    max_running: int | None = None

    def told(self) -> dict[str, object]:
        """The settings as a heartbeat returns them."""
        told: dict[str, object] = {"paused": self.paused}
        if self.concurrency is not None:
            told["concurrency"] = self.concurrency
        if self.max_running is not None:
            told |= {"max_running": self.max_running, "limited": True}
        return told


@dataclass
class Table:
    """All rows. Each method is one transaction."""

    clock: Callable[[], float]
    notify: Callable[[dict[str, object]], None]
    settled: Callable[[Row, str], None]
    """Called for each attempt that a settle ended, with its outcome, when the settle takes effect."""
    rows: dict[UUID, Row] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)
    pools: dict[tuple[int, str], bool] = field(default_factory=dict)
    """Whether a pool is idle, by worker and queue."""
    queues: dict[str, Queue] = field(default_factory=dict)
    locked: set[UUID] = field(default_factory=set)
    """Jobs that another transaction has locked: a settle skips them, or raises DatabaseBusy."""

    @property
    def now(self) -> float:
        return EPOCH_S + self.clock()

    # The application

    def insert(self, rows: Iterable[Row]) -> None:
        first: dict[str, float] = {}
        for row in rows:
            self.rows[row.id] = row
            if row.run_at <= self.now + 10:
                first[row.queue] = min(first.get(row.queue, row.run_at), row.run_at)
        for queue, run_at in first.items():
            self._wake(queue, run_at)

    def cancel(self, row: Row) -> None:
        if row.status == "running":
            row.cancel_requested = True
            self.notify({"worker": row.worker_id})
        elif row.status in WAITING:
            row.status = "cancelled"

    def change(self, queue: str, **settings: object) -> None:
        changed = self.queues.setdefault(queue, Queue())
        for name, value in settings.items():
            setattr(changed, name, value)
        self.notify({"queues": True})

    # Workers

    def register(self, lease_s: float) -> int:
        worker_id = len(self.workers) + 1
        self.workers[worker_id] = Worker(lease_s, self.now + lease_s)
        return worker_id

    def renew(self, worker_id: int) -> Worker | None:
        worker = self.workers.get(worker_id)
        if worker is None or worker.lost:
            return None
        worker.lease_until = self.now + worker.lease_s
        return worker

    def set_pool(self, worker_id: int, queue: str, *, idle: bool) -> None:
        if (worker := self.workers.get(worker_id)) is not None and not worker.lost:
            self.pools[worker_id, queue] = idle

    def sign_off(self, worker_id: int) -> bool:
        self.pools = {key: idle for key, idle in self.pools.items() if key[0] != worker_id}
        if any(self.running_of(worker_id)):
            return False
        worker = self.workers.get(worker_id)
        if worker is not None and not worker.lost:
            del self.workers[worker_id]
        return True

    def running_of(self, worker_id: int) -> list[Row]:
        return [row for row in self.rows.values() if row.worker_id == worker_id]

    def rescue(self) -> list[Row]:
        """What any other daemon does: rescues the jobs of workers whose lease has expired."""
        rescued = []
        for worker_id, worker in self.workers.items():
            if worker.lost or worker.lease_until > self.now:
                continue
            worker.lost = True
            self.pools = {key: idle for key, idle in self.pools.items() if key[0] != worker_id}
            for row in self.running_of(worker_id):
                is_spent = row.losses >= LOSSES_MAX - 1 or row.max_attempts == 1
                row.losses += 1
                row.status, row.worker_id = "dead" if is_spent else "failed", None
                rescued.append(row)
        first: dict[str, float] = {}
        for row in rescued:
            if row.status == "failed":  # claims have passed its position by now
                first[row.queue] = min(first.get(row.queue, row.run_at), row.run_at)
        for queue, run_at in first.items():
            self._wake(queue, run_at, also_awake=True)
        return rescued

    # Claim

    def claim(self, order: ClaimOrder) -> Claims:
        worker = self.workers.get(order.worker_id)
        if worker is None or worker.lost or worker.lease_until <= self.now:
            raise WorkerLost(f"worker {order.worker_id} has no lease")
        taken = self._chosen(order)
        for row in taken:
            row.status, row.worker_id, row.attempt, row.started_at = (
                "running",
                order.worker_id,
                row.attempt + 1,
                self.now,
            )
        return Claims(row.claimed() for row in taken)

    def _chosen(self, order: ClaimOrder) -> list[Row]:
        queue = self.queues.get(order.queue, Queue())
        if queue.paused:
            return []
        room = order.limit
        if queue.max_running is not None:
            running = sum(row.status == "running" and row.queue == order.queue for row in self.rows.values())
            room = max(0, min(room, queue.max_running - running))
        due = [row for row in self.due(order.queue) if row.losses <= 1]
        known = {p: (at, place) for p, at, place in zip(*order[5:8], strict=True)}
        seen = [row for row in due if (row.run_at, row.id) > known.get(row.priority, _NOWHERE)]
        taken: list[Row] = []
        if not any(row.losses > 1 for row in self.running_of(order.worker_id)):
            taken = self._in_order(row for row in self.due(order.queue) if row.losses > 1)[: min(1, room)]
        return self._in_order(taken + self._in_order(seen)[: room - len(taken)])

    def due(self, queue: str) -> list[Row]:
        """The due jobs of a queue."""
        now = self.now
        return [r for r in self.rows.values() if r.status in WAITING and r.run_at <= now and r.queue == queue]

    @staticmethod
    def _in_order(rows: Iterable[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: (-row.priority, row.run_at, row.id))

    def next_due(self, queues: Sequence[str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for row in self.rows.values():
            if row.status in WAITING and row.queue in queues:
                found[row.queue] = min(found.get(row.queue, row.run_at - self.now), row.run_at - self.now)
        return found

    # Settle

    def settle(self, ending: Ending, outcomes: Mapping[Fence, Outcome], *, skip_locked: bool) -> dict[UUID, str]:
        """Ends those that still run; their new statuses, or for what is given back always `pending`."""
        rows, found = self.still_running(outcomes), dict[UUID, str]()
        if not skip_locked and any(row.id in self.locked for row in rows):
            raise DatabaseBusy("locked, for the simulation", sqlstate="55P03")
        by_job, back = {fence.job_id: outcome for fence, outcome in outcomes.items()}, dict[str, float]()
        for row in rows:
            if row.id in self.locked:
                continue
            outcome = by_job[row.id]
            self._end(row, self._ended(row, outcome))
            found[row.id] = "pending" if ending is Ending.RELEASED else row.status
            self._freed(row.queue)
            if ending is Ending.RELEASED and outcome.delay_s is None:
                back[row.queue] = min(back.get(row.queue, row.run_at), row.run_at)
        for queue, run_at in back.items():
            self._wake(queue, run_at, also_awake=True)
        return found

    def _ended(self, row: Row, outcome: Outcome) -> str:
        """The new status of a row whose attempt has ended so; its failures and the time of its retry."""
        if outcome.ending is Ending.FAILED:
            row.failures += 1
            if outcome.permanent or row.failures >= row.max_attempts:
                return "dead"
        elif outcome.ending is not Ending.RELEASED:
            return outcome.ending.value
        if outcome.delay_s is not None:
            row.run_at = self.now + outcome.delay_s
        if row.cancel_requested:
            return "cancelled"
        return "failed" if outcome.ending is Ending.FAILED else "pending"

    def still_running(self, fences: Iterable[Fence]) -> list[Row]:
        rows = [(self.rows[fence.job_id], fence.attempt) for fence in fences]
        return [row for row, attempt in rows if row.status == "running" and row.attempt == attempt]

    def _end(self, row: Row, status: str) -> None:
        row.status, row.worker_id = status, None
        self.settled(row, status)

    # Notifications

    def _freed(self, queue: str) -> None:
        if queue in self.queues and self.queues[queue].max_running is not None:
            self._wake(queue, None)

    def _wake(self, queue: str, run_at: float | None, *, also_awake: bool = False) -> None:
        if any(name == queue and (idle or also_awake) for (_, name), idle in self.pools.items()):
            self.notify({"queue": queue} | ({} if run_at is None else {"run_at": run_at}))
