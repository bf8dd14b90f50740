"""Recurring jobs: computes the next occurrence, and restores broken chains.

Postgres stores the rules and guarantees that each occurrence exists once; the calendar arithmetic is done here, with
the database's time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import anyio

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.payload import encode
from pgworkd.core.recurrence import Missed, Recurrence
from pgworkd.core.source import Occurrence
from pgworkd.database.schedule_store import ScheduleRow, Undeclared
from pgworkd.database.store import Store
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.registry import Handler, Registry
from pgworkd.errors import BadSchedule

RETIRE_AFTER_S = 300.0
"""A schedule is disabled once no live worker has declared it for this many seconds; a restart takes less."""


@dataclass(slots=True, frozen=True)
class _Rule:
    revision: int
    recurrence: Recurrence


class Recurring:
    """Knows the schedules as of the last `refresh`, which follows a period, and each notification of a change."""

    def __init__(self, store: Store, events_: Events, *, retire_after_s: float = RETIRE_AFTER_S) -> None:
        self._store = store
        self._events = events_
        self._retire_after_s = retire_after_s
        self._declared: dict[str, dict[str, Any]] = {}
        """The rules of our code, by name."""
        self._undeclared: dict[str, float] = {}
        """Schedules that no worker declares, and when that was first seen, on the loop's clock."""
        self._differing: dict[str, Undeclared] = {}
        """Schedules of our code that are under another rule, as they were reported."""
        self._rules: dict[str, _Rule] = {}
        self._database_now = datetime.fromtimestamp(0, UTC)
        self._read_at = 0.0

    async def declare(self, app: Registry) -> None:
        """Declares the schedules of the app. One of the same name that was inserted by SQL is left as it is."""
        self._declared = rules_of(app)
        if self._declared:
            self._report(await self._store.declare_rules(None, self._declared))

    def following(self, attempt: Attempt) -> Occurrence | None:
        """The next occurrence of the attempt's schedule; None if it is unknown here (`refresh` restores the chain)."""
        name, occurrence = attempt.claimed.schedule, attempt.claimed.occurrence
        rule = self._rules.get(name) if name is not None else None
        if name is None or rule is None or occurrence is None:
            return None
        now = self._database_now + timedelta(seconds=anyio.current_time() - self._read_at)
        previous = datetime.fromtimestamp(occurrence, UTC)
        if rule.recurrence.missed == "once":  # it represents all that were missed until it started
            ran_s = 0.0 if attempt.started is None else time.monotonic() - attempt.started
            previous = max(previous, now - timedelta(seconds=ran_s))
        try:
            at = rule.recurrence.follow(previous, now)
        except BadSchedule:
            return None  # the next refresh will find the chain broken and report why
        return Occurrence(name, at, rule.revision)

    async def missed(self, attempt: Attempt) -> str | None:
        """Why the occurrence of an attempt must be skipped; None: run it. Raises PgworkdError."""
        claimed = attempt.claimed
        if claimed.schedule is None or claimed.attempt > 1:
            return None  # what has been claimed before is not skipped
        since = await self._store.missed_since(claimed.id, claimed.attempt)
        if since is None:
            return None
        return f"skipped: missed before {since.isoformat(timespec='seconds')}, when workers began to serve its queue"

    async def refresh(self, worker_id: int | None = None) -> bool:
        """Inserts an occurrence wherever a schedule has none; False if one was locked. Raises PgworkdError.

        With a worker's id it also declares that worker's schedules, and disables those that no worker declares.
        """
        if worker_id is not None:
            await self._retire(self._report(await self._store.declare_rules(worker_id, self._declared)))
        rows = await self._store.schedules()
        if rows:
            self._database_now, self._read_at = rows[0].at, anyio.current_time()
        rules: dict[str, _Rule] = {}
        missing: list[Occurrence] = []
        for row in rows:
            try:
                rule = self._rule(row)
                if row.broken:
                    missing.append(Occurrence(row.name, _next(rule.recurrence, row), row.revision))
            except BadSchedule as error:
                if await self._store.fail_schedule(row.name, row.revision, str(error)):
                    self._events.emit(events.SCHEDULE_FAILED, schedule=row.name, error=str(error))
            else:
                rules[row.name] = rule
        self._rules = rules
        if missing:
            at = {o.schedule: o.at.isoformat() for o in missing}
            added = await self._store.add_occurrences(missing)
            new = {row.name for row in rows if row.last_occurrence is None}
            for name in added:
                what = events.SCHEDULE_CREATED if name in new else events.SCHEDULE_RESTORED
                self._events.emit(what, schedule=name, occurrence=at[name])
            return len(added) == len(missing)
        return True

    def _report(self, found: Sequence[Undeclared]) -> list[str]:
        """Reports once which schedules of ours have another worker's rule, and which ones no worker declares."""
        differing = {each.name: each for each in found if each.worker is not None}
        for name, each in differing.items():
            if self._differing.get(name) != each and (theirs := each.rule) is not None:
                ours = {what: value for what, value in self._declared[name].items() if theirs[what] != value}
                facts = {"ours": ours, "theirs": {what: theirs[what] for what in ours}, "worker": each.worker}
                self._events.emit(events.SCHEDULE_DIFFERS, schedule=name, **facts)
        self._differing = differing
        return [each.name for each in found if each.rule is None]

    async def _retire(self, undeclared: Sequence[str]) -> None:
        now = anyio.current_time()
        self._undeclared = {name: self._undeclared.get(name, now) for name in undeclared}
        retired = [name for name, since in self._undeclared.items() if now - since >= self._retire_after_s]
        if retired:
            for name in await self._store.retire_schedules(retired):
                self._events.emit(events.SCHEDULE_RETIRED, schedule=name)

    def _rule(self, row: ScheduleRow) -> _Rule:
        known = self._rules.get(row.name)
        if known is not None and known.revision == row.revision:
            return known
        missed = cast(Missed, row.missed)  # checked by the table and by Recurrence
        if row.cron is not None:
            return _Rule(row.revision, Recurrence.parse(row.cron, row.timezone, missed))
        return _Rule(row.revision, Recurrence(None, row.every_s, row.timezone, missed))


def rules_of(app: Registry) -> dict[str, dict[str, Any]]:
    """The schedules of the app, by name. InvalidPayload for a payload that is no JSON object."""
    return {h.kind: _rule_of(h, h.recurrence) for h in app.handlers.values() if h.recurrence is not None}


def _rule_of(handler: Handler, rule: Recurrence) -> dict[str, Any]:
    """The rule of a handler, by the columns of `schedules`. InvalidPayload for a payload that is no JSON object."""
    return {
        "queue": handler.queue,
        "kind": handler.kind,
        "cron": rule.cron,
        "every_s": rule.every_s,
        "timezone": rule.timezone,
        "missed": rule.missed,
        "payload": json.loads(encode(dict(handler.schedule_payload), f"payload of schedule {handler.kind!r}")),
        "missed_grace_s": rule.missed_grace_s,
        "waits_for_retries": handler.wait_for_retries,
    }


def _next(recurrence: Recurrence, row: ScheduleRow) -> datetime:
    if row.last_occurrence is None:
        return recurrence.next_after(row.at)
    if recurrence.missed != "skip" or row.in_force_since is None:
        return recurrence.follow(row.last_occurrence, row.at)
    # What came due while the chain was broken is late, not missed: see missed_since().
    late_from = max(row.in_force_since, row.at - timedelta(seconds=row.missed_grace_s))
    return recurrence.follow(row.last_occurrence, min(late_from, row.at))
