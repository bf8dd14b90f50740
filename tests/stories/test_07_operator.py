"""A bad deploy leaves 300 dead jobs. An operator inspects them, edits one, retries most and discards the rest; every
operation is in the audit trail."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import asyncpg
import pytest

from pgworkd import App
from pgworkd.admin import Admin
from pgworkd.admin.jobs import JobSelection
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import NotWaiting, PermanentError
from tests.kits.daemon import running, until

BILLS, REMINDERS = 200, 100


def deploy(*, good: bool) -> tuple[App, list[dict[str, Any]]]:
    """An app that sends mail, and the list of what it has sent."""
    app, sent = App(), []

    async def send(payload: dict[str, Any]) -> None:
        if not good:
            raise PermanentError("no module named 'templates'")
        if "@" not in payload["to"]:
            raise PermanentError(f"{payload['to']} is no address")
        sent.append(payload)

    for kind in ("bill", "reminder"):
        app.handler(kind, queue="mail", concurrency=20)(send)
    return app, sent


def dead(kind: str) -> JobSelection:
    return JobSelection(queue="mail", kind=kind, status="dead")


async def test_an_operator_recovers_from_a_bad_deploy(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Inspect, edit one job, retry in chunks, discard the rest, and read the audit trail."""
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, kind, payload)"
        " SELECT 'mail', CASE WHEN n <= $1 THEN 'bill' ELSE 'reminder' END,"
        "        jsonb_build_object('n', n, 'to', CASE n WHEN 7 THEN 'eve' ELSE 'x@example.com' END)"
        " FROM generate_series(1, $2::int) n",
        BILLS,
        BILLS + REMINDERS,
    )
    async with running(deploy(good=False)[0], dsn):
        await until(lambda: db.fetchval("SELECT count(*) = $1 FROM pgworkd.jobs WHERE status = 'dead'", 300))

    app, sent = deploy(good=True)
    async with running(app, dsn), Admin(ConnectionOptions(dsn, by="ann@desk")) as ann:
        # Inspect: which jobs are dead, and with which error?
        looked = await ann.jobs.find(queue="mail", status="dead", limit=1000)
        assert Counter(job.kind for job in looked.rows) == {"bill": BILLS, "reminder": REMINDERS}
        assert {job.error for job in looked.rows} == {"pgworkd.errors.PermanentError: no module named 'templates'"}

        # One address was wrong from the start. Only a pending job can be edited: pause the queue, retry, edit, resume.
        wrong = await db.fetchval("SELECT id FROM pgworkd.jobs WHERE payload->>'to' = 'eve'")
        with pytest.raises(NotWaiting, match="Pause its queue, retry the job, edit it"):
            await ann.jobs.edit(wrong, '{"n": 7, "to": "eve@example.com"}')
        await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('mail', 'infinity')")
        assert (await ann.jobs.retry([wrong])).changed == [wrong]
        assert await ann.jobs.edit(wrong, '{"n": 7, "to": "eve@example.com"}') == ["payload"]
        await db.execute("UPDATE pgworkd.queues SET paused_until = NULL")
        await until(lambda: db.fetchval("SELECT status = 'completed' FROM pgworkd.finished_jobs WHERE id = $1", wrong))
        assert sent == [{"n": 7, "to": "eve@example.com"}]

        # Retry the other bills, in chunks of 50.
        assert await ann.jobs.count("retry", dead("bill")) == BILLS - 1
        last = None
        while True:
            some = await ann.jobs.matching("retry", dead("bill"), last, 50)
            assert (await ann.jobs.retry(list(some.ids))).key_taken == []
            if (last := some.last) is None:
                break
        await until(lambda: db.fetchval("SELECT count(*) = $1 FROM pgworkd.jobs", REMINDERS))
        assert sorted(mail["n"] for mail in sent) == list(range(1, BILLS + 1))

        # The reminders are obsolete by now: discard them.
        rest = await ann.jobs.matching("discard", dead("reminder"))
        assert await ann.jobs.cancel(list(rest.ids)) == {}, "they have ended"
        assert await ann.jobs.discard(list(rest.ids)) == REMINDERS
        assert await db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)")

        # The audit trail names every operation and who did it.
        trail = await ann.audit(queue="mail", limit=1000)
    assert Counter(note.what for note in trail) == {"retry": BILLS, "edit": 1, "discard": REMINDERS, "queue": 2}
    by_hand = {note.who for note in trail if note.what == "queue"}
    assert {note.who for note in trail} - by_hand == {"ann@desk"}, (
        "changes made in psql are recorded under the database user"
    )
    assert [note.what for note in trail if note.job_id == wrong] == ["edit", "retry"]
    (edited,) = (note for note in trail if note.what == "edit")
    assert json.loads(edited.before) == {"payload": {"n": 7, "to": "eve"}}
    assert json.loads(edited.after) == {"payload": {"n": 7, "to": "eve@example.com"}}
    assert not [note for note in trail if note.job_id is None and note.what != "queue"]
