"""Helpers for tests of `pgworkd bench`: what the database holds, and waiting for facts in it."""

from __future__ import annotations

import time
from typing import Any

from tests.kits.cli import Shell
from tests.kits.daemon import LIMIT_S

MOVING = {"seen_at", "lease_until", "steady_since", "updated_at"}
"""Columns that change while nothing happens."""
LINE = "SELECT EXISTS (SELECT FROM pgworkd.queues WHERE name LIKE 'pgworkd-bench-%%')"
JOBS = "SELECT count(*) FROM pgworkd.jobs WHERE queue LIKE 'pgworkd-bench-%%'"
REGISTERED = "SELECT EXISTS (SELECT FROM pgworkd.workers WHERE name LIKE 'pgworkd-bench-%%')"
SERVED = "SELECT EXISTS (SELECT FROM pgworkd.pools WHERE queue LIKE 'pgworkd-bench-%%')"
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgworkd pgworkd-bench-%%'"


def contents(shell: Shell) -> dict[str, list[str]]:
    """Every row of every table of the schema, as text, but where the schema's jobs run: a first worker settles that."""
    tables = shell.db.execute(
        """SELECT c.relname FROM pg_class c
           WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
             AND c.relname <> 'origin'"""
    ).fetchall()
    found = {}
    for (table,) in tables:
        rows = shell.db.execute(f"SELECT to_jsonb(t) FROM pgworkd.{table} t").fetchall()  # type: ignore[arg-type] # noqa: S608
        found[table] = sorted(str({k: v for k, v in row.items() if k not in MOVING}) for (row,) in rows)
    return found


def wait_for(shell: Shell, sql: str, limit_s: float = LIMIT_S) -> Any:
    """Asks until the answer is true; that answer."""
    until = time.monotonic() + limit_s
    while not (answer := shell.sql(sql)):
        assert time.monotonic() < until, sql
        time.sleep(0.002)
    return answer
