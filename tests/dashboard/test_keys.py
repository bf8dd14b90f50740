"""The page of a key: what runs under it and what waits behind that, in the order in which it starts; freeing it."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from pgworkd.admin import lines
from pgworkd.dashboard.pages.keys import ROWS
from tests.kits import batches as b
from tests.kits import verbs as v
from tests.kits.gateway import ALL
from tests.kits.pages import NASTY, Forms, viewing
from tests.kits.verbs import Db


async def ids_under(client: httpx.AsyncClient, queue: str, key: str, section: str) -> list[str]:
    """The jobs in a section of the page of a key, in the order shown."""
    page = await client.get("/keys", params={"queue": queue, "key": key})
    assert page.status_code == 200, page.text
    part = page.text.partition(f'<section aria-labelledby="{section}">')[2].partition("</section>")[0]
    return re.findall(r'/jobs/([0-9a-f-]{36})" class="id"', part)


async def test_the_line_of_a_key_is_shown_in_its_order_and_its_first_job_can_be_cancelled(dsn: str, db: Db) -> None:
    worker_id = await v.worker(db, 3600)
    running = await v.one(db, serialize_key=NASTY)
    await v.claim(db, worker_id)
    first, second = await v.insert(db, 2, serialize_key=NASTY)
    await db.execute("UPDATE pgworkd.jobs SET run_at = now() + interval '1 h' WHERE id = $1", first)
    await v.one(db, serialize_key="other")
    async with viewing(dsn, ALL) as client:
        job = (await client.get(f"/jobs/{running}")).text
        (place,) = [each for each in re.findall(r'href="([^"]+)"', job) if each.startswith("/keys?")]
        assert str(second) in (await client.get(place.replace("&amp;", "&"))).text
        assert await ids_under(client, "q", NASTY, "serialize") == [str(each) for each in (running, second, first)]
        page = await client.get("/keys", params={"queue": "q", "key": NASTY})
        (fields,) = [each for _, _, each in Forms(page.text).found if each.get("id") == str(second)]
        answer = await client.post("/jobs/cancel", data=fields)
        assert answer.headers["location"].startswith("/keys?queue=q&key=")
        assert await ids_under(client, "q", NASTY, "serialize") == [str(each) for each in (running, first)]


async def test_a_limited_key_shows_what_runs_and_its_limits(dsn: str, db: Db) -> None:
    limits = {"limit_per_key": 2, "rate_per_key": 3, "rate_per_key_period_s": 60, "rate_per_key_burst": 3}
    await db.execute("SELECT pgworkd.set_queue('q', $1)", json.dumps(limits))
    ids = await v.insert(db, 4, limit_key="ann")
    urgent = await v.one(db, limit_key="ann", priority=9)
    await v.one(db, limit_key="bob")
    started = [str(each) for each in await v.claim_ids(db, await v.worker(db, 3600), 3) if each in (*ids, urgent)]
    assert len(started) == 2
    rest = [str(each) for each in (urgent, *ids) if str(each) not in started]
    async with viewing(dsn) as client:
        assert await ids_under(client, "q", "ann", "limit") == [*sorted(started), *rest]
        page = (await client.get("/keys?queue=q&key=ann")).text
        assert re.search(r"<dd>2 of 2 ", page)
        assert "at most 3 start in 60 s; 1 may start now" in page


async def test_a_line_of_several_queues_shows_who_may_see_one_that_one(dsn: str, db: Db) -> None:
    for queue in ("mine", "other"):
        await db.execute("SELECT pgworkd.set_queue($1, $2)", queue, json.dumps({"serialize_scope": "accounts"}))
    mine, other = [await v.one(db, queue, serialize_key="k") for queue in ("mine", "other")]
    async with viewing(dsn) as client:
        assert await ids_under(client, "mine", "k", "serialize") == [str(mine), str(other)]
    async with viewing(dsn, {"read": ["mine"]}) as client:
        assert await ids_under(client, "mine", "k", "serialize") == [str(mine)]
        assert (await client.get("/keys?queue=other&key=k")).status_code == 403
        page = (await client.get("/keys")).text
        assert "name one of them" in page
        assert "accounts" not in page


async def test_keys_that_are_in_use_are_found_by_name(dsn: str, db: Db) -> None:
    worker_id = await v.worker(db, 3600)
    for queue, key in (("a", "x"), ("a", "y"), ("b", "z")):
        await v.one(db, queue, limit_key=key, serialize_key=f"s{key}")
        await v.claim(db, worker_id, 9, queue)
    await v.one(db, "b", limit_key="waits")
    async with viewing(dsn) as client:
        for query, wanted in (("", ["x", "y", "z", "sx", "sy", "sz"]), ("?queue=a", ["x", "y", "sx", "sy"])):
            page = (await client.get(f"/keys{query}")).text
            assert re.findall(r'<th scope="row"><a href="/keys\?queue=\w&amp;key=\w+">(\w+)<', page) == wanted


@pytest.mark.parametrize("of_batch", [False, True])
async def test_a_kept_key_is_freed_by_who_may_operate_its_queue(dsn: str, db: Db, *, of_batch: bool) -> None:
    if of_batch:
        root = await b.batch(db, "payroll", "q", dedupe_key="k", dedupe_for_s=3600)
        await b.seal(db, root)
        await db.execute("SELECT pgworkd.apply_effects()")
    else:
        await v.enqueue(db, dedupe_for_s=3600.0)
        await v.complete(db, await v.claim_ids(db, await v.worker(db, 3600)))
    fields: dict[str, Any] = {"queue": "q", "key": "k", "batch": "payroll" if of_batch else "", "back": "/keys"}
    async with viewing(dsn, {"read": None, "operate": ["other"]}) as client:
        assert "Free" not in (await client.get("/keys")).text
        assert (await client.post("/keys/free", data=fields)).status_code == 403
    async with viewing(dsn, {"read": None, "operate": ["q"]}) as client:
        assert ("/keys/free" in (await client.get("/keys")).text) is not of_batch, "a batch's key is of all queues"
        assert ((await client.post("/keys/free", data=fields)).status_code == 403) is of_batch
    async with viewing(dsn, ALL) as client:
        for said in ["key k is free"] * of_batch + ["key k is not freed: "]:
            answer = await client.post("/keys/free", data=fields)
            assert f'role="status">{said}' in (await client.get(answer.headers["location"])).text
    assert await db.fetchval("SELECT count(*) FROM pgworkd.kept_keys") == 0


async def test_a_key_with_thousands_of_jobs_is_read_by_index_and_shown_in_part(dsn: str, db: Db) -> None:
    await db.execute("""INSERT INTO pgworkd.jobs (queue, serialize_key, limit_key)
        SELECT 'q', 'k', 'k' FROM generate_series(1, 5000)""")
    await db.execute("INSERT INTO pgworkd.jobs (queue, limit_key) SELECT 'q', n FROM generate_series(1, 20000) n")
    async with viewing(dsn) as client:
        for section in ("serialize", "limit"):
            assert len(await ids_under(client, "q", "k", section)) == ROWS
        assert "there may be more" in (await client.get("/keys?queue=q&key=k")).text
    for analyzed in (False, True):
        if analyzed:
            await db.execute("ANALYZE pgworkd.jobs")
        for sql in (lines._HOLDER, lines._LINE, lines._RUNNING, lines._WAITING):
            plan = await db.fetch(f"EXPLAIN {sql}", "q", "k", ROWS)
            assert not [row[0] for row in plan if "Seq Scan on jobs" in row[0]], sql
        assert "Seq Scan on jobs" not in str(await db.fetch(f"EXPLAIN {lines._IN_USE}", None, ROWS))
