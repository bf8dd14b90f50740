"""What should happen once happens once: a dedupe key, however often and from wherever it is asked for."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.client import Enqueued, enqueue
from pgworkd.errors import PermanentError
from tests.kit import running, status, until, waits_for_status


async def an_hour_passes(db: asyncpg.Connection[Any]) -> None:
    await db.execute("UPDATE pgworkd.jobs SET dedupe_until = dedupe_until - interval '1 h'")


async def test_a_user_clicks_twice_and_gets_one_mail_an_hour(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, mails = App(), []

    @app.handler("mail")
    async def mail(payload: dict[str, Any]) -> None:
        mails.append(payload["click"])

    async def click(number: int) -> Enqueued:
        return await enqueue(
            db, "mail", {"click": number}, dedupe_key="welcome-7", dedupe_for=3600, on_duplicate="skip"
        )

    first, second = await click(1), await click(2)  # a double click: before any worker was there
    assert (first.created, second) == (True, Enqueued(first.id, created=False, changed=False))

    async with running(app, dsn):
        await until(waits_for_status(db, first.id, "completed"))
        third = await click(3)  # impatience: the mail is out, the key is kept
        assert third == second
        with pytest.raises(asyncpg.UniqueViolationError):  # a plain INSERT hears the same
            await db.execute("INSERT INTO pgworkd.jobs (queue, dedupe_key) VALUES ('mail', 'welcome-7')")

        await an_hour_passes(db)
        fourth = await click(4)
        assert (fourth.created, fourth.id == first.id) == (True, False)
        await until(waits_for_status(db, fourth.id, "completed"))
    assert mails == [1, 4]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 2


async def test_a_document_is_indexed_as_it_was_at_the_last_keystroke(dsn: str, db: asyncpg.Connection[Any]) -> None:
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
        await enqueue(db, "index", dedupe_key="document-7", on_duplicate="reschedule")  # the user says: now
        await until(waits_for_status(db, made.id, "completed"))
    assert indexed == ["Soon"]


async def test_a_dead_job_is_in_nobodys_way(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, mended = App(), anyio.Event()

    @app.handler("sync")
    async def sync() -> None:
        if not mended.is_set():
            raise PermanentError("the other side has moved")

    async with running(app, dsn):
        dead = await enqueue(db, "sync", dedupe_key="customer-7")
        await until(waits_for_status(db, dead, "dead"))
        later = await enqueue(db, "sync", dedupe_key="customer-7", delay=3600)

        # One of the two: who replays the first is told that there is another, and nothing has happened.
        with pytest.raises(asyncpg.UniqueViolationError):
            await db.execute("SELECT pgworkd.retry($1)", [dead])
        assert [await status(db, job_id) for job_id in (dead, later)] == ["dead", "pending"]

        await db.execute("SELECT pgworkd.cancel($1)", [later])
        mended.set()
        await db.execute("SELECT pgworkd.retry($1)", [dead])
        await until(waits_for_status(db, dead, "completed"))
