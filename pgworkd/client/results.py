"""Waiting for what becomes of jobs: one connection that listens and one that asks, however many wait.

    async with Results(dsn) as results:
        answer = await results.result(job_id, timeout_s=30)
        async for found in results.of_batch(root.id):
            print(found.payload, found.result)

A waiter is entered in the table `result_waiters`, so whoever ends the job notifies this process. That is a hint: jobs
are also asked about again and again, soon at first and every `poll_s` in the end.
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

from pgworkd.database.connection import Connection, ConnectionOptions, Listener
from pgworkd.errors import DatabaseUnavailable, JobFailed, JobUnknown, PgworkdError, UsageError
from pgworkd.words.validation import identity

__all__ = ["Found", "JobFailed", "JobUnknown", "Results"]

WAITERS_MAX = 10_000
"""Jobs waited for at once."""
_ROWS_MAX = 1000
_SOON_S, _LATER = 0.05, 4.0
"""After how long a job is asked about again, and how much longer it takes each time, up to `poll_s`."""
_WAITS_S_LEAST = 30.0
_PAGE_ROWS = 500
_OVER = {"completed", "dead", "discarded", "cancelled", "expired"}
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
    """A job that someone waits for."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.answer: tuple[str, str | None, str | None] | None = None
        """Status, result (JSON text) and error."""
        self.waiters = 0
        self.ask_at = -math.inf
        self.again_s = _SOON_S


class Results:
    """Knows what became of jobs as soon as they end. Any number of tasks may wait."""

    def __init__(
        self, dsn: str, *, poll_s: float = 5.0, connect_timeout_s: float = 10.0, command_timeout_s: float = 10.0
    ) -> None:
        options = ConnectionOptions(dsn, connect_timeout_s=connect_timeout_s, command_timeout_s=command_timeout_s)
        self._connection = Connection(options, "results")
        self._listener = Listener(options)
        self._poll_s = poll_s
        self._channel = f"pgworkd_results_{secrets.token_hex(8)}"
        self._waited: dict[UUID, _Waited] = {}
        self._news = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where it is open."""

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
        ours = isinstance(error, anyio.get_cancelled_exc_class())  # perhaps because a task of ours has failed
        try:
            handled = await tasks.__aexit__(*(kind, error, trace) if ours else (None, None, None))
            return handled if ours else None
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # as the caller of any other call would get it
        finally:
            with anyio.CancelScope(shield=True):
                await self._connection.close()

    async def result(self, job_id: UUID, timeout_s: float | None = None) -> Any:
        """What the job's handler returned, once it has completed.

        Raises JobFailed if it is dead (or dies), cancelled or expired, JobUnknown if there is no such job or its
        history is forgotten, TimeoutError after `timeout_s`; without that it waits for ever, also while the database
        is away. UsageError for what is no id, or where this is not open: before, after, in another thread or process.
        """
        self._usable()
        identity(job_id, "job_id")
        if len(self._waited) >= WAITERS_MAX and job_id not in self._waited:
            raise UsageError(f"{WAITERS_MAX:,} jobs are waited for already: wait for fewer at once, or for their batch")
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
            raise UsageError(f"Results was closed while job {job_id} was waited for: keep it open until it is over")
        status, result, error = waited.answer
        if status == "completed":
            return None if result is None else json.loads(result)
        if status == "gone":
            raise JobUnknown(f"job {job_id} is unknown: check the id; or its history is forgotten, or never kept")
        raise JobFailed(job_id, status, error)

    async def of_batch(self, batch_id: UUID, *, every: bool = False) -> AsyncIterator[Found]:
        """The completed jobs of a tree's final batches (if none is final: of those without children), page by page.

        `every`: of all batches. What there is now: all there is to come once the tree is finished. Queues that keep no
        history leave no results. Raises BatchClosed for a batch that does not exist, UsageError as `result` does.
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
        """UsageError where nobody would ever answer."""
        if self._loop is None:
            raise UsageError("Results is not open: ask within `async with Results(dsn) as results`")
        if self._loop is not asyncio.get_running_loop():
            raise UsageError("Results was opened in another event loop: open one in each thread and process")

    # The two tasks

    async def _listen(self) -> None:
        """Hears which jobs have ended."""
        while True:
            cut = anyio.Event()
            try:
                async with self._listener.listen(self._channel, self._heard, cut.set) as probe:
                    self._ask_soon(self._waited)
                    while not cut.is_set():
                        with anyio.move_on_after(self._poll_s):
                            await cut.wait()
                        await probe()
            except PgworkdError:
                await anyio.sleep(self._poll_s)  # polling goes on meanwhile, and says to whom it matters

    def _heard(self, payload: str) -> None:
        try:
            self._ask_soon([UUID(text) for text in json.loads(payload)])
        except (ValueError, TypeError, AttributeError):
            self._ask_soon(self._waited)  # not from us: it may mean anything

    def _ask_soon(self, ids: Iterable[UUID]) -> None:
        for job_id in ids:
            if (waited := self._waited.get(job_id)) is not None:
                waited.ask_at = -math.inf
        self._news.set()

    async def _ask_all(self) -> None:
        """Enters who waits, asks about those whose turn it is, and hands out the answers."""
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
        over = [row[0] for row in rows if row[1] in _OVER]
        answers = (
            {row[0]: (row[1], row[2], row[3]) for row in await self._connection.fetch(_RESULT, over)} if over else {}
        )
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
