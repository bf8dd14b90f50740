"""A cluster's settings that make other plans look cheap, or compile each of them, do not reach what is pinned.

What the server plans is told to the client, with the function whose statement it is; so are the flags of JIT, also by
a server that has none.
"""

from __future__ import annotations

import re

import pytest

from tests.kits.verbs import Db

HOSTILE = """
    SET jit = on; SET jit_above_cost = 0; SET seq_page_cost = 0; SET random_page_cost = 1000; SET enable_nestloop = off;
    SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0"""
JIT = r":jitFlags [1-9]"
SCANS = r"\{(SEQSCAN|GATHER)\b"
JOINS = r"\{(HASHJOIN|MERGEJOIN|BITMAPHEAPSCAN)\b"
CALLS = {
    "allowance": ("SELECT pgworkd.allowance('q', 5, now())", [SCANS]),
    "forget_rows": ("SELECT pgworkd.forget_rows(7, 100)", [JIT, SCANS, JOINS]),
    "dead_groups": ("SELECT * FROM pgworkd.dead_groups()", [JIT]),
    "place_of": (
        "SELECT pgworkd.explain(j.id) FROM pgworkd.jobs j LIMIT 1",
        [JIT, SCANS, r"\{BITMAPHEAPSCAN\b"],
    ),
    "mend_dependencies": ("SELECT pgworkd.mend_dependencies()", [JIT]),
    "throughput": ("SELECT * FROM pgworkd.throughput(now() - interval '1 h', now(), 60)", [JIT]),
    "sample_queues": ("SELECT pgworkd.sample_queues()", [JIT]),
    "ensure_schedules": ("SELECT * FROM pgworkd.ensure_schedules()", [JIT]),
}
"""Functions whose pins no other test needs: a call, and what their plans never have."""


@pytest.mark.parametrize("name", CALLS)
async def test_hostile_settings_change_no_pinned_plan(db: Db, name: str) -> None:
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 600)")
    call, forbidden = CALLS[name]
    plans: list[str] = []
    await db.execute(f"{HOSTILE}; SET debug_print_plan = on; SET client_min_messages = log")
    db.add_log_listener(lambda _, told: plans.append(f"{told.context}\n{told.detail}"))
    await db.execute(call)
    own = [plan for plan in plans if re.search(rf'function "?{name}\b', plan)]
    assert own
    assert [found for plan in own for what in forbidden for found in re.findall(what, plan)] == []
