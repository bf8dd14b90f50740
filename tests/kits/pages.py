"""A browser without JavaScript, in this process: what it is shown, and the forms it can send."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from typing import Any

import httpx

from pgworkd.database.connection import ConnectionOptions
from pgworkd.gateway.api.app import Application
from pgworkd.gateway.api.request.access import anyone
from pgworkd.gateway.api.request.gateway import Gateway, GatewayOptions
from tests.kits import batches as b
from tests.kits import verbs as v
from tests.kits.gateway import Scopes, token
from tests.kits.verbs import Db

NASTY = """<script>alert(1)</script>"'&{{ 7 * 7 }}%2F../é"""
"""Names may have any characters."""


@contextlib.asynccontextmanager
async def viewing(dsn: str, scopes: Scopes | None = None, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A browser without JavaScript. `scopes`: of the token with which it has signed in; None: anyone may call."""
    options = GatewayOptions(
        **{"database": ConnectionOptions(dsn), "api": False, "workers": False, "dashboard": True} | changes
    )
    app = Application(Gateway(options, anyone if scopes is None else None))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.running(), httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
        if scopes is not None:
            answer = await client.post("/sign-in", data={"token": await token(dsn, scopes), "next": "/queues"})
            assert (answer.status_code, answer.headers["location"]) == (303, "/queues"), answer.text
        yield client


class Forms(HTMLParser):
    """The forms of a page: method, action, and fields."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, dict[str, str]]] = []
        self._select = self._textarea = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.found.append((given.get("method", "get"), given.get("action", ""), {}))
        elif tag == "input" and self.found and "name" in given:
            self.found[-1][2][given["name"]] = given.get("value", "")
        elif tag == "select" and self.found:
            self._select = given.get("name", "")
        elif tag == "option" and self._select and (self._select not in self.found[-1][2] or "selected" in given):
            self.found[-1][2][self._select] = given.get("value", "")
        elif tag == "textarea" and self.found:
            self._textarea = given.get("name", "")
            self.found[-1][2][self._textarea] = ""

    def handle_data(self, data: str) -> None:
        if self._textarea:
            self.found[-1][2][self._textarea] += data.removeprefix("\n")

    def handle_endtag(self, tag: str) -> None:
        self._select = "" if tag == "select" else self._select
        self._textarea = "" if tag == "textarea" else self._textarea


async def filled(db: Db) -> dict[str, uuid.UUID]:
    """A job in each state, in a queue with a nasty name; a schedule, a worker, a pause."""
    worker_id = await v.worker(db, 3600)
    await db.execute("SELECT pgworkd.set_pool($1, $2, 3, true)", worker_id, NASTY)
    await db.execute("UPDATE pgworkd.workers SET name = $1", NASTY)
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s, payload) VALUES ($1, $1, 60, '{}')", NASTY)
    found = {}
    for state in ("dead", "failed", "running"):
        found[state] = await v.one(db, NASTY, payload=json.dumps({"a": NASTY}), serialize_key=state)
        await v.claim(db, worker_id, 1, NASTY)
        if state != "running":
            await v.fail(db, [found[state]], delay_s=600.0, permanent=state == "dead", message=NASTY)
    found["blocked"] = await v.one(db, NASTY, serialize_key="running")
    await v.claim(db, worker_id, 1, NASTY)
    found["pending"] = await v.one(db, NASTY)
    await db.execute("SELECT pgworkd.set_queue($1, $2)", NASTY, json.dumps({"max_running": 7}))
    await db.execute("UPDATE pgworkd.queues SET paused_until = 'infinity'")
    batch_id = await b.batch(db, NASTY, NASTY)
    await b.after(db, found["pending"], queue=NASTY, kind=NASTY, batch_id=batch_id)
    some = "{" + ",".join(["0"] * 30 + ["7"] * 42) + "}"
    await db.execute(
        """INSERT INTO pgworkd.queue_minutes SELECT now() - n * interval '10 min', 60, q, $1, NULL, 7, 7, 2, 1, 0,
        $2::text::bigint[], $2::text::bigint[], 1, 1, 0, 0 FROM generate_series(1, 300) n, unnest(ARRAY['q', $1]) q""",
        NASTY,
        some,
    )
    await db.execute(
        "INSERT INTO pgworkd.tokens (id, name, sha256, scopes) VALUES ('nastynasty', $1, $2, $3)",
        NASTY,
        bytes(32),
        json.dumps({"read": [NASTY]}),
    )
    await db.execute(
        """INSERT INTO pgworkd.operations (what, who, queue, kind, key, reason, refused, next_at, expected, finished_at)
        SELECT 'retry', left($1, 200), $1, $1, $1, $1, 1, 'infinity', 7, f FROM unnest(ARRAY[NULL, now()]) f""",
        NASTY,
    )
    await db.execute("INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ($1, 'https://x.test/', true)", NASTY)
    return found
