"""python -m tests.push.chaos: pushes under kills, to a service that answers with every line of the table at random.

Daemons and gateways are killed at any time, also between a request and its answer, and between a 202 and its callback.
The service notes each request and what it said; in the end every request must be explained, every job must have ended
as the service last said, and nothing that was acknowledged may be lost. Exit code 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg

from pgworkd.database import schema
from tests.kits.downstream import Downstream, serving
from tests.kits.push import put_endpoint
from tests.kits.server import create_empty_database, free_port, start_test_server
from tests.push.chaos_service import CALLBACK_S, DEAD, SECRET, TIMEOUT_S, Run, Seen, Service

DAEMONS = GATEWAYS = 2
QUEUES = 8
MARGIN_S = 0.5
"""By how much the clocks may be apart: what the service sees, and what the database does."""


class Process:
    """A daemon or a gateway, started again when it has been killed."""

    def __init__(self, dsn: str, log: Path, *command: str, **environ: str) -> None:
        self._command = [sys.executable, "-m", "pgworkd.cli", *command]
        self._environ = {"PGWORKD_DSN": dsn, "PGWORKD_LOG_FORMAT": "json", **environ}
        self._log = log.open("ab")
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, env=os.environ | self._environ, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        """Kills it; another one takes its place."""
        self.process.kill()
        self.process.wait()
        self.process = self._started()

    def end(self) -> int:
        """Stops it gracefully; its exit code."""
        self.process.terminate()
        return self.process.wait(60)


async def run(jobs: int, seed: int, kills: int) -> Seen:
    """One run."""
    chance, seen = random.Random(seed), Seen()  # noqa: S311 - it decides when to kill
    server = start_test_server(None)
    folder = Path(tempfile.mkdtemp(prefix="pgworkd-push-"))
    try:
        dsn = await create_empty_database(server.dsn(), "push")
        db = await asyncpg.connect(dsn)
        await db.execute(schema.text())
        ports = [free_port() for _ in range(GATEWAYS)]
        service = Service(seen, chance, ports)
        async with serving(Downstream(service.take)) as down:
            await _prepare(db, down.url, jobs)
            lease = {"PGWORKD_LEASE_S": "5", "PGWORKD_HEARTBEAT_S": "1", "PGWORKD_COMMAND_TIMEOUT_S": "2"}
            push = {"PGWORKD_SECRET_CHAOS": SECRET, "PGWORKD_CALLBACK_URL": "http://127.0.0.1:1"} | lease
            daemons = [Process(dsn, folder / f"daemon-{n}", "push", **push) for n in range(DAEMONS)]
            flags = ("--auth", "none", "--listen")
            gateways = [
                Process(dsn, folder / f"gateway-{n}", "serve", *flags, f"127.0.0.1:{ports[n]}") for n in range(2)
            ]
            async with asyncio.TaskGroup() as tasks:
                operator = tasks.create_task(_operate(db, dsn))
                await _kill(chance, seen, daemons, gateways, kills, db, jobs)
                service.calm = True
                await _ended(db, seen)
                operator.cancel()
            await service.finished()
            for each in [*daemons, *gateways]:
                if (code := await asyncio.to_thread(each.end)) != 0:
                    seen.violations.append(f"a process ended with {code}: see {folder}")
        _judge(seen, {str(row["id"]): dict(row) for row in await db.fetch(_JOBS)}, jobs)
        await db.close()
    finally:
        server.stop("immediate")
    return seen


_JOBS = """SELECT id, queue, status, attempts, failures, result::text, error,
    ARRAY(SELECT concat_ws(' ', e ->> 'attempt', e ->> 'type', e ->> 'message', e ->> 'at')
          FROM jsonb_array_elements(errors) e) AS errors FROM pgworkd.all_jobs"""
_LEFT = "SELECT count(*) FROM pgworkd.jobs WHERE status <> 'dead'"


async def _prepare(db: Any, url: str, jobs: int) -> None:
    for number in range(QUEUES):
        mode = "callback" if number % 2 else "sync"
        times = {"timeout_s": TIMEOUT_S, "callback_timeout_s": CALLBACK_S}
        await put_endpoint(db, f"e{number}", url, f"q{number}", mode=mode, secret_name="chaos", **times)
        changes = '{"backoff_s": 0.5, "backoff_cap_s": 5, "max_losses": 100}'
        await db.execute("SELECT pgworkd.set_queue($1, $2)", f"q{number}", changes)
    insert = """INSERT INTO pgworkd.jobs (queue, payload, max_attempts)
        SELECT 'q' || n % $2::int, jsonb_build_object('n', n), 100 FROM generate_series(1, $1::int) n"""
    await db.execute(insert, jobs, QUEUES)


async def _operate(db: Any, dsn: str) -> None:
    """Enables endpoints that have said they are gone, and ends long pauses."""
    connection = await asyncpg.connect(dsn)
    while True:
        await asyncio.sleep(1)
        await connection.execute(
            "SELECT pgworkd.enable_endpoint(name) FROM pgworkd.endpoints"
            " WHERE disabled_at IS NOT NULL OR paused_until > now() + interval '2 s'"
        )


async def _kill(
    chance: random.Random, seen: Seen, daemons: list[Process], gateways: list[Process], kills: int, db: Any, jobs: int
) -> None:
    """Kills while there is work, the more the faster it goes."""
    for number in range(1, kills + 1):
        share = jobs - jobs * number // (kills + 1)
        for _ in range(int(60 / 0.05)):
            if await db.fetchval(_LEFT) <= share:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(chance.uniform(0, 0.3))
        if chance.random() < 0.6:
            seen.kills.append(time.monotonic())
            await asyncio.to_thread(chance.choice(daemons).kill)
            seen.kills.append(time.monotonic())
        else:
            await asyncio.to_thread(chance.choice(gateways).kill)


async def _ended(db: Any, seen: Seen) -> None:
    until = time.monotonic() + 180
    while await db.fetchval(_LEFT):
        if time.monotonic() > until:
            left = await db.fetch("SELECT id, queue, status, attempts, run_at, error FROM pgworkd.jobs LIMIT 5")
            seen.violations.append(f"{await db.fetchval(_LEFT)} jobs have not ended: {[dict(row) for row in left]}")
            return
        await asyncio.sleep(0.2)


def _judge(seen: Seen, rows: dict[str, dict[str, Any]], jobs: int) -> None:
    if len(rows) != jobs:
        seen.violations.append(f"{len(rows)} jobs of {jobs} are there")
    for job, runs in seen.runs.items():
        runs.sort(key=lambda run: run.attempt)
        said = [str(run) for run in runs]
        for first, then in pairwise(runs):
            if first.attempt == then.attempt:
                seen.violations.append(f"an attempt was sent twice: {said}")
            elif (why := _unexplained(first, then, seen.kills)) is not None:
                seen.violations.append(f"{why}: {rows[job]['errors']} {said}")
        seen.violations += [f"{why}: {rows[job]}, {said}" for why in _wrong_end(runs, rows[job])]
    for job, row in rows.items():
        if job not in seen.runs:
            seen.violations.append(f"it ended without a request: {job} {row}")


def _unexplained(first: Run, then: Run, kills: list[float]) -> str | None:
    """Why the second run should not have been; None: it is explained."""
    killed = any(first.at - MARGIN_S <= at <= then.at for at in kills)
    if isinstance(first.said, tuple):  # it was accepted
        # Once the next attempt runs, a failure that is told again can only be answered with 409.
        if first.acknowledged in ("failed", "pending", "perhaps"):
            return None
        if first.acknowledged in ("completed", "dead"):
            return "a run after an acknowledged end"
        return "a run while another was held" if then.at < first.held_until - MARGIN_S else None
    if first.said in (200, 201, 204, *DEAD):
        return None if killed else "a run after an answer that ends the job"
    return None


def _wrong_end(runs: list[Run], row: dict[str, Any]) -> list[str]:
    """What is wrong with how a job has ended."""
    acknowledged = {run.acknowledged for run in runs} & {"completed", "dead"}
    wrong = [f"{status} was acknowledged" for status in acknowledged if row["status"] != status]
    ends = {run.attempt: run for run in runs}
    if row["status"] == "completed":
        last = ends.get(row["attempts"])
        good = last is not None and last.said in (200, 201, 204, ("later", "complete"), ("later", "extend"))
        result = None if last is None or last.said == 204 else json.dumps({"attempt": row["attempts"]})
        if not good or row["result"] != result:
            wrong.append("it completed, and its last run says otherwise")
    elif row["status"] == "dead":
        last = ends.get(row["attempts"])
        if last is None or last.said not in (*DEAD, ("later", "dead")):
            wrong.append("it is dead, and its last run did not say so")
    else:
        wrong.append("it has not ended")
    return wrong


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main(argv: list[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=5_000)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args(argv)
    began = time.monotonic()
    seen = asyncio.run(run(wanted.jobs, wanted.seed, wanted.kills))
    requests = sum(map(len, seen.runs.values()))
    _say(f"{wanted.jobs:,} jobs, {requests:,} requests, {wanted.kills} kills, {time.monotonic() - began:.0f} s")
    _say(", ".join(f"{line}: {count}" for line, count in sorted(seen.lines.items(), key=lambda each: str(each[0]))))
    for violation in seen.violations[:20]:
        _say(violation)
    _say(f"{len(seen.violations)} violations")
    return 1 if seen.violations else 0


if __name__ == "__main__":
    sys.exit(main())
