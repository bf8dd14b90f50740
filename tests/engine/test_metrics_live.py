"""Metrics and health of real daemons over HTTP: while they work, are blocked, lose the database, drain and die."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from anyio.to_thread import run_sync

from tests.kits.commands import NOWHERE, Start, database, start, waits_until
from tests.kits.metrics import PROMETHEUS_ACCEPT, PROMTOOL, Page, address_of, complaints, fell, fetch, total
from tests.kits.proxy import Proxy
from tests.kits.watched import APP, ASK, LISTEN, finished, insert, ready, serve, until_finished

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["start"]  # fixtures

OTEL = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))

def names():
    scopes = [scope for each in reader.get_metrics_data().resource_metrics for scope in each.scope_metrics]
    return [metric.name for scope in scopes for metric in scope.metrics]
"""


def test_a_daemon_at_work(start: Start, dsn: str, tmp_path: Path) -> None:
    address = serve(start, tmp_path, dsn)
    waits_until(lambda: ready(address))
    first = fetch(address).page
    assert finished(first, kind="mail") == 0, "kinds of the app are there from the start"
    assert total(first, "pgworkd_slots", queue="mail") == 3
    insert(dsn, "mail", 200)
    insert(dsn, "mail", 1, '{"fails": true}')
    insert(dsn, "hang")
    page = until_finished(address, 200)
    waits_until(lambda: finished(fetch(address).page, "failed") >= 1)
    waits_until(lambda: total(fetch(address).page, "pgworkd_jobs_running", queue="hang") == 1)
    page = fetch(address).page
    assert total(page, "pgworkd_jobs_started_total", kind="mail") >= 201
    assert total(page, "pgworkd_job_run_seconds_count", kind="mail") >= 201
    assert total(page, "pgworkd_job_wait_seconds_count", kind="mail") >= 201
    assert total(page, "pgworkd_claims_total", result="jobs") > 0
    assert total(page, "pgworkd_claims_total", result="failed") == 0
    assert 0 < total(page, "pgworkd_lease_remaining_seconds") <= 30
    assert total(page, "pgworkd_database_up") == total(page, "pgworkd_listening") == 1
    assert total(page, "pgworkd_loop_lag_seconds") < 5
    assert total(page, "pgworkd_maintenance_seconds_count") > 0
    assert page == fetch(address, accept=PROMETHEUS_ACCEPT).page or not fell(page, fetch(address).page)
    if PROMTOOL is not None:
        assert complaints(fetch(address).text) == ""


def test_off_it_imports_nothing(start: Start, dsn: str, tmp_path: Path) -> None:
    names = {"prometheus_client", "http.server", "pgworkd.metrics.page", "pgworkd.metrics.server", "opentelemetry"}
    found = tmp_path / "found"
    text = APP + ASK % f"sorted({names!r} & sys.modules.keys())"
    (tmp_path / "watched.py").write_text(text)
    start("run", "--app=watched:app", PGWORKD_DSN=dsn)
    insert(dsn, "ask")
    waits_until(lambda: found.exists() and found.read_text())
    assert found.read_text() == "[]"


def test_a_meter_provider_of_the_app_is_used(start: Start, dsn: str, tmp_path: Path) -> None:
    found = tmp_path / "found"
    text = OTEL + APP + ASK % "names()"
    (tmp_path / "watched.py").write_text(text)
    start("run", "--app=watched:app", PGWORKD_DSN=dsn)
    insert(dsn, "ask")
    waits_until(lambda: found.exists() and found.read_text())
    assert "pgworkd.jobs_started" in found.read_text()
    assert "messaging.client.consumed.messages" in found.read_text()


@pytest.mark.alone("a page has to come within 50 ms")
def test_a_blocked_loop_does_not_block_health(start: Start, dsn: str, tmp_path: Path) -> None:
    address = serve(start, tmp_path, dsn)
    waits_until(lambda: ready(address))
    insert(dsn, "block", payload='{"seconds": 60}')
    waits_until(lambda: total(fetch(address).page, "pgworkd_loop_lag_seconds") > 0.5)
    took = []
    for _ in range(40):
        began = time.perf_counter()
        assert fetch(address, "/healthz").status == 200
        took.append(time.perf_counter() - began)
    took.sort()
    print("healthz beside a blocked loop, ms:", [round(each * 1000, 1) for each in (took[0], took[20], took[-1])])  # noqa: T201
    assert took[len(took) // 2] < 0.05
    waits_until(lambda: not ready(address))
    assert fetch(address, "/readyz").failing.keys() == {"loop"}
    page = fetch(address).page
    assert total(page, "pgworkd_loop_lag_seconds") > 1
    assert total(page, "pgworkd_database_up") == 1, "the lease is renewed by a thread of its own"


def test_before_the_database_is_reached(start: Start, tmp_path: Path) -> None:
    address = serve(start, tmp_path, NOWHERE)
    assert fetch(address, "/healthz").status == 200
    response = fetch(address, "/readyz")
    assert response.status == 503
    assert response.failing["database"] == "waiting for the database"
    assert "c4n4ry" not in response.text
    page = fetch(address).page
    assert total(page, "pgworkd_database_up") == total(page, "pgworkd_lease_remaining_seconds") == 0


async def test_the_database_goes_away_and_comes_back(start: Start, dsn: str, tmp_path: Path) -> None:
    flags = ("--lease-s=5", "--heartbeat-s=1")
    async with Proxy(dsn) as proxy:
        address = await run_sync(lambda: serve(start, tmp_path, proxy.dsn, *flags, PGWORKD_COMMAND_TIMEOUT_S="2"))
        await run_sync(lambda: waits_until(lambda: ready(address)))
        proxy.mode = "refuse"
        proxy.cut()
        away = await run_sync(_while_the_database_is_away, address)
        proxy.mode = "pass"
        await run_sync(lambda: waits_until(lambda: ready(address)))
        assert not fell(away, (await run_sync(fetch, address)).page)


def _while_the_database_is_away(address: str) -> Page:
    waits_until(lambda: total(fetch(address).page, "pgworkd_database_up") == 0)
    waits_until(lambda: total(fetch(address).page, "pgworkd_listening") == 0)
    waits_until(lambda: fetch(address, "/readyz").failing.get("database") == "did not answer the last heartbeat")
    waits_until(lambda: fetch(address, "/readyz").failing["database"] == "was not reached within the lease")
    assert "lease" in fetch(address, "/readyz").failing
    assert fetch(address, "/healthz").status == 200
    return fetch(address).page


def test_while_it_drains(start: Start, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(APP)
    run = start("run", "--app=watched:app", *LISTEN, PGWORKD_DSN=dsn, PGWORKD_LOG_FORMAT="json")
    address = address_of(run)
    waits_until(lambda: ready(address))
    insert(dsn, "hang")
    waits_until(lambda: total(fetch(address).page, "pgworkd_jobs_running") == 1)
    run.stop()
    run.event("daemon.stopping")
    assert fetch(address, "/healthz").status == 200
    assert fetch(address, "/readyz").failing == {"claims": "stopping"}
    assert total(fetch(address).page, "pgworkd_jobs_running") == 1
    run.stop()
    assert run.ends() == 0
    with pytest.raises(OSError, match="refused"):
        fetch(address)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_port_in_use_ends_the_start(start: Start, dsn: str, processes: str) -> None:
    insert(dsn, "mail")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = start(
            "run",
            "--app=notes:app",
            f"--processes={processes}",
            PGWORKD_DSN=dsn,
            PGWORKD_METRICS_LISTEN=address,
            PGWORKD_LOG_FORMAT="json",
        )
        assert run.ends() == 2
    where = f"metrics_listen (environment PGWORKD_METRICS_LISTEN): cannot listen on {address}"
    remedy = "the port is in use: stop the program that has it, or give another port (0: any free one)"
    assert [line for line in run.lines if line.startswith("pgworkd: ")] == [f"pgworkd: {where}: {remedy}"]
    with database(dsn) as db:
        assert db.execute("SELECT status::text, attempts FROM pgworkd.jobs").fetchone() == ("pending", 0)


def test_ipv6(start: Start, dsn: str, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    address = serve(start, tmp_path, dsn, "--metrics-listen=[::1]:0")
    assert address.startswith("[::1]:")
    assert fetch(address, "/healthz").status == 200


def test_a_thousand_kinds_are_bounded(start: Start, dsn: str, tmp_path: Path) -> None:
    text = APP + "for n in range(1000):\n    @app.handler(f'k{n}', queue='many')\n    async def each() -> None: ...\n"
    address = serve(start, tmp_path, dsn, text=text)
    waits_until(lambda: ready(address))
    with database(dsn) as db:
        db.execute("INSERT INTO pgworkd.jobs (queue, kind) SELECT 'many', 'k' || n FROM generate_series(0, 999) n")
    page = until_finished(address, 1000)
    kinds = {dict(labels)["kind"] for name, labels in page if name == "pgworkd_job_run_seconds_count"}
    assert len(kinds) <= 201
    assert finished(page, kind="other") >= 799
    if PROMTOOL is not None:
        assert complaints(fetch(address).text) == ""
