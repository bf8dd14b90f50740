"""Operations of statistics and deaths for the sweep."""

from __future__ import annotations

from pgworkd.database.signal_store import AlertRule, Minutes
from tests.chaos.wire_engine import Engine
from tests.chaos.wire_kit import Told, differs, told_by

_DEATH = """INSERT INTO pgworkd.jobs (queue, status, failures, failed_at, error) VALUES ($1, 'dead', 1, now(), 'no')
    RETURNING id"""
_ALERTS = "SELECT count(*)::int FROM pgworkd.jobs WHERE queue = $1"
_COUNTS = "SELECT coalesce(sum(deaths), 0)::int FROM pgworkd.error_groups WHERE queue = $1"
_STARTED = "SELECT coalesce(sum(started), 0)::int FROM pgworkd.queue_minutes WHERE queue = $1"


class CountDeaths(Engine):
    """A death is counted once, and makes one alert, whoever counts it in the end."""

    name = "count_deaths: a death and its alert"
    cuts_min = (5, 8)

    async def prepare(self) -> None:
        self.alerts = f"alerts-{self.queue}"
        rule = AlertRule(self.queue, self.alerts, "pgworkd.alert", [self.queue], True, None, 600, 3600, 300)
        await self.scene.aside.signals.declare_alerts([rule])
        job_id = await self.db.fetchval(_DEATH, self.queue)
        await self.db.execute("SELECT pgworkd.note_deaths(ARRAY[$1::text::uuid])", str(job_id))

    async def attempt(self) -> Told:
        return await told_by(self.store.signals.count_deaths())

    async def done(self) -> bool:
        return bool(await self.db.fetchval(_COUNTS, self.queue))

    async def carry_on(self) -> None:
        while (await self.scene.aside.signals.count_deaths()) != 0:
            pass

    async def faults(self) -> list[str]:
        found = (await self.db.fetchval(_COUNTS, self.queue), await self.db.fetchval(_ALERTS, self.alerts))
        return differs("deaths counted, and alerts", found, (1, 1))


class Append(Engine):
    """A period's statistics are never added twice: they are not sent again."""

    name = "append_minutes"
    cuts_min = (5, 8)

    async def prepare(self) -> None:
        """Nothing."""

    async def attempt(self) -> Told:
        row = Minutes(self.queue, "k", 7, 7, 0, 0, 0, [7] + [0] * 22, [7] + [0] * 22, 0.0, 0.0)
        return await told_by(self.store.signals.append("w", 10.0, [row]))

    async def done(self) -> bool:
        return await self.db.fetchval(_STARTED, self.queue) == 7

    async def faults(self) -> list[str]:
        found = await self.db.fetchval(_STARTED, self.queue)
        return [] if found in (0, 7) else [f"{found} runs were written, not 7 or none"]


class Sample(Engine):
    """A sample is whole, and there is one each five seconds at most."""

    name = "sample_queues"
    cuts_min = (5, 8)

    async def prepare(self) -> None:
        await super().prepare()
        await self.db.execute("DELETE FROM pgworkd.samples")
        await self.db.execute("DELETE FROM pgworkd.queue_samples")

    async def attempt(self) -> Told:
        return await told_by(self.store.signals.sample())

    async def done(self) -> bool:
        return bool(await self.db.fetchval("SELECT count(*) FROM pgworkd.samples"))

    async def carry_on(self) -> None:
        await self.scene.aside.signals.sample()
        await self.run_again()

    async def faults(self) -> list[str]:
        sql = """SELECT (SELECT count(*) FROM pgworkd.samples)::int, (SELECT sum(due) FROM pgworkd.queue_samples
                 WHERE queue = $1 AND at = (SELECT max(at) FROM pgworkd.samples))::int"""
        return differs(
            "samples, and jobs due in the last", tuple(await self.db.fetchrow(sql, self.queue) or ()), (1, 1)
        )
