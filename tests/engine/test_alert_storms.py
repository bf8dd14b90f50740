"""Storms: thousands of jobs die within seconds. Few mails are sent, and they tell of all deaths, whatever ails the
server."""

from __future__ import annotations

import re
import time
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.alerts import mail, recipient
from pgworkd.engine.life import signals
from tests.kits.alerts import MailHost
from tests.kits.daemon import running, until

pytestmark = pytest.mark.slow("thousands of deaths, and mail servers that hang")

DEATHS = 5000
BUNDLE_S, STORM_S = 2, 4
DIE = """INSERT INTO pgworkd.jobs (queue, status, attempts, failures, failed_at, error)
    SELECT 'q', 'dead', 1, 1, now(), 'no such customer ' || translate((n % $3::int)::text, '0123456789', 'ghijklmnop')
    FROM generate_series($1::int, $2::int) n"""
NOTED = "SELECT pgworkd.note_deaths(ARRAY(SELECT id FROM pgworkd.jobs WHERE queue = 'q'))"
ALL_TOLD = """SELECT NOT EXISTS (SELECT FROM pgworkd.deaths WHERE group_id IS NULL)
    AND NOT EXISTS (SELECT FROM pgworkd.alerts WHERE due_at IS NOT NULL)
    AND NOT EXISTS (SELECT FROM pgworkd.jobs WHERE queue = 'alerts')"""
RESULTS = """SELECT coalesce(sum((result ->> 'deaths')::int), 0) FROM pgworkd.finished_jobs
    WHERE queue = 'alerts' AND (result ->> 'sent')::boolean"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute is a fifth of a second; a mail server has a second for each answer."""
    monkeypatch.setattr(signals, "DEATHS_S", 0.2)
    monkeypatch.setattr(mail, "STEP_S", 1.0)
    monkeypatch.setitem(recipient.OPTIONS, "backoff", {"base_s": 0.5, "factor": 1, "cap_s": 0.5})


def told_of(text: str) -> int:
    """The number of deaths that a mail tells of."""
    found = re.search(r"^deaths: +([\d,]+)\s", text, re.MULTILINE) or re.search(r"^([\d,]+) jobs died of", text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("groups", [1, 40, DEATHS])
@pytest.mark.parametrize("ails", ["nothing", "refuses", "hangs", "is slow"])
async def test_a_storm_makes_few_mails_and_all_deaths_are_told(
    dsn: str,
    db: asyncpg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    quick: None,
    ails: str,
    groups: int,
) -> None:
    host = AilingHost(ails)
    monkeypatch.setenv("PGWORKD_SMTP_FROM", "jobs@example.com")
    app = App()
    app.alert(to="ops@example.com", bundle_s=BUNDLE_S, cooldown_s=5)
    async with host.serving():
        monkeypatch.setenv("PGWORKD_SMTP_URL", f"smtp://127.0.0.1:{host.port}")
        async with running(app, dsn):
            began_s = time.monotonic()
            for first in range(0, DEATHS, 250):
                await db.execute(
                    DIE.replace("$1", str(first)).replace("$2", str(first + 249)).replace("$3", str(groups))
                )
                await db.execute(NOTED)
                await anyio.sleep(STORM_S * 250 / DEATHS)
            host.refuses.clear()
            host.cured.set()
            await until(lambda: db.fetchval(ALL_TOLD), 60)
            took_s = time.monotonic() - began_s
    assert await db.fetchval(RESULTS) == DEATHS, "each once"
    texts = [message.get_content() for *_, message in host.mails]
    assert sum(map(told_of, texts)) >= DEATHS, "one may have been sent twice"
    assert len(texts) <= took_s / BUNDLE_S + 1
    assert len(texts) <= 5
    assert max(map(len, texts)) < 20_000


class AilingHost(MailHost):
    """A mail server that refuses, hangs before it answers, or takes its time."""

    def __init__(self, ails: str) -> None:
        super().__init__()
        self.ails, self.cured = ails, anyio.Event()
        if ails == "refuses":
            self.refuses["MAIL"] = "451 try again later"

    async def _session(self, reader: Any, writer: Any) -> None:
        with anyio.move_on_after({"hangs": 3, "is slow": 0.8}.get(self.ails, 0)):
            await self.cured.wait()
        await super()._session(reader, writer)
