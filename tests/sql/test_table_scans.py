"""No verb reads a table of jobs, batches or history whole, though the statistics say that each is empty.

A plan that was made while a table was empty is kept by the session. What was read is in the counters of the
transaction, whichever function has read it.
"""

from __future__ import annotations

import re

import pytest

from tests.kits.verbs import Db, worker

GROWING = "jobs batches batch_additions job_dependencies pending_effects result_waiters refused_rows progress"
SCANNED = """SELECT relname FROM pg_stat_xact_user_tables WHERE schemaname = 'pgworkd' AND seq_scan > 0
    AND (relname = ANY ($1) OR relname LIKE 'finished_jobs%')"""
FIRST = "'00000000-0000-7000-8000-000000000001'"
COMPLETED = "SELECT pgworkd.settle_completed(<running_>, '{1,1}', '{NULL,NULL}', p_worker => <worker>)"
TOKEN = "(SELECT token FROM pgworkd.workers WHERE id = <worker>)"
STEPS = {
    "enqueue": "SELECT pgworkd.enqueue('q', p_dedupe_key => 'k', p_dedupe_until => pgworkd.clock() + interval '1 h')",
    "enqueue, a duplicate": "SELECT pgworkd.enqueue('q', p_dedupe_key => 'k', p_on_duplicate => 'skip')",
    "enqueue, moved": "SELECT pgworkd.enqueue('q', p_dedupe_key => 'k', p_on_duplicate => 'reschedule')",
    "enqueue_once": "SELECT pgworkd.enqueue_once(<first>, 'once')",
    "enqueue_once, again": "SELECT pgworkd.enqueue_once(<first>, 'once')",
    "insert": "INSERT INTO pgworkd.jobs (queue, dedupe_key) SELECT 'q', n::text FROM generate_series(1, 6) n",
    "insert, with keys": """INSERT INTO pgworkd.jobs (queue, serialize_key, limit_key)
        SELECT 'keyed', 's' || n % 2, 'l' FROM generate_series(1, 8) n""",
    "limits": """SELECT pgworkd.set_queue('limited', '{"max_running": 5, "limit_per_key": 3}')""",
    "insert, under limits": "INSERT INTO pgworkd.jobs (queue, limit_key) VALUES ('limited', 'a'), ('limited', 'b')",
    "create_batch": "SELECT pgworkd.create_batch('root', 'batched', p_dedupe_key => 'b')",
    "create_batch, a child": "SELECT pgworkd.create_batch('child', p_parent => <root>, p_stream => true)",
    "create_batch, another": "SELECT pgworkd.create_batch('other', 'batched')",
    "add_jobs": "SELECT pgworkd.add_jobs(<root>, ARRAY['{}', '{}', '{}']::jsonb[])",
    "add_jobs, another": "SELECT pgworkd.add_jobs(<other>, ARRAY['{}']::jsonb[])",
    "cancel_batch": "SELECT pgworkd.cancel_batch(<other>)",
    "depend": """WITH made AS (INSERT INTO pgworkd.jobs (queue) VALUES ('later') RETURNING id)
        SELECT pgworkd.depend(id, ARRAY[<first>::uuid], 'cancel') FROM made""",
    "depend, another": """WITH made AS (INSERT INTO pgworkd.jobs (queue) VALUES ('freed') RETURNING id)
        SELECT pgworkd.depend(id, ARRAY[<first>::uuid], 'run') FROM made""",
    "undepend": "SELECT pgworkd.undepend(<blocked_freed>)",
    "await_results": "SELECT pgworkd.await_results(ARRAY[<first>::uuid], 'channel', 60)",
    "claim": "SELECT * FROM pgworkd.claim(<worker>, 'q', 4)",
    "claim, once": "SELECT * FROM pgworkd.claim(<worker>, 'once', 1)",
    "claim, keyed": "SELECT * FROM pgworkd.claim(<worker>, 'keyed', 2)",
    "claim, limited": "SELECT * FROM pgworkd.claim(<worker>, 'limited', 2)",
    "claim, batched": "SELECT * FROM pgworkd.claim(<worker>, 'batched', 2)",
    "wanted": "SELECT * FROM pgworkd.wanted(<worker>, NULL, '{q,keyed}')",
    "progress": """SELECT pgworkd.report_progress(<running_q>, '{1,1,1,1}', '{0.5,0.5,0.5,0.5}', '{a,b,c,d}',
        <worker>)""",
    "settle_completed": COMPLETED.replace("running_", "running_once"),
    "settle_completed, keyed": COMPLETED.replace("running_", "running_keyed"),
    "settle_completed, limited": COMPLETED.replace("running_", "running_limited"),
    "settle_completed, batched": COMPLETED.replace("running_", "running_batched"),
    "settle_failed": """SELECT pgworkd.settle_failed(<running_q>, '{1,1,1,1}', '{0,0,0,0}', '{t,t,f,f}', '{a,b,c,d}',
        '{"{}","{}","{}","{}"}', p_worker => <worker>)""",
    "discard": "SELECT pgworkd.discard((<dead_q>)[1:1])",
    "retry": "SELECT pgworkd.retry(<dead_q>)",
    "edit": "SELECT pgworkd.edit((<pending_q>)[1], '{}', pgworkd.clock(), 3)",
    "cancel": "SELECT pgworkd.cancel((<pending_q>)[1:1])",
    "claim, and leave running": "SELECT * FROM pgworkd.claim(<worker>, 'q', 1)",
    "cancel, one that runs": "SELECT pgworkd.cancel(<running_q>)",
    "claim, the rest": "SELECT * FROM pgworkd.claim(<worker>, 'keyed', 2)",
    "settle_released": """SELECT pgworkd.settle_released(<running_keyed>, '{1,1}', '{0,0}', '{NULL,NULL}', <worker>)""",
    "claim, again": "SELECT * FROM pgworkd.claim(<worker>, 'keyed', 2)",
    "settle_ended": """SELECT pgworkd.settle_ended(<running_keyed>, '{2,2}', '{cancelled,expired}', '{x,y}',
        <worker>)""",
    "free_key": "SELECT pgworkd.free_key('q', 'k')",
    "seal_batch": "SELECT pgworkd.seal_batch(<root>)",
    "free_batch_key": "SELECT pgworkd.free_batch_key('root', 'b')",
    "delete_batch": "SELECT pgworkd.delete_batch(<other>)",
    "rescue": "SELECT * FROM pgworkd.rescue(<worker>)",
    "expire_jobs": "SELECT * FROM pgworkd.expire_jobs()",
    "fail_overdue": "SELECT * FROM pgworkd.fail_overdue()",
    "apply_effects": "SELECT pgworkd.apply_effects()",
    "unblock": "SELECT pgworkd.unblock()",
    "next_due": "SELECT * FROM pgworkd.next_due('{q,keyed,limited}')",
    "take_back": "SELECT * FROM pgworkd.take_back(<running_q>, '{1}')",
    "put_schedule": "SELECT pgworkd.put_schedule('s', 's', NULL, NULL, 60, 'UTC', 'skip', '{}')",
    "ensure_schedules": "SELECT * FROM pgworkd.ensure_schedules()",
    "add_occurrences": """SELECT pgworkd.restore_occurrences('{s}', ARRAY[pgworkd.clock()],
        ARRAY(SELECT revision FROM pgworkd.schedules))""",
    "run_schedule": "SELECT pgworkd.run_schedule('s')",
    "put_schedule, changed": "SELECT pgworkd.put_schedule('s', 's', NULL, NULL, 90, 'UTC', 'skip', '{}')",
    "remove_schedule": "SELECT pgworkd.remove_schedule('s')",
    "batch_tree": "SELECT * FROM pgworkd.batch_tree(<root>)",
    "register": "SELECT pgworkd.register('x', 1, 'v', 30)",
    "abandon": f"SELECT pgworkd.abandon(<worker>, {TOKEN})",
    "sign_off": f"SELECT pgworkd.sign_off(<worker>, {TOKEN})",
    "worker_ended": f"SELECT pgworkd.worker_ended(<worker>, {TOKEN})",
    "rescue, of a job": "SELECT * FROM pgworkd.rescue(<worker>)",
}


async def _facts(db: Db) -> dict[str, str]:
    """What the steps name: batches, and jobs of a queue in a status, as SQL."""
    batches = {name: f"'{batch}'::uuid" for name, batch in await db.fetch("SELECT name, id FROM pgworkd.batches")}
    jobs = await db.fetch(
        "SELECT status || '_' || queue, array_agg(id ORDER BY id)::text FROM pgworkd.jobs GROUP BY status, queue"
    )
    return batches | {name: f"'{ids}'::uuid[]" for name, ids in jobs} | {"first": FIRST}


@pytest.mark.parametrize("analysed", [True, False])
async def test_no_verb_reads_a_growing_table_whole(db: Db, other: Db, *, analysed: bool) -> None:
    me = await worker(db)
    if analysed:
        await db.execute("ANALYZE")
    read = {}
    for name, step in STEPS.items():
        facts = await _facts(other) | {"worker": str(me)}
        await db.execute("SELECT pg_stat_force_next_flush()")  # what is counted so far is not of this step
        async with db.transaction():
            await db.execute(re.sub(r"<(\w+)>", lambda found, facts=facts: facts[found[1]], step))
            await db.execute("SET CONSTRAINTS ALL IMMEDIATE")
            if tables := [row[0] for row in await db.fetch(SCANNED, GROWING.split())]:
                read[name] = tables
    assert read == {}
