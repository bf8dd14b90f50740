"""The stack of a running job over HTTP: POST asks, GET reads what its worker has answered."""

from __future__ import annotations

from tests.kits import verbs as v
from tests.kits.gateway import also, calling, token
from tests.kits.pages import NASTY, viewing
from tests.kits.verbs import Db


async def test_post_asks_and_get_reads(dsn: str, db: Db) -> None:
    job_id, worker_id = await v.one(db), await v.worker(db, 3600, "w7")
    await v.claim(db, worker_id)
    async with calling(dsn, {"operate": ["q"]}) as call:
        path = f"/v1/jobs/{job_id}/stack"
        nothing = await call("GET", path)
        assert (nothing.status_code, nothing.json()["type"]) == (404, "/v1/problems/not-found")
        assert "POST asks for one" in nothing.json()["detail"]
        asked = await call("POST", path)
        assert asked.status_code == 202
        facts = {"id": str(job_id), "attempt": 1, "worker_id": worker_id, "worker": "w7", "running": True}
        assert asked.json().items() >= (facts | {"stack": None, "answered_at": None}).items()
        answer = "SELECT pgworkd.answer_stack($1, 1, $2, $3, 'in handle')"
        assert await db.fetchval(answer, job_id, worker_id, await v.token(db, worker_id))
        read = await call("GET", path)
        assert read.status_code == 200
        assert read.json().items() >= (facts | {"stack": "in handle"}).items()
        assert read.json()["answered_at"] is not None
        await v.complete(db, [job_id])
        again = await call("POST", path)
        assert (again.status_code, again.json()["type"]) == (409, "/v1/problems/conflict")
        assert f"job {job_id} is completed: only a running job has a stack" in again.json()["detail"]
        assert not (await call("GET", path)).json()["running"]


async def test_only_who_may_operate_the_queue_asks_or_reads(dsn: str, db: Db) -> None:
    job_id, worker_id = await v.one(db), await v.worker(db, 3600)
    await v.claim(db, worker_id)
    async with calling(dsn, {"operate": ["other"]}) as call:
        everything_else = {"read": None, "payload": None, "enqueue": None, "metrics": None}
        for caller, code in ((call, 404), (also(call, await token(dsn, everything_else)), 403)):
            for method in ("POST", "GET"):
                assert (await caller(method, f"/v1/jobs/{job_id}/stack")).status_code == code
    assert await db.fetchval("SELECT count(*) FROM pgworkd.stack_requests") == 0


async def test_a_page_shows_a_stack_to_who_may_operate_the_queue(dsn: str, db: Db) -> None:
    """Hostile text is escaped; the button is there while the job runs."""
    job_id, worker_id = await v.one(db), await v.worker(db, 3600)
    await v.claim(db, worker_id)
    await db.execute("SELECT pgworkd.ask_stack($1, $2)", job_id, NASTY)
    answer = "SELECT pgworkd.answer_stack($1, 1, $2, $3, $4)"
    await db.fetchval(answer, job_id, worker_id, await v.token(db, worker_id), f"in {NASTY}")
    page, act = f"/jobs/{job_id}", f"/jobs/{job_id}/stack"
    for scopes, may in (({"read": None, "operate": ["q"]}, True), ({"read": None, "operate": ["other"]}, False)):
        async with viewing(dsn, scopes) as browser:
            shown = (await browser.get(page)).text
            assert (act in shown, "Where in its code" in shown) == (may, may)
            assert "<script>alert" not in shown
            sent = await browser.post(act, data={"back": page}, headers={"Origin": "http://localhost"})
            assert sent.status_code == (303 if may else 404)
    await v.complete(db, [job_id])
    async with viewing(dsn) as browser:
        assert act not in (shown := (await browser.get(page)).text)
        assert "The attempt ended before it answered." in shown
        refused = await browser.post(act, data={"back": page}, headers={"Origin": "http://localhost"})
        assert refused.status_code == 409
        assert "only a running job has a stack" in refused.text
