"""A gateway deletes only the history that the settings do not keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncpg
import pytest

from pgworkd.gateway.api.app import Application, asgi
from pgworkd.settings.config import Settings
from tests.kits.cli import clean
from tests.kits.daemon import until

__all__ = ["clean"]

DAY = """
    DO $$
    DECLARE d timestamptz := date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' - interval '%(days)s days';
    BEGIN
        EXECUTE format('CREATE TABLE pgworkd.finished_jobs_%%s PARTITION OF pgworkd.finished_jobs
                        FOR VALUES FROM (%%L) TO (%%L)', to_char(d, 'YYYYMMDD'), d, d + interval '1 day');
        INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, status, priority, attempts, failures,
                                           queue, payload, errors)
        VALUES (pgworkd.new_id(), d + interval '1 hour', d, d, 'completed', 0, 1, 0, 'q', '{"days": %(days)s}', '[]');
    END $$"""
KEPT = "SELECT array_agg((payload ->> 'days')::int ORDER BY finished_at DESC) FROM pgworkd.finished_jobs"


@pytest.fixture(params=["environment", "file", "settings"])
def gateway(request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch, clean: None) -> Application:
    """One that is told by each of these to keep 30 days."""
    if request.param == "environment":
        monkeypatch.setenv("PGWORKD_KEEP_DAYS", "30")
    elif request.param == "file":
        Path("pgworkd.toml").write_text("keep_days = 30\n")
    return asgi(Settings(dsn=dsn, keep_days=30) if request.param == "settings" else dsn)


async def test_a_gateway_keeps_what_keep_days_says(gateway: Application, db: asyncpg.Connection[Any]) -> None:
    for days in (20, 40):
        await db.execute(DAY % {"days": days})
    async with gateway.running():
        await until(lambda: "prune" in gateway.gateway.remote.counters.maintenance_s)  # once, to its end
    assert await db.fetchval(KEPT) == [20]
