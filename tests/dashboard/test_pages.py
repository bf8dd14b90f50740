"""Each page says what is in the database, to those who may see it, in whatever words."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import quote

import httpx
import pytest

from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import PgworkdError
from pgworkd.gateway.api.app import Application
from pgworkd.gateway.api.request.gateway import Gateway, GatewayOptions
from tests.kits import verbs as v
from tests.kits.browser import PAGES
from tests.kits.gateway import ALL, token
from tests.kits.pages import NASTY, Forms, filled, viewing
from tests.kits.verbs import Db


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
        assert "name one of them" in (await client.get("/jobs")).text
        for path in ("/jobs?queue=other", "/queues/other", "/workers", "/dead", "/audit", f"/jobs/{other}"):
            assert (await client.get(path)).status_code in (403, 404), path


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("queue=&status=&kind=&key=&batch=&group=&since=&until=", 200, "No job here matches"),
        ("key=customer", 200, "key match whole names only"),
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
        assert (await client.head(f"/sign-in?once={secret}")).status_code == 200, "who only looks uses nothing up"
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
        assert found.text.count("#pause") == 100
        acts = {path.rpartition("/")[2] for method, path, _ in Forms(found.text).found if method == "post"}
        assert "pause" not in acts, "a list pauses nothing for ever without asking"


@pytest.mark.parametrize("name", ["eu/mail", "a\nb", "50% off?&x=1#y", "\ue000s"])
async def test_a_page_follows_and_acts_on_the_queue_of_its_name(dsn: str, db: Db, name: str) -> None:
    await v.one(db, name)
    async with viewing(dsn) as client:
        place = f"/queues/{quote(name, safe='')}"
        page = (await client.get(place)).text
        follows = unescape(page.partition('hx-sse:connect="')[2].partition('"')[0])
        assert follows == place
        acts = {unescape(path) for method, path, _ in Forms(page).found if method == "post" and "/queues/" in path}
        assert acts == {f"{place}/pause"}
        assert (await client.post(f"{place}/pause", data={"for_s": "60", "back": place})).status_code == 303
    assert await db.fetchval("SELECT name FROM pgworkd.queues WHERE paused_until > now()") == name


async def test_reasons_name_no_job_that_may_not_be_seen(dsn: str, db: Db) -> None:
    for queue in ("mine", "theirs"):
        await db.execute("INSERT INTO pgworkd.queues (name, serialize_scope) VALUES ($1, 'stage')", queue)
    first = await v.one(db, "theirs", serialize_key="k", run_at=v.at(-9))
    second = await v.one(db, "mine", serialize_key="k", run_at=v.at(-5))
    for scopes, is_seen in (({"read": ["mine"]}, False), ({"read": None}, True)):
        async with viewing(dsn, scopes) as client:
            page = (await client.get(f"/jobs/{second}")).text
            assert "is before it in the line" in page
            assert (str(first) in page) is is_seen


async def test_the_audit_has_older_pages(dsn: str, db: Db) -> None:
    await db.execute(
        "INSERT INTO pgworkd.audit (who, what, queue, before, after) "
        "SELECT 'ann', 'queue', 'q' || n, '{}', '{}' FROM generate_series(1, 150) n"
    )
    async with viewing(dsn) as client:
        page = (await client.get("/audit")).text
        older = unescape(page.partition('<a href="/audit?before=')[2].partition('"')[0])
        rest = (await client.get(f"/audit?before={older}")).text
        assert ("q150<" in page, "q51<" in page, "q50<" in page) == (True, True, False)
        assert ("q50<" in rest, "q1<" in rest, "Older" in rest) == (True, True, False)


async def test_a_page_without_the_schema_says_what_makes_it(dsn: str, db: Db) -> None:
    async with viewing(dsn) as client:
        assert (await client.get("/queues")).status_code == 200
        await db.execute("DROP SCHEMA pgworkd CASCADE")
        page = await client.get("/queues")
        assert (page.status_code, "Run: pgworkd migrate" in page.text) == (503, True)


async def test_lists_of_dead_jobs_say_when_they_died(dsn: str, db: Db) -> None:
    job_id = await v.one(db)
    await v.claim(db, await v.worker(db, 3600))
    await v.fail(db, [job_id], permanent=True)
    await db.execute("UPDATE pgworkd.jobs SET failed_at = '2026-03-04 05:06:07Z'")
    async with viewing(dsn) as client:
        assert "2026-03-04 05:06:07Z" in (await client.get("/jobs?status=dead")).text


async def test_a_job_that_is_locked_says_by_whom(dsn: str, db: Db) -> None:
    job_id = await v.one(db)
    options = ConnectionOptions(dsn, command_timeout_s=1.0)
    async with viewing(dsn, ALL, database=options) as client, db.transaction():
        await db.execute("UPDATE pgworkd.jobs SET priority = 3")
        pid = await db.fetchval("SELECT pg_backend_pid()")
        for path in ("/jobs/cancel", f"/jobs/{job_id}/edit"):
            answer = await client.post(
                path, data={"id": str(job_id), "back": "/", "priority": "2", "was.priority": "0"}
            )
            assert answer.status_code == 504
            assert f"pid {pid} (" in unescape(answer.text)
            assert f"has locked job {job_id}: end that transaction" in answer.text
    assert await v.statuses(db, [job_id]) == ["pending"]
