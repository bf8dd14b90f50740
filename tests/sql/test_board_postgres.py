"""Each panel of the board that asks Postgres, as a reader, on a database with work and history in it."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from tests.kits.boards import POSTGRES
from tests.kits.grafana import filled
from tests.kits.prometheus import ODD
from tests.kits.schema import Roles
from tests.kits.verbs import Db

pytestmark = pytest.mark.slow("all queries of a board on hours of statistics")

QUEUES = ["mail", "it's", ODD]
LARGE = {"jobs", "queue_samples", "queue_minutes", "deaths", "audit", "batches"}
"""Tables that no panel may read whole; and all partitions of finished_jobs."""
WORKER = """INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until, lost_at)
    VALUES ($1, 1, '0', 30, now() + $2::text::interval, NULL) RETURNING id"""


def targets() -> Iterator[tuple[str, str, str, str]]:
    """Title, type and format of each panel, and its SQL."""
    for panel in POSTGRES["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], panel["type"], target["format"], target["rawSql"]


@pytest.fixture
async def loaded(db: Db) -> Db:
    """3 queues with 12,000 jobs waiting and 300 dead, 6,000 that ended, and 3 hours of statistics."""
    await db.execute("INSERT INTO pgworkd.queues (name, concurrency) SELECT q, 4 FROM unnest($1::text[]) q", QUEUES)
    await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('paused', 'infinity')")
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, kind, run_at) SELECT q, 'send', now() - n * interval '1 s' "
        "FROM unnest($1::text[]) q, generate_series(1, 4000) n",
        QUEUES,
    )
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, status, attempts, failures, failed_at, error) "
        "SELECT q, 'dead', 3, 3, now(), 'ValueError: ' || n FROM unnest($1::text[]) q, generate_series(1, 100) n",
        QUEUES,
    )
    await db.execute(
        "INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, status, priority, attempts, failures, "
        "queue, payload, errors) SELECT gen_random_uuid(), now() - n * interval '5 s', now(), now(), 'completed', 0, "
        "1, 0, q, '{}', '[]' FROM unnest($1::text[]) q, generate_series(1, 2000) n",
        QUEUES,
    )
    alive = await db.fetchval(WORKER, "alive", "1 hour")
    await db.fetchval(WORKER, "lost", "-1 hour")
    await db.execute("SELECT pgworkd.standing_worker()")
    await db.execute("SELECT pgworkd.set_pool($1, q, 4, false) FROM unnest($2::text[]) q", alive, QUEUES)
    await db.execute(
        "UPDATE pgworkd.jobs SET status = 'running', attempts = 1, worker_id = $1, started_at = now() WHERE id IN "
        "(SELECT id FROM pgworkd.jobs WHERE status = 'pending' ORDER BY id LIMIT 5)",
        alive,
    )
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('nightly', 'mail', 60)")
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, schedule, occurrence, run_at) "
        "VALUES ('mail', 'nightly', now(), now() - interval '1 hour')"
    )
    await _statistics(db)
    await db.execute("VACUUM ANALYZE")
    return db


async def _statistics(db: Db) -> None:
    await db.execute(
        "INSERT INTO pgworkd.samples (at, took_s) "
        "SELECT now() - n * interval '5 s', 0.01 FROM generate_series(1, 5000) n"
    )
    await db.execute(
        "INSERT INTO pgworkd.queue_samples (at, queue, due, scheduled, running, failed, blocked, dead, oldest_due_s) "
        "SELECT s.at, q, 10, 1, 4, 1, 1, 2, 30 FROM pgworkd.samples s, unnest($1::text[]) q",
        QUEUES,
    )
    counts = "{" + ",".join(["0"] * 20 + ["5", "4", "1"] + ["0"] * 49) + "}"
    await db.execute(
        "INSERT INTO pgworkd.queue_minutes SELECT now() - n * interval '1 min' - interval '11 min', 60, q, 'send', "
        "NULL, 10, 9, 1, 1, 0, $2::text::bigint[], $2::text::bigint[], 1, 1 "
        "FROM unnest($1::text[]) q, generate_series(0, 3000) n",
        QUEUES,
        counts,
    )
    await db.execute("SELECT pgworkd.sample_queues()")
    await db.execute(
        "INSERT INTO pgworkd.error_groups (queue, kind, error_group, error_type, pattern, sample_id, deaths, first_at, "
        "last_at) SELECT q, 'send', gen_random_uuid(), 'ValueError', 'x', gen_random_uuid(), 3, now(), now() "
        "FROM unnest($1::text[]) q",
        QUEUES,
    )
    await db.execute(
        "INSERT INTO pgworkd.refused_rows (what, key, sqlstate, error, until) "
        "VALUES ('rescue', 'x', '23514', 'no', now())"
    )


async def test_every_panel_returns_what_grafana_draws(loaded: Db, roles: Roles) -> None:
    async with roles.session("reader") as reader:
        for title, _, form, sql in targets():
            rows = await reader.fetch(filled(sql, QUEUES))
            assert rows, title
            # Go's driver, with which Grafana reads, shows no panel at all that has an instant without end.
            assert not any(isinstance(at, dt.datetime) and at.year == dt.MAXYEAR for row in rows for at in row), title
            if form == "time_series":
                times = [row["time"] for row in rows]
                assert times == sorted(times), title
                assert all(value is not None for value in rows[0].values()), title
                if "metric" in rows[0]:
                    assert {row["metric"] for row in rows} == set(QUEUES), title
                assert len(rows) <= 1000 * len(QUEUES), f"{title}: {len(rows)} rows"


async def test_the_numbers_are_right(loaded: Db, roles: Roles) -> None:
    expected: dict[str, int] = {"Queues stalled": 1, "Dead jobs": 300, "Effects put off": 0}
    expected |= {"Workers lost": 1, "Schedules late": 1, "Queues paused": 1, "Without a worker": 0}
    async with roles.session("reader") as reader:
        found = {
            title: await reader.fetchval(filled(sql, QUEUES)) for title, kind, _, sql in targets() if kind == "stat"
        }
        tables = {
            title: await reader.fetch(filled(sql, QUEUES)) for title, kind, _, sql in targets() if kind == "table"
        }
    assert {title: found[title] for title in expected} == expected
    assert found["Oldest due job"] > 3900
    assert found["Age of the sample"] < 60
    assert found["Oldest transaction"] is None, "a reader without pg_read_all_stats cannot see others' transactions"
    now = {row["queue"]: row for row in tables["Queues now"]}
    assert (now["mail"]["slots"], now["mail"]["workers"], now["mail"]["paused"]) == (4, 1, False)
    assert sum(row["running"] for row in now.values()) == 5
    assert [row["name"] for row in tables["Workers"]] == ["lost", "alive"]
    assert tables["Schedules"][0]["late_s"] > 3500


async def test_queues_that_are_stalled_or_have_no_worker_are_seen(loaded: Db, roles: Roles) -> None:
    await loaded.execute("UPDATE pgworkd.workers SET lease_until = now() - interval '1 s' WHERE kind = 'daemon'")
    await loaded.execute("UPDATE pgworkd.queue_minutes SET at = now() - interval '1 min' WHERE queue = 'mail'")
    async with roles.session("reader") as reader:
        found = {
            title: await reader.fetchval(filled(sql, QUEUES)) for title, kind, _, sql in targets() if kind == "stat"
        }
        assert (found["Without a worker"], found["Queues stalled"], found["Workers lost"]) == (3, 0, 2)
        sql = next(sql for title, _, _, sql in targets() if title == "Completed by queue")
        rows = await reader.fetch(filled(sql, ["it's"], "send"))
        assert {round(row["value"], 3) for row in rows} <= {0.15, 0.3}


async def test_panels_stand_no_or_unknown_queues(loaded: Db, roles: Roles) -> None:
    async with roles.session("reader") as reader:
        for _, _, _, sql in targets():
            await reader.fetch(filled(sql, []))
            await reader.fetch(filled(sql, ["nobody's"], "it's \\ none"))


async def test_a_queue_without_live_jobs_is_drawn_at_0(loaded: Db, roles: Roles) -> None:
    """It has no row in queue_samples."""
    await loaded.execute("DELETE FROM pgworkd.queue_samples WHERE queue = 'mail' AND at > now() - interval '1 hour'")
    sql = next(sql for title, _, _, sql in targets() if title == "Due")
    async with roles.session("reader") as reader:
        values = [row["value"] for row in await reader.fetch(filled(sql, ["mail"]))]
    assert len(values) in (180, 181, 182), "one a minute"
    assert (values[0], values[-1]) == (10, 0)


async def test_variables_list_queues_and_kinds(loaded: Db, roles: Roles) -> None:
    lists = {each["name"]: each["query"] for each in POSTGRES["templating"]["list"]}
    async with roles.session("reader") as reader:
        assert {row[0] for row in await reader.fetch(filled(lists["queue"], []))} == {*QUEUES, "paused"}
        assert [row[0] for row in await reader.fetch(filled(lists["kind"], QUEUES))] == ["send"]


async def test_no_panel_reads_jobs_or_the_history_whole(loaded: Db, roles: Roles) -> None:
    """By the plan, and by what Postgres counts, which includes what functions do."""
    lists = [(each["name"], each["query"]) for each in POSTGRES["templating"]["list"][1:]]
    async with roles.session("reader") as reader:
        await reader.execute("SET max_parallel_workers_per_gather = 0")  # what those read is counted elsewhere
        for title, text in [*((title, sql) for title, _, _, sql in targets()), *lists]:
            sql = filled(text, QUEUES)
            assert not await _scanned(reader, sql), title
            assert not await _planned(reader, sql), title


async def _scanned(db: asyncpg.Connection[Any], sql: str) -> set[str]:
    """The large tables that a statement has read whole."""
    transaction = db.transaction()
    await transaction.start()
    await db.fetch(sql)
    rows = await db.fetch("SELECT relname FROM pg_stat_xact_user_tables WHERE schemaname = 'pgworkd' AND seq_scan > 0")
    await transaction.rollback()
    return {name for (name,) in rows if name in LARGE or name.startswith("finished_jobs")}


async def _planned(db: asyncpg.Connection[Any], sql: str) -> set[str]:
    """The large tables that a statement would read whole, by its plan; functions are not looked into."""
    (plan,) = json.loads(await db.fetchval(f"EXPLAIN (FORMAT JSON) {sql}"))
    nodes = [plan["Plan"]]
    for node in nodes:
        nodes += node.get("Plans", [])
    names = {node.get("Relation Name", "") for node in nodes if node["Node Type"] == "Seq Scan"}
    return {name for name in names if name in LARGE or name.startswith("finished_jobs")}
