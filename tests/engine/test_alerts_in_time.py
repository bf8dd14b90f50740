"""What dies while a rule may not send yet is told when it may, though nothing dies any more."""

from __future__ import annotations

from typing import Any

import asyncpg

from pgworkd import App, PermanentError
from pgworkd.alerts import Alert
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
