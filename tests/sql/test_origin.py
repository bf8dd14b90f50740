"""A database knows where its jobs are to run, and a copy of it can be told from it."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import anyio
import asyncpg
import pytest

from tests.kits.daemon import until

Db: TypeAlias = "asyncpg.Connection[Any]"
ROW = "SELECT server, database, environment FROM pgworkd.origin"
PLACES = {
    "here": "",
    "another server": "UPDATE pgworkd.origin SET server = 7",
    "another name": "UPDATE pgworkd.origin SET database = 'production'",
    "a server that was not to be seen": "UPDATE pgworkd.origin SET server = NULL",
}
IS_HERE = {"here", "a server that was not to be seen"}


async def here(db: Db) -> tuple[int, str]:
    found = await db.fetchrow("SELECT system_identifier, current_database() FROM pg_control_system()")
    assert found is not None
    return found[0], found[1]


async def test_the_first_worker_says_where_it_is(db: Db) -> None:
    assert await db.fetchval("SELECT count(*) FROM pgworkd.origin") == 0
    assert await db.fetchval("SELECT pgworkd.is_origin(NULL)")
    assert await db.fetchval("SELECT pgworkd.belong(NULL)")
    assert await db.fetchrow(ROW) == (*await here(db), None)
    since = await db.fetchval("SELECT since FROM pgworkd.origin")
    assert await db.fetchval("SELECT pgworkd.belong(NULL)")
    assert await db.fetchval("SELECT since FROM pgworkd.origin") == since
    assert await db.fetchval("SELECT count(*) FROM pgworkd.audit") == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stored", [None, "production"])
@pytest.mark.parametrize("ours", [None, "production", "staging"])
async def test_a_copy_is_told_from_what_was_moved(db: Db, place: str, stored: str | None, ours: str | None) -> None:
    """Without an environment the place decides; with one, nothing else does."""
    await db.execute("SELECT pgworkd.belong($1)", stored)
    if PLACES[place]:
        await db.execute(PLACES[place])
    expected = ours == stored if stored is not None else place in IS_HERE
    before = await db.fetchrow(ROW)
    assert await db.fetchval("SELECT pgworkd.is_origin($1)", ours) is expected
    assert await db.fetchrow(ROW) == before, "asking changes nothing"
    assert await db.fetchval("SELECT pgworkd.belong($1)", ours) is expected
    assert await db.fetchrow(ROW) == ((*await here(db), ours) if expected else before)
    entries = await db.fetch("SELECT what, before, after FROM pgworkd.audit")
    assert len(entries) == (1 if expected and before != (*await here(db), ours) else 0)


async def test_to_adopt_a_copy_is_in_the_audit(db: Db) -> None:
    await db.execute("SELECT pgworkd.belong('production')")
    await db.execute(PLACES["another server"])
    await db.execute("SET pgworkd.by = 'ada'")
    await db.execute("SELECT pgworkd.adopt('staging')")
    assert await db.fetchrow(ROW) == (*await here(db), "staging")
    assert [await db.fetchval("SELECT pgworkd.is_origin($1)", each) for each in ("production", "staging", None)] == [
        False,
        True,
        False,
    ]
    (entry,) = await db.fetch("SELECT who, what, queue, job_id, before, after FROM pgworkd.audit")
    assert tuple(entry)[:4] == ("ada", "adopt", "", None)
    before, after = (json.loads(entry[name]) for name in ("before", "after"))
    assert (before["server"], before["environment"]) == (7, "production")
    assert (after["database"], after["environment"]) == ((await here(db))[1], "staging")


async def test_a_database_that_nobody_has_used_can_be_adopted(db: Db) -> None:
    await db.execute("SELECT pgworkd.adopt('production')")
    assert await db.fetchrow(ROW) == (*await here(db), "production")


async def test_of_two_environments_that_start_at_once_one_has_it(dsn: str, db: Db) -> None:
    await db.execute("SELECT pgworkd.belong(NULL)")
    found: dict[str, bool] = {}

    async def start(environment: str) -> None:
        connection = await asyncpg.connect(dsn)
        try:
            found[environment] = await connection.fetchval("SELECT pgworkd.belong($1)", environment)
        finally:
            connection.terminate()

    async with anyio.create_task_group() as tasks, db.transaction():
        await db.execute("SELECT FROM pgworkd.origin FOR UPDATE")
        for environment in ("production", "staging"):
            tasks.start_soon(start, environment)
        await until(lambda: db.fetchval("SELECT count(*) >= 2 FROM pg_locks WHERE NOT granted"))
    (first,) = [environment for environment, belongs in found.items() if belongs]
    assert await db.fetchval("SELECT environment FROM pgworkd.origin") == first


async def test_who_may_not_see_the_server_goes_by_the_name(db: Db) -> None:
    await db.execute("SELECT pgworkd.belong(NULL)")
    stored = await db.fetchrow(ROW)
    await db.execute("CREATE ROLE origin_nobody; REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
    try:
        await db.execute("GRANT USAGE ON SCHEMA pgworkd TO origin_nobody; GRANT ALL ON pgworkd.origin TO origin_nobody")
        await db.execute("SET ROLE origin_nobody")
        assert await db.fetchval("SELECT pgworkd.server_id()") is None
        assert await db.fetchval("SELECT pgworkd.belong(NULL)")
        assert await db.fetchrow(ROW) == stored, "what others could see stays"
        await db.execute("RESET ROLE; UPDATE pgworkd.origin SET database = 'production'; SET ROLE origin_nobody")
        assert not await db.fetchval("SELECT pgworkd.belong(NULL)")
    finally:
        await db.execute("RESET ROLE; DROP OWNED BY origin_nobody; DROP ROLE origin_nobody")


@pytest.mark.parametrize("name", ["", "n" * 201])
async def test_an_environment_has_a_name_of_reasonable_length(db: Db, name: str) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="environment_must_have_1_to_200_characters"):
        await db.execute("SELECT pgworkd.adopt($1)", name)
