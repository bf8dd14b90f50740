"""A form that is sent twice, as by a double press, makes what it makes once."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from tests.kits import verbs as v
from tests.kits.gateway import ALL
from tests.kits.pages import Forms, viewing
from tests.kits.verbs import Db

COUNTS = "SELECT (SELECT count(*) FROM pgworkd.jobs), (SELECT count(*) FROM pgworkd.schedules)"
RULE = {"name": "n", "queue": "q", "every_s": "60"}


async def form(client: httpx.AsyncClient, path: str, action: str = "", **changes: str) -> tuple[str, dict[str, str]]:
    """The form of a page that is sent to `action`, filled in."""
    page = await client.get(path)
    assert page.status_code == 200, page.text
    found = [fields for method, to, fields in Forms(page.text).found if (method, to) == ("post", action or path)]
    return action or path, found[0] | changes


async def said(client: httpx.AsyncClient, answer: httpx.Response) -> str:
    assert answer.status_code == 303, answer.text
    page = (await client.get(answer.headers["location"])).text
    return page.partition('class="said" role="status">')[2].partition("<")[0]


async def sent_twice(client: httpx.AsyncClient, path: str, fields: dict[str, str]) -> list[httpx.Response]:
    """Both answers to two presses at once, that of the first to be served first."""
    answers: list[httpx.Response] = []

    async def send() -> None:
        answers.append(await client.post(path, data=fields))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        tasks.start_soon(send)
    return answers


async def test_a_job_is_enqueued_once_by_a_form_that_is_sent_twice(dsn: str, db: Db) -> None:
    await v.one(db, "other")
    async with viewing(dsn, ALL) as client:
        place, fields = await form(client, "/queues/q/enqueue", kind="mail", delay_s="3600")
        answers = await sent_twice(client, place, fields)
        (job,) = {answer.headers["location"] for answer in answers}
        assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE queue = 'q'") == 1
        job_id = await db.fetchval("SELECT id FROM pgworkd.jobs WHERE queue = 'q'")
        assert job == f"/jobs/{job_id}"
        assert "was enqueued before by this form" in await said(client, await client.post(place, data=fields))
        await db.execute("DELETE FROM pgworkd.jobs")
        again = await client.post(place, data=fields)
        assert again.headers["location"] == job, "also when it has ended, whatever its queue keeps"
        assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0
        _, anew = await form(client, place, kind="mail")
        assert anew["once"] != fields["once"]
        assert "is enqueued" in await said(client, await client.post(place, data=anew))


async def test_a_form_that_was_refused_is_sent_again(dsn: str, db: Db) -> None:
    async with viewing(dsn, ALL) as client:
        place, fields = await form(client, "/queues/q/enqueue", priority="much")
        refused = await client.post(place, data=fields)
        assert (refused.status_code, await db.fetchval("SELECT count(*) FROM pgworkd.jobs")) == (422, 0)
        assert "is enqueued" in await said(client, await client.post(place, data=fields | {"priority": "7"}))


async def test_a_form_that_was_sent_and_is_filled_in_otherwise_asks_first(dsn: str, db: Db) -> None:
    async with viewing(dsn, ALL) as client:
        place, fields = await form(client, "/queues/q/enqueue", kind="a")
        await client.post(place, data=fields)
        answer = await client.post(place, data=fields | {"kind": "b"})
        assert answer.status_code == 409
        assert "this form was sent before, and filled in otherwise" in answer.text
        ((_, _, again),) = [each for each in Forms(answer.text).found if each[1] == place]
        assert again == fields | {"kind": "b", "once": again["once"]} != fields | {"kind": "b"}
        await client.post(place, data=again)
    assert await db.fetchval("SELECT string_agg(kind, ' ' ORDER BY kind) FROM pgworkd.jobs") == "a b"


async def test_schedules_and_their_runs_and_replays_are_made_once(dsn: str, db: Db) -> None:
    async with viewing(dsn, ALL) as client:
        place, fields = await form(client, "/schedules/edit", **RULE)
        answers = await sent_twice(client, place, fields)
        assert {answer.headers["location"] for answer in answers} == {"/schedules"}
        assert await said(client, await client.post(place, data=fields)) == "schedule n was saved before by this form"
        run = "/schedules/n/run"
        for once in await ids(client, "/schedules"):
            for answer in await sent_twice(client, run, {"back": "/schedules", "once": once}):
                assert answer.status_code == 303
        assert tuple(await db.fetchrow(COUNTS)) == (1, 1)
        job_id = await db.fetchval("SELECT id FROM pgworkd.jobs")
        await v.cancel(db, job_id)
        (once,) = await ids(client, f"/jobs/{job_id}")
        answers = await sent_twice(client, f"/jobs/{job_id}/replay", {"once": once})
        (made,) = {answer.headers["location"] for answer in answers}
        new_id = await db.fetchval("SELECT id FROM pgworkd.jobs")
        assert made == f"/jobs/{new_id}"
        assert "made before" in await said(client, await client.post(f"/jobs/{job_id}/replay", data={"once": once}))


async def ids(client: httpx.AsyncClient, path: str) -> list[str]:
    """The ids that a page has for forms that follow the database."""
    text = (await client.get(path)).text.partition("</main>")[2]
    found = [each.partition('"')[0] for each in text.split('name="once" value="')[1:]]
    for each in text.split('form="')[1:]:
        assert f'id="{each.partition(chr(34))[0]}"' in (await client.get(path)).text, "they belong to forms"
    return found


async def test_a_token_is_added_once_and_its_text_is_in_the_first_answer_only(dsn: str, db: Db) -> None:
    async with viewing(dsn, ALL) as client:
        place, fields = await form(client, "/system", "/system/tokens", name="shop", scope="read")
        first, second = [await client.post(place, data=fields) for _ in range(2)]
    assert (first.status_code, second.status_code) == (201, 200)
    token = first.text.partition("<pre>")[2].partition("</pre>")[0]
    assert token.startswith("pgw_")
    assert "sent twice" in second.text
    assert token not in second.text
    rows = await db.fetch("SELECT id FROM pgworkd.tokens WHERE name = 'shop'")
    assert f"/system/tokens/{rows[0][0]}/revoke" in second.text
    assert (len(rows), await db.fetchval("SELECT count(*) FROM pgworkd.idempotent_calls")) == (1, 1)
    kept = await db.fetchval("SELECT answer FROM pgworkd.idempotent_calls")
    assert token.rpartition("_")[2] not in kept, "no secret is stored"


@pytest.mark.parametrize("once", ["x", "x" * 10_000, "<script>", "7"])
async def test_the_id_of_a_form_is_a_uuid(dsn: str, db: Db, once: str) -> None:
    wrong: list[Any] = []
    async with viewing(dsn, ALL) as client:
        for path, fields in (("/queues/q/enqueue", {}), ("/schedules/edit", RULE), ("/system/tokens", {"name": "n"})):
            answer = await client.post(path, data={"once": once, "scope": "read", **fields})
            wrong.append((answer.status_code, "once: the id of a form is a UUID" in answer.text))
    assert wrong == [(422, True)] * 3
    assert tuple(await db.fetchrow(COUNTS)) == (0, 0)
