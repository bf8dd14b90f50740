"""The `database` families: what one connection that only reads finds, shared by all scrapes of a few seconds."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal

from pgworkd.admin.doctor_database import TABLES
from pgworkd.core.events import Events
from pgworkd.database import schema
from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.database.reconnect import Outage
from pgworkd.engine.life.startup import REMIND_S
from pgworkd.errors import DatabaseBusy, DatabaseUnavailable, PgworkdError
from pgworkd.metrics import queries
from pgworkd.metrics.daemon import BUILD
from pgworkd.metrics.samples import Check, Labels, Samples, Value
from pgworkd.process.redaction import redact

STATEMENT_S = 2.5
"""Time limit of one statement, in seconds; the server gives up at 2 s."""
SCRAPE_S = 2.0
"""No further statement begins after this time, in seconds."""
CONNECT_S = 2.0
SHARED_S = 3.0
"""Scrapes within this time, in seconds, share one answer."""
STATES = ("due", "scheduled", "running", "failed", "blocked", "dead")
WORKER_STATES = ("running", "blocked", "stopping", "lost")
HOLDERS = ("session", "prepared", "slot")


class DatabaseReader:
    """Reads the database, in the event loop. Calls within SHARED_S share one answer."""

    def __init__(self, options: ConnectionOptions, events_: Events | None = None) -> None:
        """`events_`: for the log, which says that there is no answer."""
        self._outage = Outage("metrics", events_ or Events(), remind_s=REMIND_S)
        options = replace(
            options,
            connect_timeout_s=min(options.connect_timeout_s, CONNECT_S),
            command_timeout_s=STATEMENT_S,
            lock_timeout_s=0.5,
            any_server=True,
        )
        self._connection = Connection(options, "exporter")
        self._lock = anyio.Lock()
        self._asked_at = -math.inf
        self._shown: tuple[Samples, list[Check]] = {}, []

    async def read(self) -> tuple[Samples, list[Check]]:
        """The values of the last seconds (without an answer: that there is none), and whether it answers and fits."""
        async with self._lock:
            if time.monotonic() - self._asked_at >= SHARED_S:
                self._shown = await self._read()
                self._asked_at = time.monotonic()
            return self._shown

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()

    async def _read(self) -> tuple[Samples, list[Check]]:
        ours: Samples = {"pgworkd_build_info": {BUILD: 1}}
        try:
            found = await self._fetch()
            version = await schema.installed_version(self._connection)
        except PgworkdError as error:
            self._outage.failed(error)
            said = redact(str(error))
            return {**ours, "pgworkd_scrape_up": {(): 0}}, [Check("database", ok=False, says=said)]
        self._outage.passed()
        fits = version == schema.VERSION
        says = "fits" if fits else f"is at version {version}, this program needs {schema.VERSION}"
        checks = [Check("database", ok=True, says="answers"), Check("schema", fits, says)]
        return {**ours, **found, "pgworkd_scrape_up": {(): 1}}, checks

    async def _fetch(self) -> Samples:
        until = anyio.current_time() + SCRAPE_S

        async def fetch(sql: str, *args: object) -> list[Sequence[Any]]:
            if anyio.current_time() > until:
                raise DatabaseUnavailable(f"the database needs more than {SCRAPE_S:g} s for its statistics")
            return await self._connection.fetch(sql, *args)

        await fetch(queries.READ_ONLY)
        found: Samples = {}
        for read, sql, args in (
            (oldest, queries.OLDEST, ()),
            (workers, queries.WORKERS, ()),
            (queues, queries.QUEUES, (queries.ROWS_MAX,)),
            (depths, queries.DEPTHS, (queries.ROWS_MAX,)),
            (endpoints, queries.ENDPOINTS, (queries.ROWS_MAX,)),
            (schedules, queries.SCHEDULES, (queries.ROWS_MAX,)),
            (tables, TABLES, ()),
        ):
            with contextlib.suppress(DatabaseBusy):  # a table is locked, as by VACUUM FULL: the rest is worth having
                found.update(read(await fetch(sql, *args)))
        return found


class DatabaseSource:
    """A source of the `database` families. `samples` and `checks`: from any thread but that of the portal's loop."""

    def __init__(self, options: ConnectionOptions, portal: BlockingPortal, events_: Events | None = None) -> None:
        self._reader = DatabaseReader(options, events_)
        self._portal = portal
        self._is_closed = False

    async def begin(self) -> None:
        """Reads for the first time, in the portal's loop: the log says at once if there is no answer."""
        await self._reader.read()

    async def close(self) -> None:
        """Closes the connection; from now on there are no values."""
        self._is_closed = True
        await self._reader.close()

    def samples(self) -> Samples:
        """The values of the last seconds; without an answer only that there is none.

        OpenTelemetry's SDK asks once more while the process ends.
        """
        return {} if self._is_closed else self._portal.call(self._reader.read)[0]

    def checks(self) -> list[Check]:
        """Whether the database answers, and has this version's schema."""
        return [] if self._is_closed else self._portal.call(self._reader.read)[1]

    def sick(self) -> str:
        """Returns "": no restart would help, as it only reads."""
        return ""


def depths(rows: Iterable[Sequence[Any]]) -> Samples:
    """The depths of the last sample of the queues; nothing if there is none yet."""
    jobs: dict[Labels, Value] = {}
    waits: dict[Labels, Value] = {}
    ages: dict[Labels, Value] = {}
    for queue, *counts, oldest_s, age_s in rows:
        jobs.update(((queue, state), count) for state, count in zip(STATES, counts, strict=True))
        waits[(queue,)] = oldest_s or 0.0
        ages[()] = age_s
    return {
        "pgworkd_queue_jobs": jobs,
        "pgworkd_queue_oldest_due_seconds": waits,
        "pgworkd_sample_age_seconds": ages,
    }


def queues(rows: Iterable[Sequence[Any]]) -> Samples:
    """The queues that are paused, and by whom; and who serves each."""
    rows = list(rows)
    paused: dict[Labels, Value] = {}
    for queue, is_paused, by_endpoint, _, _ in rows:
        paused[queue, "operator"] = int(is_paused and not by_endpoint)
        paused[queue, "endpoint"] = int(is_paused and by_endpoint)
    return {
        "pgworkd_queue_paused": paused,
        "pgworkd_queue_workers": {(queue,): count for queue, _, _, count, _ in rows},
        "pgworkd_queue_slots": {(queue,): slots for queue, _, _, _, slots in rows},
    }


def endpoints(rows: Iterable[Sequence[Any]]) -> Samples:
    """The endpoints that are paused or disabled."""
    rows = list(rows)
    return {
        "pgworkd_endpoint_paused": {(name,): int(paused) for name, paused, _ in rows},
        "pgworkd_endpoint_disabled": {(name,): int(disabled) for name, _, disabled in rows},
    }


def workers(rows: Iterable[Sequence[Any]]) -> Samples:
    """How many workers there are in each state, none included."""
    counts: dict[Labels, Value] = {(state,): 0 for state in WORKER_STATES}
    counts.update(((state,), count) for state, count in rows)
    return {"pgworkd_workers": counts}


def schedules(rows: Iterable[Sequence[Any]]) -> Samples:
    """When each schedule was last due, and how late its next occurrence is."""
    rows = list(rows)
    return {
        "pgworkd_schedule_last_seconds": {(name,): last_s for name, last_s, _ in rows if last_s is not None},
        "pgworkd_schedule_late_seconds": {(name,): late_s or 0.0 for name, _, late_s in rows},
    }


def tables(rows: Iterable[Sequence[Any]]) -> Samples:
    """Sizes and dead rows of tables."""
    rows = list(rows)
    return {
        "pgworkd_table_bytes": {(table,): size for table, size, _ in rows},
        "pgworkd_table_dead_rows": {(table,): dead for table, _, dead in rows},
    }


def oldest(rows: Iterable[Sequence[Any]]) -> Samples:
    """The oldest snapshots that hold back vacuum."""
    (row,) = rows
    held: dict[Labels, Value] = {(by,): count or 0.0 for by, count in zip(HOLDERS, row[1:], strict=True)}
    return {"pgworkd_oldest_snapshot_seconds": {(): row[0]}, "pgworkd_oldest_snapshot_transactions": held}
