"""Where more is wrong than a report lists: its numbers count all, and it says how many it has left out."""

from __future__ import annotations

from datetime import timedelta

import asyncpg
import pytest

from pgworkd import App
from pgworkd.admin import Admin
from pgworkd.admin.findings import judged
from pgworkd.alerts.digest import summary
from pgworkd.cli import serve
from pgworkd.database.connection import ConnectionOptions
from pgworkd.settings.config import Settings
from tests.kits.verbs import Db

BROKEN = """INSERT INTO pgworkd.schedules (name, queue, cron, error)
    SELECT 's' || lpad(i::text, 3, '0'), 'q', '* * * * *', 'bad' FROM generate_series(1, 33) i"""


async def test_a_digest_counts_all_and_lists_some(dsn: str, db: Db) -> None:
    await db.execute(BROKEN)
    async with asyncpg.create_pool(dsn) as pool:
        digest = await summary(pool.fetch, lambda now: now - timedelta(days=1))
    assert "33 broken schedules" in digest.subject
    assert (digest.text().count(": bad"), "... and 13 more: pgworkd doctor" in digest.text()) == (20, True)


async def test_doctor_lists_some_and_says_how_many_more(dsn: str, db: Db) -> None:
    await db.execute(BROKEN)
    async with Admin(ConnectionOptions(dsn)) as admin:
        found = [each for each in judged(await admin.health()) if each.subject == "schedules"]
    assert len(found) == 11
    assert (found[-1].level, found[-1].finding) == ("bad", "and 23 more findings like these")


@pytest.mark.parametrize(("given", "notes"), [({}, 1), ({"smtp_url": "smtp://u:p@mail.example.com:587"}, 0)])
def test_a_daemon_says_at_its_start_that_its_mails_have_no_server(given: dict[str, str], notes: int) -> None:
    app = App()
    app.alert(to=print)
    assert not app.mails
    app.digest(every=86_400, to="ops@example.com")
    assert app.mails
    settings = Settings(dsn="postgresql://nobody@127.0.0.1:1/x", **given)
    found = serve._mail_notes(settings, mails=app.mails)
    assert len(found) == notes
    assert all("PGWORKD_SMTP_URL" in each for each in found)
