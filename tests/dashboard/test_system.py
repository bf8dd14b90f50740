"""The page of the system: what doctor finds, the facts behind it; tokens, for who may add them."""

from __future__ import annotations

import re
import uuid
from html import unescape
from urllib.parse import urlsplit

import asyncpg
import pytest

from pgworkd.admin import Admin
from pgworkd.admin.examination import examine
from pgworkd.admin.findings import Finding
from pgworkd.database import grants, schema
from pgworkd.database.connection import ConnectionOptions
from tests.kits import verbs as v
from tests.kits.browser import PAGES
from tests.kits.gateway import ALL, token
from tests.kits.pages import Forms, viewing
from tests.kits.verbs import Db


async def test_it_has_every_finding_of_doctor_what_is_bad_first(dsn: str, db: Db) -> None:
    await v.one(db)
    await db.execute("UPDATE pgworkd.jobs SET run_at = now() - interval '1 h'")
    async with viewing(dsn, {"read": None}) as client:
        page = (await client.get("/system")).text
    found = re.findall(r'<li class="(ok|warn|bad)"><strong>([^<]+)</strong>', page)
    wanted = list[Finding]()
    async with Admin(ConnectionOptions(dsn)) as admin:
        await examine(admin, wanted, dsn, "", None)
    assert sorted(found) == sorted((each.level, each.subject) for each in wanted)
    assert len(wanted) > 15
    assert ("bad", "queues") in found
    assert [level for level, _ in found] == sorted((level for level, _ in found), key=["bad", "warn", "ok"].index)
    assert f"<dd>version {schema.VERSION}</dd>" in page
    assert f"{await db.fetchval('SELECT current_database()')}, as " in page
    assert re.search(r"finished_jobs</td><td class=\"num\">\d[\d,.]* [kM]B<", page), "with all its days"
    assert "finished_jobs_2" not in page
    assert "Tokens</h2>" not in page, "they are for who may add them"


async def test_it_names_who_holds_back_vacuum(dsn: str, db: Db) -> None:
    other = await asyncpg.connect(dsn, server_settings={"application_name": "<b>report"})
    async with viewing(dsn) as client, other.transaction(isolation="repeatable_read"):
        await other.fetchval("SELECT pg_current_xact_id()")
        page = (await client.get("/system")).text
        assert f"session pid {other.get_server_pid()} (&lt;b&gt;report, " in page
    await other.close()


async def test_a_token_is_shown_once_works_and_is_revoked(dsn: str, db: Db) -> None:
    async with viewing(dsn, ALL) as client:
        ((_, place, fields),) = [
            each for each in Forms((await client.get("/system")).text).found if each[1] == "/system/tokens"
        ]
        given = {**fields, "name": "ann", "scope": ["read", "operate"], "queues": "mail, report-*", "days": "30"}
        answer = await client.post(place, data=given)
        assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
        (made,) = re.findall(r"<pre>(pgw_[\w-]+)</pre>", answer.text)
        assert made not in str(answer.headers)
        assert made not in str(client.cookies)
        page = (await client.get("/system")).text
        assert made not in page
        token_id = made.split("_")[1]
        async with Admin(ConnectionOptions(dsn)) as admin:
            row = next(each for each in await admin.tokens.find() if each.id == token_id)
        assert row.scopes == {"read": ["mail", "report-*"], "operate": ["mail", "report-*"]}
        assert row.created_by.startswith("tester")
        assert await db.fetchval(
            "SELECT expires_at - now() BETWEEN '29 d' AND '31 d' FROM pgworkd.tokens WHERE id = $1", token_id
        )
        ((_, place, fields),) = [each for each in Forms(page).found if token_id in each[1]]
        said = await client.get((await client.post(place, data=fields)).headers["location"])
        assert f"token {token_id} is revoked" in unescape(said.text)
        assert (await client.post(place, data=fields)).status_code == 404, "it is revoked already"
    async with Admin(ConnectionOptions(dsn)) as admin:
        assert await admin.tokens.known([token_id]) == {}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "ann", "days": ""}, "give at least one"),
        ({"name": "ann", "scope": "fly", "days": ""}, "unknown scope"),
        ({"name": "", "scope": "read", "days": ""}, "the name must be text"),
        ({"name": "ann", "scope": "read", "days": "7"}, "days: give 30, 90, 365"),
    ],
)
async def test_a_token_that_cannot_be_is_refused(dsn: str, db: Db, fields: dict[str, str], says: str) -> None:
    async with viewing(dsn, ALL) as client:
        answer = await client.post("/system/tokens", data=fields)
        assert answer.status_code == 422
        assert says in unescape(answer.text)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.tokens") == 1


async def test_who_may_see_some_queues_does_not_see_the_system(dsn: str, db: Db) -> None:
    other = await token(dsn, ALL, "other")
    async with viewing(dsn, {"read": ["mail"], "admin": None}) as client:
        assert (await client.get("/system")).status_code == 403
    async with viewing(dsn, {"read": None, "operate": None}) as client:
        assert "Revoke" not in (await client.get("/system")).text
        answer = await client.post(f"/system/tokens/{other.split('_')[1]}/revoke", data={"back": "/"})
        assert answer.status_code == 403
    assert await db.fetchval("SELECT count(*) FROM pgworkd.tokens WHERE revoked_at IS NOT NULL") == 0


async def test_a_role_that_only_reads_shows_the_pages_and_says_what_it_may_not_read(dsn: str, db: Db) -> None:
    await v.one(db, "mail")
    names = dict.fromkeys(("owner", "worker", "enqueuer", "gateway"), "")
    names = {name: f"{name}_{uuid.uuid4().hex[:12]}" for name in (*names, "reader")}
    await db.execute(grants.text(names))
    await db.execute(f"ALTER ROLE {names['reader']} LOGIN PASSWORD 'p'")
    reader = urlsplit(dsn)
    place = f"{names['reader']}:p@{reader.netloc.rpartition('@')[2]}"
    try:
        options = ConnectionOptions(reader._replace(netloc=place).geturl())
        unread = {"/push": ["endpoints"], "/system": ["tokens"]}
        async with viewing(dsn, ALL, dashboard_database=options) as client:
            for path in PAGES:
                page = await client.get(path)
                assert page.status_code == 200, (path, page.text)
                assert re.findall(r"Not read: (\w+)", page.text) == unread.get(path, []), path
            assert f", as {names['reader']}<" in (await client.get("/system")).text
            assert (await client.post("/queues/mail/pause", data={"back": "/"})).status_code == 303
        assert await db.fetchval("SELECT name FROM pgworkd.queues WHERE paused_until > now()") == "mail"
    finally:
        roles = ", ".join(names.values())
        await db.execute(f"DROP OWNED BY {roles} CASCADE; DROP ROLE {roles}")
