"""A database of any schema that ever had a number, not only the last of each, becomes what a fresh one is."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from tests.kits.schema import catalog, differences
from tests.kits.verbs import Db

from .versions import names, stored

EVERY = [name for version in range(1, schema.VERSION) for name in names(version)]
_FILL = """
    INSERT INTO pgworkd.queues (name, concurrency) VALUES ('q', 7);
    INSERT INTO pgworkd.schedules (name, queue, cron) VALUES ('nightly', 'q', '0 3 * * *');
    INSERT INTO pgworkd.jobs (queue, kind, payload, meta, priority, run_at, max_attempts, dedupe_key)
    SELECT 'q', 'k' || i % 3, jsonb_build_object('n', i), '{"t": 1}', i % 5, now() + i * interval '1 s', 2, 'd' || i
    FROM generate_series(1, 50) i;
    INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until)
    VALUES ('old', 1, '0', 30, now() + interval '30 s');
    UPDATE pgworkd.jobs SET status = 'running', attempts = 1, started_at = now(),
        worker_id = (SELECT id FROM pgworkd.workers) WHERE payload @> '{"n": 1}';
    INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, status, priority, attempts, failures, queue,
        kind, payload, errors)
    SELECT gen_random_uuid(), now(), now(), now(), 'completed', 0, 1, 0, 'q', 'k', '{}', '[]'"""
_ROWS = """
    SELECT (SELECT jsonb_agg(jsonb_build_array(id, queue, kind, status, payload, meta, priority, run_at, attempts,
                                               worker_id, max_attempts, dedupe_key) ORDER BY id) FROM pgworkd.jobs),
           (SELECT jsonb_agg(jsonb_build_array(id, status, finished_at)) FROM pgworkd.finished_jobs),
           (SELECT jsonb_agg(jsonb_build_array(name, concurrency)) FROM pgworkd.queues),
           (SELECT jsonb_agg(jsonb_build_array(name, queue, cron)) FROM pgworkd.schedules),
           (SELECT jsonb_agg(jsonb_build_array(id, name, lease_until)) FROM pgworkd.workers)"""


@pytest.fixture
async def old(empty_dsn: str) -> AsyncIterator[Db]:
    """A session in an empty database."""
    connection = await asyncpg.connect(empty_dsn)
    yield connection
    connection.terminate()


@pytest.mark.slow("a hundred schemas, each installed and migrated")
@pytest.mark.parametrize("name", EVERY)
async def test_any_schema_that_had_a_number_becomes_like_a_fresh_one(
    db: Db, old: Db, empty_dsn: str, name: str
) -> None:
    try:
        await old.execute(stored()[name])
    except asyncpg.PostgresSyntaxError:
        assert name == EVERY[0]
        assert old.get_server_version().major >= 16, "it has a function json_object(), a keyword from 16 on"
        return
    await old.execute(_FILL)
    before = await old.fetchrow(_ROWS)
    assert await schema.migrate(ConnectionOptions(empty_dsn)) == (int(name[:4]), schema.VERSION)
    assert await old.fetchrow(_ROWS) == before
    assert differences(_valid(await catalog(old)), _valid(await catalog(db))) == []
    assert await schema.migrate(ConnectionOptions(empty_dsn), force=True) == (schema.VERSION, schema.VERSION)
    assert await old.fetchrow(_ROWS) == before


def _valid(found: dict[str, Any]) -> dict[str, Any]:
    """Values stored before a CHECK was changed are not checked again."""
    constraints = {name: text.removesuffix(" NOT VALID") for name, text in found["constraints"].items()}
    return {**found, "constraints": constraints}


def test_a_schema_that_has_landed_is_not_changed_under_its_number() -> None:
    """Raise the number (`schema.VERSION` says where), and bring databases of this one there by a migration."""
    for name in names(schema.VERSION):
        assert _code(stored()[name]) == _code(schema.text()), f"this is not {name}"


def _code(script: str) -> list[str]:
    """The script without its comments, which may be mended at any time, and without its transaction."""
    lines = (re.sub(r"(^|\s)--.*", "", line).strip() for line in script.splitlines())
    return [line for line in lines if line not in ("", "BEGIN;", "COMMIT;")]
