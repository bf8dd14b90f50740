"""Metrics and health of several daemons as one, while some die, freeze or are blocked; and a real Prometheus."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgworkd.metrics.fleet import SHARED_S
from tests.kits.commands import Start, database, start, waits_until
from tests.kits.metrics import NO_PROMETHEUS, PROMETHEUS, address_of, fell, fetch, total
from tests.kits.watched import APP, ASK, LISTEN, finished, insert, ready, serve, until_finished

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["start"]  # fixtures


def pids(dsn: str) -> list[int]:
    with database(dsn) as db:
        return [pid for (pid,) in db.execute("SELECT pid FROM pgworkd.workers WHERE lost_at IS NULL ORDER BY name")]


def test_processes_add_up_and_totals_survive_a_death(start: Start, dsn: str, tmp_path: Path) -> None:
    address = serve(start, tmp_path, dsn, "--processes=2", PGWORKD_WORKER_NAME="w")
    waits_until(lambda: ready(address))
    page = fetch(address).page
    assert total(page, "pgworkd_slots", queue="mail") == 6
    assert total(page, "pgworkd_processes", state="answering") == total(page, "pgworkd_processes", state="wanted") == 2
    insert(dsn, "mail", 500)
    before = until_finished(address, 500)
    os.kill(pids(dsn)[0], signal.SIGKILL)
    waits_until(lambda: not ready(address))
    assert fetch(address, "/healthz").status == 200
    during = fetch(address).page
    assert not fell(before, during)
    waits_until(lambda: ready(address))
    after = fetch(address).page
    assert not fell(during, after)
    assert finished(after) >= 500
    insert(dsn, "mail", 100)
    assert finished(until_finished(address, 600)) == 600


def test_a_frozen_process_is_left_out_and_named(start: Start, dsn: str, tmp_path: Path) -> None:
    address = serve(start, tmp_path, dsn, "--processes=2", PGWORKD_WORKER_NAME="w")
    waits_until(lambda: ready(address))
    insert(dsn, "mail", 100)
    before = until_finished(address, 100)
    frozen = pids(dsn)[0]
    os.kill(frozen, signal.SIGSTOP)
    try:
        time.sleep(2 * SHARED_S)  # until the last answer is no longer shared
        began = time.monotonic()
        during = fetch(address).page
        assert time.monotonic() - began < 3
        assert not fell(before, during)
        assert total(during, "pgworkd_processes", state="answering") == 1
        assert total(during, "pgworkd_slots", queue="mail") == 3
        failing = fetch(address, "/readyz").failing
        assert failing["processes"] == "1 of 2 answer"
        assert failing["w-1: answers"].startswith("did not answer within 1 s")
        assert fetch(address, "/healthz").status == 200
    finally:
        os.kill(frozen, signal.SIGCONT)
    waits_until(lambda: total(fetch(address).page, "pgworkd_processes", state="answering") == 2)
    assert not fell(during, fetch(address).page)


def test_a_process_whose_loop_is_blocked_still_reports(start: Start, dsn: str, tmp_path: Path) -> None:
    address = serve(start, tmp_path, dsn, "--processes=2", PGWORKD_WORKER_NAME="w")
    waits_until(lambda: ready(address))
    insert(dsn, "block", payload='{"seconds": 8}')
    waits_until(lambda: total(fetch(address).page, "pgworkd_loop_lag_seconds") > 5)
    failing = fetch(address, "/readyz").failing
    assert len(failing) == 1
    assert next(iter(failing)) in ("w-1: loop", "w-2: loop")
    assert total(fetch(address).page, "pgworkd_processes", state="answering") == 2


def test_handlers_do_not_inherit_the_address_to_report_to(start: Start, dsn: str, tmp_path: Path) -> None:
    found = tmp_path / "found"
    text = APP + ASK % "'PGWORKD_REPORT_TO' in os.environ"
    address = serve(start, tmp_path, dsn, "--processes=2", text=text)
    waits_until(lambda: ready(address))
    insert(dsn, "ask")
    waits_until(lambda: found.exists() and found.read_text())
    assert found.read_text() == "False"


def test_autoscale_shows_its_workers_as_one(start: Start, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "watched.py").write_text(APP)
    flags = ("--queue=hang", "--min=2", "--max=2", "--up-at=5", "--down-at=1", "--every-s=0.1", *LISTEN)
    command = (sys.executable, "-m", "pgworkd.cli", "run", "--app=watched:app", "--queue=mail")
    run = start(
        "autoscale", *flags, "--", *command, PGWORKD_DSN=dsn, PGWORKD_LOG_FORMAT="json", PGWORKD_WORKER_NAME="w"
    )
    address = address_of(run)
    waits_until(lambda: ready(address))
    page = fetch(address).page
    assert total(page, "pgworkd_slots", queue="mail") == 6
    assert total(page, "pgworkd_processes", state="answering") == 2
    insert(dsn, "mail", 50)
    before = until_finished(address, 50)
    os.kill(pids(dsn)[0], signal.SIGKILL)
    waits_until(lambda: not ready(address))
    assert not fell(before, fetch(address).page)
    waits_until(lambda: ready(address))
    run.stop()
    assert run.ends() == 0


# Prometheus itself

CONFIG = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
- job_name: pgworkd
  static_configs: [{targets: ["%s"]}]
"""


@contextlib.contextmanager
def prometheus(tmp_path: Path, target: str) -> Iterator[str]:
    """A Prometheus that scrapes the target; its address."""
    assert PROMETHEUS is not None
    (tmp_path / "prometheus.yml").write_text(CONFIG % target)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with (tmp_path / "prometheus.log").open("w") as log:
        process = subprocess.Popen([PROMETHEUS, *flags], cwd=tmp_path, stdout=log, stderr=log)
        try:
            yield address
        finally:
            process.kill()
            process.wait()


@pytest.mark.skipif(PROMETHEUS is None, reason=NO_PROMETHEUS)
def test_prometheus_scrapes_a_daemon(start: Start, dsn: str, tmp_path: Path) -> None:
    address = serve(start, tmp_path, dsn)
    waits_until(lambda: ready(address))
    insert(dsn, "mail", 50)
    until_finished(address, 50)

    def found(query: str) -> str | None:
        with contextlib.suppress(OSError, ValueError):  # it starts
            result = json.loads(fetch(server, f"/api/v1/query?query={query}").text)["data"]["result"]
            return str(result[0]["value"][1]) if result else None
        return None

    with prometheus(tmp_path, address) as server:
        waits_until(lambda: found("up") == "1")
        waits_until(lambda: found("sum(pgworkd_jobs_finished_total)") == "50")
        assert found('pgworkd_job_run_seconds_count{kind="mail"}') == "50"
        assert float(found("histogram_quantile(0.5,pgworkd_job_run_seconds_bucket)") or "nan") >= 0
