"""Lists of jobs by worker, by schedule, and by what is in their payloads: on pages and over HTTP."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest

from pgworkd.admin import listing
from pgworkd.admin.admin import Admin
from pgworkd.admin.listing import Listed
from pgworkd.admin.payload_filter import PayloadTerm, payload_terms
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import UsageError
from tests.kits import verbs as v
from tests.kits.gateway import ALL, also, calling, token
from tests.kits.pages import NASTY, Forms, viewing
from tests.kits.verbs import Db

PAYLOADS: dict[str, Any] = {
    "number": {"a": {"b": 7}},
    "decimal": {"a": {"b": 7.0}},
    "text": {"a": {"b": "7"}},
    "true": {"a": {"b": True}},
    "null": {"a": {"b": None}},
    "word": {"a": {"b": "true story"}, "c": "x:y"},
    "list": {"a": {"b": [7, {"c": 7}]}},
    "none": {"a": 7},
    "nasty": {"a": {"b": NASTY}},
}
FOUND = {
    "a.b:7": "decimal number",
    "a.b:7.00": "decimal number",
    'a.b:"7"': "text",
    "a.b:true": "true",
    "a.b:null": "null",
    'a.b:"true story"': "word",
    'a.b:"true story" c:x:y': "word",
    'a.b:"true story" c:x': "",
    "a.b.0:7": "list",
    "a.b.1.c:7": "list",
    "a.b.x:7": "",
    "a:7": "none",
    "b:7": "",
    "a.b:1e999": "",
    f"a.b:{json.dumps(NASTY)}": "nasty",
}


async def filled(db: Db, *, ended: bool = False) -> dict[UUID, str]:
    names = {await v.one(db, payload=json.dumps(payload)): name for name, payload in PAYLOADS.items()}
    if ended:
        await db.execute("SELECT pgworkd.cancel($1)", list(names))
    return names


@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
async def test_terms_match_by_path_and_type(dsn: str, db: Db, *, ended: bool) -> None:
    names = await filled(db, ended=ended)
    async with (
        calling(dsn, dashboard=True) as call,
        viewing(dsn, ALL) as client,
        Admin(ConnectionOptions(dsn)) as admin,
    ):
        for text, wanted in FOUND.items():
            page = await admin.jobs.page(Listed(payload=payload_terms(text)))
            assert " ".join(sorted(names[row.id] for row in page.rows)) == wanted, text
            listed = await call.ok("GET", "/v1/jobs", params={"payload": text, "queue": "q"})
            assert " ".join(sorted(names[UUID(row["id"])] for row in listed["jobs"])) == wanted, text
            shown = (await client.get("/jobs", params={"payload": text})).text
            assert sorted(name for job, name in names.items() if f"row-{job}" in shown) == wanted.split(), text
            (form,) = [fields for _, action, fields in Forms(shown).found if action == "/jobs" and "payload" in fields]
            assert form["payload"] == text
            assert "/matching" not in shown, "what is done to all that match would do it to others"
            assert NASTY not in shown


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a", "give terms as"),
        ("a:", "give terms as"),
        (":7", "give terms as"),
        ("a..b:7", "give terms as"),
        (".:7", "give terms as"),
        ("a:7b c", "give terms as"),
        ('a:"x', "give terms as"),
        ('a:"x"y', "give terms as"),
        (r'a:"\x"', "no text as in JSON"),
        ('a:{"b":7}', "give terms as"),
        ("a:[7]", "lists cannot be compared"),
        (r'a:"\u0000"', "NUL"),
        (r'a:"\ud800"', "surrogate"),
        ("a\0:7", "NUL"),
        (" ".join(["a:7"] * 11), "11 terms, 10 are allowed"),
        ("a:" + "7" * 10_000, "1,000"),
        ("<script>", "&lt;script&gt;"),
    ],
)
async def test_what_is_no_filter_is_refused_with_what_to_give(dsn: str, text: str, says: str) -> None:
    if says[0] != "&":
        with pytest.raises(UsageError, match=f"payload: .*{says}"):
            payload_terms(text)
    async with calling(dsn, dashboard=True) as call, viewing(dsn, ALL) as client:
        code, slug, found = await call.problem("GET", "/v1/jobs", params={"payload": text})
        assert (code, slug) == (422, "invalid")
        assert "payload" in json.dumps(found)
        page = await client.get("/jobs", params={"payload": text})
        assert page.status_code == 422
        assert "payload" in page.text
        assert "<script>" not in page.text
        assert says.startswith(("1,000", "give")) or says in page.text


def test_terms_are_values_of_json() -> None:
    assert payload_terms("  ") is None
    assert payload_terms('a:7\tb.c:x  d:-1.5e3 e:0x7 f:"é\\n" g:07') == (
        PayloadTerm("a", "7"),
        PayloadTerm("b.c", '"x"'),
        PayloadTerm("d", "-1.5e3"),
        PayloadTerm("e", '"0x7"'),
        PayloadTerm("f", '"é\\n"'),
        PayloadTerm("g", '"07"'),
    )


async def test_a_filter_tells_nothing_to_who_may_not_see_payloads(dsn: str, db: Db) -> None:
    await v.one(db, payload='{"pin": 1234}')
    await v.one(db, "other", payload='{"pin": 1234}')
    some = {"read": None, "payload": ["q"]}
    async with calling(dsn, dashboard=True) as call:
        for scopes, query, code in (
            ({"read": None}, "?payload=pin:1234", 403),
            ({"read": None}, "?payload=pin:9&queue=q", 403),
            (some, "?payload=pin:1234", 403),
            (some, "?payload=pin:1234&queue=other", 403),
            (some, "?payload=pin:1234&queue=q", 200),
        ):
            caller = also(call, await token(dsn, scopes))
            answer = await caller("GET", f"/v1/jobs{query}")
            assert answer.status_code == code, (scopes, query)
            assert "payload" in answer.text or code == 200
            page = await caller("GET", f"/jobs{query}")
            assert page.status_code == code, (scopes, query)
            assert ("scope payload" in page.text) == (code == 403)
        caller = also(call, await token(dsn, {"read": None}))
        assert 'name="payload"' not in (await caller("GET", "/jobs")).text


async def test_a_page_reads_few_payloads_and_says_so(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "WALK_ALL_ROWS", 5)
    old = await v.one(db, payload='{"a": 7}')
    await v.insert(db, 7)
    async with viewing(dsn, ALL) as client:
        first = (await client.get("/jobs?payload=a:7")).text
        assert "the 5 newest that are live and as many finished ones were looked at" in first
        assert f"row-{old}" not in first
        older = first.partition('rel="next"')[0].rpartition('href="')[2].partition('"')[0].replace("&amp;", "&")
        assert "payload=a%3A7" in older
        second = (await client.get(older)).text
        assert f"row-{old}" in second
        assert "were looked at" not in second
        assert f"row-{old}" in (await client.get("/jobs?queue=q")).text, "where no payload is read, more is"


async def test_jobs_are_found_by_worker_and_by_schedule(dsn: str, db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s, payload) VALUES ($1, 'q', 60, '{}')", NASTY)
    mine = await v.one(db, schedule=NASTY)
    waiting = await v.one(db)
    worker_id = await v.worker(db, 3600)
    done, running = (await v.insert(db, 2, "w"))[:2]
    await v.claim(db, worker_id, 2, "w")
    await v.complete(db, [done])
    queries: list[tuple[dict[str, str], set[UUID]]] = [
        ({"worker": str(worker_id)}, {done, running}),
        ({"worker": str(worker_id), "status": "running"}, {running}),
        ({"worker": str(worker_id + 1)}, set()),
        ({"schedule": NASTY}, {mine}),
        ({"schedule": "s"}, set()),
    ]
    async with calling(dsn, dashboard=True) as call, viewing(dsn, ALL) as client:
        for query, wanted in queries:
            listed = await call.ok("GET", "/v1/jobs", params=query)
            assert {UUID(row["id"]) for row in listed["jobs"]} == wanted, query
            page = (await client.get("/jobs", params=query)).text
            assert {job for job in (mine, waiting, done, running) if f"row-{job}" in page} == wanted, query
            assert "/matching" not in page
        for path in ("/schedules", "/workers"):
            links = [each.partition('"')[0] for each in (await client.get(path)).text.split('href="')[1:]]
            (link,) = [each for each in links if each.startswith("/jobs?")]
            assert "row-" in (await client.get(link.replace("&amp;", "&"))).text, path
        for wrong in ("worker=0", "worker=x", f"worker={2**31}", "schedule=" + "s" * 10_000):
            assert (await client.get(f"/jobs?{wrong}")).status_code == 422, wrong
            assert (await call("GET", f"/v1/jobs?{wrong}")).status_code == 422, wrong


@pytest.mark.parametrize("name", ["payload", "worker", "schedule", "since", "until"])
async def test_what_is_done_to_all_that_match_refuses_a_filter_that_it_has_not(dsn: str, db: Db, name: str) -> None:
    job_id = await v.one(db)
    async with viewing(dsn, ALL) as client, calling(dsn) as call:
        answer = await client.post("/jobs/cancel/matching", data={"queue": "q", name: "7"})
        assert (answer.status_code, f"takes no filter by {name}" in answer.text) == (422, True)
        assert (await call("POST", "/v1/jobs/cancel", {"queue": "q", name: "7"})).status_code == 422
    assert await v.statuses(db, [job_id]) == ["pending"]
