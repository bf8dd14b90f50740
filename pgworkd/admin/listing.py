"""Lists of jobs by page, live and finished, the newest first: a page looks at a bounded number of rows.

A row that matches may be far away, behind a million others: then a page is empty, and says where to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from pgworkd.admin.payload_filter import PayloadTerm
from pgworkd.admin.queries import ENDED_AS, OF_JOB, JobRow, read, select
from pgworkd.core import validation
from pgworkd.core.job import Status
from pgworkd.database.connection import Connection

WALK_ROWS, WALK_ALL_ROWS = 20_000, 2_000
"""Rows of each table that a page looks at; where any job will do, or payloads are read."""
# Each walks its table by id, downwards, and also returns one row without an id: how many rows it has seen, and where it
# stopped. Payloads are read only where a filter is about them.
_WALK = """WITH walked AS MATERIALIZED (
        SELECT id, queue, kind, {status} AS status, priority, run_at, created_at, failed_at,
            {finished_at} AS finished_at, attempts, failures, max_attempts, error,
            dedupe_key, serialize_key, limit_key, batch_id, worker_id, schedule, {payload} AS payload
        FROM {table} WHERE $1::uuid IS NULL OR id < $1 ORDER BY id DESC LIMIT $9),
    found AS ({found}
        WHERE {which}
          AND ($2::text IS NULL OR queue = $2) AND ($3::text IS NULL OR coalesce(kind, queue) = $3)
          AND ($4::text IS NULL OR status = $4)
          AND ($5::text IS NULL OR $5 IN (dedupe_key, serialize_key, limit_key))
          AND ($6::uuid IS NULL OR batch_id = $6)
          AND ($7::bigint IS NULL OR EXISTS (
              SELECT FROM pgworkd.deaths d WHERE d.job_id = w.id AND d.group_id = $7))
          AND ($10::timestamptz IS NULL OR created_at >= $10) AND ($11::timestamptz IS NULL OR created_at < $11)
          AND ($12::int IS NULL OR worker_id = $12) AND ($13::text IS NULL OR schedule = $13)
          AND NOT EXISTS (
              SELECT FROM unnest($14::text[], $15::text[]) t (path, value)
              WHERE w.payload #> string_to_array(t.path, '.') IS DISTINCT FROM t.value::jsonb)
        ORDER BY id DESC LIMIT $8)
    SELECT * FROM found UNION ALL {end}"""
_SELECTED = {
    "found": select(JobRow, "FROM walked w", **OF_JOB),
    "end": select(
        JobRow,
        "FROM walked",
        **dict.fromkeys(JobRow._fields, "NULL") | {"priority": "count(*)::int", "error": "min(id::text)"},
    ),
}
_NOT_READ = "NULL::jsonb"
_LIVE, _LIVE_BY_PAYLOAD = (
    _WALK.format(
        table="pgworkd.jobs",
        status="status::text",
        finished_at="NULL::timestamptz",
        which="status <> 'completed'",  # rows that only keep a dedupe key
        payload=payload,
        **_SELECTED,
    )
    for payload in (_NOT_READ, "payload::jsonb")
)
_FINISHED, _FINISHED_BY_PAYLOAD = (
    _WALK.format(
        table="pgworkd.finished_jobs",
        status=ENDED_AS,
        finished_at="finished_at",
        which="true",
        payload=payload,
        **_SELECTED,
    )
    for payload in (_NOT_READ, "payload")
)


class Listed(NamedTuple):
    """Which jobs to list: those that match every field that is not None; `key` is any of a job's three keys.

    `error_group`: the number of a group of errors, as `DeadGroup` has it. Created from `since` on, and before `until`.
    `worker`: the id of the one that runs a job, or has ended it. `payload`: terms that all match; see `payload_filter`.
    """

    queue: str | None = None
    kind: str | None = None
    status: str | None = None
    key: str | None = None
    batch: UUID | None = None
    error_group: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    worker: int | None = None
    schedule: str | None = None
    payload: tuple[PayloadTerm, ...] | None = None

    @property
    def walk(self) -> int:
        """How many of the newest rows of each table a page looks at. Payloads are large: of few rows they are read."""
        is_broad = self.payload is not None or all(each is None for each in self)
        return WALK_ALL_ROWS if is_broad else WALK_ROWS


class Page(NamedTuple):
    """Jobs in descending order of their ids; `next`: where the next page starts, None after the last one."""

    rows: list[JobRow]
    next: UUID | None


async def page(connection: Connection, which: Listed, before: UUID | None, limit: int) -> Page:
    """The next jobs, at most `limit` (1 to ROWS_MAX), whose ids are below `before` (None: the newest)."""
    validation.bounded(limit)
    validation.one_of(which.status, "status", tuple(Status))
    names = (validation.name(which.queue), validation.name(which.kind), which.status, validation.name(which.key))
    wanted = (before, *names, which.batch, which.error_group, limit + 1, which.walk, which.since, which.until)
    terms = which.payload or ()
    more = (
        which.worker,
        validation.name(which.schedule),
        [each.path for each in terms],
        [each.value for each in terms],
    )
    statements = (_LIVE_BY_PAYLOAD, _FINISHED_BY_PAYLOAD) if terms else (_LIVE, _FINISHED)
    live, live_end = _walked(await connection.fetch(statements[0], *wanted, *more), which.walk)
    old, old_end = _walked(await connection.fetch(statements[1], *wanted, *more), which.walk)
    # What lies below the end of either walk is for the next page: the other walk may have a newer one there.
    end = max((each for each in (live_end, old_end) if each is not None), default=None)
    both = {each.id: each for each in [*live, *old] if end is None or each.id >= end}  # one may just have moved
    rows = sorted(both.values(), key=lambda each: each.id, reverse=True)
    if len(rows) > limit:
        return Page(rows[:limit], rows[limit - 1].id)
    return Page(rows, end)


def _walked(rows: Sequence[Sequence[Any]], walk: int) -> tuple[list[JobRow], UUID | None]:
    """The jobs that match, and the lowest id that was looked at; None: there are none below."""
    *found, end = sorted(rows, key=lambda row: row[0] is None)
    return [read(JobRow, row) for row in found], UUID(end[-1]) if end[4] == walk else None
