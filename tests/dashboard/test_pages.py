"""Each page says what is in the database, to those who may see it, in whatever words; and works as a form alone."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from pgworkd.dashboard.pages import ROUTERS
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import PgworkdError
from pgworkd.gateway.api.app import Application
from pgworkd.gateway.api.request.access import anyone
from pgworkd.gateway.api.request.gateway import Gateway, GatewayOptions
from tests.kits import verbs as v
from tests.kits.browser import PAGES
from tests.kits.gateway import ALL, Scopes, token
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
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.found.append((given.get("method", "get"), given.get("action", ""), {}))
        elif tag == "input" and self.found and "name" in given:
            self.found[-1][2][given["name"]] = given.get("value", "")


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
    return found


async def test_every_page_says_what_there_is_and_escapes_it(dsn: str, db: Db) -> None:
    jobs = await filled(db)
    assert await v.statuses(db, list(jobs.values())) == list(jobs)
    async with viewing(dsn) as client:
        for path in [*PAGES, f"/queues/{quote(NASTY, safe='')}", *(f"/jobs/{job_id}" for job_id in jobs.values())]:
            answer = await client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            assert "<script>alert" not in answer.text, path
            assert "Not read" not in answer.text, path
            assert "&lt;script&gt;alert(1)" in answer.text or path in ("/dead", "/audit"), path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert not re.search(r"<[^>]+\s(on\w+|style)=", answer.text), path


ACTS = {"/dead/{group}/{act}": ("retry", "mute"), "/schedules/{name}/{act}": ("run", "disable")}


def _acts() -> list[tuple[str, str]]:
    """Each act, with a path that it is for."""
    values = {"queue": "q", "operation": "cancel", "group": "1", "name": "s"}
    routes: list[Any] = [route for router in ROUTERS for route in router.routes]
    paths = [each.path for each in routes if "POST" in each.methods and not each.path.startswith(("/sign", "/theme"))]
    return [(path, path.format(**values, act=act)) for path in paths for act in ACTS.get(path, ("",))]


WHOLE = "SELECT (SELECT md5(string_agg(j::text, ' ' ORDER BY j.id)) FROM pgworkd.jobs j), \
    (SELECT md5(string_agg(q::text, ' ')) FROM pgworkd.queues q), (SELECT md5(string_agg(s::text, ' ')) FROM \
    pgworkd.schedules s), (SELECT count(*) FROM pgworkd.audit WHERE what <> 'token')"


@pytest.mark.parametrize("scopes", [{"read": None, "payload": None}, {"operate": ["other"], "read": None}])
async def test_who_may_only_look_changes_nothing(dsn: str, db: Db, scopes: Scopes) -> None:
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s, payload) VALUES ('s', 'q', 60, '{}')")
    job_id = await v.one(db)
    before = await db.fetchrow(WHOLE)
    acts = _acts()
    assert len(acts) >= 6
    async with viewing(dsn, scopes) as client:
        for template, path in acts:
            answer = await client.post(path, data={"id": str(job_id), "back": "/"})
            assert answer.status_code in (403, 404), (template, answer.status_code, answer.headers)
            assert answer.headers["content-type"].startswith("text/html")
        page = await client.get("/queues")
        assert not [each for each in Forms(page.text).found if "/queues" in each[1] and each[0] == "post"]
    assert await db.fetchrow(WHOLE) == before


async def test_payloads_are_shown_to_those_who_may_see_them(dsn: str, db: Db) -> None:
    job_id = await v.one(db, payload='{"secret": "s3cr3t", "amount": 1.10, "many": 123456789012345678901234567890}')
    async with viewing(dsn, {"read": None}) as client:
        page = (await client.get(f"/jobs/{job_id}")).text
        assert "s3cr3t" not in page
        assert "needs the scope payload" in page
    async with viewing(dsn, {"read": None, "payload": ["q"]}) as client:
        page = (await client.get(f"/jobs/{job_id}")).text
        assert "s3cr3t" in page
        assert "1.10" in page
        assert "123456789012345678901234567890" in page


async def test_a_token_for_some_queues_shows_those(dsn: str, db: Db) -> None:
    mine, other = await v.one(db, "mine"), await v.one(db, "other")
    async with viewing(dsn, {"read": ["mine"]}) as client:
        for path in ("/", "/queues", "/schedules"):
            page = await client.get(path)
            assert page.status_code == 200
            assert "other" not in page.text
        assert "mine" in (await client.get("/queues")).text
        assert (await client.get("/jobs?queue=mine")).status_code == 200
        assert (await client.get(f"/jobs/{mine}")).status_code == 200
        for path in ("/jobs", "/jobs?queue=other", "/queues/other", "/workers", "/dead", "/audit", f"/jobs/{other}"):
            assert (await client.get(path)).status_code in (403, 404), path


async def test_acts_are_forms_which_lead_back_and_say_what_was_done(dsn: str, db: Db) -> None:
    worker_id = await v.worker(db, 3600)
    dead = await v.one(db)
    await v.claim(db, worker_id)
    await v.fail(db, [dead], permanent=True)
    waiting = await v.one(db)
    async with viewing(dsn, ALL) as client:

        async def said(path: str, **fields: str) -> str:
            answer = await client.post(path, data=fields)
            assert answer.status_code == 303, answer.text
            assert answer.headers["location"] == fields["back"]
            page = await client.get(answer.headers["location"])
            assert 'role="status"' not in (await client.get(answer.headers["location"])).text, "it is said once"
            return page.text.partition('role="status">')[2].partition("<")[0]

        here = "/jobs?queue=q&status=dead"
        assert await said("/jobs/retry", id=str(dead), back=here) == "1 job retried"
        assert (await said("/jobs/retry", id=str(waiting), back=here)).startswith("1 job left as they are: ")
        assert await said("/jobs/cancel", id=str(waiting), back=here) == "1 job cancelled"
        assert await said("/jobs/cancel", back=here) == "nothing was selected"
        assert await said("/queues/q/pause", for_s="900", back="/queues/q") == "queue q is paused"
        assert await db.fetchval(
            "SELECT paused_until > now() + interval '800 s' AND isfinite(paused_until) FROM pgworkd.queues"
        )
        assert await said("/queues/q/resume", back="/") == "queue q is resumed"
    assert await v.statuses(db, [dead]) == ["pending"]
    who = await db.fetch("SELECT DISTINCT who FROM pgworkd.audit WHERE what <> 'token'")
    assert [row[0].partition(" ")[0] for row in who] == ["tester"]


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/jobs/retry", {"id": "nonsense"}, "named by its UUID"),
        ("/queues/q/pause", {"for_s": "-1"}, "give seconds"),
        ("/queues/q/pause", {"for_s": "nan"}, "give seconds"),
        ("/theme", {"theme": "pink"}, "a theme is one of"),
        ("/dead/1/mute", {"back": "/"}, "no group of errors 1"),
        ("/dead/1/kill", {"back": "/"}, "unmute"),
        ("/schedules/none/run", {"back": "/"}, "no schedule"),
        ("/jobs/replace", {"back": "/"}, "invalid"),
    ],
)
async def test_bad_forms_are_pages_that_say_why(dsn: str, path: str, fields: dict[str, str], says: str) -> None:
    async with viewing(dsn, ALL) as client:
        answer = await client.post(path, data=fields)
        assert 400 <= answer.status_code < 500
        assert answer.headers["content-type"].startswith("text/html")
        assert says in answer.text
        for place in ("//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)"):
            answer = await client.post("/theme", data={"theme": "dark", "back": place})
            assert answer.headers["location"] == "/"


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("queue=&status=&kind=&key=&batch=&group=&since=&until=", 200, "No job here matches"),
        ("status=nonsense", 422, "status"),
        ("batch=nonsense", 422, "batch"),
        ("since=yesterday", 422, "since"),
        ("statsu=dead", 422, "status"),
        ("queue=%ff", 200, ""),
    ],
)
async def test_filters_that_make_no_sense_are_named(dsn: str, query: str, status: int, says: str) -> None:
    async with viewing(dsn, ALL) as client:
        answer = await client.get(f"/jobs?{query}")
        assert answer.status_code == status
        assert says in answer.text


async def test_who_has_not_signed_in_is_asked_to_and_led_on(dsn: str, db: Db) -> None:
    async with viewing(dsn, ALL) as client:
        client.cookies.clear()
        asked = await client.get("/jobs?queue=a%20b&status=dead")
        assert asked.status_code == 303
        form = await client.get(asked.headers["location"])
        ((_, action, fields),) = [each for each in Forms(form.text).found if each[1] == "/sign-in"]
        wrong = await client.post(action, data={**fields, "token": "pgw_aaaaaaaaaaaa_" + "x" * 43})
        assert (wrong.status_code, "unknown, expired or revoked" in wrong.text) == (401, True)
        assert "no token of pgworkd" in (await client.post(action, data={**fields, "token": "x"})).text
        right = await client.post(action, data={**fields, "token": await token(dsn)})
        assert right.headers["location"] == "/jobs?queue=a%20b&status=dead"
        cookie = right.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert (await client.get(right.headers["location"])).status_code == 200
        await client.post("/sign-out", data={})
        assert (await client.get("/")).status_code == 303


async def test_a_one_time_address_is_worth_one_session(dsn: str) -> None:
    options = GatewayOptions(ConnectionOptions(dsn), workers=False, dashboard=True)
    app = Application(Gateway(options))
    assert app.dashboard is not None
    transport = httpx.ASGITransport(app=app)
    async with app.running(), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        old, secret = app.dashboard.callers.once(), app.dashboard.callers.once()
        for wrong in (old, "x"):
            assert "has been used, or is too old" in (await client.get(f"/sign-in?once={wrong}")).text
        assert (await client.get(f"/sign-in?once={secret}")).status_code == 303
        assert (await client.get("/workers")).status_code == 200
        session = client.cookies["pgworkd_session"]
        client.cookies.clear()
        assert "has been used" in (await client.get(f"/sign-in?once={secret}")).text
        client.cookies.set("pgworkd_session", session)
        await client.post("/sign-out", data={})
        client.cookies.set("pgworkd_session", session)
        assert (await client.get("/workers")).status_code == 303, "the session has ended"


async def test_what_cannot_be_read_in_time_leaves_the_rest_of_the_page(dsn: str, db: Db) -> None:
    await v.one(db, "mail")
    async with viewing(dsn) as client, db.transaction():
        await db.execute("LOCK TABLE pgworkd.deaths")
        page = await client.get("/")
        assert page.status_code == 200
        assert re.findall(r"Not read: (\w+):", page.text) == ["dead"]
        assert "mail" in page.text


async def test_pages_cannot_change_anything(dsn: str, db: Db) -> None:
    app = Application(Gateway(GatewayOptions(ConnectionOptions(dsn), workers=False, dashboard=True)))
    assert app.dashboard is not None
    async with app.running(), app.dashboard.pool.session() as connection:
        with pytest.raises(PgworkdError, match="read-only"):
            await connection.fetch("INSERT INTO pgworkd.jobs (queue) VALUES ('q') RETURNING id")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_thousands_of_queues_are_a_page_that_can_be_searched(dsn: str, db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'queue-' || n FROM generate_series(1000, 3999) n")
    await db.execute("INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('queue-late', now() - interval '1 h')")
    async with viewing(dsn) as client:
        for path in ("/", "/queues", "/jobs"):
            page = await client.get(path)
            assert len(page.text) < 250_000, path
        assert "3,001: search for others" in (await client.get("/queues")).text
        first, _, _ = (await client.get("/")).text.partition("queue-1000")
        assert "queue-late" in first, "it has waited longest"
        found = await client.get("/queues?search=e-37")
        assert found.text.count("/pause") == 100


async def test_a_group_of_dead_jobs_is_retried_and_muted(dsn: str, db: Db) -> None:
    worker_id = await v.worker(db, 3600)
    ids = await v.insert(db, 3)
    await v.claim(db, worker_id)
    await v.fail(db, ids, permanent=True)
    await db.execute("SELECT pgworkd.apply_effects(), pgworkd.count_deaths()")
    async with viewing(dsn, ALL) as client:
        forms = [each for each in Forms((await client.get("/dead")).text).found if each[1].startswith("/dead/")]
        assert [each[1].rpartition("/")[2] for each in forms] == ["retry", "mute"]
        for method, path, fields in reversed(forms):
            assert method == "post"
            assert (await client.post(path, data=fields)).headers["location"] == "/dead"
        assert "3 jobs retried" in (await client.get("/dead")).text
    assert await v.statuses(db, ids) == ["pending"] * 3
    assert await db.fetchval("SELECT muted_until > now() + interval '23 h' FROM pgworkd.error_groups")
