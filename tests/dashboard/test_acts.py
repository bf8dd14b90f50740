"""Acts are forms: they do what they say, lead back, and do nothing for those who may only look."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from pgworkd.dashboard.pages import ROUTERS
from tests.kits import batches as b
from tests.kits import remote
from tests.kits import verbs as v
from tests.kits.gateway import ALL, Scopes
from tests.kits.pages import Forms, viewing
from tests.kits.verbs import Db

ACTS = {"/dead/{group}/{act}": ("retry", "mute"), "/schedules/{name}/{act}": ("run", "disable", "remove")}
ACTS |= {
    "/jobs/{operation}": ("cancel", "undepend", "prioritize"),
    "/workers/{worker_id}/{act}": ("quiet", "stop", "run"),
}
ACTS |= {"/system/tokens": ("",), "/system/tokens/{token_id}/revoke": ("",)}
ACTS |= {"/push/{name}/{act}": ("disable", "enable"), "/batches/{batch_id}/{act}": ("seal", "cancel", "delete")}


NO_JOB = "01a22e0f-09b2-73c6-9f83-ae0d74c8e082"
FILLED = {"back": "/", "name": "s", "queue": "q", "every_s": "60", "payload": "{}", "priority": "3", "max_running": "1"}
"""What any of the forms takes."""


def _acts(**ids: object) -> list[tuple[str, str]]:
    """Each act, with a path that it is for."""
    values = {"queue": "q", "group": "1", "name": "s", "token_id": "nastynasty", "operation_id": 1, **ids}
    routes: list[Any] = [route for router in ROUTERS for route in router.routes]
    paths = [each.path for each in routes if "POST" in each.methods and not each.path.startswith(("/sign", "/theme"))]
    found = [(path, act) for path in paths for act in ACTS.get(path, ("cancel",))]
    return [(path, path.format(**values, act=act, operation=act)) for path, act in found]


WHOLE = """SELECT (SELECT md5(string_agg(j::text, ' ' ORDER BY j.id)) FROM pgworkd.jobs j),
    (SELECT md5(string_agg(q::text, ' ')) FROM pgworkd.queues q),
    (SELECT md5(string_agg(s::text, ' ')) FROM pgworkd.schedules s),
    (SELECT md5(string_agg(b::text, ' ')) FROM pgworkd.batches b),
    (SELECT md5(string_agg(e::text, ' ')) FROM pgworkd.endpoints e),
    (SELECT md5(string_agg(w::text, ' ')) FROM pgworkd.workers w),
    (SELECT md5(string_agg(o::text, ' ')) FROM pgworkd.operations o),
    (SELECT md5(string_agg(r::text, ' ')) FROM pgworkd.stack_requests r),
    (SELECT count(*) FROM pgworkd.tokens WHERE revoked_at IS NULL AND name <> 'tester'),
    (SELECT count(*) FROM pgworkd.audit WHERE what <> 'token')"""


@pytest.mark.parametrize("scopes", [{"read": None, "payload": None}, {"operate": ["other"], "read": None}])
async def test_who_may_only_look_changes_nothing(dsn: str, db: Db, scopes: Scopes) -> None:
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s, payload) VALUES ('s', 'q', 60, '{}')")
    job_id = await v.one(db)
    await db.execute("INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ('s', 'https://x.test/', true)")
    await db.execute("SELECT pgworkd.start_operation('cancel', 'q')")
    worker_id = await remote.registered(db, lease_s=3600)
    acts = _acts(batch_id=await b.batch(db), job_id=job_id, worker_id=worker_id)
    before = await db.fetchrow(WHOLE)
    assert len(acts) >= 23
    async with viewing(dsn, scopes) as client:
        for template, path in [*acts, ("of one that is there", "/schedules/edit")]:
            was = {"was.name": "s"} if template.startswith("of") else {}
            answer = await client.post(path, data={"id": str(job_id), **FILLED, **was})
            assert answer.status_code in (403, 404), (template, answer.status_code, answer.headers)
            assert answer.headers["content-type"].startswith("text/html")
        page = await client.get("/queues")
        assert not [each for each in Forms(page.text).found if "/queues" in each[1] and each[0] == "post"]
    assert await db.fetchrow(WHOLE) == before


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
            assert 'class="said"' not in (await client.get(answer.headers["location"])).text, "it is said once"
            return page.text.partition('class="said" role="status">')[2].partition("<")[0]

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
        ("/jobs/prioritize", {"id": NO_JOB}, "priority: give a whole number"),
        ("/jobs/prioritize", {"id": NO_JOB, "priority": "1.5"}, "priority: give a whole number"),
        ("/jobs/prioritize", {"id": NO_JOB, "priority": "2147483648"}, "priority must be an int from -2147483648"),
        ("/jobs/prioritize", {"id": NO_JOB, "priority": "7" * 10_000}, "priority: give a whole number"),
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


async def test_a_batch_is_watched_sealed_cancelled_and_deleted(dsn: str, db: Db) -> None:
    root = await b.batch(db, "payroll", "q")
    (child,) = (await b.create(db, "bonus", "q", parent=root))[:1]
    jobs = await b.add(db, child, 3)
    async with viewing(dsn, ALL) as client:
        place = f"/batches/{root}"
        page = (await client.get("/batches?name=payroll")).text
        assert place in page
        assert 'aria-label="0 of 3 jobs"' in page
        seen = []
        for act in ("seal", "cancel", "delete"):
            await db.execute("SELECT pgworkd.apply_effects()")
            forms = [form for form in Forms((await client.get(place)).text).found if form[1].startswith(place)]
            seen.append([path.rpartition("/")[2] for _, path, _ in forms])
            (fields,) = [fields for _, path, fields in forms if path.endswith(act)]
            said = await client.get((await client.post(f"{place}/{act}", data=fields)).headers["location"])
            seen.append(said.text.partition('class="said" role="status">')[2].partition("<")[0])
        assert seen == [
            ["seal", "cancel"],
            "the batch is sealed",
            ["cancel"],
            "3 jobs cancelled, 0 asked to stop",
            ["delete"],
            "2 batches deleted",
        ]
        assert (await client.get(place)).status_code == 404
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE id = ANY ($1)", jobs) == 0


async def test_a_group_with_many_and_a_batch_with_dead_jobs_are_retried(dsn: str, db: Db) -> None:
    root, ids = await b.sealed(db, 2)
    await v.claim(db, await v.worker(db, 3600))
    await v.fail(db, ids, permanent=True)
    async with viewing(dsn, ALL) as client:
        page = (await client.get(f"/batches/{root}")).text
        (fields,) = [fields for _, path, fields in Forms(page).found if path == "/jobs/retry/matching"]
        answer = await client.post("/jobs/retry/matching", data=fields)
        assert answer.headers["location"] == f"/batches/{root}"
        assert "2 jobs retried" in (await client.get(answer.headers["location"])).text
        assert await v.statuses(db, ids) == ["pending"] * 2
        many = await v.insert(db, 1001, "big", status="dead", attempts=1, failures=1, failed_at=datetime.now(UTC))
        await db.execute("SELECT pgworkd.note_deaths($1)", many)
        await db.execute("SELECT pgworkd.count_deaths(2000)")
        group = await db.fetchval("SELECT id FROM pgworkd.error_groups WHERE queue = 'big'")
        answer = await client.post(f"/dead/{group}/retry", data={"back": "/dead"})
        assert answer.headers["location"] == "/operations"
        assert "operation 1 is started" in (await client.get("/operations")).text
    assert await db.fetchval("SELECT group_id FROM pgworkd.operations") == group


async def test_an_endpoint_is_disabled_and_enabled_and_its_address_is_for_admins(dsn: str, db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.endpoints (name, url, unsigned) VALUES ('e', 'https://x.test/?key=s', true)")
    async with viewing(dsn, {"read": None, "operate": None}) as client:
        page = (await client.get("/push")).text
        assert "x.test" not in page
        for act, state in (("disable", "disabled"), ("enable", "live")):
            await client.post(f"/push/e/{act}", data={"back": "/push"})
            assert f"<td>{state}" in (await client.get("/push")).text
    async with viewing(dsn, ALL) as client:
        assert "https://x.test/?key=s" in (await client.get("/push")).text


async def test_all_that_match_are_cancelled_and_others_are_left(dsn: str, db: Db) -> None:
    mine = await v.insert(db, 3, serialize_key="ann")
    other = await v.one(db, serialize_key="bob")
    async with viewing(dsn, ALL) as client:
        forms = Forms((await client.get("/jobs?queue=q&key=ann&status=pending")).text).found
        (fields,) = [fields for _, path, fields in forms if path == "/jobs/cancel/matching"]
        answer = await client.post("/jobs/cancel/matching", data=fields)
        assert answer.headers["location"] == "/jobs?queue=q&key=ann&status=pending"
        assert "3 jobs cancelled" in (await client.get(answer.headers["location"])).text
        for wrong in ({"batch": "x"}, {"group": "x"}):
            assert (await client.post("/jobs/cancel/matching", data=wrong)).status_code == 422
    found = await db.fetch("SELECT id FROM pgworkd.jobs WHERE status = 'pending'")
    assert ([row[0] for row in found], len(mine)) == ([other], 3)


async def test_jobs_that_are_selected_get_another_priority_if_they_wait(dsn: str, db: Db) -> None:
    worker_id = await v.worker(db, 3600)
    running = await v.one(db, priority=1)
    await v.claim(db, worker_id, 1)
    first, second = await v.insert(db, 2, run_at=v.at(3600))
    other = await v.one(db, priority=3)
    async with viewing(dsn, ALL) as client:
        answer = await client.post(
            "/jobs/prioritize", data={"id": [str(each) for each in (first, second, running)], "priority": "-7"}
        )
        said = (await client.get(answer.headers["location"])).text
        assert "2 jobs given priority -7; 1 job left: only those that wait" in said
    rows = await db.fetch("SELECT id, priority FROM pgworkd.jobs")
    assert dict(rows) == {first: -7, second: -7, running: 1, other: 3}
    audit = await db.fetch("SELECT job_id, before::text, after::text FROM pgworkd.audit WHERE what = 'edit'")
    assert {tuple(row) for row in audit} == {(each, '{"priority": 0}', '{"priority": -7}') for each in (first, second)}
    claimed = await v.claim(db, worker_id, 5)
    assert [row["id"] for row in claimed] == [other]


async def test_a_thousand_jobs_get_another_priority_at_once(dsn: str, db: Db) -> None:
    ids = await v.insert(db, 1000)
    async with viewing(dsn, ALL) as client:
        answer = await client.post("/jobs/prioritize", data={"id": [str(each) for each in ids], "priority": "5"})
        assert answer.status_code == 303, answer.text
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE priority = 5") == 1000


async def test_a_queue_that_nobody_knows_is_not_paused(dsn: str, db: Db) -> None:
    async with viewing(dsn, ALL) as client:
        assert "<form" not in (await client.get("/queues/misspelt")).text.partition("<main")[2].partition("</main")[0]
        answer = await client.post("/queues/misspelt/pause", data={"back": "/"})
        assert (answer.status_code, "no live job" in answer.text) == (404, True)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.queues") == 0
