"""Jobs that were not started in time expire; the log reports it and `all_jobs` has the time."""

from __future__ import annotations

import json
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.engine.life import maintenance
from pgworkd.engine.life.maintenance import Periods
from tests.kits.cli import Shell, clean, shell
from tests.kits.daemon import running, until

__all__ = ["clean", "shell"]  # fixtures

LATE = """INSERT INTO pgworkd.jobs (queue, kind, run_at, expires_at)
    SELECT 'mail', k, now() + interval '1 h', now() - interval '1 min' FROM unnest('{a,a,b,NULL}'::text[]) AS u (k)"""


async def test_the_log_counts_expired_jobs_by_queue_and_kind(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("mail")
    async def mail() -> None:
        """Has nothing to do."""

    await db.execute(LATE)
    async with running(app, dsn, periods=Periods(expire_s=0.1)) as (_, seen):
        await seen.wait(events.JOBS_EXPIRED, 3)
        told = {(fact["queue"], fact["kind"]): fact for fact in seen.all(events.JOBS_EXPIRED)}
    assert {key: fact["count"] for key, fact in told.items()} == {
        ("mail", "a"): 2,
        ("mail", "b"): 1,
        ("mail", "mail"): 1,
    }
    rows = await db.fetch("SELECT id::text, kind, status, expires_at < now() AS past FROM pgworkd.all_jobs")
    assert {(row["status"], row["past"]) for row in rows} == {("expired", True)}
    examples = {fact["job_id"] for fact in told.values()}
    assert examples < {row["id"] for row in rows}, "one of each"


async def test_a_job_that_has_expired_soon_holds_up_its_line_no_more(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "EXPIRED_S", 0.1)
    app, done = App(), anyio.Event()

    @app.handler("sound")
    async def sound() -> None:
        done.set()

    await db.execute(
        "INSERT INTO pgworkd.queues (name, serialize_scope) VALUES ('lights', 'stage'), ('sound', 'stage')"
    )
    insert = "INSERT INTO pgworkd.jobs (queue, serialize_key, expires_at) VALUES ($1, 'k', $2::text::timestamptz)"
    await db.execute(insert, "lights", "2100-01-01Z")  # nobody serves it
    await db.execute(insert, "sound", None)
    async with running(app, dsn, periods=Periods()) as (_, seen):
        await until(lambda: db.fetchval("SELECT bool_or(status = 'blocked') FROM pgworkd.jobs"))
        await db.execute("UPDATE pgworkd.jobs SET expires_at = now() WHERE queue = 'lights'")
        with anyio.fail_after(5):
            await done.wait()
        await seen.wait(events.JOBS_EXPIRED)


def test_a_job_shows_when_it_expires_and_when_it_was_claimed(shell: Shell) -> None:
    job_id = shell.sql("INSERT INTO pgworkd.jobs (queue, expires_at) VALUES ('q', '2150-01-01 00:00Z') RETURNING id")
    job = json.loads(shell("job", str(job_id), "--json").stdout)
    assert (job["expires_at"], job["claimed_at"]) == ("2150-01-01T00:00:00+00:00", None)
    assert "expires_at:" in shell("job", str(job_id)).stdout
    shell("cancel", str(job_id))
    assert json.loads(shell("job", str(job_id), "--json").stdout)["expires_at"] == job["expires_at"], "also afterwards"
