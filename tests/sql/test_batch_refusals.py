"""What a batch refuses, with a SQLSTATE of its own and a remedy; and invalid arguments of batches."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, cast

import asyncpg
import pytest

from tests.kits.batches import add, batch, cancel_batch, counts, create, seal, sealed, state
from tests.kits.verbs import BATCH_CLOSED, Db, claim, insert, worker

pytestmark = pytest.mark.usefixtures("t0")


async def _batch_that(db: Db, what: str) -> uuid.UUID:
    """A batch that accepts no more jobs."""
    if what == "does not exist":
        return uuid.uuid4()
    batch_id: uuid.UUID
    batch_id, _ = await sealed(db, 0 if what == "is finished" else 1, "payroll")
    if what == "was cancelled":
        await claim(db, await worker(db))
        await cancel_batch(db, batch_id)
        assert await state(db, batch_id) == ["cancelling"]
    return batch_id


@pytest.mark.parametrize("how", ["add_jobs", "insert", "child"])
@pytest.mark.parametrize("what", ["does not exist", "is sealed", "is finished", "was cancelled"])
async def test_a_closed_batch_refuses_jobs_and_names_its_state(db: Db, what: str, how: str) -> None:
    batch_id = await _batch_that(db, what)
    before = await db.fetchval("SELECT count(*) FROM pgworkd.jobs")
    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "add_jobs": lambda: add(db, batch_id),
        "insert": lambda: insert(db, 2, batch_id=batch_id),
        "child": lambda: batch(db, "child", parent=batch_id),
    }
    with pytest.raises(asyncpg.PostgresError, match=f"{batch_id}.*{what}") as caught:
        await ways[how]()
    error: Any = caught.value
    assert error.sqlstate == BATCH_CLOSED
    assert re.search(r"[Cc]reate another batch|create_batch", error.hint)
    if what != "does not exist":
        assert "payroll" in str(error)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == before


async def test_a_transaction_cannot_add_to_a_batch_it_has_sealed(db: Db) -> None:
    batch_id = await batch(db)
    async with db.transaction():
        await add(db, batch_id)
        await seal(db, batch_id)
        for how in (add, lambda db, batch_id: insert(db, 1, batch_id=batch_id)):
            with pytest.raises(asyncpg.PostgresError, match="is sealed"):
                async with db.transaction():
                    await how(db, batch_id)
    assert await counts(db, batch_id) == (1, 0, 0, 0)


async def test_a_child_belongs_to_the_root_of_its_parent(db: Db) -> None:
    root, other = await batch(db, "root"), await batch(db, "other")
    child = await batch(db, "child", parent=root)
    sql = "INSERT INTO pgworkd.batches (name, parent_id, root_id) VALUES ('x', $1, $2) RETURNING root_id"
    for parent in (root, child):
        with pytest.raises(asyncpg.PostgresError, match="cannot belong to root") as caught:
            await db.execute(sql, parent, other)
        assert caught.value.sqlstate == "22023"
        assert f"{root}" in str(caught.value.hint)
    assert await db.fetchval(sql, child, root) == root
    with pytest.raises(asyncpg.PostgresError, match="cannot belong to root"):
        await db.execute(sql, None, other)
    row = await db.fetchrow("SELECT root_id, depth FROM pgworkd.batches WHERE name = 'x'")
    assert tuple(row or ()) == (root, 2)


async def test_a_batch_is_not_its_own_parent(db: Db) -> None:
    with pytest.raises(asyncpg.PostgresError, match="does not exist"):
        await db.execute("INSERT INTO pgworkd.batches (id, name, parent_id) VALUES ($1, 'x', $1)", uuid.uuid4())


CHILD_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "only_a_child_can_stream"),
    ({"max_failures": -1}, "max_failures_must_not_be_negative"),
    ({"stream_kind": "k"}, "stream_kind_needs_stream"),
    ({"kind": "x" * 201}, "name_must_have_1_to_200_characters"),
    ({"dedupe_key": ""}, "key_must_have_1_to_512_characters"),
]
ROOT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"on_complete": {"queue": "q"}}, "only_a_root_can_call_back"),
    ({"on_failure": {"queue": "q"}}, "only_a_root_can_call_back"),
    ({"dedupe_key": "k"}, "only_a_root_can_have_a_dedupe_key"),
    ({"stream": True, "stream_kind": "k", "kind": "k"}, "stream_kind_must_differ_from_kind"),
    ({"stream": True, "stream_kind": "q"}, "stream_kind_must_differ_from_kind"),
]


@pytest.mark.parametrize(("options", "check"), CHILD_ONLY)
async def test_arguments_that_a_root_refuses(db: Db, options: dict[str, Any], check: str) -> None:
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await create(db, **options)
    assert caught.value.constraint_name == check


@pytest.mark.parametrize(("options", "check"), ROOT_ONLY)
async def test_arguments_that_a_child_refuses(db: Db, options: dict[str, Any], check: str) -> None:
    root = await batch(db)
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await create(db, "child", parent=root, **options)
    assert caught.value.constraint_name == check


@pytest.mark.parametrize("column", ["on_complete", "on_failure"])
@pytest.mark.parametrize(
    ("job", "error"),
    [
        ({}, "names no queue"),
        ({"queue": None}, "names no queue"),
        ({"queue": "q", "quueue": "q"}, 'knows no "quueue"'),
        ({"queue": "q", "batch_id": str(uuid.uuid4())}, 'knows no "batch_id"'),
        ({"queue": "q", "payload": {"batch": 1}}, 'has a payload with "batch"'),
        ({"queue": "q", "payload": {"x": "a" * 1_048_570}}, "larger than 1 MiB"),
        ({"queue": "q", "payload": []}, "value_must_be_a_json_object"),
        ({"queue": ""}, "name_must_have_1_to_200_characters"),
        ({"queue": "q", "kind": ""}, "name_must_have_1_to_200_characters"),
        ({"queue": "q", "max_attempts": 0}, "max_attempts_must_be_1_to_1000"),
        ({"queue": "q", "priority": "high"}, "invalid input syntax for type integer"),
        ({"queue": "q", "serialize_key": "k" * 2000}, "key_must_have_1_to_512_characters"),
    ],
)
async def test_a_callback_that_could_not_be_inserted_is_refused_at_creation(
    db: Db, column: str, job: dict[str, Any], error: str
) -> None:
    with pytest.raises(asyncpg.PostgresError, match=error):
        await create(db, **cast("dict[str, Any]", {column: job}))
    assert await db.fetchval("SELECT count(*) FROM pgworkd.batches") == 0


async def test_a_callback_of_the_maximum_size_is_inserted(db: Db) -> None:
    job = {"queue": "done", "payload": {"x": "a" * 1_048_500}}
    await seal(db, await batch(db, on_complete=job))
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE queue = 'done'") == 1
