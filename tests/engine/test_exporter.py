"""`pgworkd exporter` and `pgworkd health`: the database as Prometheus sees it, under the role reader."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import asyncpg
import pytest
from anyio.from_thread import start_blocking_portal
from anyio.to_thread import run_sync

from pgworkd import App
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import PgworkdError
from pgworkd.metrics import exporter
from pgworkd.metrics.exporter import DatabaseSource
from pgworkd.metrics.families import FAMILIES
from pgworkd.metrics.samples import Labels, Samples, Value
from tests.kits.commands import NOWHERE, Start, start, waits_until
from tests.kits.daemon import running, until
from tests.kits.metrics import PROMTOOL, address_of, complaints, fetch, total
from tests.kits.proxy import Proxy
from tests.kits.schema import granted

pytestmark = pytest.mark.slow("an exporter of its own for each, read over HTTP")

__all__ = ["start"]  # fixtures


def read(dsn: str) -> Samples:
    """One scrape."""
    with start_blocking_portal() as portal:
        source = DatabaseSource(ConnectionOptions(dsn), portal)
        try:
            return source.samples()
        finally:
            portal.call(source.close)


async def samples(dsn: str) -> Samples:
    return await run_sync(read, dsn)


def app() -> App:
    found = App()

    @found.handler("mail", concurrency=7)
    async def mail() -> None: ...

    return found


QUEUES = ("gone", "mail", "slow", "still")


async def test_all_families_as_a_reader(db: asyncpg.Connection[Any], dsn: str) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('still', 'infinity')")
    await db.execute("INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('still', now() - interval '1 min')")
    for name in ("gone", "slow"):
        await db.execute('SELECT pgworkd.set_endpoint($1, \'{"url": "https://x.example", "unsigned": true}\')', name)
        await db.execute("INSERT INTO pgworkd.queues (name, endpoint) VALUES ($1, $1)", name)
    await db.execute("SELECT pgworkd.disable_endpoint('gone', '410')")
    await db.execute("SELECT pgworkd.pause_endpoint('slow', 600, '503')")
    async with granted(dsn, db) as roles, running(app(), dsn):
        await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.queue_depths WHERE due > 0"))
        found = await samples(roles.dsn("reader"))
    assert found["pgworkd_scrape_up"] == {(): 1}
    assert found["pgworkd_queue_jobs"]["still", "due"] == 1
    assert float(found["pgworkd_queue_oldest_due_seconds"][("still",)]) >= 60  # type: ignore[arg-type]
    paused: dict[Labels, Value] = {(queue, "operator"): int(queue == "still") for queue in QUEUES}
    paused |= {(queue, "endpoint"): int(queue in ("gone", "slow")) for queue in QUEUES}
    assert found["pgworkd_queue_paused"] == paused
    assert found["pgworkd_endpoint_paused"] == {("gone",): 0, ("slow",): 1}
    assert found["pgworkd_endpoint_disabled"] == {("gone",): 1, ("slow",): 0}
    assert found["pgworkd_queue_workers"] == {(queue,): int(queue == "mail") for queue in QUEUES}
    assert found["pgworkd_queue_slots"] == {(queue,): 7 if queue == "mail" else 0 for queue in QUEUES}
    assert found["pgworkd_workers"] == {("running",): 1, ("blocked",): 0, ("stopping",): 0, ("lost",): 0}
    assert 0 <= float(found["pgworkd_sample_age_seconds"][()]) < 30  # type: ignore[arg-type]
    assert float(found["pgworkd_table_bytes"][("jobs",)]) > 8192  # type: ignore[arg-type]
    assert ("finished_jobs",) in found["pgworkd_table_bytes"]
    assert not [name for (name,) in found["pgworkd_table_bytes"] if name.startswith("finished_jobs_2")]
    assert ("jobs",) in found["pgworkd_table_dead_rows"]
    names = {family.name for family in FAMILIES if family.source == "database"}
    assert names - found.keys() == set()


async def test_schedules(db: asyncpg.Connection[Any], dsn: str) -> None:
    scheduled = App()

    @scheduled.handler("tick", every=3600)
    async def tick() -> None: ...

    async with running(scheduled, dsn):
        await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE schedule IS NOT NULL"))
    await db.execute("UPDATE pgworkd.schedules SET last_occurrence = pgworkd.clock() - interval '5 min'")
    await db.execute("UPDATE pgworkd.jobs SET run_at = pgworkd.clock() - interval '4 min' ")
    found = await samples(dsn)
    assert 300 <= float(found["pgworkd_schedule_last_seconds"][("tick",)]) < 330  # type: ignore[arg-type]
    assert 240 <= float(found["pgworkd_schedule_late_seconds"][("tick",)]) < 270  # type: ignore[arg-type]
    await db.execute("DELETE FROM pgworkd.jobs; UPDATE pgworkd.schedules SET error = 'no such zone'")
    await db.execute("UPDATE pgworkd.schedules SET in_force_since = pgworkd.clock() - interval '1 h'")
    found = await samples(dsn)
    late_s = float(found["pgworkd_schedule_late_seconds"][("tick",)])  # type: ignore[arg-type]
    assert 300 <= late_s < 330, "there is no next occurrence, and its error says why"


async def test_the_last_occurrence_of_an_interval_lies_in_the_past(db: asyncpg.Connection[Any], dsn: str) -> None:
    scheduled = App()

    @scheduled.handler("tick", every=3600)
    async def tick() -> None: ...

    async with running(scheduled, dsn):
        await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE schedule IS NOT NULL"))
    assert await db.fetchval("SELECT last_occurrence > pgworkd.clock() FROM pgworkd.schedules")
    found = await samples(dsn)
    assert 0 <= float(found["pgworkd_schedule_last_seconds"][("tick",)]) <= 3600  # type: ignore[arg-type]


@pytest.mark.parametrize("table", ["jobs", "workers", "queue_samples", "schedules", "audit"])
async def test_a_locked_table_costs_what_is_read_from_it_only(
    db: asyncpg.Connection[Any], dsn: str, table: str
) -> None:
    async with db.transaction():
        await db.execute(f"LOCK TABLE pgworkd.{table} IN ACCESS EXCLUSIVE MODE")
        found = await samples(dsn)
    assert found["pgworkd_scrape_up"] == {(): 1}
    assert "pgworkd_oldest_snapshot_seconds" in found
    assert "pgworkd_table_bytes" not in found
    assert ("pgworkd_workers" in found) == (table != "workers")


async def test_what_holds_back_vacuum(db: asyncpg.Connection[Any], dsn: str) -> None:
    async with db.transaction():
        await db.execute("SELECT pg_current_xact_id()")
        await until(lambda: db.fetchval("SELECT clock_timestamp() - now() > '0.3 s'"))
        found = await samples(dsn)
    assert float(found["pgworkd_oldest_snapshot_seconds"][()]) >= 0.3  # type: ignore[arg-type]
    assert set(found["pgworkd_oldest_snapshot_transactions"]) == {("session",), ("prepared",), ("slot",)}


async def test_without_a_schema_it_says_so(empty_dsn: str) -> None:
    assert (await samples(empty_dsn))["pgworkd_scrape_up"] == {(): 0}


async def test_it_cannot_write(dsn: str) -> None:
    def attempt() -> str:
        with start_blocking_portal() as portal:
            source = DatabaseSource(ConnectionOptions(dsn), portal)
            source.samples()
            try:
                portal.call(source._reader._connection.fetch, "INSERT INTO pgworkd.jobs (queue) VALUES ('q')")
            except PgworkdError as error:
                return str(error)
            finally:
                portal.call(source.close)
            return ""

    assert "read-only" in await run_sync(attempt)


@pytest.mark.parametrize(("shared_s", "reads"), [(3600, 1), (0, 11)])
async def test_many_scrapers_cost_one(dsn: str, monkeypatch: pytest.MonkeyPatch, shared_s: float, reads: int) -> None:
    made: list[None] = []
    read = exporter.DatabaseReader._read

    async def counted(reader: exporter.DatabaseReader) -> object:
        made.append(None)
        return await read(reader)

    monkeypatch.setattr(exporter, "SHARED_S", shared_s)
    monkeypatch.setattr(exporter.DatabaseReader, "_read", counted)

    def ask() -> None:
        with start_blocking_portal() as portal:
            source = DatabaseSource(ConnectionOptions(dsn), portal)
            source.samples()
            for _ in range(5):
                source.samples()
                source.checks()
            portal.call(source.close)

    await run_sync(ask)
    assert len(made) == reads


async def test_two_hundred_queues_in_time(db: asyncpg.Connection[Any], dsn: str) -> None:
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, kind) SELECT 'q' || q, 'k' || k FROM generate_series(1, 200) q,"
        " generate_series(1, 50) k"
    )
    await db.execute("SELECT pgworkd.sample_queues()")
    began = time.perf_counter()
    found = await samples(dsn)
    took_s = time.perf_counter() - began
    assert len(found["pgworkd_queue_jobs"]) == 1200
    assert took_s < 1, took_s


# The commands


async def test_the_database_goes_away_and_comes_back(start: Start, dsn: str) -> None:
    async with Proxy(dsn) as proxy:
        run = start("exporter", "--listen=127.0.0.1:0", PGWORKD_DSN=proxy.dsn, PGWORKD_LOG_FORMAT="json")
        address = await run_sync(address_of, run)
        page = (await run_sync(fetch, address)).page
        assert total(page, "pgworkd_scrape_up") == 1
        assert total(page, "pgworkd_table_bytes", table="jobs") > 0
        if PROMTOOL is not None:
            assert complaints((await run_sync(fetch, address)).text) == ""
        proxy.mode = "refuse"
        proxy.cut()
        await run_sync(lambda: waits_until(lambda: total(fetch(address).page, "pgworkd_scrape_up") == 0))
        page = (await run_sync(fetch, address)).page
        assert {name for name, _ in page} == {"pgworkd_scrape_up", "pgworkd_build_info"}
        assert (await run_sync(fetch, address, "/healthz")).status == 200
        assert (await run_sync(fetch, address, "/readyz")).status == 503
        proxy.mode = "pass"
        await run_sync(lambda: waits_until(lambda: total(fetch(address).page, "pgworkd_scrape_up") == 1))
        run.stop()
        assert await run_sync(run.ends) == 0


async def test_a_silent_database_is_given_up_in_time(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "CONNECT_S", 0.5)
    async with Proxy(dsn) as proxy:
        proxy.mode = "blackhole"
        began = time.monotonic()
        assert (await samples(proxy.dsn))["pgworkd_scrape_up"] == {(): 0}
        assert time.monotonic() - began < 4


def test_health_tells_each_check(start: Start, dsn: str) -> None:
    run = start("run", "--app=notes:app", "--metrics-listen=127.0.0.1:0", PGWORKD_DSN=dsn, PGWORKD_LOG_FORMAT="json")
    address = address_of(run)
    waits_until(lambda: fetch(address, "/readyz").status == 200)
    asked = start("health", f"--url=http://{address}", stdout=subprocess.PIPE)
    assert asked.ends() == 0
    assert asked.process.stdout is not None
    lines = asked.process.stdout.read().splitlines()
    assert [line.split()[1] for line in lines] == ["database", "schema", "lease", "loop", "wake", "claims"]
    assert {line.split()[0] for line in lines} == {"ok"}
    port = address.rpartition(":")[2]
    assert start("health", PGWORKD_METRICS_LISTEN=f"0.0.0.0:{port}").ends() == 0


def test_health_of_a_daemon_that_waits_for_its_database(start: Start) -> None:
    run = start(
        "run", "--app=notes:app", "--metrics-listen=127.0.0.1:0", PGWORKD_DSN=NOWHERE, PGWORKD_LOG_FORMAT="json"
    )
    assert start("health", f"--url=http://{address_of(run)}").ends() == 1


@pytest.mark.parametrize(
    ("args", "environ", "code", "says"),
    [
        (["--url=http://127.0.0.1:1"], {}, 1, "no answer from 127.0.0.1 port 1 (Connection refused)"),
        ([], {}, 2, "no address given: pass --url http://127.0.0.1:9464, or set PGWORKD_METRICS_LISTEN"),
        ([], {"PGWORKD_METRICS_LISTEN": "127.0.0.1:0"}, 2, "metrics_listen has port 0"),
        (["--url=https://x:1"], {}, 2, "--url: give http://host:port"),
        (["--url=http://x"], {}, 2, "--url: give http://host:port"),
        (["--url=127.0.0.1:9464"], {}, 2, "--url: give http://host:port"),
    ],
)
def test_health_without_an_answer(start: Start, args: list[str], environ: dict[str, str], code: int, says: str) -> None:
    run = start("health", *args, **environ)
    assert run.ends() == code
    run.says(says)


def test_an_exporter_without_a_database_still_answers(start: Start) -> None:
    run = start("exporter", "--listen=127.0.0.1:0", PGWORKD_DSN=NOWHERE, PGWORKD_LOG_FORMAT="json")
    address = address_of(run)
    assert fetch(address, "/healthz").status == 200
    assert total(fetch(address).page, "pgworkd_scrape_up") == 0
    response = fetch(address, "/readyz")
    assert response.status == 503
    assert "c4n4ry" not in response.text
    again = start("exporter", f"--listen={address}", PGWORKD_DSN=NOWHERE)
    assert again.ends() == 2
    again.says(f"pgworkd: --listen: cannot listen on {address}: the port is in use")
