"""What dies while a rule may not send yet is told when it may, though nothing dies any more; and whose rule it is."""

from __future__ import annotations

from typing import Any

import asyncpg

from pgworkd import App, PermanentError
from pgworkd.alerts import Alert
from pgworkd.core import events
from tests.kits.daemon import insert, running, until


async def test_the_second_message_comes_after_bundle_s_and_not_with_the_next_look(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app, sent = App(), list[Alert]()

    @app.handler("q", max_attempts=1)
    async def handle(payload: dict[str, str]) -> None:
        raise PermanentError(payload["error"])

    app.alert(to=sent.append, bundle_s=3)
    async with running(app, dsn):
        await insert(db, "q", '{"error": "first"}')
        await until(lambda: len(sent) == 1)
        await insert(db, "q", '{"error": "another"}')
        await until(lambda: len(sent) == 2)  # which gives up before a minute is over
    assert [each.deaths for each in sent] == [1, 1]


async def test_a_rule_that_another_application_declares_otherwise_is_told_of(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    ours, theirs, same = App(), App(), App()
    ours.alert(to=print)
    theirs.alert(to=print, queues=["third"])
    same.alert(to=print, queues=["third"])
    async with running(ours, dsn) as (_, first), running(theirs, dsn) as (_, second):
        assert await second.wait(events.ALERT_DIFFERS) == {"rule": "default"}
        async with running(same, dsn) as (_, third):
            assert await db.fetchval("SELECT queues FROM pgworkd.alert_rules") == ["third"]
        assert not first.all(events.ALERT_DIFFERS), "it was the first"
        assert not third.all(events.ALERT_DIFFERS), "it is the same"
