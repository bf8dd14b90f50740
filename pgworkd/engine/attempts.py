"""The attempts in flight in this daemon, from the claim to the settled row."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from uuid import UUID

import anyio

from pgworkd.core.claims import ClaimedJob
from pgworkd.core.fence import Fence
from pgworkd.core.job import Job, Outcome, Reason
from pgworkd.core.registration import token_of
from pgworkd.core.traces import Trace
from pgworkd.database.own_transaction import OwnTransaction
from pgworkd.database.transactions import CUT_AFTER_S
from pgworkd.engine.runner_task import RunScope


class Attempt:
    """One attempt in flight.

    Written by its runner, except `reason`, which `stop()` sets for whoever ends the run early.
    """

    job: Job | None = None
    """The `Job` that the handler was given, if it takes one."""
    scope: RunScope | None = None
    """Set while the handler runs; ending it cancels this run only."""
    in_thread = False
    """The handler runs in a thread, which can only be asked to end."""
    stack: Callable[[], str] | None = None
    """Tells where the handler is, if it runs in a thread or process. Called from any thread; takes up to 2 s."""
    grace_s: Callable[[Reason], float]
    """Seconds for the handler's clean-up until it is cancelled again; set with `scope`."""
    reason: Reason | None = None
    commit: anyio.CancelScope | None = None
    """Set while `job.transaction()` commits: a stop waits CUT_AFTER_S for the answer."""
    progress: tuple[float, str] | None = None
    """The latest progress that the handler reported, from any thread, until it has been written."""
    started: float | None = None
    """When the handler was called, on the monotonic clock; None: it waits for a slot."""
    start_counted = False
    """The start has been counted: see `Counters.begun`."""
    ended: float = 0.0
    """When the handler returned, on the monotonic clock."""
    stop_seen = False
    """The handler, in a thread, had been asked to end before it returned."""
    in_transaction = False
    """The handler is inside its `job.transaction()`."""
    own: OwnTransaction | None = None
    """The transaction in which the attempt was claimed, and ends; None: the claim is committed."""
    status_after: str | None = None
    """The status of the job after `own` has ended; None: the attempt is not settled there."""
    settled = False
    """The handler has completed the job itself, in its own transaction."""
    handed_over = False
    """The attempt runs under the standing worker (then `worker_id`), and may be settled by others, too."""
    outcome_unknown = False
    """The attempt may have been settled: the answer to a COMMIT, or to its settle, was lost."""
    unreadable: Exception | None = None
    """The error with which the database failed to return the payload."""
    trace: Trace | None = None
    """The trace that follows the attempt, where attempts are traced."""
    reported_slow = False
    """The attempt has been reported as slow."""
    reported_overdue = False
    """The attempt has been reported as running on although it was to end."""

    outcome: Outcome
    """How the attempt has ended; set when it has."""
    size = 0
    """About how many bytes the settle of the attempt sends or copies."""
    delays = 0
    """How often the settle was delayed: the row was locked, or the database rejected it."""

    def __init__(
        self, claimed: ClaimedJob, queue: str, worker_id: int | None = None, own: OwnTransaction | None = None
    ) -> None:
        """`worker_id`: the id under which it was claimed; the daemon may have another by now."""
        self.claimed = claimed
        self.job_id, self.number = claimed.id, claimed.attempt
        self.queue = queue
        self.worker_id = worker_id
        if own is not None:
            self.own = own
            own.on_lost(lambda: self.stop(Reason.LOST))

    @property
    def fence(self) -> Fence:
        """The fence that a settle of the attempt must match."""
        return Fence.of(self.job_id, self.number, self.worker_id)

    def facts(self) -> dict[str, object]:
        """The facts that every event about this attempt carries."""
        claimed = self.claimed
        facts = {"job_id": str(claimed.id), "queue": self.queue, "kind": claimed.kind, "attempt": claimed.attempt}
        return facts if self.trace is None else {**facts, **self.trace.ids}

    def stop(self, reason: Reason) -> None:
        """Ends the run; the first reason counts. Runs in the loop or a process are cancelled, threads asked to end."""
        if self.reason is None:
            self.reason = reason
            if self.job is not None:
                self.job.stopping.set()
            if self.commit is not None:
                self.commit.deadline = anyio.current_time() + CUT_AFTER_S
        if self.scope is not None and not self.in_thread:
            self.scope.end(self.grace_s(reason))

    def committing(self) -> anyio.CancelScope:
        """The scope to commit in: shielded, and without a deadline until the run is stopped."""
        deadline = math.inf if self.reason is None else anyio.current_time() + CUT_AFTER_S
        self.commit = anyio.CancelScope(shield=True, deadline=deadline)
        return self.commit

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Stops the handler's time-out while the block lasts."""
        scope = self.scope
        if scope is None or scope.deadline == math.inf:
            yield
            return
        left_s, scope.deadline = scope.deadline - anyio.current_time(), math.inf
        try:
            yield
        finally:
            scope.deadline = anyio.current_time() + left_s


class InFlight:
    """All attempts in flight. Pools add, the settler removes, all in the daemon's loop."""

    def __init__(self) -> None:
        self._by_id: dict[UUID, Attempt] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._by_id.values()))

    def add(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Adds claimed attempts; returns them without those that are in flight here, which must not be started again.

        That happens when the database has lost the commit of a claim (a failover). An older attempt of the same job,
        or the same one under a lost worker id, is no longer ours: it is stopped.
        """
        by_id, added = self._by_id, []
        for attempt in attempts:
            older = by_id.setdefault(attempt.job_id, attempt)
            if older is not attempt:
                if _are_same(older, attempt):
                    continue
                older.stop(Reason.FENCE)
                by_id[attempt.job_id] = attempt
            added.append(attempt)
        return added

    def remove(self, attempts: Iterable[Attempt]) -> None:
        """Removes settled attempts."""
        by_id = self._by_id
        for attempt in attempts:
            other = by_id.pop(attempt.job_id, attempt)
            if other is not attempt:
                by_id[attempt.job_id] = other

    def find(self, job_id: UUID, attempt: int) -> Attempt | None:
        """The attempt of this job and number, if it is in flight here."""
        found = self._by_id.get(job_id)
        return found if found is not None and found.number == attempt else None

    def running(self) -> list[Attempt]:
        """The attempts whose handler has been called and has not returned."""
        return [h for h in self._by_id.values() if h.started is not None and h.scope is not None]

    def stop_all(self, reason: Reason) -> None:
        """Stops every attempt."""
        for attempt in self:
            attempt.stop(reason)


def _are_same(one: Attempt, other: Attempt) -> bool:
    return one.number == other.number and token_of(one.worker_id) == token_of(other.worker_id)
