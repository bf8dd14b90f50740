"""The calls that collect statistics and deaths, on a connection of their own: a sample may take seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from pgworkd.database.connection import Connection, ConnectionOptions

ROLL_UP_STEP = DEATHS_STEP = 2_000
"""Rows that one step sums up or deletes."""
_OTHERS_RULES = """SELECT r.name::text FROM pgworkd.alert_rules r
    JOIN jsonb_populate_recordset(NULL::pgworkd.alert_rules, $1::text::jsonb) n ON n.name = r.name
    WHERE r.updated_at > pgworkd.clock() - interval '15 min'
      AND (r.queue, r.kind, r.queues, r.on_new, r.deaths, r.within_s, r.cooldown_s, r.bundle_s)
          IS DISTINCT FROM (n.queue, n.kind, n.queues, n.on_new, n.deaths, n.within_s, n.cooldown_s, n.bundle_s)
    ORDER BY r.name"""


class Minutes(NamedTuple):
    """What ended in one period, of one kind in one queue: a row of `queue_minutes`; durations in seconds.

    `waits` and `runs` are counts by `histogram.BOUNDS_S`.
    """

    queue: str
    kind: str
    started: int
    completed: int
    failed: int
    dead: int
    released: int
    waits: Sequence[int]
    runs: Sequence[int]
    wait_s: float
    run_s: float


class AlertRule(NamedTuple):
    """Which deaths make an alert: a row of `alert_rules`, which says more. `queues` None: deaths in all queues."""

    name: str
    queue: str
    kind: str
    queues: Sequence[str] | None
    on_new: bool
    deaths: int | None
    within_s: int
    cooldown_s: int
    bundle_s: int


class SignalStore:
    """Calls about statistics and deaths, on one connection. Raises PgworkdError."""

    def __init__(self, options: ConnectionOptions) -> None:
        # No more time than any other: a stop waits for the answer of a call. So there are no samples where counting all
        # live jobs takes longer.
        self._connection = Connection(options, "signals")

    @property
    def answers(self) -> int:
        """How many calls the server has answered."""
        return self._connection.answers

    async def sample(self) -> float:
        """Counts the jobs of all queues, if that is due in the fleet; the seconds until it is due again."""
        return float(await self._connection.value("SELECT pgworkd.sample_queues()"))

    async def append(self, worker: str, period_s: float, rows: Sequence[Minutes]) -> None:
        """Adds what ended in the last `period_s` seconds."""
        columns = [list(column) for column in zip(*rows, strict=True)]
        columns[7:9] = [[f"{{{','.join(map(str, counts))}}}" for counts in column] for column in columns[7:9]]
        sql = "SELECT pgworkd.append_minutes($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
        await self._connection.value(sql, worker, period_s, *columns)

    async def usual(self, queues: Sequence[str], kinds: Sequence[str]) -> dict[tuple[str, str], Sequence[int]]:
        """The durations of runs in the last days, by queue and kind of these: counts by `histogram.BOUNDS_S`."""
        rows = await self._connection.fetch("SELECT queue, kind, runs FROM pgworkd.usual_runs($1, $2)", queues, kinds)
        return {(queue, kind): runs for queue, kind, runs in rows}

    async def roll_up(self, keep_dead_days: int) -> bool:
        """Makes one step of the retention of statistics and deaths; True: there is more."""
        return bool(await self._connection.value("SELECT pgworkd.roll_up($1, $2)", keep_dead_days, ROLL_UP_STEP))

    async def count_deaths(self) -> int | None:
        """Counts deaths, one step, with the jobs of alerts; how many there were. None: another daemon does it."""
        return cast("int | None", await self._connection.value("SELECT pgworkd.count_deaths($1)", DEATHS_STEP))

    async def next_alert_s(self) -> float | None:
        """In how many seconds an alert is due; 0 or less: now; None: there is none to come."""
        return cast("float | None", await self._connection.value("SELECT pgworkd.next_alert_s()"))

    async def declare_alerts(self, rules: Iterable[AlertRule]) -> list[str]:
        """Stores the alert rules of this program, and that they are in its code now; those that another one declares.

        Of these, the last to come are in force.
        """
        rows = json.dumps([rule._asdict() for rule in rules])
        others = [str(name) for (name,) in await self._connection.fetch(_OTHERS_RULES, rows)]
        await self._connection.value("SELECT pgworkd.declare_alerts($1::text::jsonb)", rows)
        return others

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()
