"""Forms: who may fill them in, what they refuse, and that nothing is lost which somebody may not see."""

from __future__ import annotations

import json
from html import unescape
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from pgworkd.settings.queue import SETTINGS
from tests.kits import verbs as v
from tests.kits.gateway import ALL, Scopes
from tests.kits.pages import NASTY, Forms, viewing
from tests.kits.verbs import Db


async def filled_in(client: httpx.AsyncClient, path: str) -> dict[str, str]:
    """The fields of the one form of a page, as they are."""
    page = await client.get(path)
    assert page.status_code == 200, page.text
    (form,) = [fields for method, action, fields in Forms(page.text).found if action == path.partition("?")[0]]
    return form


async def sent(client: httpx.AsyncClient, path: str, **changes: str) -> str:
    """What the page says after its form has been changed and sent; or what is wrong with it."""
    fields = await filled_in(client, path) | {name.replace("was_", "was."): value for name, value in changes.items()}
    answer = await client.post(path.partition("?")[0], data=fields)
    if answer.status_code == 303:
        page = (await client.get(answer.headers["location"])).text
        return unescape(page.partition('class="said" role="status">')[2].partition("<")[0])
    assert 400 <= answer.status_code < 500
    assert "<form" in answer.text.partition("<main")[2], "it is shown again"
    return unescape(" ".join(each.partition("<")[0] for each in answer.text.split('role="alert">')[1:]))


async def test_each_setting_of_a_queue_is_set_and_unset(dsn: str, db: Db) -> None:
    await v.one(db)
    await db.execute("INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ('hook', 'https://x.test/', true)")
    texts = {"serialize_scope": "scope", "endpoint": "hook", "fair": "yes", "rate": "5/30s", "rate_per_key": "7/min"}
    given = {name: texts.get(name, "5") for name in SETTINGS}
    async with viewing(dsn, ALL) as client:
        path = "/queues/q/settings"
        before = await filled_in(client, path)
        assert {name for name in before if not name.startswith("was.")} == set(SETTINGS)
        for name in given:
            lone = given[name.removesuffix("_burst")] if name.endswith("_burst") else ""
            more = {name.removesuffix("_burst"): lone} if lone else {}
            assert "of q changed" in await sent(client, path, **{name: given[name]}, **more), name
            after = await filled_in(client, path)
            assert after[name] == after[f"was.{name}"] == given[name]
            assert await sent(client, path, **dict.fromkeys((name, *more), "")) != "", name
            assert (await filled_in(client, path))[name] == before[name] == "", name


async def test_settings_that_are_wrong_are_named_at_their_fields_and_none_is_changed(dsn: str, db: Db) -> None:
    await v.one(db)
    async with viewing(dsn, ALL) as client:
        said = await sent(client, "/queues/q/settings", max_running="0", rate="9", keep_s="5")
        assert "rate '9' has no period" in said
        assert "max_running '0': give a whole number" in said
        assert "rate_burst needs a rate" in await sent(client, "/queues/q/settings", rate_burst="3")
        assert "no such endpoint" in await sent(client, "/queues/q/settings", endpoint="none")
        assert await db.fetchval("SELECT count(*) FROM pgworkd.queues WHERE keep_s IS NOT NULL") == 0
        assert "1 setting" in await sent(client, "/queues/q/settings", max_running="9")
        first = await filled_in(client, "/queues/q/settings")
        assert "1 setting" in await sent(client, "/queues/q/settings", max_running="11")
        await client.post("/queues/q/settings", data={**first, "keep_s": "60"})
    row = await db.fetchrow("SELECT max_running, keep_s FROM pgworkd.queues")
    assert tuple(row) == (11, 60), "only what was changed"


@pytest.mark.parametrize("scopes", [{"read": None, "operate": ["q"]}, {"read": None, "enqueue": ["q"]}])
async def test_forms_are_for_those_who_may_send_them(dsn: str, db: Db, scopes: Scopes) -> None:
    job_id, other = await v.one(db), await v.one(db, "other")
    for name in ("q", "other"):
        rule = "INSERT INTO pgworkd.schedules (name, queue, every_s, payload) VALUES ($1, $1, 60, '{}')"
        await db.execute(rule, name)
    mine = {
        "operate": {"/queues/q/settings", f"/jobs/{job_id}/edit", "/schedules/edit", "/schedules/edit?name=q"},
        "enqueue": {"/queues/q/enqueue"},
    }
    theirs = {"/queues/other/settings", "/queues/other/enqueue", f"/jobs/{other}/edit", "/schedules/edit?name=other"}
    async with viewing(dsn, scopes) as client:
        for path in {*mine["operate"], *mine["enqueue"], *theirs}:
            is_mine = any(path in paths for scope, paths in mine.items() if scope in scopes)
            assert (await client.get(path)).status_code in ((200,) if is_mine else (403, 404)), path
        if "operate" in scopes:
            assert "endpoint" not in await filled_in(client, "/queues/q/settings")
            forged = {"endpoint": "hook", "was.endpoint": ""}
            answer = await client.post("/queues/q/settings", data=forged)
            assert await db.fetchval("SELECT count(*) FROM pgworkd.queues") == 0, answer.text
            answer = await client.post(
                "/queues/q/settings", data={"serialize_scope": "other", "was.serialize_scope": ""}
            )
            assert answer.status_code == 403
            moved = {"name": "other", "was.name": "", "queue": "q", "every_s": "60"}
            assert (await client.post("/schedules/edit", data=moved)).status_code == 409
    assert await db.fetchval("SELECT queue FROM pgworkd.schedules WHERE name = 'other'") == "other"


async def test_payloads_that_one_may_not_see_stay_as_they_are(dsn: str, db: Db) -> None:
    job_id = await v.one(db, payload='{"secret": "s3cr3t", "amount": 1.10}', run_at=v.at(3600))
    await db.execute(
        "INSERT INTO pgworkd.schedules "
        "(name, queue, cron, payload, max_attempts, timeout_s, missed, waits_for_retries) "
        """VALUES ('s', 'q', '0 7 * * *', '{"secret": "s3cr3t"}', 4, 2.5, 'all', true)"""
    )
    every = (
        "SELECT to_jsonb(s) - 'timezone' - 'revision' - 'in_force_since' - 'last_occurrence' FROM pgworkd.schedules s"
    )
    before = await db.fetchval(every)
    async with viewing(dsn, {"read": None, "operate": None}) as client:
        for path, name, value in (
            (f"/jobs/{job_id}/edit", "priority", "3"),
            ("/schedules/edit?name=s", "timezone", "Europe/Berlin"),
        ):
            assert "s3cr3t" not in (await client.get(path)).text
            assert "s3cr3t" not in await sent(client, path, **{name: value})
    assert await db.fetchval("SELECT payload::text FROM pgworkd.jobs") == '{"amount": 1.10, "secret": "s3cr3t"}'
    assert await db.fetchval("SELECT priority FROM pgworkd.jobs") == 3
    assert await db.fetchval("SELECT timezone FROM pgworkd.schedules") == "Europe/Berlin"
    assert await db.fetchval(every) == before


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("/queues/q/enqueue", {"priority": "much"}, "integer"),
        ("/queues/q/enqueue", {"run_at": "tomorrow"}, "must be an instant with its zone"),
        ("/queues/q/enqueue", {"delay_s": "nan"}, "0"),
        ("/queues/q/enqueue", {"delay_s": "5", "run_at": "2027-01-31T07:00:00Z"}, "run_at"),
        ("/queues/q/enqueue", {"payload": "[1]"}, "JSON object"),
        ("/schedules/edit", {"name": "n", "queue": "q"}, "no rule"),
        ("/schedules/edit", {"name": "n", "queue": "q", "every_s": "60", "timezone": "Mars/Base"}, "Mars/Base"),
        ("/schedules/edit", {"name": "n", "every_s": "60"}, "required"),
        ("/schedules/edit", {"name": "", "queue": "q", "every_s": "60"}, "name"),
    ],
)
async def test_what_does_not_fit_is_said_and_what_was_typed_is_kept(
    dsn: str, db: Db, path: str, fields: dict[str, str], says: str
) -> None:
    async with viewing(dsn, ALL) as client:
        given = await filled_in(client, path) | fields
        answer = await client.post(path, data=given)
        assert answer.status_code == 422, answer.text
        assert says in unescape(" ".join(each.partition("<")[0] for each in answer.text.split('role="alert">')[1:]))
        ((_, _, again),) = [each for each in Forms(answer.text).found if each[1] == path]
        assert again == given
    assert (
        await db.fetchval("SELECT (SELECT count(*) FROM pgworkd.jobs) + (SELECT count(*) FROM pgworkd.schedules)") == 0
    )


async def test_a_job_with_a_large_payload_is_edited(dsn: str, db: Db) -> None:
    text = json.dumps({"text": "é" * 100_000})
    job_id = await v.one(db, payload=text)
    async with viewing(dsn, ALL) as client:
        assert await sent(client, f"/jobs/{job_id}/edit", priority="3") == "changed: priority"
    row = await db.fetchrow("SELECT payload = $1::jsonb, priority FROM pgworkd.jobs", text)
    assert tuple(row) == (True, 3)


async def test_a_new_schedule_does_not_replace_another_one(dsn: str, db: Db) -> None:
    async with viewing(dsn, ALL) as client:
        for expected in ("schedule n is saved", "there is a schedule of this name"):
            assert expected in await sent(client, "/schedules/edit", name="n", queue="q", every_s="60")
        code = "UPDATE pgworkd.schedules SET source = 'code'"
        await db.execute(code)
        assert "?name=n" not in (await client.get("/schedules")).text
        assert "declared in code" in await sent(client, "/schedules/edit?name=n", every_s="30")
    assert await db.fetchval("SELECT every_s FROM pgworkd.schedules") == 60


@pytest.mark.parametrize("name", [".", "..", "~.", "~~..", "~", "...", NASTY])
async def test_names_that_a_browser_takes_for_steps_have_pages_and_acts(dsn: str, db: Db, name: str) -> None:
    await v.one(db, name)
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s, payload) VALUES ($1, $1, 60, '{}')", name)
    await db.execute("INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ($1, 'https://x.test/', true)", name)

    async def steps(page: httpx.Response) -> Any:
        """The addresses of a page, as a browser makes them: without the steps in their paths."""
        found = {unescape(each.partition('"')[0]) for each in page.text.split(' href="')[1:]}
        return sorted(httpx.URL("http://localhost").join(each).raw_path.decode() for each in found if each[:1] == "/")

    async with viewing(dsn, ALL) as client:
        for path in ("/", "/queues", "/push", "/schedules"):
            page = await client.get(path)
            (place,) = {each for each in await steps(page) if each.startswith("/queues/") and "#" not in each} or {""}
            if path != "/push":
                one = await client.get(place)
                assert f"<h1>{name if name != NASTY else ''}" in one.text, (path, place)
            for method, action, fields in Forms(page.text).found:
                if method == "post" and action.rpartition("/")[2] in ("disable", "pause"):
                    assert (await client.post(str(httpx.URL(action)), data=fields)).status_code == 303, action
        place = f"/queues/{quote(name, safe='')}" if name.strip("~.") else place
        assert (
            await sent(client, f"{one.url.raw_path.decode()}/settings", max_running="3")
            == f"1 setting of {name} changed"
        )
    assert await db.fetchval("SELECT name FROM pgworkd.queues WHERE max_running = 3") == name
    assert not await db.fetchval("SELECT enabled FROM pgworkd.schedules")
    assert await db.fetchval("SELECT disabled_at IS NOT NULL FROM pgworkd.endpoints")
