"""What a gateway publishes of what it does, against what was done through it; and its port of metrics."""

from __future__ import annotations

import re

import anyio
import pytest
from anyio.to_thread import run_sync

from pgworkd.gateway.api.app import Application
from pgworkd.metrics.families import FAMILIES
from pgworkd.metrics.samples import Samples
from tests.kits.commands import Start, start, waits_until
from tests.kits.daemon import until
from tests.kits.gateway import also, calling, token
from tests.kits.metrics import PROMTOOL, address_of, complaints, fetch
from tests.kits.metrics import total as page_total
from tests.kits.proxy import Proxy
from tests.kits.verbs import Db, insert
from tests.kits.workers import registered

__all__ = ["start"]  # fixtures


def shown(app: Application) -> Samples:
    return app.gateway.source.samples()


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the values with these labels; of a histogram how many were observed."""
    (names,) = (family.labels for family in FAMILIES if family.name == name)
    rows = [(dict(zip(names, key, strict=True)), value) for key, value in samples[name].items()]
    found = [value for row, value in rows if labels.items() <= row.items()]
    return sum(sum(each[0]) if isinstance(each, tuple) else each for each in found)


async def test_what_remote_workers_run_is_counted_by_their_gateway(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        app = call.client._transport.app  # type: ignore[attr-defined]
        worker = await registered(call, {"q": 10})
        await insert(db, 6, "q", kind="k", max_attempts=1)
        claimed = await worker.claim(6)
        running = shown(app)
        assert total(running, "pgworkd_jobs_started_total", queue="q", kind="k") == 6, "when they are given"
        assert total(running, "pgworkd_job_wait_seconds", kind="k") == 6
        assert total(running, "pgworkd_jobs_running", queue="q") == 6
        assert total(running, "pgworkd_slots", queue="q") == 10
        for each in claimed[:3]:
            await worker.settle(each)
        for each in claimed[3:5]:
            await worker.settle(each, "fail", message="no")
        await worker.settle(claimed[5], "release", delay_s=60)
        found = shown(app)
        outcomes = {"completed": 3, "dead": 2, "released": 1}
        assert {each: total(found, "pgworkd_jobs_finished_total", outcome=each) for each in outcomes} == outcomes
        assert total(found, "pgworkd_jobs_finished_total") == total(found, "pgworkd_job_run_seconds") == 6
        assert total(found, "pgworkd_jobs_started_total") == total(found, "pgworkd_job_wait_seconds") == 6
        assert total(found, "pgworkd_jobs_running") == 0
        assert total(found, "pgworkd_claims_total") == total(found, "pgworkd_claim_seconds") > 0


async def test_what_is_taken_back_from_a_worker_is_counted(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True) as call:
        app = call.client._transport.app  # type: ignore[attr-defined]
        worker = await registered(call, {"q": 10})
        await insert(db, 2, "q", kind="k", max_attempts=1)
        await worker.beat(*await worker.claim(2))
        await worker.beat()  # it says that it has lost both
        await until(lambda: total(shown(app), "pgworkd_jobs_rescued_total", queue="q") == 2)
        assert total(shown(app), "pgworkd_jobs_finished_total", outcome="dead", kind="k") == 2


async def test_each_request_is_counted_by_route_and_status(dsn: str) -> None:
    """However the path is spelt: no label is a name that a caller gives."""
    async with calling(dsn) as call:
        app = call.client._transport.app  # type: ignore[attr-defined]
        for number in range(3):
            await call.ok("PUT", f"/v1/jobs/00000000-0000-4000-8000-00000000000{number}", {"queue": "q"})
        await call("GET", "/v1/jobs/none-such")
        await call("GET", "/v1/no/such/path")
        await call("BREW", "/v1/jobs")
        await also(call, "wrong")("GET", "/v1/queues")
        await call("HEAD", "/healthz")
        found = shown(app)
        assert found["pgworkd_requests_total"] == {
            ("PUT", "/v1/jobs/{job_id}", "201"): 3,
            ("GET", "/v1/jobs/{job_id}", "422"): 1,
            ("none", "none", "404"): 1,
            ("none", "none", "405"): 1,
            ("GET", "/v1/queues", "401"): 1,
            ("GET", "/healthz", "200"): 1,
        }
        assert total(found, "pgworkd_request_seconds") == 8


async def test_who_waits_and_which_connections_are_used(dsn: str, db: Db) -> None:
    async with calling(dsn, workers=True, connections_max=3) as call:
        app = call.client._transport.app  # type: ignore[attr-defined]
        worker = await registered(call, {"q": 1})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.claim, 1, 60)
            await until(lambda: total(shown(app), "pgworkd_requests_waiting", what="claims") == 1)
            tasks.cancel_scope.cancel()
        await until(lambda: total(shown(app), "pgworkd_requests_waiting") == 0)
        transaction = db.transaction()
        await transaction.start()
        await db.execute("INSERT INTO pgworkd.jobs (queue, dedupe_key) VALUES ('q', 'k')")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "POST", "/v1/jobs", {"queue": "q", "dedupe_key": "k"})
            await until(lambda: total(shown(app), "pgworkd_request_connections", state="used") == 1)
            assert total(shown(app), "pgworkd_request_connections", state="most") == 3
            await transaction.rollback()
        await until(lambda: total(shown(app), "pgworkd_request_connections", state="used") == 0)


@pytest.mark.slow("a gateway of its own")
async def test_a_port_of_its_own_needs_no_token_and_answers_while_the_database_is_away(dsn: str, start: Start) -> None:
    async with Proxy(dsn) as proxy:
        command = ("serve", "--listen=127.0.0.1:0", "--auth=none", "--metrics-listen=127.0.0.1:0")
        run = start(*command, PGWORKD_DSN=proxy.dsn, PGWORKD_LOG_FORMAT="json", PGWORKD_CONNECT_TIMEOUT_S="1")
        address = await run_sync(address_of, run)
        await run_sync(lambda: waits_until(lambda: fetch(address, "/readyz").status == 200))
        assert PROMTOOL is None or not complaints((await run_sync(fetch, address)).text)
        proxy.mode = "refuse"
        proxy.cut()
        await run_sync(lambda: waits_until(lambda: page_total(fetch(address).page, "pgworkd_database_up") == 0))
        assert "database" in (await run_sync(fetch, address, "/readyz")).failing
        assert (await run_sync(fetch, address, "/healthz")).status == 200
        proxy.mode = "pass"
        run.stop()
        assert await run_sync(run.ends) == 0


async def test_all_its_families_are_on_its_own_route(dsn: str) -> None:
    async with calling(dsn, workers=True) as call:
        await call("GET", "/v1/queues")
        text = (await also(call, await token(dsn, {"metrics": None}, "prometheus"))("GET", "/metrics")).text
        app = call.client._transport.app  # type: ignore[attr-defined]
        assert shown(app).keys() == {family.name for family in FAMILIES if family.source != "database"}
        assert {name for name, rows in shown(app).items() if rows} <= set(re.findall(r"# TYPE (\w+)", text))
        assert "pgworkd_scrape_up 1" in text
