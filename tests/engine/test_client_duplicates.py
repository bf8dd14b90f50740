"""on_duplicate: what the client does and returns if a dedupe key is taken, with each driver."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, assert_type

import asyncpg
import pytest

from pgworkd.client import Enqueued, enqueue
from tests.engine.test_client import sqlstate
from tests.kits.drivers import in_a_transaction, in_autocommit, settled, stored

if TYPE_CHECKING:
    import psycopg


@in_autocommit
async def test_each_on_duplicate_option_works(opener: Any, dsn: str, db: asyncpg.Connection[Any]) -> None:
    later = datetime(2150, 1, 1, tzinfo=UTC)
    async with opener(dsn, autocommit=True) as caller:

        async def ask(word: Any, payload: Any = None, **options: Any) -> Any:
            return await settled(enqueue(caller.conn, "q", payload, dedupe_key="k", on_duplicate=word, **options))

        first = await ask("skip", {"n": 1}, priority=3)
        assert isinstance(first, Enqueued)
        assert first[1:] == (True, False)
        assert await ask("skip", {"n": 2}) == (first.id, False, False)
        assert await stored(db) == {first.id: {"n": 1}}

        assert await ask("reschedule", {"n": 3}, run_at=later) == (first.id, False, True)
        row = await db.fetchrow("SELECT payload::text, run_at, priority FROM pgworkd.jobs")
        assert tuple(row or ()) == ('{"n": 1}', later, 3)

        everything = {"kind": "x", "max_attempts": 7, "timeout_s": 2.5, "meta": {"m": 1}, "expires_at": later}
        assert await ask("replace", {"n": 4}, delay=60, **everything) == (first.id, False, True)
        row = dict(await db.fetchrow("SELECT * FROM pgworkd.jobs") or {})
        assert {name: row[name] for name in everything} | {"meta": json.loads(row["meta"])} == everything
        assert (json.loads(row["payload"]), row["priority"]) == ({"n": 4}, 0)
        assert timedelta(seconds=55) < row["run_at"] - row["created_at"] < timedelta(seconds=75)

        with pytest.raises(Exception) as caught:  # noqa: PT011 - each driver has its own
            await ask("raise", {"n": 5})
        assert sqlstate(caught.value) == "23505"
        assert await stored(db) == {first.id: {"n": 4}}
        assert (await settled(enqueue(caller.conn, "q", dedupe_key="other", on_duplicate="raise"))).created


@in_a_transaction
async def test_on_duplicate_joins_the_callers_transaction(opener: Any, dsn: str, db: asyncpg.Connection[Any]) -> None:
    async with opener(dsn, autocommit=False) as caller:
        for word in ("skip", "replace", "reschedule"):
            made = await settled(enqueue(caller.conn, "q", {"n": 1}, dedupe_key="k", on_duplicate=word))
            assert made.created == (word == "skip")
        assert await stored(db) == {}
        await settled(caller.rollback())
    assert await stored(db) == {}


async def test_session_settings_do_not_matter(db: asyncpg.Connection[Any]) -> None:
    await db.execute("SET DateStyle = 'German, DMY'; SET timezone = 'Asia/Kolkata'; SET search_path = pg_catalog")
    for name in ("jsonb", "uuid", "timestamptz", "int4"):  # values as the caller prefers them
        await db.set_type_codec(name, schema="pg_catalog", encoder=str, decoder=str, format="text")
    run_at, until = datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2041, 2, 3, 4, 5, 6, 7, tzinfo=UTC)
    made = await enqueue(
        db, "q", {"n": 1}, run_at=run_at, priority=7, dedupe_key="k", dedupe_until=until, on_duplicate="skip"
    )
    found = await db.fetchval(
        "SELECT run_at = '2031-02-03 04:05:06Z' AND dedupe_until = '2041-02-03 04:05:06.000007Z' AND priority = 7"
        " AND id = $1 FROM pgworkd.jobs",
        str(made.id),
    )
    assert found is True


async def types_as_mypy_sees_them(  # never called
    pool: asyncpg.Pool[Any], sync: psycopg.Connection[Any]
) -> None:
    assert_type(await enqueue(pool, "q", dedupe_key="k", on_duplicate="skip"), Enqueued)
    assert_type(enqueue(sync, "q", dedupe_key="k", on_duplicate="replace"), Enqueued)
