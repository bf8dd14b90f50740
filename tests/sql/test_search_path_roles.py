"""A role that creates functions, operators and tables with the names the engine uses gets nobody to run them."""

from __future__ import annotations

import re
from uuid import UUID

import asyncpg
import pytest

from tests.kits.schema import Roles
from tests.kits.sessions import Notices
from tests.kits.verbs import Db, at, clock, one, set_pool, statuses, worker

from .test_search_path import every_verb

OPERATORS = ["=", "<>", "<", ">", "<=", ">=", "+", "-", "*", "/", "||", "->", "->>", "?", "&&", "@>", "~", "~~"]
TYPES = """
uuid text integer bigint timestamptz interval jsonb boolean float8 real numeric tid xid date anyarray anyenum
"""
BANG = "LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'evil code runs as %', current_user; END $$"
CONTROLS = ("SELECT now()", "SELECT clock_timestamp()", "SELECT 'a'::text = 'b'", "SELECT jsonb_array_elements('[1]')")


async def lay(db: Db, schema: str) -> int:
    """Creates a double of each function and operator of Postgres that a body of ours could mean; the number of them."""
    bodies = await db.fetchval(
        "SELECT string_agg(pg_get_functiondef(oid), ' ') FROM pg_proc WHERE pronamespace = 'pgworkd'::regnamespace"
    )
    functions = await db.fetch(
        """SELECT quote_ident(p.proname), p.proargtypes::regtype[]::text[], p.provariadic <> 0, p.proretset,
                  p.prorettype::regtype::text
           FROM pg_proc p
           WHERE p.pronamespace IN ('pg_catalog'::regnamespace, 'pgworkd'::regnamespace) AND p.proname = ANY ($1)
             AND NOT EXISTS (SELECT FROM unnest(p.proargtypes::oid[] || p.prorettype) AS u (t)
                             JOIN pg_type t ON t.oid = u.t
                             WHERE t.typtype = 'p' AND t.typname !~ '^any.|^void$')""",
        sorted({"now", "clock_timestamp", "jsonb_array_elements", *re.findall(r"\w+", bodies)}),
    )
    made = []
    for name, types, variadic, many, answer in functions:
        arguments = [*types[:-1], f"VARIADIC {types[-1]}"] if variadic else types
        returns = f"{'SETOF ' if many else ''}{answer}"
        made.append(f"CREATE FUNCTION {schema}.{name}({', '.join(arguments)}) RETURNS {returns} {BANG}")
    operators = await db.fetch(
        """SELECT oprname, oprleft::regtype::text, oprright::regtype::text, oprresult::regtype::text FROM pg_operator
           WHERE oprnamespace = 'pg_catalog'::regnamespace AND oprkind = 'b' AND oprname = ANY ($1)
             AND oprleft = ANY ($2::text[]::regtype[]) AND oprright = ANY ($2::text[]::regtype[])""",
        OPERATORS,
        TYPES.split(),
    )
    for number, (name, left, right, answer) in enumerate(operators):
        made.append(f"CREATE FUNCTION {schema}.operator_{number}({left}, {right}) RETURNS {answer} {BANG}")
        arguments = f"LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = {schema}.operator_{number}"
        made.append(f"CREATE OPERATOR {schema}.{name} ({arguments})")
    await db.execute(";\n".join(made))
    return len(made)


async def hide_tables(db: Db, session: Db) -> None:
    """Puts tables and types of the session's own before ours in its search path."""
    names = await db.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = 'pgworkd'::regnamespace AND relkind IN ('r', 'p', 'v')"
    )
    for (name,) in names:
        await session.execute(f"CREATE TEMP TABLE {name} (evil int)")
    await session.execute("CREATE TYPE pg_temp.job_status AS ENUM ('evil'); CREATE DOMAIN pg_temp.name_text AS int")


async def set_trap(db: Db, session: Db) -> None:
    """From now on every name means the double in that session; a double that runs raises an error."""
    await db.execute("CREATE SCHEMA lair; GRANT USAGE ON SCHEMA lair TO PUBLIC")
    assert await lay(db, "lair") > 500
    await hide_tables(db, session)
    # The driver introspects types with queries of its own, which would resolve there: so let it cache them before.
    arrays = ("uuid[]", "int[]", "float8[]", "text[]", "bool[]", "real[]", "timestamptz[]", "jsonb[]")
    sql = ", ".join(f"${number}::{name}" for number, name in enumerate((*arrays, "pgworkd.instant"), 1))
    await session.fetch(f"SELECT {sql}", *([] for _ in arrays), at(0))
    await session.execute("SET search_path = lair, pg_temp, pg_catalog, pgworkd")
    for control in CONTROLS:
        with pytest.raises(asyncpg.PostgresError, match="evil code runs"):
            pytest.fail(f"{control} is {await session.fetchval(control)}: the path is not hostile")
    assert await session.fetch("SELECT evil FROM jobs") == []


async def test_a_worker_runs_no_function_of_another_role(db: Db, roles: Roles) -> None:
    async with roles.acting("worker") as ours:
        await set_trap(db, ours)
        await clock(0, ours)
        ended = await every_verb(ours)
    assert await statuses(db, ended) == ["completed", "cancelled", "failed"]


async def test_an_enqueuer_cannot_make_the_owner_run_its_functions(db: Db, roles: Roles, notices: Notices) -> None:
    """Each function that runs as the owner, each trigger, and the deferred work at commit."""
    await set_pool(db, await worker(db))
    async with roles.session("enqueuer") as ours:
        await set_trap(db, ours)
        insert = "INSERT INTO pgworkd.jobs (queue, dedupe_key, dedupe_until) VALUES ('q', 'k', $1) RETURNING id"
        holder = await ours.fetchval(insert, at(9))
        assert await notices.queues() == ["q"]
        for way, changed in (("skip", False), ("replace", True), ("reschedule", True)):
            sql = "SELECT id, created, changed FROM pgworkd.enqueue('q', p_dedupe_key => 'k', p_on_duplicate => $1)"
            assert await ours.fetchrow(sql, way) == (holder, False, changed)
        async with ours.transaction():
            first, second = [await ours.fetchval("SELECT id FROM pgworkd.enqueue('q')") for _ in range(2)]
            assert await ours.fetchval("SELECT pgworkd.depend($1, $2)", second, [first]) == 1
            make = "SELECT id FROM pgworkd.create_batch($1, 'q', p_on_complete => '{\"queue\": \"r\"}')"
            root = await ours.fetchval(make, "b")
            child = "SELECT id FROM pgworkd.create_batch('c', p_parent => $1, p_stream => true)"
            assert isinstance(await ours.fetchval(child, root), UUID)
            await ours.execute("SELECT pgworkd.add_jobs($1, $2)", root, ["{}"])
            await ours.execute("INSERT INTO pgworkd.jobs (queue, batch_id) VALUES ('q', $1)", root)
            assert await ours.fetchval("SELECT pgworkd.seal_batch($1)", root) is True
        empty = await ours.fetchval(make, "e")
        assert await ours.fetchval("SELECT pgworkd.seal_batch($1)", empty) is True
        assert await ours.fetch("SELECT * FROM pgworkd.await_results($1, 'c', 9)", [first]) == []
    assert await statuses(db, [holder, first, second]) == ["pending", "pending", "blocked"]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE queue = 'r'") == 1
    assert await db.fetchval("SELECT total FROM pgworkd.batch_progress WHERE id = $1", root) == 2


async def test_the_views_of_a_reader_keep_the_names_resolved_at_creation(db: Db, roles: Roles) -> None:
    await one(db)
    async with roles.session("reader") as ours:
        await set_trap(db, ours)
        views = "queue_stats batch_progress batch_trees blocked_jobs kept_keys job_progress worker_stats"
        for view in views.split():
            await ours.fetch(f"SELECT 1 FROM pgworkd.{view}")  # noqa: S608 - names are ours
        assert await ours.fetchval("SELECT due FROM pgworkd.queue_stats") == 1
        for call in ("result_of('{}')", "batch_tree(NULL)"):
            assert await ours.fetch(f"SELECT 1 FROM pgworkd.{call}") == []  # noqa: S608 - names are ours
