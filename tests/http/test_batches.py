"""Trees of batches over HTTP: what the async service's nine routes did."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest
from anyio.to_thread import run_sync

from pgworkd.client import batch
from pgworkd.errors import UsageError
from pgworkd.gateway.api.request import batch_waits
from tests.kits import verbs
from tests.kits.cli import invoke
from tests.kits.daemon import running, until
from tests.kits.gateway import also, calling, token
from tests.stories.test_10_payroll import Payroll

Db: TypeAlias = "asyncpg.Connection[Any]"
EMPLOYEES = 25
PAYROLL = {
    "name": "payroll",
    "kind": "calculate",
    "dedupe_key": "2026-11",
    "on_complete": {"queue": "report", "payload": {"month": 11}},
    "children": [{"name": "cheques", "kind": "send_cheque", "stream": True, "final": True}],
    "payloads": [{"employee": n} for n in range(EMPLOYEES)],
    "sealed": True,
}
_CANCEL = "SELECT pgworkd.cancel(ARRAY(SELECT id FROM pgworkd.jobs WHERE batch_id = ANY ($1::uuid[])))"


async def test_the_payroll_story_in_one_call(dsn: str) -> None:
    payroll = Payroll()
    async with calling(dsn) as call:
        made = await call("POST", "/v1/batches", PAYROLL)
        assert made.status_code == 201
        root = made.json()["id"]
        assert set(made.json()["ids"]) == {"payroll", "payroll/cheques"}
        again = await call("POST", "/v1/batches", PAYROLL)
        assert (again.status_code, again.json()["id"], again.json()["created"]) == (200, root, False)

        async with running(payroll.app, dsn):
            await until(lambda: bool(payroll.reports))
        assert sorted(payroll.cheques) == [(n, 1000 + n) for n in range(EMPLOYEES)]
        facts = {"completed": 2 * EMPLOYEES, "dead": 0, "cancelled": 0, "state": "completed"}
        assert payroll.reports == [{"month": 11, "batch": {"id": root, "name": "payroll", **facts}}]

        tree = await call.ok("GET", f"/v1/batches/{root}")
        assert [(each["name"], each["state"], each["done"]) for each in (tree, *tree["below"])] == [
            ("payroll", "completed", EMPLOYEES),
            ("cheques", "completed", EMPLOYEES),
        ]
        results, cursor = [], ""
        while cursor is not None:
            page = await call.ok("GET", f"/v1/batches/{root}/results?limit=10{cursor and '&cursor=' + cursor}")
            results += page["results"]
            cursor = page["next"]
        assert {each["result"] for each in results} == {f"cheque {n}" for n in range(EMPLOYEES)}
        closed = await call.problem("POST", f"/v1/batches/{root}/jobs", {"payloads": [{}]})
        assert closed[:2] == (409, "batch-closed")
        assert (await call.ok("DELETE", f"/v1/batches/{root}"))["deleted"] == 2
        assert (await call.problem("GET", f"/v1/batches/{root}"))[:2] == (404, "not-found")


async def test_a_batch_filled_step_by_step(dsn: str) -> None:
    async with calling(dsn) as call:
        root = (await call.ok("POST", "/v1/batches", {"name": "month", "queue": "q"}))["id"]
        child = await call("POST", f"/v1/batches/{root}/children", {"name": "a", "payloads": [{}, {}]})
        assert child.status_code == 201
        same = await call("POST", f"/v1/batches/{root}/children", {"name": "a"})
        assert (same.status_code, same.json()["id"]) == (200, child.json()["id"])
        more = {
            "content": '{"payloads": [{"x": 1.10}], "priority": 4}',
            "headers": {"Content-Type": "application/json"},
        }
        ids = (await call.ok("POST", f"/v1/batches/{root}/jobs", **more))["ids"]
        assert '"x": 1.10' in (await call("GET", f"/v1/jobs/{ids[0]}")).text
        assert await call.ok("POST", f"/v1/batches/{root}/seal") == {"id": root, "sealed": True}
        assert await call.ok("POST", f"/v1/batches/{root}/seal") == {"id": root, "sealed": False}
        done = await call.ok("POST", f"/v1/batches/{root}/cancel")
        assert (done["cancelled"], done["requested"], done["more"]) == (3, 0, False)


async def test_a_fault_anywhere_in_a_tree_creates_nothing(dsn: str, db: Db) -> None:
    tree = {"name": "a", "payloads": [{}], "children": [{"name": "b", "payloads": [{"t": "\0"}]}]}
    async with calling(dsn) as call:
        assert (await call.problem("POST", "/v1/batches", tree))[:2] == (422, "invalid")
        deep: dict[str, Any] = {"name": "leaf"}
        for n in range(40):
            deep = {"name": f"b{n}", "children": [deep]}
        assert (await call.problem("POST", "/v1/batches", deep))[0] in (400, 422)
        assert (await call.problem("POST", f"/v1/batches/{uuid4()}/jobs", {"payloads": [{}]}))[0] == 404
    assert await db.fetchval("SELECT count(*) FROM pgworkd.batches") == 0


async def test_a_tree_needs_the_scope_for_each_queue_in_it(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        narrow = also(call, await token(dsn, {"enqueue": ["a"], "read": ["a"]}))
        for tree in (
            {"name": "b"},
            {"name": "a", "children": [{"name": "x", "queue": "b"}]},
            {"name": "a", "on_complete": {"queue": "b"}},
            {"name": "a", "children": [{"name": "x", "children": [{"name": "y", "kind": "b"}]}]},
        ):
            assert (await narrow.problem("POST", "/v1/batches", tree))[:2] == (403, "forbidden"), tree
        other = (await call.ok("POST", "/v1/batches", {"name": "b"}))["id"]
        for method, path in (("GET", ""), ("POST", "/seal"), ("POST", "/cancel"), ("DELETE", "")):
            assert (await narrow.problem(method, f"/v1/batches/{other}{path}"))[:2] == (404, "not-found")
        assert (await narrow.problem("GET", f"/v1/batches/{other}/results"))[:2] == (403, "forbidden")
        own = (await narrow.ok("POST", "/v1/batches", {"name": "a"}))["id"]
        moved = await narrow.problem("POST", f"/v1/batches/{own}/jobs", {"payloads": [{}], "queue": "b"})
        assert moved[:2] == (403, "forbidden")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.batches") == 2


async def test_a_batch_belongs_to_the_queue_of_its_root(dsn: str, db: Db) -> None:
    def tree(root: str, child: str) -> dict[str, Any]:
        return {"name": root, "children": [{"name": "x", "queue": child, "payloads": [{"secret": 1}], "sealed": True}]}

    async with calling(dsn) as call:
        narrow = also(call, await token(dsn, {scope: ["a"] for scope in ("enqueue", "read", "payload")}))
        theirs = (await call.ok("POST", "/v1/batches", tree("b", "a")))["ids"]["b/x"]
        for method, path, body in (("GET", "", None), ("POST", "/jobs", {"payloads": [{}]}), ("POST", "/cancel", None)):
            assert (await narrow.problem(method, f"/v1/batches/{theirs}{path}", body))[:2] == (404, "not-found")
        ours = await call.ok("POST", "/v1/batches", {**tree("a", "b"), "payloads": [{"mine": 1}], "sealed": True})
        root, child = ours["id"], ours["ids"]["a/x"]
        assert (await narrow.ok("GET", f"/v1/batches/{child}"))["name"] == "x"
        assert (await narrow.problem("POST", f"/v1/batches/{child}/jobs", {"payloads": [{}]}))[:2] == (403, "forbidden")
        worker = await verbs.worker(db)
        for queue in ("a", "b"):
            await verbs.complete(db, await verbs.claim_ids(db, worker, queue=queue))
        found = await narrow.ok("GET", f"/v1/batches/{root}/results?every=true")
        assert [each["payload"] for each in found["results"]] == [{"mine": 1}]
        assert len((await call.ok("GET", f"/v1/batches/{root}/results?every=true"))["results"]) == 2
        shown = await narrow.ok("GET", f"/v1/batches/{root}?wait_s=20")
        assert (shown["finished"], shown["state"], len(shown["below"])) == (True, "completed", 1)


async def test_a_batch_says_how_often_its_jobs_are_tried_and_what_it_is_about(dsn: str, db: Db) -> None:
    """By all doors; jobs that say for themselves are left alone, and streamed ones ask their own batch."""
    meta = '{"by": "ann", "amount": 1.10}'
    child = {"name": "child", "stream": True, "max_attempts": 5, "meta": {"of": "child"}}
    async with calling(dsn) as call:
        body = {"name": "http", "queue": "q", "max_attempts": 7, "payloads": [{}], "children": [child]}
        content = json.dumps(body)[:-1] + f', "meta": {meta}}}'
        answer = await call(
            "POST", "/v1/batches", content=content.encode(), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 201, answer.text
        root = answer.json()["id"]
        await call.ok("POST", f"/v1/batches/{root}/jobs", {"payloads": [{}], "max_attempts": 2})
        await call.ok(
            "POST", f"/v1/batches/{root}/children", {"name": "late", "meta": {"of": "late"}, "max_attempts": 4}
        )
        (first, *_) = await verbs.claim(db, await verbs.worker(db))
        await verbs.complete(db, [first["id"]])
        shown = await call("GET", f"/v1/batches/{root}")
        assert '"meta":{"by": "ann", "amount": 1.10}' in shown.text
        assert [each["meta"] for each in shown.json()["below"]] == [{"of": "child"}, {"of": "late"}]
        narrow = also(call, await token(dsn, {"read": None}))
        seen = await narrow.ok("GET", f"/v1/batches/{root}")
        assert [each["meta"] for each in (seen, *seen["below"])] == [None] * 3
        assert (await narrow.ok("GET", "/v1/batches"))["batches"][0]["meta"] is None
        assert (await call.ok("GET", "/v1/batches"))["batches"][0]["meta"] == {"by": "ann", "amount": 1.1}
        for wrong in ({"max_attempts": 0}, {"max_attempts": 1001}, {"meta": [1]}):
            assert (await call.problem("POST", "/v1/batches", {"name": "x"} | wrong))[:2] == (422, "invalid")
    made = await batch(db, "python", queue="p", max_attempts=3, meta={"n": 1})
    await made.add([{}])
    assert [each.meta for each in await made.progress()] == ['{"n": 1}']
    for wrong in ({"max_attempts": 0}, {"meta": [1]}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            await batch(db, "python", **wrong)
    by_sql = await db.fetchval("SELECT id FROM pgworkd.create_batch('s', 's', p_max_attempts => 9, p_meta => '{}')")
    await db.execute("SELECT pgworkd.add_jobs($1, ARRAY['{}'::jsonb])", by_sql)
    tried = await db.fetch(
        "SELECT b.name::text, j.max_attempts FROM pgworkd.jobs j JOIN pgworkd.batches b ON b.id = batch_id"
    )
    assert sorted(map(tuple, tried)) == [("child", 5), ("http", 2), ("python", 3), ("s", 9)]
    assert await db.fetchval("SELECT max_attempts FROM pgworkd.finished_jobs") == 7


async def test_a_key_of_a_tree_is_kept_with_it_by_a_word(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        body = {"name": "http", "queue": "q", "dedupe_key": "k", "dedupe_for": "kept", "sealed": True}
        made = (await call.ok("POST", "/v1/batches", body))["id"]
        await until(lambda: db.fetchval("SELECT tree_finished_at IS NOT NULL FROM pgworkd.batches"))
        assert (await call.ok("POST", "/v1/batches", body))["id"] == made
        for wrong in (
            {"dedupe_for": "ever"},
            {"dedupe_for_s": 3.0},
            {"dedupe_key": None},
            {"dedupe_until": "2100-01-01T00:00:00Z"},
        ):
            assert (await call.problem("POST", "/v1/batches", body | wrong))[:2] == (422, "invalid")
    again = await batch(db, "http", queue="q", dedupe_key="k", dedupe_for="kept")
    assert (str(again.id), again.created) == (made, False)
    other = await batch(db, "python", dedupe_key="k", dedupe_for="kept")
    kept = await db.fetch("SELECT id FROM pgworkd.batches WHERE dedupe_until = 'infinity' ORDER BY id")
    assert [str(row[0]) for row in kept] == [made, str(other.id)]
    shown = await run_sync(lambda: invoke(["keys"], env={"PGWORKD_DSN": dsn}))
    assert shown.stdout.splitlines()[1].split()[:4] == ["k", "q", "http", "-"]


@pytest.mark.parametrize("door", ["http", "command"])
async def test_a_tree_is_deleted_with_its_items_whatever_its_state(dsn: str, db: Db, door: str) -> None:
    """In steps, each of which is audited; what runs is waited for, and another tree keeps its items."""
    made = {}
    for name in ("gone", "kept"):
        root = await batch(db, name, queue="q")
        child = await root.child("child", queue="q")
        made[name] = root
        for each in (root, child):
            await each.add([{"n": n} for n in range(4)])
    worker = await verbs.worker(db)
    ids = [row["id"] for row in await verbs.claim(db, worker, 16)]
    await verbs.complete(db, ids[0::4])
    await verbs.fail(db, ids[1::4], permanent=True)
    gone, kept = made["gone"].id, made["kept"].id

    async def running() -> bool:
        return bool(await db.fetchval("SELECT count(*) > 0 FROM pgworkd.jobs WHERE cancel_requested_at IS NOT NULL"))

    async def stop() -> None:
        await until(running)
        left = await db.fetch("SELECT id FROM pgworkd.jobs WHERE cancel_requested_at IS NOT NULL")
        await verbs.end(db, [row[0] for row in left])

    async with calling(dsn) as call, asyncio.TaskGroup() as tasks:
        tasks.create_task(stop())
        if door == "http":
            path = f"/v1/batches/{gone}"
            assert (await call.problem("DELETE", f"{path}?items=true"))[:2] == (409, "batch-closed")
            narrow = also(call, await token(dsn, {"enqueue": None}))
            assert (await narrow.problem("DELETE", f"{path}?items=true"))[:2] == (403, "forbidden")
            steps = [await call.ok("DELETE", f"{path}?items=true&cancel=true")]
            while steps[-1]["more"]:
                await asyncio.sleep(0.02)
                steps.append(await call.ok("DELETE", f"{path}?items=true&cancel=true"))
            assert (sum(each["items"] for each in steps), steps[-1]["deleted"]) == (8, 2)
        else:
            args = ["batches", "delete", str(gone), "--items", "--cancel"]
            asked = await run_sync(lambda: invoke(args, env={"PGWORKD_DSN": dsn}))
            assert (asked.exit_code, "add --yes" in asked.stderr) == (2, True)
            done = await run_sync(lambda: invoke([*args, "--yes"], env={"PGWORKD_DSN": dsn}))
            assert done.stdout == "2 batches deleted, with 8 jobs\n", done.stderr
    of_tree = "SELECT count(*) FROM pgworkd.all_jobs j JOIN pgworkd.batches b ON b.id = j.batch_id WHERE b.root_id = $1"
    assert (await db.fetchval(of_tree, kept), await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs")) == (8, 8)
    noted = await db.fetch("SELECT before FROM pgworkd.audit WHERE what = 'delete_batch' ORDER BY id")
    facts = [json.loads(row[0]) for row in noted]
    assert sum(each.get("items", 0) for each in facts) == 8
    assert facts[-1] == {"batch": str(gone), "name": "gone"}


async def test_a_cursor_that_is_none_is_refused(dsn: str) -> None:
    async with calling(dsn) as call:
        root = (await call.ok("POST", "/v1/batches", {"name": "a"}))["id"]
        for cursor in ("x", f"{uuid4()}", f"{uuid4()}.x", "%00"):
            assert (await call.problem("GET", f"/v1/batches/{root}/results?cursor={cursor}"))[:2] == (422, "invalid")


async def test_the_job_after_a_batch_keeps_its_digits_and_its_meta(dsn: str, db: Db) -> None:
    payload, meta = '{"n":12345678901234567890.123456789,"amount":1.10,"big":1e400}', '{"trace":{"t":1.50}}'
    text = f'"queue": "report", "payload": {payload}, "meta": {meta}'
    for what in ("on_complete", "on_failure"):
        body = f'{{"name": "{what}", "queue": "q", "{what}": {{{text}}}, "sealed": true}}'
        async with calling(dsn) as call:
            headers = {"Content-Type": "application/json"}
            refused = await call("POST", "/v1/batches", content=body, headers=headers)
            assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, f"/{what}/payload/big")
            body = body.replace(',"big":1e400', "")
            made = await call("POST", "/v1/batches", content=body, headers=headers)
            assert made.status_code == 201, made.text
        stored = await db.fetchval("SELECT to_jsonb(b) ->> $1 FROM pgworkd.batches b WHERE name = $1", what)
        assert "12345678901234567890.123456789" in stored
        assert '"meta": {"trace": {"t": 1.50}}' in stored
        assert '"amount": 1.10' in stored


async def test_trees_are_found_by_name_key_and_queue(dsn: str) -> None:
    async with calling(dsn) as call:
        made = {}
        for name, key, queue in (("a", "1", "p"), ("a", "2", "p"), ("a", "1", "q"), ("b", None, "p")):
            body = {"name": name, "dedupe_key": key, "queue": queue, "children": [{"name": "below"}], "payloads": [{}]}
            made[name, key, queue] = (await call.ok("POST", "/v1/batches", body))["id"]
        newest = list(reversed(made.values()))

        async def found(query: str) -> list[str]:
            return [each["id"] for each in (await call.ok("GET", f"/v1/batches?{query}"))["batches"]]

        assert await found("") == newest
        for query in (
            "name=a&dedupe_key=1",
            "queue=p",
            "name=b",
            "dedupe_key=2",
            "name=a&dedupe_key=1&queue=q",
            "name=x",
        ):
            wanted = dict(pair.split("=") for pair in query.split("&"))
            assert await found(query) == [
                id_
                for (name, key, queue), id_ in reversed(made.items())
                if wanted.items() <= {"name": name, "dedupe_key": key, "queue": queue}.items()
            ], query
        await call.ok("POST", f"/v1/batches/{newest[0]}/cancel")
        assert await found("state=running") == newest[1:]
        assert await found("state=cancelled&name=b") == newest[:1]
        assert await found("state=completed") == []
        assert (await call.problem("GET", "/v1/batches?state=open"))[:2] == (422, "invalid")
        first = await call.ok("GET", "/v1/batches?limit=3")
        rest = await call.ok("GET", f"/v1/batches?limit=3&cursor={first['next']}")
        assert [each["id"] for each in first["batches"] + rest["batches"]] == newest
        assert rest["next"] is None
        assert (first["batches"][0]["batches"], first["batches"][0]["total"]) == (2, 1)
        narrow = also(call, await token(dsn, {"read": ["q"]}))
        assert (await narrow.problem("GET", "/v1/batches"))[:2] == (403, "forbidden")
        assert len((await narrow.ok("GET", "/v1/batches?queue=q"))["batches"]) == 1


async def test_a_wait_ends_with_the_tree(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_waits, "PERIOD_S", 0.01)
    below = [{"name": name, "sealed": True, "payloads": [{}]} for name in ("b", "c")]
    tree = {"name": "a", "queue": "q", "sealed": True, "payloads": [{}], "children": below}
    async with calling(dsn) as call:
        ids = (await call.ok("POST", "/v1/batches", tree))["ids"]
        gateway = call.client._transport.app.gateway  # type: ignore[attr-defined]
        assert (await call.ok("GET", f"/v1/batches/{ids['a']}?wait_s=0.05"))["state"] == "sealed"
        await until(lambda: not gateway.batch_waits._wanted.is_set())
        async with asyncio.TaskGroup() as tasks:
            waits = {name: tasks.create_task(call.ok("GET", f"/v1/batches/{ids[name]}?wait_s=60")) for name in ids}
            await until(lambda: gateway.waits.taken == len(ids))
            await db.execute(_CANCEL, [ids["a"], ids["a/b"]])
            assert (await waits["a/b"])["done"] == 1
            assert not waits["a"].done()
            await db.execute(_CANCEL, [ids["a/c"]])
            ended = await waits["a"]
        assert [each["state"] for each in (ended, *ended["below"])] == ["completed with failures"] * 3
        assert (await call.ok("GET", f"/v1/batches/{ids['a']}?wait_s=60"))["done"] == 1
