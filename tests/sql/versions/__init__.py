"""Every schema that ever had a number, and a database with rows of every kind that it allowed.

`schemas.tar.xz` holds, for each commit that changed the schema, the whole script (`schema.text()`) and the grants as
NUMBER-PLACE-COMMIT. The numbers up to 7 stand for several schemas each, as they changed while they were in use. From 8
on a schema that has landed never changes without a new number: its script is added here when it lands, and the next
change finds it.
"""

from __future__ import annotations

import functools
import json
import tarfile
from pathlib import Path
from typing import Any

from tests.kits.verbs import Db

TABLES = """workers pools queues rates schedules jobs finished_jobs batches batch_additions job_dependencies
    pending_effects result_waiters refused_rows progress audit"""


@functools.cache
def stored() -> dict[str, str]:
    """All scripts by name."""
    with tarfile.open(Path(__file__).parent / "schemas.tar.xz") as packed:
        files = {member.name: packed.extractfile(member) for member in packed.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def names(version: int) -> list[str]:
    """The schemas of this number, in the order in which they came."""
    return sorted(name for name in stored() if name.startswith(f"{version:04}-") and name.endswith(".sql"))


def schema_of(version: int) -> str:
    """The last script of this number."""
    return stored()[names(version)[-1]]


def grants_of(version: int) -> str:
    """The last grants.sql of this number (1 and 2 have the same)."""
    return stored()[names(max(version, 2))[-1].replace(".sql", ".grants")]


async def filled(db: Db) -> int:
    """Jobs in all states with every column they can have, in a database of any version; the worker that runs some."""
    worker = await db.fetchval("SELECT pgworkd.register('old', 7, '0.1.0', 600, $1, '{q,slow}')", TOKEN)
    await db.execute(_FULL.replace("WORKER", str(worker)).replace("TOKEN", TOKEN))
    return int(worker)


async def contents(db: Db) -> dict[str, list[Any]]:
    """All rows, by the names that their columns have now."""
    found = {}
    for table in TABLES.split():
        rows = await db.fetch(f"SELECT to_jsonb(t)::text FROM pgworkd.{table} t ORDER BY t::text")  # noqa: S608
        found[table] = [
            {
                _RENAMED.get(name, name): value
                for name, value in json.loads(row[0]).items()
                if (table, name) not in _ADDED
            }
            for row in rows
        ]
    return found


_ADDED = {
    *(("workers", name) for name in ("kind", "requested", "rules")),
    *(("jobs", name) for name in ("lease_s", "begun", "claim_id", "listed", "serialize_scope")),
    ("queues", "endpoint"),
    *(("batches", name) for name in ("max_attempts", "meta")),
    *(("queues", name) for name in ("max_attempts", "timeout_s", "serialize_scope")),
}
_RENAMED = {"asleep": "idle", "unless": "on_failed_dependency"}
TOKEN = "11111111-2222-4333-8444-555555555555"
_FULL = """
SELECT pgworkd.set_pool(WORKER, 'q', 10, true, 10, 'code', 'TOKEN');
SELECT pgworkd.set_queue('q', '{"rate": 1000, "rate_period_s": 1, "rate_per_key": 900, "rate_per_key_period_s": 1}');
SELECT pgworkd.set_queue('paused', jsonb_build_object('paused_until', now() + interval '1 hour', 'keep_s', 60));
SELECT pgworkd.put_schedule('nightly', 'q', NULL, '0 3 * * *', NULL, 'UTC', 'once', '{}');
SELECT pgworkd.add_occurrences('{nightly}', ARRAY[now() + interval '1 day'], '{1}');

-- Runs: to completed, failed, dead, cancelled, expired, released; and what goes on running, with progress.
INSERT INTO pgworkd.jobs (queue, kind, payload, meta, dedupe_key, dedupe_until, limit_key, max_attempts)
SELECT 'q', 'kind' || i % 3, jsonb_build_object('n', i), '{"trace": "t"}', 'dedupe' || i,
       CASE WHEN i % 2 = 0 THEN now() + interval '1 day' END, 'limit' || i % 4, 2
FROM generate_series(1, 40) i;
SELECT count(*) FROM pgworkd.claim(WORKER, 'q', 40, p_token => 'TOKEN');
SELECT pgworkd.settle_completed(ARRAY(SELECT id FROM pgworkd.jobs WHERE payload ->> 'n' IN ('1', '2', '3', '4')),
                                '{1,1,1,1}', ARRAY['{"r": 1}', NULL, NULL, NULL],
                                p_worker => WORKER, p_token => 'TOKEN');
SELECT count(*) FROM pgworkd.settle_failed(ARRAY(SELECT id FROM pgworkd.jobs WHERE payload ->> 'n' IN ('5', '6', '7')),
                                           '{1,1,1}', '{0,3600,0}', '{f,f,t}', '{a,b,c}',
                                           ARRAY['{"type": "E"}', '{"type": "E"}', '{"type": "E"}'],
                                           p_worker => WORKER, p_token => 'TOKEN');
SELECT count(*) FROM pgworkd.settle_released(ARRAY(SELECT id FROM pgworkd.jobs WHERE payload ->> 'n' = '8'), '{1}',
                                             '{0}', '{NULL}', WORKER, 'TOKEN');
SELECT count(*) FROM pgworkd.settle_ended(ARRAY(SELECT id FROM pgworkd.jobs WHERE payload ->> 'n' IN ('9', '10')),
                                          '{1,1}', '{cancelled,expired}', '{x,y}', WORKER, 'TOKEN');
SELECT pgworkd.report_progress(ARRAY(SELECT id FROM pgworkd.jobs WHERE payload ->> 'n' = '11'),
                               '{1}', '{0.5}', '{half}', WORKER, 'TOKEN');
SELECT count(*) FROM pgworkd.cancel(ARRAY(SELECT id FROM pgworkd.jobs WHERE payload ->> 'n' = '12'), 'ann');
SELECT pgworkd.discard(ARRAY(SELECT id FROM pgworkd.jobs WHERE payload ->> 'n' = '7'), 'ann');

-- Waiting: due, later, with keys, expiring, lost before, and behind a serialize_key that is held.
INSERT INTO pgworkd.jobs (queue, priority, run_at, serialize_key, limit_key, expires_at, losses, max_attempts)
SELECT 'slow', i % 3, now() + CASE i % 2 WHEN 0 THEN '0 s' ELSE '1 day' END::interval,
       CASE WHEN i % 5 = 0 THEN 'line' END, CASE WHEN i % 7 = 0 THEN 'key' END,
       CASE WHEN i % 6 = 0 THEN now() + interval '2 days' END, i % 3, 3
FROM generate_series(1, 60) i;
SELECT count(*) FROM pgworkd.claim(WORKER, 'slow', 3, p_token => 'TOKEN');
UPDATE pgworkd.jobs SET status = 'blocked' WHERE queue = 'slow' AND status = 'pending' AND serialize_key IS NOT NULL;
SELECT pgworkd.edit((SELECT min(id::text)::uuid FROM pgworkd.jobs WHERE queue = 'slow' AND status = 'pending'),
                    '{"edited": 1}', NULL, 7, 'ann');

-- Batches: open, sealed, streaming, finished with a callback, cancelled; one that additions still wait for.
DO $$
DECLARE
    v_root  uuid := (SELECT id FROM pgworkd.create_batch('root', 'q', p_on_complete => '{"queue": "q"}',
                                                         p_dedupe_key => 'k'));
    v_child uuid := (SELECT id FROM pgworkd.create_batch('child', p_parent => v_root, p_stream => true));
    v_other uuid := (SELECT id FROM pgworkd.create_batch('other', 'q', p_max_failures => 3));
    v_first uuid;
    v_ids   uuid[];
BEGIN
    v_ids := pgworkd.add_jobs(v_root, ARRAY['{"n": 100}', '{"n": 101}']::jsonb[]);
    PERFORM pgworkd.seal_batch(v_root);
    PERFORM pgworkd.add_jobs(v_other, ARRAY['{}', '{}', '{}']::jsonb[]);
    PERFORM pgworkd.add_jobs((SELECT id FROM pgworkd.create_batch('cancelled', 'q')), ARRAY['{}']::jsonb[]);
    INSERT INTO pgworkd.jobs (queue, payload) VALUES ('q', '{"waits": 1}') RETURNING id INTO v_first;
    PERFORM pgworkd.depend(v_first, v_ids, 'run');
    PERFORM pgworkd.await_results(ARRAY[v_first], 'channel', 600);
END $$;
DO $$
BEGIN
    PERFORM pgworkd.cancel_batch((SELECT id FROM pgworkd.batches WHERE name = 'cancelled'), 100, 'ann');
    PERFORM pgworkd.seal_batch((SELECT id FROM pgworkd.create_batch('empty', 'q', p_on_complete => '{"queue": "q"}')));
END $$;
INSERT INTO pgworkd.pending_effects (queue, serialize_key) VALUES ('slow', 'line');
INSERT INTO pgworkd.refused_rows (what, key, sqlstate, error, until) VALUES ('rescue', 'x', '23503', 'no', now());
"""
