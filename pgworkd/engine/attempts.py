"""The attempts this daemon holds, from the claim to the settled row."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from uuid import UUID

import anyio

from pgworkd.database.connection import CUT_AFTER_S
from pgworkd.database.store import Claimed
from pgworkd.engine.runner_task import RunScope
from pgworkd.words.job import Job, Reason
from pgworkd.words.registration import token_of


class Attempt:
    """One attempt in our hands.

    Written by its runner, but for `reason`, which whoever ends the run early writes through `stop()`.
    """

    job: Job | None = None
    """What the handler was given, if it asked for it."""
    scope: RunScope | None = None
    """Set while the handler runs: ending it ends this run, and only this."""
    in_thread = False
    """It runs in a thread, which can only be asked to end."""
    grace_s: Callable[[Reason], float]
    """How long its clean-up may take until it is cancelled again; set with `scope`."""
    reason: Reason | None = None
    commit: anyio.CancelScope | None = None
    """Set once its transaction commits, by whoever commits: a stop leaves the answer CUT_AFTER_S to come."""
    progress: tuple[float, str] | None = None
    """The latest word of the handler, in whatever thread, until the reporter has passed it on."""
    started: float | None = None
    """On the monotonic clock, when the handler was called; None: still waits for a slot."""
    ended: float = 0.0
    """On the same clock, when it came back."""
    stop_seen = False
    """Of a thread: it had been asked to end when it came back."""
    in_transaction = False
    """The handler is inside its `job.transaction()`."""
    settled = False
    """The handler has completed the job itself, in its own transaction."""
    outcome_unknown = False
    """It may have: the answer to its COMMIT was lost."""
    unreadable: Exception | None = None
    """The database cannot give its payload."""
    delays = 0
    """How often its settle was put off, because the row was locked or the database refused it."""
    reported_slow = False
    """Has been reported as slow."""

    def __init__(self, claimed: Claimed, queue: str, worker_id: int | None = None) -> None:
        """`worker_id`: under which it was claimed, which a daemon may have lost since."""
        self.claimed = claimed
        self.queue = queue
        self.worker_id = worker_id

    def facts(self) -> dict[str, object]:
        """What every event about this attempt says."""
        claimed = self.claimed
        return {"job_id": str(claimed.id), "queue": self.queue, "kind": claimed.kind, "attempt": claimed.attempt}

    def stop(self, reason: Reason) -> None:
        """Asks the run to end; the first reason stands. Loop and process runs are cancelled, threads told."""
        if self.reason is None:
            self.reason = reason
            if self.job is not None:
                self.job.stopping.set()
            if self.commit is not None:
                self.commit.deadline = anyio.current_time() + CUT_AFTER_S
        if self.scope is not None and not self.in_thread:
            self.scope.end(self.grace_s(reason))

    def committing(self) -> anyio.CancelScope:
        """The scope to commit in: shielded, without limit until the run is to end."""
        deadline = math.inf if self.reason is None else anyio.current_time() + CUT_AFTER_S
        self.commit = anyio.CancelScope(shield=True, deadline=deadline)
        return self.commit

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """The time that is spent in here is not the handler's: its time-out comes that much later."""
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
    """All attempts held by this daemon. Pools add, the settler removes, all in the daemon's loop."""

    def __init__(self) -> None:
        self._by_id: dict[UUID, Attempt] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._by_id.values()))

    def add(self, attempt: Attempt) -> bool:
        """Notes a claimed attempt; False: it is in flight here already, and must not be started again.

        That happens when the database has lost the commit of a claim (a failover). An older attempt of the same job,
        or the same under a worker id that was lost, is ours no more.
        """
        older = self._by_id.setdefault(attempt.claimed.id, attempt)
        if older is not attempt:
            if older.claimed.attempt == attempt.claimed.attempt and token_of(older.worker_id) == token_of(
                attempt.worker_id
            ):
                return False
            older.stop(Reason.FENCE)
            self._by_id[attempt.claimed.id] = attempt
        return True

    def remove(self, attempt: Attempt) -> None:
        """Forgets a settled attempt."""
        job_id = attempt.claimed.id
        other = self._by_id.pop(job_id, attempt)
        if other is not attempt:
            self._by_id[job_id] = other

    def find(self, job_id: UUID, attempt: int) -> Attempt | None:
        """The attempt, if we hold it."""
        found = self._by_id.get(job_id)
        return found if found is not None and found.claimed.attempt == attempt else None

    def running(self) -> list[Attempt]:
        """Those whose handler has been called and has not come back."""
        return [h for h in self._by_id.values() if h.started is not None and h.scope is not None]

    def stop_all(self, reason: Reason) -> None:
        """Asks every run to end."""
        for attempt in self:
            attempt.stop(reason)


def began_ago_s(attempts: Sequence[Attempt]) -> list[float | None]:
    """So many seconds ago the handler of each was called; None: it was not."""
    now = time.monotonic()
    return [None if attempt.started is None else now - attempt.started for attempt in attempts]
