"""`dedupe_by="payload"` over each door: one job per kind and payload, by a key that SQL alone makes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import psycopg
import pytest
from anyio.to_thread import run_sync

from pgworkd.client import NewJob, Workflow, enqueue, enqueue_many, enqueue_once
from pgworkd.errors import UsageError
from tests.kits.cli import invoke
from tests.kits.gateway import Caller, calling

Db: TypeAlias = "asyncpg.Connection[Any]"
Door: TypeAlias = "Callable[[Caller, Db, str, str], Awaitable[Any]]"

PAYLOADS = {
    "plain": '{"b": {"d": 1, "c": [1.5, null]}, "a": "\u00fc"}',
    "turned": '{"a":"\u00fc","b":{"c":[1.5,null],"d":1}}',
}
OTHERS = ('{"a": "\u00fc"}', '{"b": {"d": 1, "c": [1.50, null]}, "a": "\u00fc"}', "{}")
"""Payloads that are not the same: the digits of a number count."""
REMEDIES = {"kind": "k", "dedupe_by": "payload"}


async def python(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    return await enqueue(db, "q", json.loads(payload), kind="k", dedupe_by="payload")


async def many(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    return await enqueue_many(db, [NewJob("q", json.loads(payload), kind="k", dedupe_by="payload"), NewJob("other")])


async def workflow(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    flow = Workflow()
    flow.add("a", "q", json.loads(payload), kind="k", dedupe_by="payload")
    return await flow.enqueue(db)


async def once(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    return await enqueue_once(db, uuid4(), "q", json.loads(payload), kind="k", dedupe_by="payload")


async def sync(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    def insert() -> Any:
        with psycopg.connect(dsn) as connection:
            return enqueue(connection, "q", json.loads(payload), kind="k", dedupe_by="payload")

    return await run_sync(insert)


async def sql(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    return await db.fetchrow("SELECT * FROM pgworkd.enqueue('q', $1, 'k', p_dedupe_by => 'payload')", payload)


async def plain_insert(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    return await db.execute(
        "INSERT INTO pgworkd.jobs (queue, kind, payload, dedupe_key)"
        " SELECT 'q', 'k', new.payload, pgworkd.payload_key('k', new.payload)"
        " FROM (VALUES ($1::jsonb)) AS new (payload)",
        payload,
    )


async def http(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    body = f'{{"queue": "q", "kind": "k", "dedupe_by": "payload", "payload": {payload}}}'
    return await answered(call, "POST", "/v1/jobs", body)


async def put(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    body = f'{{"queue": "q", "kind": "k", "dedupe_by": "payload", "payload": {payload}}}'
    return await answered(call, "PUT", f"/v1/jobs/{uuid4()}", body)


async def bulk(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    body = f'{{"jobs": [{{"queue": "q", "kind": "k", "dedupe_by": "payload", "payload": {payload}}}]}}'
    return await answered(call, "POST", "/v1/jobs/bulk", body)


async def command(call: Caller, db: Db, dsn: str, payload: str) -> Any:
    args = ["enqueue", "q", payload, "--kind", "k", "--dedupe-by", "payload", "--on-duplicate", "raise"]
    found = await run_sync(lambda: invoke(args, env={"PGWORKD_DSN": dsn}))
    if found.exit_code:
        raise asyncpg.UniqueViolationError(found.stderr)
    return found.stdout


async def answered(call: Caller, method: str, path: str, body: str) -> Any:
    answer = await call(method, path, content=body.encode(), headers={"Content-Type": "application/json"})
    if answer.status_code == 409:
        raise asyncpg.UniqueViolationError(answer.text)
    assert answer.status_code == 201, answer.text
    return answer.json()


DOORS: dict[str, Door] = {
    each.__name__: each for each in (python, many, workflow, once, sync, sql, plain_insert, http, put, bulk, command)
}


@pytest.mark.parametrize("door", DOORS)
async def test_each_door_makes_the_key_that_every_other_finds_taken(dsn: str, db: Db, door: str) -> None:
    async with calling(dsn) as call:
        await DOORS[door](call, db, dsn, PAYLOADS["plain"])
        for other in DOORS.values():
            with pytest.raises((asyncpg.UniqueViolationError, psycopg.errors.UniqueViolation)):
                await other(call, db, dsn, PAYLOADS["turned"])
    keys = await db.fetch("SELECT dedupe_key, pgworkd.payload_key(kind, payload) FROM pgworkd.jobs WHERE queue = 'q'")
    assert [row[0] for row in keys] == [row[1] for row in keys]
    assert len(keys) == 1


async def test_another_payload_or_kind_is_another_job_and_an_ended_one_frees_the_key(dsn: str, db: Db) -> None:
    async with calling(dsn) as call:
        for payload in (PAYLOADS["plain"], *OTHERS):
            await sql(call, db, dsn, payload)
        same = json.loads(PAYLOADS["plain"])
        for kind in (None, "other"):
            await enqueue(db, "q", same, kind=kind, dedupe_by="payload")
        found = await enqueue(db, "q", same, kind="q", dedupe_by="payload", on_duplicate="skip")
        assert not found.created  # without a kind it is the queue's own
        assert (await enqueue(db, "q2", same, kind="k", dedupe_by="payload", on_duplicate="skip")).created
        await db.execute("SELECT pgworkd.cancel($1)", [found.id])
        assert (await enqueue(db, "q", same, dedupe_by="payload", on_duplicate="skip")).created
        taken = await call(
            "POST", "/v1/jobs", {"queue": "q", "payload": same, "dedupe_by": "payload", "on_duplicate": "skip"}
        )
        assert (taken.status_code, taken.json()["created"]) == (200, False)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dedupe_by": "payload", "dedupe_key": "k"}, "dedupe_by and dedupe_key are both given: pass one of them"),
        ({"dedupe_by": "kind"}, 'dedupe_by must be "payload"'),
        ({"dedupe_for": 3}, "dedupe_for needs a dedupe_key"),
    ],
)
async def test_bad_combinations_are_refused(dsn: str, db: Db, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        await enqueue(db, "q", {}, **options)
    names = {"dedupe_for": "p_dedupe_for_s"}
    if "dedupe_by" in options:
        given = ", ".join(f"{names.get(name, 'p_' + name)} => '{value}'" for name, value in options.items())
        with pytest.raises(asyncpg.InvalidParameterValueError, match=r"p_dedupe_"):
            await db.execute(f"SELECT pgworkd.enqueue('q', '{{}}', {given})")
