"""Keys of jobs of batches over each door: a dedupe key counts in its batch alone, a serialize key in its queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import psycopg
import pytest
from anyio.to_thread import run_sync

from pgworkd.client import Batch, batch, enqueue
from pgworkd.errors import UsageError
from tests.kits import verbs
from tests.kits.batches import counted, counts
from tests.kits.gateway import Caller, also, calling, token

Db: TypeAlias = "asyncpg.Connection[Any]"
Door: TypeAlias = "Callable[[Caller, Db, str, UUID, str], Awaitable[Any]]"
KEYS = {"dedupe_key": "k", "serialize_key": "s"}
LONG = "x" * 475


async def python(call: Caller, db: Db, dsn: str, batch_id: UUID, key: str) -> Any:
    return await Batch(db, batch_id).add([{}], dedupe_key=key, serialize_key="s")


async def listed(call: Caller, db: Db, dsn: str, batch_id: UUID, key: str) -> Any:
    return await Batch(db, batch_id).add([{}], dedupe_key=[key], serialize_key=["s"])


async def sync(call: Caller, db: Db, dsn: str, batch_id: UUID, key: str) -> Any:
    def add() -> Any:
        with psycopg.connect(dsn) as connection:
            return Batch(connection, batch_id).add([{}], dedupe_key=key, serialize_key="s")

    return await run_sync(add)


async def http(call: Caller, db: Db, dsn: str, batch_id: UUID, key: str) -> Any:
    body = {"payloads": [{}], "dedupe_key": key, "serialize_key": ["s"]}
    return await answered(call, f"/v1/batches/{batch_id}/jobs", body)


async def child(call: Caller, db: Db, dsn: str, batch_id: UUID, key: str) -> Any:
    """A tree in one call: its child is refused, where nothing else is, with the job that is refused."""
    body = {"payloads": [{}, {}], "dedupe_key": ["new", "new"]}
    refused = await call.problem("POST", f"/v1/batches/{batch_id}/children", {"name": "c", "jobs": [body]})
    assert refused[:2] == (409, "duplicate-key")
    return await http(call, db, dsn, batch_id, key)


async def function(call: Caller, db: Db, dsn: str, batch_id: UUID, key: str) -> Any:
    sql = "SELECT pgworkd.enqueue(NULL, '{}', p_batch => $1, p_dedupe_key => $2, p_serialize_key => 's')"
    return await db.execute(sql, batch_id, key)


async def insert(call: Caller, db: Db, dsn: str, batch_id: UUID, key: str) -> Any:
    sql = "INSERT INTO pgworkd.jobs (queue, batch_id, dedupe_key, serialize_key) VALUES ('q', $1, $2, 's')"
    return await db.execute(sql, batch_id, key)


async def copy(call: Caller, db: Db, dsn: str, batch_id: UUID, key: str) -> Any:
    columns = ("queue", "payload", "batch_id", "dedupe_key", "serialize_key")
    rows = [("q", "{}", batch_id, key, "s")]
    return await db.copy_records_to_table("jobs", schema_name="pgworkd", columns=columns, records=rows)


async def answered(call: Caller, path: str, body: Any) -> Any:
    answer = await call("POST", path, body)
    if answer.status_code == 409:
        assert "has the dedupe key" in answer.json()["detail"]
        raise asyncpg.UniqueViolationError(answer.text)
    assert answer.status_code == 201, answer.text
    return answer.json()


DOORS: dict[str, Door] = {each.__name__: each for each in (python, listed, sync, http, child, function, insert, copy)}
TAKEN = (asyncpg.UniqueViolationError, psycopg.errors.UniqueViolation)


@pytest.mark.parametrize("door", DOORS)
async def test_a_dedupe_key_counts_in_its_batch_alone_and_each_door_finds_it_taken(dsn: str, db: Db, door: str) -> None:
    one, two = [(await batch(db, name, queue="q")).id for name in ("one", "two")]
    below = (await Batch(db, one).child("below")).id
    async with calling(dsn) as call:
        await enqueue(db, "q", dedupe_key="k")
        for batch_id in (one, two, below):
            await DOORS[door](call, db, dsn, batch_id, "k")
            for other in DOORS.values():
                with pytest.raises(TAKEN):
                    await other(call, db, dsn, batch_id, "k")
        await DOORS[door](call, db, dsn, one, "other")
        await DOORS[door](call, db, dsn, one, LONG)
    found = await db.fetch("SELECT batch_id, dedupe_key, serialize_key FROM pgworkd.jobs ORDER BY created_at, id")
    assert [tuple(row) for row in found] == [
        (None, "k", None),
        *((batch_id, f"{batch_id}/k", "s") for batch_id in (one, two, below)),
        (one, f"{one}/other", "s"),
        (one, f"{one}/{LONG}", "s"),
    ]
    assert [await counts(db, batch_id) for batch_id in (one, two, below)] == [(n, 0, 0, 0) for n in (3, 1, 1)]
    await counted(db)
    # one line of the queue, in the order in which they came
    worker = await verbs.worker(db)
    keyed = [row["id"] for row in await db.fetch("SELECT id FROM pgworkd.jobs WHERE batch_id IS NOT NULL ORDER BY id")]
    ran = []
    while claimed := await verbs.claim_ids(db, worker, 10):
        ran += [job_id for job_id in claimed if job_id in keyed]
        await verbs.complete(db, claimed)
    assert ran == keyed
    async with calling(dsn) as call:
        for batch_id in (one, two, below):  # ended jobs hold no key
            await DOORS[door](call, db, dsn, batch_id, "k")


@pytest.mark.parametrize("word", ["skip", "replace", "reschedule"])
async def test_what_is_added_again_is_what_is_there(dsn: str, db: Db, word: Any) -> None:
    root = await batch(db, "b", queue="q", kind="k", max_attempts=7)
    first = await root.add([{"n": 1}, {"n": 2}], dedupe_key=["a", "b"])
    again = await root.add(
        [{"n": 3}, {"n": 4}, {"n": 5}, {"n": 6}], dedupe_key=["b", "c", "a", "c"], priority=4, on_duplicate=word
    )
    changes = word != "skip"
    assert [each[1:] for each in again] == [(False, changes), (True, False), (False, changes), (False, changes)]
    assert [again[0].id, again[2].id, again[3].id] == [*reversed(first), again[1].id]
    async with calling(dsn) as call:
        body = {"payloads": [{}, {}], "dedupe_key": ["b", "d"], "on_duplicate": "skip"}
        found = await call.ok("POST", f"/v1/batches/{root.id}/jobs", body)
        assert (found["ids"][0], found["created"]) == (str(first[1]), [False, True])
        assert found["changed"] == [False, False]
    rows = await db.fetch("SELECT dedupe_key, payload ->> 'n', priority, kind, max_attempts FROM pgworkd.jobs")
    shown = {row[0][37:]: tuple(row)[1:] for row in rows}
    numbers = {"replace": "536", "reschedule": "124", "skip": "124"}[word]
    low = 4 if changes else 0
    assert shown == {
        "a": (numbers[0], low, "k", 7),
        "b": (numbers[1], low, "k", 7),
        "c": (numbers[2], 4, "k", 7),
        "d": (None, 0, "k", 7),
    }
    assert await counts(db, root.id) == (4, 0, 0, 0)
    assert await root.add([], dedupe_key=[], on_duplicate=word) == []


async def test_a_key_of_a_batch_is_kept_freed_and_made_of_the_payload(dsn: str, db: Db) -> None:
    root = await batch(db, "b", queue="q")
    added = await root.add([{"n": 1}, {"n": 2}, {"n": 1.0}, {"n": 1}], dedupe_by="payload", on_duplicate="skip")
    assert [each.created for each in added] == [True, True, True, False]
    (kept,) = await root.add([{}], dedupe_key="k", dedupe_for=3600)
    await verbs.complete(db, await verbs.claim_ids(db, await verbs.worker(db), 10))
    with pytest.raises(asyncpg.UniqueViolationError):
        await root.add([{}], dedupe_key="k")
    assert (await root.add([{}], dedupe_key="k", on_duplicate="skip"))[0].id == kept
    assert await db.fetchval("SELECT pgworkd.free_key('q', pgworkd.item_key($1, 'k'))", root.id)
    assert (await root.add([{}], dedupe_key="k", on_duplicate="skip"))[0].created
    await counted(db)


async def test_a_tree_in_one_call_has_jobs_with_keys(dsn: str, db: Db) -> None:
    jobs = [
        {"payloads": [{"n": 1}, {"n": 2}], "dedupe_key": ["a", "b"], "serialize_key": "s"},
        {"payloads": [{"n": 3}], "dedupe_key": "b", "on_duplicate": "skip"},
        {"payloads": [{"n": 4}], "queue": "other", "limit_key": "l", "dedupe_key": "a", "dedupe_for_s": 60},
    ]
    tree = {"name": "root", "queue": "q", "jobs": jobs, "children": [{"name": "child", "jobs": jobs[:1]}]}
    async with calling(dsn) as call:
        made = await call.ok("POST", "/v1/batches", tree)
        narrow = also(call, await token(dsn, {"enqueue": ["q"]}))
        assert (await narrow.problem("POST", "/v1/batches", tree))[:2] == (403, "forbidden")
    totals = [await counts(db, UUID(made["ids"][name])) for name in ("root", "root/child")]
    assert totals == [(3, 0, 0, 0), (2, 0, 0, 0)]
    found = await db.fetch("SELECT queue, limit_key, serialize_key FROM pgworkd.jobs ORDER BY queue, id")
    assert [tuple(row) for row in found] == [("other", "l", None), *[("q", None, "s")] * 4]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dedupe_key": LONG + "x"}, "dedupe_key must be text of 1 to 475 characters"),
        ({"dedupe_key": ["a", ""]}, r"dedupe_key\[1\] must be text of 1 to 475 characters"),
        ({"serialize_key": ["a"]}, "serialize_key lists 1 key for 2 payloads"),
        ({"serialize_key": 7}, "serialize_key must be text, or a list with one for each payload"),
        ({"on_duplicate": "skip"}, "on_duplicate needs a dedupe_key"),
        ({"on_duplicate": "drop", "dedupe_key": "k"}, "on_duplicate must be one of"),
        ({"dedupe_for": 3}, "dedupe_for needs a dedupe_key"),
        ({"dedupe_by": "payload", "dedupe_key": "k"}, "dedupe_by and dedupe_key are both given"),
        ({"on_retry": "yield"}, "needs a serialize_key"),
        ({"after": []}, "unexpected keyword argument 'after'"),
    ],
)
async def test_bad_keys_are_refused_and_named(dsn: str, db: Db, options: dict[str, Any], told: str) -> None:
    root = await batch(db, "b", queue="q")
    with pytest.raises((UsageError, TypeError), match=told):
        await root.add([{}, {}], **options)
    async with calling(dsn) as call:
        body = {"dedupe_for_s" if name == "dedupe_for" else name: value for name, value in options.items()}
        path = f"/v1/batches/{root.id}/jobs"
        assert (await call.problem("POST", path, {"payloads": [{}, {}], **body}))[:2] == (422, "invalid")
    for sql in ("INSERT INTO pgworkd.jobs (queue, batch_id, dedupe_key) VALUES ('q', $1, $2)",):
        with pytest.raises(asyncpg.CheckViolationError, match="dedupe_key of a job of a batch must have 1 to 475"):
            await db.execute(sql, root.id, LONG + "x")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 0
