"""Where the engine's work comes from: Postgres, a gateway, or a simulation of both.

`WorkSource` is all that the engine asks of it on a job's way. `tests/sources` holds each to what is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import anyio

from pgworkd.core.claims import ClaimOrder, Claims
from pgworkd.core.fence import Fence, Settling
from pgworkd.core.job import Ending
from pgworkd.core.registration import Registration
from pgworkd.errors import PgworkdError

Payload = tuple[UUID, str | None, str | None, bool]
"""(id, payload, meta, expired) of an attempt."""


class Occurrence(NamedTuple):
    """The next occurrence of a schedule, computed under this revision of its rule."""

    schedule: str
    at: datetime
    revision: int


@dataclass(frozen=True, slots=True)
class Instructions:
    """What is wanted of a worker that has renewed its lease."""

    cancels: Sequence[tuple[UUID, int]]
    """The attempts to cancel, as (id, attempt)."""
    queues: dict[str, dict[str, Any]]
    """Rows of `queues` by name, without NULLs; always with `paused`, and with `pause_s` if the pause has an end."""
    differing: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """The queues to which other workers' code gives another concurrency than ours, and that concurrency."""
    schema_version: int = 0
    """The version of the database's schema; 0: it does not matter."""
    asked: frozenset[str] | None = None
    """The queues that `queues` is complete for; None: all."""
    clock_ahead_s: float = 0.0
    """By how many seconds the database's clock is ahead of ours, to within half of the time that this call took."""
    stacks: Sequence[tuple[UUID, int]] = ()
    """The attempts whose stack an operator has asked for, as (id, attempt)."""


class Heartbeats(Protocol):
    """The calls of a heartbeat thread, on a connection of its own. All of them raise PgworkdError."""

    async def heartbeat(self, worker_id: int, state: str) -> bool:
        """Renews the lease; False if the worker is lost. `state`: running, stopping or blocked."""

    async def instructions(self, worker_id: int, queues: Collection[str] | None = None) -> Instructions:
        """The instructions for this worker, with the rows of these queues (None: all)."""

    async def close(self) -> None:
        """Closes the connection."""


class Transactions(Protocol):
    """Connections to the database for handlers."""

    def begin(
        self,
        committing: Callable[[], anyio.CancelScope],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> AbstractAsyncContextManager[Any]:
        """A connection in a transaction, which is committed at the end of the block, in the scope `committing`.

        Waits for one within `waiting()`.
        """


class SettleSource(Protocol):
    """Where attempts are settled. All methods raise PgworkdError."""

    async def settle(
        self,
        ending: Ending,
        settles: Sequence[Settling],
        following: Sequence[Occurrence] = (),
        *,
        skip_locked: bool = False,
        deferred: bool = False,
    ) -> dict[UUID, str]:
        """Ends attempts of different jobs in one way; the new status of each that ran under its fence.

        completed: moves the job to the history. failed: counts a failure; the status is failed, dead or cancelled.
        released: counts no failure; a delay of None keeps its place in the queue. cancelled and expired end the job.
        `following`: the next occurrences of those that have a schedule.

        `skip_locked`: waits for no row; locked ones are missing, too (see `running`). `deferred`: leaves all effects
        on other rows to maintenance, which sets aside what is refused.
        """

    async def running(self, fences: Sequence[Fence]) -> set[UUID]:
        """The jobs of the attempts that still run: a settle that skips locked rows has left them out."""

    async def settled(self, fences: Sequence[Fence]) -> dict[UUID, str]:
        """The status each attempt was settled with; running, rescued and pruned ones are missing."""


class WorkSource(SettleSource, Protocol):
    """A source of work.

    All calls may be repeated: every method raises `DatabaseUnavailable` when it can be retried, because the call had no
    effect or its outcome is unknown.
    """

    async def register(
        self, name: str, pid: int, version: str, lease_s: float, kinds: Sequence[str] | None = None, kind: str = ""
    ) -> Registration:
        """Registers a worker of that kind under a new id and token; `kinds`: those it has handlers for, None: any."""

    def heartbeats(self, limit_s: float) -> Heartbeats:
        """The calls of a worker's heartbeat thread, each of which takes `limit_s` at most."""

    async def sign_off(self, worker_id: int) -> bool:
        """Ends the registration, if it has not ended; False if the worker still has running jobs."""

    async def set_pool(
        self, worker_id: int, queue: str, slots: int, *, idle: bool, code: tuple[int | None, str | None] = (None, None)
    ) -> None:
        """Announces a pool. `idle`: inserts must NOTIFY it; `code`: concurrency without overrides, and its source."""

    async def drop_pool(self, worker_id: int, queue: str) -> None:
        """Removes the pool of a queue that this worker no longer serves."""

    async def claim(self, order: ClaimOrder) -> Claims:
        """Claims jobs: they are now running under this worker. Raises `WorkerLost` without a lease."""

    async def refuse_claims(self, order: ClaimOrder, error: PgworkdError | None = None) -> int | None:
        """Sets aside the job that this claim takes first if it is refused, and those that follow it; how many.

        With the error of that claim the first is set aside without a trial. None: a lock on all jobs holds up claims.
        """

    async def payloads(
        self,
        ids: Sequence[UUID],
        attempts: Sequence[int],
        bytes_max: int,
        worker_id: int | None = None,
        begin: int | None = None,
    ) -> list[Payload]:
        """Payloads that claims have left out, up to `bytes_max`; the first `begin` (None: all) are about to begin."""

    async def kinds_elsewhere(self, worker_id: int, queue: str, kinds: Sequence[str]) -> set[str]:
        """The kinds among these for which another live worker of the queue has a handler."""

    async def report_progress(self, rows: Sequence[tuple[UUID, int, float, str]], worker_id: int | None = None) -> None:
        """Stores the progress of attempts that still run: (id, attempt, 0 to 1, message) of each."""

    @property
    def transactions(self) -> Transactions:
        """The transactions for `job.transaction()`."""

    async def complete_on(self, connection: Any, settling: Settling, following: Sequence[Occurrence] = ()) -> bool:
        """Completes a job in a transaction of `transactions`; False if the attempt is no longer ours."""

    async def close(self) -> None:
        """Closes all connections."""
