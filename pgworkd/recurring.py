"""Recurring jobs: what comes after this occurrence, and chains that someone broke.

Postgres keeps the rules and guards that each occurrence exists once; the calendar arithmetic is done here,
with the database's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import cast

import anyio

from . import events
from .app import App
from .errors import BadSchedule
from .events import Events
from .held import Held
from .payload import encode
from .schedule import Missed, Recurrence
from .store import Occurrence, ScheduleRow, Store


@dataclass(slots=True, frozen=True)
class _Rule:
    revision: int
    recurrence: Recurrence


class Recurring:
    """Knows the schedules as of the last look; a daemon looks every few seconds and when it hears of a change."""

    def __init__(self, store: Store, events_: Events) -> None:
        self._store = store
        self._events = events_
        self._rules: dict[str, _Rule] = {}
        self._database_now = datetime.fromtimestamp(0, UTC)
        self._read_at = 0.0

    async def declare(self, app: App) -> None:
        """Enters the schedules that stand in code. One that SQL has put under the same name stays as it is."""
        for handler in app.handlers.values():
            if (rule := handler.recurrence) is not None:
                await self._store.put_schedule(
                    handler.kind,
                    handler.queue,
                    handler.kind,
                    cron=rule.cron,
                    every_s=rule.every_s,
                    timezone=rule.timezone,
                    missed=rule.missed,
                    payload=encode(dict(handler.schedule_payload), f"payload of schedule {handler.kind!r}"),
                )

    def following(self, held: Held) -> Occurrence | None:
        """The occurrence after the given one; None if its schedule is unknown here (a look will restore the chain)."""
        name, occurrence = held.claimed.schedule, held.claimed.occurrence
        rule = self._rules.get(name) if name is not None else None
        if name is None or rule is None or occurrence is None:
            return None
        now = self._database_now + timedelta(seconds=anyio.current_time() - self._read_at)
        try:
            at = rule.recurrence.follow(datetime.fromtimestamp(occurrence, UTC), now)
        except BadSchedule:
            return None  # the next look will find the chain broken and say why
        return Occurrence(name, at, rule.revision)

    async def look(self) -> None:
        """Reads all schedules and inserts an occurrence where there is none. Raises PgworkdError."""
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
            for name in await self._store.add_occurrences(missing):
                self._events.emit(events.SCHEDULE_RESTORED, schedule=name, occurrence=at[name])

    def _rule(self, row: ScheduleRow) -> _Rule:
        known = self._rules.get(row.name)
        if known is not None and known.revision == row.revision:
            return known
        missed = cast(Missed, row.missed)  # the table's CHECK and Recurrence look at it
        if row.cron is not None:
            return _Rule(row.revision, Recurrence.parse(row.cron, row.timezone, missed))
        return _Rule(row.revision, Recurrence(None, row.every_s, row.timezone, missed))


def _next(recurrence: Recurrence, row: ScheduleRow) -> datetime:
    if row.last_occurrence is None:
        return recurrence.next_after(row.at)
    return recurrence.follow(row.last_occurrence, row.at)
