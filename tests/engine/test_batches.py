"""Application code creates, fills and seals batches on its own connection, with any driver."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.client import Batch, NewJob, Progress, batch, columns
from pgworkd.database import schema
from pgworkd.errors import InvalidPayload, PermanentError, UsageError
from tests.kits.daemon import running, until
from tests.kits.drivers import in_a_transaction, in_autocommit, psycopg_sync, settled
from tests.kits.verbs import Db

NOBODY = UUID(int=7)


async def jobs_of(db: Db, batch_id: UUID) -> list[asyncpg.Record]:
    return await db.fetch("SELECT * FROM pgworkd.jobs WHERE batch_id = $1 ORDER BY id", batch_id)


@in_autocommit
async def test_each_driver_can_create_a_batch_tree(
    opener: Any, dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "STATEMENT_ROWS", 2)
    async with opener(dsn, autocommit=True) as caller:
        root = await settled(
            batch(caller.conn, "payroll", kind="calculate", dedupe_key="11", on_complete={"queue": "r"})
        )
        child = await settled(root.child("cheques", kind="send", queue="mail", stream=True, final=True))
        assert await settled(root.add([])) == []
        ids = await settled(root.add({"n": n} for n in range(5)))
        assert [row["id"] for row in await jobs_of(db, root.id)] == ids
        assert await settled(root.seal()) is True
        assert await settled(root.seal()) is False
        assert await settled(root.progress()) == [
            Progress(root.id, "payroll", 0, "sealed", 5, 0, 0, 0, 0),
            Progress(child.id, "cheques", 1, "open", 0, 0, 0, 0, 0),
        ]
        again = await settled(batch(caller.conn, "payroll", kind="calculate", dedupe_key="11"))
        assert (again.id, again.created, root.created) == (root.id, False, True)
        assert await settled(Batch(caller.conn, root.id).cancel()) == (5, 0, False)
    states = await db.fetch("SELECT name, state, queue, kind, stream, final FROM pgworkd.batch_tree($1)", root.id)
    assert [tuple(row) for row in states] == [
        ("payroll", "cancelled", "calculate", "calculate", False, False),
        ("cheques", "cancelled", "mail", "send", True, True),
    ]


@in_a_transaction
async def test_a_tree_commits_and_rolls_back_with_the_callers_transaction(
    opener: Any, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=False) as caller:
        root = await settled(batch(caller.conn, "b"))
        await settled(root.add([{"n": 1}]))
        assert await db.fetchval("SELECT count(*) FROM pgworkd.batches") == 0
        await settled(caller.rollback())
    assert await db.fetchval("SELECT count(*) FROM pgworkd.batches") == 0
    assert await db.fetchval("SELECT count(*) FROM pgworkd.batch_additions") == 0


async def test_the_context_manager_seals_the_batch_unless_it_raises(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with psycopg_sync(dsn, autocommit=True) as caller:
        with batch(caller.conn, "sync") as root, root.child("static") as static:
            static.add([{}])
            root.add([{}])
            root.child("streamed", stream=True).add([])
        assert [each.state for each in root.progress()] == ["sealed", "sealed", "open"]
    with pytest.raises(ZeroDivisionError):
        async with batch(db, "async") as failing:
            raise ZeroDivisionError
    assert [each.state for each in await failing.progress()] == ["open"]


async def test_omitted_fields_are_inherited_from_the_batch(db: asyncpg.Connection[Any]) -> None:
    root = await batch(db, "b", kind="k", queue="q")
    at = datetime(2030, 1, 1, tzinfo=UTC)
    usual = await root.add([{"n": 1}])
    options = {"kind": "k2", "queue": "q2", "priority": 7, "run_at": at, "max_attempts": 9, "timeout_s": 1.5}
    other = await root.add([{"n": 2}], **options, meta={"tag": 1})
    rows = {row["id"]: row for row in await jobs_of(db, root.id)}
    assert (rows[usual[0]]["queue"], rows[usual[0]]["kind"], rows[usual[0]]["max_attempts"]) == ("q", "k", None)
    assert {name: rows[other[0]][name] for name in options} == options
    assert rows[other[0]]["meta"] == '{"tag": 1}'


async def test_the_app_resolves_queues_of_kinds_and_stream_functions(db: asyncpg.Connection[Any]) -> None:
    app = App()
    app.handler("calculate", queue="numbers")(lambda: None)
    app.handler("send", queue="mail")(lambda: None)
    app.stream("payroll", "cheques", max_attempts=7)(lambda given, result: None)
    root = await app.batch(db, "payroll", kind="calculate")
    await root.child("cheques", kind="send", stream=True)
    await root.child("notes", kind="unheard of", stream=True)
    rows = await db.fetch("SELECT name, queue, kind, stream_kind FROM pgworkd.batches ORDER BY id")
    assert [tuple(row) for row in rows] == [
        ("payroll", "numbers", "calculate", None),
        ("cheques", "mail", "send", "payroll -> cheques"),
        ("notes", "unheard of", "unheard of", None),
    ]
    assert app.queues().keys() == {"numbers", "mail"}, "a stream function has no pool of its own"
    assert app.handlers["payroll -> cheques"].max_attempts == 7


async def test_callbacks_are_stored_as_job_templates(db: asyncpg.Connection[Any]) -> None:
    @dataclass
    class Month:
        month: int

    told = NewJob(
        "report", Month(11), kind="k", priority=3, max_attempts=1, timeout_s=2.0, meta={"m": 1}, limit_key="l"
    )
    async with batch(db, "b", on_complete=told, on_failure={"queue": "alarm", "serialize_key": "s"}) as root:
        await root.add([{}], max_attempts=1)
    await db.execute("SELECT pgworkd.cancel(ARRAY(SELECT id FROM pgworkd.jobs))")
    async with batch(db, "c", on_complete=told):
        pass
    alarm, report = await db.fetch("SELECT * FROM pgworkd.jobs ORDER BY id")
    assert (alarm["queue"], alarm["serialize_key"]) == ("alarm", "s")
    assert [
        report[name] for name in ("queue", "kind", "priority", "max_attempts", "timeout_s", "meta", "limit_key")
    ] == ["report", "k", 3, 1, 2.0, '{"m": 1}', "l"]
    assert '"month": 11' in report["payload"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": ""}, "name must be text of 1 to 200 characters"),
        ({"queue": "x" * 201}, "queue must be text"),
        ({"kind": 7}, "kind must be text"),
        ({"dedupe_key": ""}, "dedupe_key must be text of 1 to 512"),
        ({"max_failures": -1}, "max_failures must be an int from 0"),
        ({"on_complete": {"kind": "k"}}, "on_complete is not a job: .*'queue'"),
        ({"on_complete": {"queue": ""}}, "on_complete.queue must be text"),
        ({"on_failure": {"queue": "q", "delay": 5}}, "on_failure.delay has no meaning .* drop it"),
        ({"on_failure": {"queue": "q", "payload": {"a": {1}}}}, "on_failure.payload.a"),
    ],
)
async def test_bad_arguments_are_refused_before_the_database(options: dict[str, Any], says: str, db: Db) -> None:
    with pytest.raises(UsageError, match=says):
        batch(db, **{"name": "b", **options})


async def test_invalid_payloads_are_reported_with_their_path(db: asyncpg.Connection[Any]) -> None:
    root = await batch(db, "b")
    with pytest.raises(InvalidPayload, match=r"payloads\[1\]\.name"):
        root.add([{}, {"name": float("nan")}])
    with pytest.raises(UsageError, match="max_attempts must be an int"):
        root.add([{}], max_attempts=0)
    with pytest.raises(UsageError, match="cannot enqueue on a str"):
        batch("postgresql://", "b")
    assert await jobs_of(db, root.id) == []


async def test_the_database_refuses_invalid_batch_operations(db: asyncpg.Connection[Any]) -> None:
    async with batch(db, "b") as root:
        pass
    for refused in (root.add([{}]), root.child("late"), Batch(db, NOBODY).add([{}]), Batch(db, NOBODY).seal()):
        with pytest.raises(asyncpg.PostgresError) as error:
            await refused
        assert error.value.sqlstate == "PW003"
    assert await Batch(db, NOBODY).progress() == []


ENDS = {
    "completed": ("completed", {}),
    "dead": ("completed with failures", {}),
    "expired": ("completed with failures", {}),
    "cancelled": ("cancelled", {}),
    "too many failures": ("cancelled", {"max_failures": 0}),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_loop_that_waits_for_a_tree_ends_with_it(dsn: str, db: asyncpg.Connection[Any], end: str) -> None:
    """As the docs show it: whatever becomes of the jobs."""
    app = App()

    @app.handler("one")
    async def one(payload: dict[str, Any]) -> None:
        if end in ("dead", "too many failures") and payload.get("n") == 1:
            raise PermanentError("no")
        if end in ("cancelled", "too many failures"):
            await anyio.sleep_forever()

    state, options = ENDS[end]
    async with running(app, dsn):
        # in one transaction, so that none runs before it is to expire
        async with db.transaction(), app.batch(db, "b", kind="one", **options) as tree:
            ids = await tree.add({"n": n} for n in range(3))
            child = await tree.child("c", kind="one", stream=True)
            if end == "expired":
                await db.execute(
                    "UPDATE pgworkd.jobs SET run_at = now() + '1 h', expires_at = now() WHERE id = $1", ids[0]
                )
            assert not all(progress.finished for progress in await tree.progress())
        if end == "cancelled":
            await tree.cancel()

        async def finished() -> bool:
            return all(progress.finished for progress in await tree.progress())

        await until(finished)
        assert (await tree.progress())[0].state == state
        assert await db.fetchval("SELECT tree_finished_at IS NOT NULL FROM pgworkd.batches WHERE id = $1", tree.id)
        assert await db.fetchval("SELECT finished_at IS NOT NULL FROM pgworkd.batches WHERE id = $1", child.id)


def test_every_state_that_the_database_knows_is_finished_or_not() -> None:
    view = schema.text().partition("CREATE OR REPLACE VIEW batch_progress")[2].partition(" AS state,")[0]
    states = dict.fromkeys(re.findall(r"(?:THEN|ELSE) '([a-z ]+)'", view))
    assert [each for each in states if Progress(NOBODY, "b", 0, each, 0, 0, 0, 0, 0).finished] == [
        "cancelled",
        "completed with failures",
        "completed",
    ]
    assert len(states) == 6
