"""Single jobs of many callers: those that come while others are on their way are created by one statement.

Each is answered for itself. What an INSERT may wait for (a dedupe key, a serialize key) stands in no such statement: it
would hold up the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from anyio.abc import TaskGroup

from pgworkd.client import NewJob, enqueue_many
from pgworkd.client.new_job import row
from pgworkd.database.requests import RequestPool
from pgworkd.errors import DatabaseError, DatabaseUnavailable, OutcomeUnknown, PgworkdError
from pgworkd.gateway.api.request.caller import CALLER

STATEMENTS_MAX = 3
"""Statements under way at once; the next one takes all that has come meanwhile."""
JOBS_MAX, CHARS_MAX = 100, 1024**2
"""Maximum jobs of one statement, and characters of their payloads, but for a single job's."""
_WAIT = frozenset({"dedupe_key", "serialize_key", "after", "on_duplicate"})
"""Members of a job that may have to wait for others."""


def may_share(given: set[str]) -> bool:
    """Whether a job with these members may be created together with others."""
    return not given & _WAIT


class _Waiting(NamedTuple):
    job: NewJob
    size: int
    answer: asyncio.Future[UUID]


class Enqueues:
    """Creates single jobs, on at most STATEMENTS_MAX connections."""

    def __init__(self, database: RequestPool) -> None:
        self._database = database
        self._waiting: deque[_Waiting] = deque()
        self._under_way = 0

    async def add(self, job: NewJob, tasks: TaskGroup) -> UUID:
        """Creates a job; its id. `tasks`: in which statements are sent. Raises PgworkdError for this job."""
        row(job)  # raises UsageError
        waiting = _Waiting(job, len(str(job.payload)), asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._under_way < STATEMENTS_MAX:
            self._under_way += 1
            tasks.start_soon(self._send, name="enqueues")
        return await waiting.answer

    async def _send(self) -> None:
        CALLER.set("")  # none of those whose jobs these are waits for its turn here
        taken: list[_Waiting] = []
        try:
            while taken := self._take():
                await self._create(taken)
        except BaseException:  # cancelled: the gateway stops
            _fail(taken, OutcomeUnknown("the gateway has stopped; the call may have taken effect"))
            _fail(self._waiting, DatabaseUnavailable("the gateway stops"))
            raise
        finally:
            self._under_way -= 1

    def _take(self) -> list[_Waiting]:
        taken, size = list[_Waiting](), 0
        while self._waiting and len(taken) < JOBS_MAX and (not taken or size + self._waiting[0].size <= CHARS_MAX):
            waiting = self._waiting.popleft()
            if not waiting.answer.done():  # else its caller has gone
                taken.append(waiting)
                size += waiting.size
        return taken

    async def _create(self, taken: Sequence[_Waiting]) -> None:
        try:
            ids = await self._database.call(lambda connection: enqueue_many(connection, [each.job for each in taken]))
        except DatabaseError as error:  # of one of them, such as a constraint that somebody has added
            if len(taken) == 1:
                _fail(taken, error)
                return
            half = len(taken) // 2
            await self._create(taken[:half])
            await self._create(taken[half:])
        except PgworkdError as error:
            _fail(taken, error)
        else:
            for each, job_id in zip(taken, ids, strict=True):
                if not each.answer.done():
                    each.answer.set_result(job_id)


def _fail(taken: Iterable[_Waiting], error: PgworkdError) -> None:
    for each in taken:
        if not each.answer.done():
            each.answer.set_exception(error)
