"""Deduplication: at most one live job per queue and dedupe key, and optionally for a while after it has finished."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.client import Enqueued, enqueue
from pgworkd.errors import PermanentError
from tests.kits.daemon import running, status, until, waits_for_status


async def an_hour_passes(db: asyncpg.Connection[Any]) -> None:
    await db.execute("UPDATE pgworkd.jobs SET dedupe_until = dedupe_until - interval '1 h'")


async def test_a_double_click_sends_one_mail_per_hour(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """`dedupe_for` keeps the key after the job has finished: duplicates are skipped until the hour has passed."""
    app, mails = App(), []

    @app.handler("mail")
    async def mail(payload: dict[str, Any]) -> None:
        mails.append(payload["click"])

    async def click(number: int) -> Enqueued:
        return await enqueue(
            db, "mail", {"click": number}, dedupe_key="welcome-7", dedupe_for=3600, on_duplicate="skip"
        )

    first, second = await click(1), await click(2)  # a double click, before any worker runs
    assert (first.created, second) == (True, Enqueued(first.id, created=False, changed=False))

    async with running(app, dsn):
        await until(waits_for_status(db, first.id, "completed"))
        third = await click(3)  # the mail has been sent, and the key is still taken
        assert third == second
        with pytest.raises(asyncpg.UniqueViolationError):  # a plain INSERT gets the same answer
            await db.execute("INSERT INTO pgworkd.jobs (queue, dedupe_key) VALUES ('mail', 'welcome-7')")

        await an_hour_passes(db)
        fourth = await click(4)
        assert (fourth.created, fourth.id == first.id) == (True, False)
        await until(waits_for_status(db, fourth.id, "completed"))
    assert mails == [1, 4]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 2


async def test_a_debounced_job_runs_once_with_the_latest_payload(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Debouncing: each keystroke replaces the payload of the waiting job, and "reschedule" runs it now."""
    app, indexed = App(), []

    @app.handler("index")
    async def index(payload: dict[str, Any]) -> None:
        indexed.append(payload["text"])

    async with running(app, dsn):
        for text in ("S", "So", "Soo", "Soon"):
            made = await enqueue(
                db, "index", {"text": text}, delay=3600, dedupe_key="document-7", on_duplicate="replace"
            )
        assert (made.created, made.changed) == (False, True)
        await enqueue(db, "index", dedupe_key="document-7", on_duplicate="reschedule")  # the user asks for it now
        await until(waits_for_status(db, made.id, "completed"))
    assert indexed == ["Soon"]


async def test_a_dead_job_does_not_hold_its_dedupe_key(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """A new job may take the key of a dead one; retrying the dead one is then refused until the new one is gone."""
    app, mended = App(), anyio.Event()

    @app.handler("sync")
    async def sync() -> None:
        if not mended.is_set():
            raise PermanentError("the other side has moved")

    async with running(app, dsn):
        dead = await enqueue(db, "sync", dedupe_key="customer-7")
        await until(waits_for_status(db, dead, "dead"))
        later = await enqueue(db, "sync", dedupe_key="customer-7", delay=3600)

        # Only one of the two may be live: the retry raises a unique violation and changes nothing.
        with pytest.raises(asyncpg.UniqueViolationError):
            await db.execute("SELECT pgworkd.retry($1)", [dead])
        assert [await status(db, job_id) for job_id in (dead, later)] == ["dead", "pending"]

        await db.execute("SELECT pgworkd.cancel($1)", [later])
        mended.set()
        await db.execute("SELECT pgworkd.retry($1)", [dead])
        await until(waits_for_status(db, dead, "completed"))
