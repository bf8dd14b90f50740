"""What pages ask is found by an index, however many jobs there are: no statement reads a whole table of jobs."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pgworkd.database.connection import Connection
from tests.kits.pages import viewing
from tests.kits.verbs import Db

PAGES = """/ /queues /queues/q1 /jobs /jobs?queue=q1 /jobs?queue=q1&status=failed /jobs?status=dead /jobs?kind=k1
    /jobs?queue=q1&key=key1 /jobs?status=completed /jobs?before={last} /jobs?payload=a.b:7
    /jobs?queue=q1&payload=a:x /jobs?worker=7 /jobs?schedule=s /jobs/{job} /dead /dead?queue=q1 /dead?since=24h
    /batches /operations /schedules /workers /push /audit /audit?queue=q1
    /system /keys /keys?queue=q1&key=line1 /keys?queue=q1&key=key1 /?span=30d /queues/q1?span=30d""".split()
FILL = """
    SET session_replication_role = replica;
    INSERT INTO pgworkd.jobs (queue, kind, status, waiting_on, attempts, failures, failed_at, error, serialize_key)
    SELECT 'q' || i / 10 % 40, 'k' || i % 7, (ARRAY['pending', 'failed', 'blocked', 'blocked', 'dead'])[1 + i % 5]
        ::pgworkd.job_status, CASE i % 5 WHEN 3 THEN 1 ELSE 0 END, 1, 1, now(), 'E: bad',
        CASE i % 5 WHEN 2 THEN 'line' || i / 10 END FROM generate_series(1, 20000) i;
    INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, status, priority, attempts, failures,
        max_attempts, queue, payload, errors)
    SELECT pgworkd.new_id(), now(), now(), now(), 'completed', 0, 1, 0, 3, 'q' || i % 40, '{}', '[]'
    FROM generate_series(1, 20000) i;
    INSERT INTO pgworkd.samples (at, took_s) VALUES (now(), 1);
    SET session_replication_role = origin;
    ANALYZE;"""


async def test_no_page_reads_all_jobs(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queues are counted by samples: a daemon has found that to count them takes long."""
    await db.execute(FILL)
    job = await db.fetchval("SELECT id FROM pgworkd.jobs WHERE queue = 'q1' AND status = 'blocked' LIMIT 1")
    last = await db.fetchval("SELECT max(id::text) FROM pgworkd.all_jobs")
    today = await db.fetchval("SELECT 'finished_jobs_' || to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    asked: dict[str, tuple[str, tuple[Any, ...]]] = {}

    def noted(real: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def ask(self: Connection, query: str, *args: Any) -> Any:
            if query.lstrip().startswith(("SELECT", "WITH")):
                asked.setdefault(f"{page} {query}", (query, args))
            return await real(self, query, *args)

        return ask

    for name in ("fetch", "value"):
        monkeypatch.setattr(Connection, name, noted(getattr(Connection, name)))
    async with viewing(dsn) as browser:
        for page in (each.format(job=job, last=last) for each in PAGES):
            assert (await browser.get(page)).status_code == 200, page
    monkeypatch.undo()
    assert len({query for query, _ in asked.values()}) > 25
    whole = []
    for place, (query, args) in asked.items():
        plan = "\n".join(row[0] for row in await db.fetch(f"EXPLAIN {query}", *args))
        if re.search(rf"Seq Scan on (jobs|{today})\b", plan):
            whole.append(f"{place.split()[0]}: {query[:300]}")
    assert whole == []
