"""Waiting for the results of jobs: one connection that listens and one that queries, for any number of waiters.

    async with Results(dsn) as results:
        answer = await results.result(job_id, timeout_s=30)
        async for found in results.of_batch(root.id):
            print(found.payload, found.result)

A waiter is entered in the table `result_waiters`, so that the end of the job notifies this process. That is a hint:
jobs are also polled, at short intervals first, which grow to `poll_s`.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Any, NamedTuple, Self, cast
from uuid import UUID

import anyio
from anyio.abc import TaskGroup

from pgworkd.core.job import ENDED
from pgworkd.core.validation import identity
from pgworkd.database.connection import Connection, ConnectionOptions, Listener
from pgworkd.errors import DatabaseUnavailable, JobFailed, JobUnknown, PgworkdError, UsageError

__all__ = ["Found", "JobFailed", "JobUnknown", "Results"]

WAITERS_MAX = 10_000
"""Jobs waited for at once."""
_ROWS_MAX = 1000
_SOON_S, _LATER = 0.05, 4.0
"""Seconds until a job is polled first, and the factor by which the interval grows each time, up to `poll_s`."""
_WAITS_S_LEAST = 30.0
_PAGE_ROWS = 500
_AWAIT = "SELECT id, status FROM pgworkd.await_results($1, $2, $3)"
_RESULT = "SELECT id, status, result::text, error FROM pgworkd.result_of($1)"
_PAGE = "SELECT batch_id, batch, id, payload::text, result::text FROM pgworkd.batch_results($1, $2, $3, $4, $5)"


class Found(NamedTuple):
    """A completed job of a batch."""

    batch: str
    id: UUID
    payload: Any
    result: Any


class _Waited:
    """A job with waiters."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.answer: tuple[str, str | None, str | None] | None = None
        """The answer that waiters get: status, result (JSON text) and error."""
        self.waiters = 0
        self.ask_at = -math.inf
        self.again_s = _SOON_S


class Results:
    """Returns the results of jobs as soon as they finish. Any number of tasks may wait, for up to 10,000 jobs."""

    def __init__(
        self,
        dsn: str | ConnectionOptions,
        *,
        poll_s: float = 5.0,
        connect_timeout_s: float = 10.0,
        command_timeout_s: float = 10.0,
    ) -> None:
        """Opens no connection yet: `async with` does, one to listen and one to query.

        dsn: the database, as postgresql://user:password@host:5432/database. poll_s: the longest interval in seconds
        between two polls of a job whose notification does not come. connect_timeout_s, command_timeout_s: limits in
        seconds for a new connection and for one statement. (All but poll_s may come in ConnectionOptions.)
        """
        options = (
            dsn
            if isinstance(dsn, ConnectionOptions)
            else ConnectionOptions(dsn, connect_timeout_s=connect_timeout_s, command_timeout_s=command_timeout_s)
        )
        self._connection = Connection(options, "results")
        self._listener = Listener(options)
        self._poll_s = poll_s
        self._channel = f"pgworkd_results_{secrets.token_hex(8)}"
        self._waited: dict[UUID, _Waited] = {}
        self._news = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which `Results` is open."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._listen)
        self._tasks.start_soon(self._ask_all)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        tasks = cast("TaskGroup", self._tasks)
        self._loop = None
        for waited in self._waited.values():
            waited.ended.set()
        tasks.cancel_scope.cancel()
        ours = isinstance(error, anyio.get_cancelled_exc_class())  # perhaps because one of the tasks has failed
        try:
            handled = await tasks.__aexit__(*(kind, error, trace) if ours else (None, None, None))
            return handled if ours else None
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # as the caller of any other call would get it
        finally:
            with anyio.CancelScope(shield=True):
                await self._connection.close()

    async def result(self, job_id: UUID, timeout_s: float | None = None) -> Any:
        """The value that the job's handler returned, once the job has completed.

        Raises JobFailed if the job is dead, cancelled or expired; JobUnknown if it does not exist or its history has
        been deleted; TimeoutError after `timeout_s` seconds (None: waits without limit, also while the database is
        unavailable); UsageError for an argument that is not a UUID, or if this is not open in the current event loop.
        """
        text = await self.result_text(job_id, timeout_s)
        return None if text is None else json.loads(text)

    async def result_text(self, job_id: UUID, timeout_s: float | None = None) -> str | None:
        """The result of a job as JSON text; None: the handler returned nothing. Raises the errors of `result`."""
        self._usable()
        identity(job_id, "job_id")
        if len(self._waited) >= WAITERS_MAX and job_id not in self._waited:
            raise UsageError(f"{WAITERS_MAX:,} jobs already have waiters: wait for fewer at once, or for their batch")
        waited = self._waited.setdefault(job_id, _Waited())
        waited.waiters += 1
        self._news.set()
        try:
            with anyio.fail_after(timeout_s):
                await waited.ended.wait()
        finally:
            waited.waiters -= 1
            if not waited.waiters and self._waited.get(job_id) is waited:
                del self._waited[job_id]
        if waited.answer is None:
            raise UsageError(f"Results was closed before job {job_id} finished: keep it open until then")
        status, result, error = waited.answer
        if status == "completed":
            return result
        if status == "gone":
            raise JobUnknown(f"job {job_id} is unknown: check the id; its history may be deleted, or never kept")
        raise JobFailed(job_id, status, error)

    async def of_batch(self, batch_id: UUID, *, every: bool = False) -> AsyncIterator[Found]:
        """The completed jobs of a tree's final batches (if none is final: of those without children), page by page.

        `every`: of all batches of the tree. Returns what has completed so far, which is everything once the tree has
        finished. Jobs of queues that keep no history are missing. Raises BatchClosed for a batch that does not exist,
        and UsageError as `result` does.
        """
        self._usable()
        identity(batch_id, "batch_id")
        after: tuple[UUID | None, UUID | None] = (None, None)
        while True:
            rows = await self._connection.fetch(_PAGE, batch_id, every, *after, _PAGE_ROWS)
            for _, batch, job_id, payload, result in rows:
                yield Found(batch, job_id, json.loads(payload), None if result is None else json.loads(result))
            if len(rows) < _PAGE_ROWS:
                return
            after = rows[-1][0], rows[-1][2]

    def _usable(self) -> None:
        """Raises UsageError where no answer could ever arrive."""
        if self._loop is None:
            raise UsageError("Results is not open: use it within `async with Results(dsn) as results`")
        if self._loop is not asyncio.get_running_loop():
            raise UsageError("Results was opened in another event loop: open one in each thread and process")

    # The two tasks

    async def _listen(self) -> None:
        """Receives notifications of jobs that have finished."""
        while True:
            lost = anyio.Event()
            try:
                async with self._listener.listen(self._channel, self._notified, lost.set) as probe:
                    self._ask_soon(self._waited)
                    while not lost.is_set():
                        with anyio.move_on_after(self._poll_s):
                            await lost.wait()
                        await probe()
            except PgworkdError:
                await anyio.sleep(self._poll_s)  # polling continues, and raises errors where they matter

    def _notified(self, payload: str) -> None:
        try:
            self._ask_soon([UUID(text) for text in json.loads(payload)])
        except (ValueError, TypeError, AttributeError):
            self._ask_soon(self._waited)  # sent by another program: it may mean anything

    def _ask_soon(self, ids: Iterable[UUID]) -> None:
        for job_id in ids:
            if (waited := self._waited.get(job_id)) is not None:
                waited.ask_at = -math.inf
        self._news.set()

    async def _ask_all(self) -> None:
        """Enters the waiters, polls the jobs that are due, and hands out the answers."""
        while True:
            self._news = anyio.Event()
            now = anyio.current_time()
            due = [job_id for job_id, waited in self._waited.items() if waited.ask_at <= now]
            try:
                for at in range(0, len(due), _ROWS_MAX):
                    await self._ask(due[at : at + _ROWS_MAX])
            except DatabaseUnavailable:
                await anyio.sleep(self._poll_s)
                continue
            next_at = min((waited.ask_at for waited in self._waited.values()), default=math.inf)
            with anyio.move_on_after(next_at - anyio.current_time()):
                await self._news.wait()

    async def _ask(self, ids: list[UUID]) -> None:
        now = anyio.current_time()
        rows = await self._connection.fetch(_AWAIT, ids, self._channel, max(3 * self._poll_s, _WAITS_S_LEAST))
        ended = [row[0] for row in rows if row[1] in ENDED]
        results = await self._connection.fetch(_RESULT, ended) if ended else []
        answers = {row[0]: (row[1], row[2], row[3]) for row in results}
        answers |= {row[0]: ("gone", None, None) for row in rows if row[1] == "gone"}
        for job_id in ids:
            if (waited := self._waited.get(job_id)) is None:
                continue
            if (answer := answers.get(job_id)) is not None:
                waited.answer = answer
                waited.ended.set()
                del self._waited[job_id]
            else:
                waited.ask_at, waited.again_s = now + waited.again_s, min(waited.again_s * _LATER, self._poll_s)
