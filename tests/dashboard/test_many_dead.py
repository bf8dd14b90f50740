"""After a bad release: pages show the groups of the newest deaths, at a cost that does not grow with the dead."""

from __future__ import annotations

import pytest

from pgworkd.admin import Admin
from pgworkd.dashboard.pages import dead, overview, queues
from pgworkd.database.connection import ConnectionOptions
from tests.kits.pages import viewing
from tests.kits.verbs import Db

DEAD = """INSERT INTO pgworkd.jobs (queue, status, attempts, failures, failed_at, error)
    SELECT 'q' || i % 2, 'dead', 3, 3, now() - i * interval '1 min',
        'E: no ' || CASE WHEN i > 20 THEN 'bread' ELSE 'salt' END
    FROM generate_series(1, 40) i;
    SELECT pgworkd.note_deaths(array_agg(id)) FROM pgworkd.jobs;
    UPDATE pgworkd.deaths d SET at = j.failed_at FROM pgworkd.jobs j WHERE j.id = d.job_id;
    SELECT pgworkd.count_deaths(1000)"""


@pytest.mark.parametrize("queue", [None, "q1"])
@pytest.mark.parametrize("since_s", [None, 1230.0])
async def test_the_newest_deaths_are_those_that_all_would_show(
    dsn: str, db: Db, queue: str | None, since_s: float | None
) -> None:
    await db.execute(DEAD)
    async with Admin(ConnectionOptions(dsn)) as admin:
        whole = await admin.dead.find(since_s, queue)
        assert whole.newest is None
        assert await admin.dead.find(since_s, queue, most=whole.dead) == whole
        some = await admin.dead.find(since_s, queue, most=whole.dead - 1)
        assert (some.newest, some.dead) == (whole.dead - 1, whole.dead - 1)
        of = {row.group: row for row in whole.rows}
        for row in some.rows:  # without the oldest death of one group
            same = of[row.group]._replace(dead=row.dead, first_at=row.first_at)
            assert row == same
        few = await admin.dead.find(since_s, queue, most=5)
        assert {row.error for row in few.rows} == {"E: no salt"}, "they died last"


async def test_pages_say_that_more_are_dead(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    await db.execute(DEAD)
    for module in (dead, overview, queues):
        monkeypatch.setattr(module, "DEAD_MAX", 10)
    async with viewing(dsn) as browser:
        for path in ("/", "/dead", "/queues/q1"):
            page = (await browser.get(path)).text
            assert "10+" in page, path
        assert "the newest 10 deaths" in (await browser.get("/dead")).text
