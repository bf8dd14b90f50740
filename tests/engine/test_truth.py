"""Every number that is published, against the workload's own ledger: beside a kill, a restart of Postgres, a stop."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import httpx
import psycopg
import pytest
from anyio.to_thread import run_sync

from pgworkd.core.job import OUTCOMES
from tests.kits import ledger
from tests.kits.commands import Command, Start, start
from tests.kits.gateway import Caller, token
from tests.kits.ledger import KINDS, QUEUES, Line, counted, lines
from tests.kits.metrics import Page, address_of, fell, fetch, total
from tests.kits.server import start_test_server
from tests.kits.workers import registered

pytestmark = pytest.mark.slow("a fleet at work for half a minute, and its ledger")

__all__ = ["start"]  # fixtures

SCRAPED_S = 0.25
LATE_S = 1.5
"""What a scrape may not know yet: starts of the last half second, and ends that are being settled."""
LOST_S = 11.0
"""What of the statistics goes with a process that is killed."""
STEPS, SECONDS = {"kill": 6.0, "postgres": 11.0, "stop": 18.0}, 23.0
"""When what happens, in seconds, and how long jobs are inserted."""

GATEWAY = ("serve", "--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0")


class Target:
    """One life of a process, scraped until it ends."""

    def __init__(self, name: str, run: Command) -> None:
        self.name, self.run, self.address = name, run, address_of(run)
        self.pages: list[tuple[float, Page]] = []
        """Each page, and when it was asked for."""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._scrape, daemon=True)
        self._thread.start()

    def _scrape(self) -> None:
        while not self._ends.wait(SCRAPED_S):
            at = time.time()
            with contextlib.suppress(OSError, httpx.HTTPError):
                if (answer := fetch(self.address)).status == 200:
                    self.pages.append((at, answer.page))

    def close(self) -> None:
        """Scrapes no more."""
        self._ends.set()
        self._thread.join()

    @property
    def has_gone(self) -> bool:
        """True once it is not scraped any more."""
        return self._ends.is_set()

    @property
    def last(self) -> tuple[float, Page]:
        """The last page."""
        return self.pages[-1]

    def fell(self) -> list[Any]:
        """What has become less from one page to the next."""
        pages = [page for _, page in self.pages]
        return [each for before, after in pairwise(pages) for each in fell(before, after)]


def started(page: Page, kind: str) -> float:
    return total(page, "pgworkd_jobs_started_total", kind=kind)


def finished(page: Page, kind: str) -> dict[str, float]:
    return {each: total(page, "pgworkd_jobs_finished_total", kind=kind, outcome=each) for each in OUTCOMES}


def insert(db: psycopg.Connection[Any], number: int) -> None:
    for kind in KINDS:
        db.execute("INSERT INTO pgworkd.jobs (queue, kind) VALUES (%s, %s)", [QUEUES.get(kind, "q"), kind])
    db.execute("INSERT INTO pgworkd.jobs (queue, payload) VALUES ('remote', %s)", [json.dumps({"n": number})])
    if number % 10 == 0:
        db.execute("INSERT INTO pgworkd.jobs (queue, expires_at) VALUES ('nobody', now() + interval '1 s')")
        (waits,) = db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('nobody') RETURNING id").fetchone() or ()
        db.execute("SELECT pgworkd.cancel(ARRAY[%s]::uuid[])", [waits])


async def work_remotely(url: str, text: str, note: Path, until: threading.Event) -> None:
    """A worker that fails each fifth job, and keeps the same ledger."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        worker = await registered(Caller(client, text), {"remote": 5})
        while not until.is_set():
            try:
                claimed = await worker.claim(5, 1)
            except AssertionError:  # the database is away
                continue
            with note.open("a") as file:
                for each in claimed:
                    job = each["job"]
                    ends = "failed" if job["payload"]["n"] % 5 == 0 and job["attempt"] == 1 else "completed"
                    for what in ("begin", ends):
                        file.write(f"gateway {time.time()} {what} remote {job['id']} {job['attempt']}\n")
            for each in claimed:
                job = each["job"]
                ends = "fail" if job["payload"]["n"] % 5 == 0 and job["attempt"] == 1 else "complete"
                await settled(worker, each, ends)
        await worker.sign_off()


async def settled(worker: Any, assignment: Any, how: str) -> None:
    """Settles an attempt, however often that takes: it answers what it has answered before."""
    while True:
        with contextlib.suppress(AssertionError):
            await worker.settle(assignment, how, **({"retry_in_s": 0.2} if how == "fail" else {}))
            return


@pytest.fixture
def own_server() -> Iterator[Any]:
    """A server that may be restarted."""
    server = start_test_server()
    yield server
    server.stop("immediate")


class Fleet:
    """Two daemons, one of several processes, and a gateway, at a server of their own."""

    def __init__(self, start: Start, server: Any, note: Path) -> None:
        self._start, self._server, self.dsn = start, server, server.dsn()
        shared = {"PGWORKD_DSN": self.dsn, "PGWORKD_LOG_FORMAT": "json", "PGWORKD_COMMAND_TIMEOUT_S": "2"}
        self._environ = shared | {"LEDGER": str(note)}
        assert start("migrate", **self._environ).ends() == 0
        self.targets = {"gateway": Target("gateway", run := start(*GATEWAY, **self._environ))}
        self.url = f"http://{run.event('http.listening')['address']}"
        self._serve("d1")
        self._serve("d2", "--processes=2")

    def _serve(self, life: str, *more: str) -> None:
        command = ("run", "--app=ledger_app:app", "--metrics-listen=127.0.0.1:0", "--lease-s=6", "--heartbeat-s=1")
        self.targets[life] = Target(life, self._start(*command, *more, LIFE=life, **self._environ))

    def kill(self) -> None:
        """Kills one daemon, which is started again."""
        self.targets["d1"].run.process.kill()
        self.targets["d1"].run.process.wait()
        self.targets["d1"].close()
        self._serve("d1again")

    def stop(self) -> None:
        """Stops that daemon, as systemd would."""
        self.targets["d1again"].run.stop()
        assert self.targets["d1again"].run.ends() == 0
        self.targets["d1again"].close()

    def postgres(self) -> None:
        """Restarts the database."""
        self._server.restart()

    def drive(self) -> None:
        """Inserts jobs all the while, does each of STEPS in its time, and waits until nothing is left to do."""
        began, number, left = time.time(), 0, dict(STEPS)
        while (now_s := time.time() - began) < SECONDS:
            for step in [each for each, at in left.items() if at <= now_s]:
                del left[step]
                getattr(self, step)()
            with psycopg.connect(self.dsn, autocommit=True) as db:
                insert(db, number := number + 1)
            time.sleep(0.05)
        live = "SELECT count(*) FROM pgworkd.jobs WHERE status <> 'dead'"
        deadline = time.time() + 60
        with psycopg.connect(self.dsn, autocommit=True) as db:
            while (db.execute(live).fetchone() or ())[0]:
                assert time.time() < deadline, db.execute("SELECT * FROM pgworkd.queue_stats").fetchall()
                time.sleep(0.2)
        known = time.time() + LATE_S
        while not all(each.has_gone or each.last[0] >= known for each in self.targets.values()):
            assert time.time() < deadline, "a process is not scraped any more"
            time.sleep(SCRAPED_S)


async def test_what_is_published_is_what_has_happened(start: Start, tmp_path: Path, own_server: Any) -> None:
    note, ends = tmp_path / "ledger", threading.Event()
    (tmp_path / "ledger_app.py").write_text(ledger.APP)
    fleet = await run_sync(Fleet, start, own_server, note)
    text = await token(fleet.dsn)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work_remotely, fleet.url, text, note, ends)
        await run_sync(fleet.drive)
        ends.set()
    for target in fleet.targets.values():
        target.close()
    found = lines(note)
    judge_lives(found, fleet.targets)
    judge_survivors(found, fleet.targets)
    with psycopg.connect(fleet.dsn, autocommit=True) as db:
        judge_database(db, found, fleet.targets)


def judge_lives(found: list[Line], targets: dict[str, Target]) -> None:
    """A process that has gone: all up to a moment before its last page, and never more than there was."""
    for life, target in targets.items():
        assert not target.fell(), life
        at, page = target.last
        before, ever = counted(found, life, at - LATE_S), counted(found, life)
        for kind in (*KINDS, "remote"):
            assert before["begin", kind] <= started(page, kind) <= ever["begin", kind], (life, kind)
            assert started(page, kind) == total(page, "pgworkd_job_wait_seconds_count", kind=kind), (life, kind)
            for outcome in ledger.OUTCOMES:
                shown = finished(page, kind)[outcome]
                assert shown <= ever[outcome, kind] or life == "d2", (life, kind, outcome)


def judge_survivors(found: list[Line], targets: dict[str, Target]) -> None:
    """A process that is there, and has nothing to do: exactly what was."""
    for life in ("d2", "gateway"):
        page, ever = targets[life].last[1], counted(found, life)
        for kind in (*KINDS, "remote"):
            shown = finished(page, kind)
            assert started(page, kind) == ever["begin", kind], (life, kind)
            assert {each: shown[each] for each in ledger.OUTCOMES} == {
                each: ever[each, kind] for each in ledger.OUTCOMES
            }, (life, kind)
            assert total(page, "pgworkd_job_run_seconds_count", kind=kind) == ever["begin", kind], (life, kind)
        assert total(page, "pgworkd_claims_total") == total(page, "pgworkd_claim_seconds_count") > 0, life
        assert total(page, "pgworkd_jobs_running") == 0, life
        assert total(page, "pgworkd_database_up") == 1, life


def judge_database(db: psycopg.Connection[Any], found: list[Line], targets: dict[str, Target]) -> None:
    """What SQL says of the whole fleet."""

    def rows(sql: str) -> dict[Any, Any]:
        return dict(db.execute(sql).fetchall())

    completed = {(line.kind, line.job) for line in found if line.what == "completed"}
    died = {(line.kind, line.job) for line in found if line.what == "dead"}
    stored = rows(
        "SELECT coalesce(kind, queue), count(*) FROM pgworkd.finished_jobs WHERE status = 'completed' GROUP BY 1"
    )
    assert stored == {kind: sum(each == kind for each, _ in completed) for kind in (*KINDS, "remote") if kind != "bad"}
    for sql in (
        "SELECT 1, count(*) FROM pgworkd.jobs WHERE status = 'dead'",
        "SELECT 1, count(*) FROM pgworkd.deaths",
        "SELECT 1, sum(deaths) FROM pgworkd.error_groups",
    ):
        assert rows(sql) == {1: len(died)}, sql
    ends = {(line.job, line.attempt) for line in found if line.what != "begin"}
    cut_short = [line for line in found if line.what == "begin" and (line.job, line.attempt) not in ends]
    rescued = sum(total(target.last[1], "pgworkd_jobs_rescued_total") for target in targets.values())
    assert 0 < len(cut_short) <= rescued, "somebody has published each"
    ended = rows("SELECT status::text, count(*) FROM pgworkd.finished_jobs GROUP BY 1")
    sums = db.execute("SELECT sum(completed), sum(cancelled), sum(expired) FROM pgworkd.queue_minutes").fetchone() or ()
    killed_at = targets["d1"].last[0]
    gone = sum(1 for line in found if line.life == "d1" and line.what == "completed" and line.at > killed_at - LOST_S)
    assert ended["completed"] - gone <= sums[0] <= ended["completed"]
    assert (sums[1], sums[2]) == (ended["cancelled"], ended["expired"])
    stats = rows("SELECT queue, due + scheduled + running + failed + blocked FROM pgworkd.queue_stats")
    assert set(stats.values()) == {0}
