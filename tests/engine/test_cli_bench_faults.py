"""`pgworkd bench` where something is missing or breaks: no schema, too few rights, lost connections, a lost server."""

from __future__ import annotations

import subprocess

import anyio
import pytest

from tests.kits.bench import JOBS, LINE, SESSIONS
from tests.kits.cli import clean
from tests.kits.commands import Command, Start, start
from tests.kits.daemon import until
from tests.kits.proxy import Proxy
from tests.kits.schema import Roles, granted
from tests.kits.verbs import Db

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["clean", "start"]  # fixtures


SLOW_END_S = 90.0
BULK = f"SELECT ({JOBS}) > 1000".replace("%%", "%")
ROWS = """SELECT (SELECT count(*) FROM pgworkd.jobs) + (SELECT count(*) FROM pgworkd.finished_jobs)
    + (SELECT count(*) FROM pgworkd.queues) + (SELECT count(*) FROM pgworkd.workers)
    + (SELECT count(*) FROM pgworkd.pools) + (SELECT count(*) FROM pgworkd.audit)"""


async def ended(command: Command) -> tuple[int, str]:
    """Waits for the end in a thread, so that a proxy in this loop goes on; exit code and standard error."""
    code = await anyio.to_thread.run_sync(lambda: command.process.wait(SLOW_END_S))
    assert await anyio.to_thread.run_sync(command.ends) == code
    return code, "\n".join(command.lines)


def bench(start: Start, dsn: str, *args: str) -> Command:
    command: Command = start("bench", *args, stdout=subprocess.DEVNULL, PGWORKD_DSN=dsn)
    return command


async def test_the_role_of_a_worker_suffices_and_others_are_told_what_is_missing(
    dsn: str, db: Db, start: Start
) -> None:
    async with granted(dsn, db) as roles:
        code, said = await ended(bench(start, roles.dsn("worker"), "--jobs", "100"))
        assert code == 0, said
        assert await db.fetchval(ROWS) == 0
        for role in ("enqueuer", "reader"):
            await _refused(roles, role, start)
        assert await db.fetchval(ROWS) == 0


async def _refused(roles: Roles, role: str, start: Start) -> None:
    code, said = await ended(bench(start, roles.dsn(role), "--jobs", "100"))
    assert code == 2, said
    assert "permission denied for table jobs" in said
    assert "pgworkd_worker" in said


@pytest.mark.parametrize("moment", [LINE, BULK], ids=["created", "in bulk"])
async def test_lost_connections_leave_nothing_behind(dsn: str, db: Db, start: Start, moment: str) -> None:
    command = bench(start, dsn, "--jobs", "10000")
    await until(lambda: db.fetchval(moment.replace("%%", "%")), SLOW_END_S)
    sql = SESSIONS.replace("%%", "%").replace("count(*)", "count(pg_terminate_backend(pid))")
    assert await db.fetchval(sql)
    code, said = await ended(command)
    assert code in (0, 1), said  # a connection that was idle, or not open yet, is opened again
    assert "could not be removed" not in said
    assert await db.fetchval(ROWS) == 0


async def test_a_server_that_does_not_come_back_is_told_with_what_is_left_and_the_remedy(
    dsn: str, db: Db, start: Start
) -> None:
    async with Proxy(dsn) as proxy:
        command = bench(start, proxy.dsn, "--jobs", "10000")
        await until(lambda: db.fetchval(BULK), SLOW_END_S)
        proxy.mode = "refuse"
        proxy.cut()
        code, said = await ended(command)
    assert code == 1
    assert "could not be removed" in said
    assert said.endswith("remove them with: pgworkd bench --clean")
    assert await db.fetchval(ROWS) > 1000
    code, said = await ended(bench(start, dsn, "--clean"))
    assert code == 0, said
    assert await db.fetchval(ROWS) == 0


async def test_what_a_dead_run_has_left_is_removed_in_whatever_state_a_rescue_put_it(
    dsn: str, db: Db, start: Start
) -> None:
    await db.execute(
        """INSERT INTO pgworkd.queues (name, keep_s) VALUES ('pgworkd-bench-0123456789ab', 0);
           INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until, lost_at) OVERRIDING SYSTEM VALUE
               VALUES ('pgworkd-bench-0123456789ab', 1, '0', 15, now(), now());
           INSERT INTO pgworkd.jobs (queue, status, losses, failed_at, attempts)
               SELECT 'pgworkd-bench-0123456789ab', v.status::pgworkd.job_status, v.losses, now(), v.losses
               FROM (VALUES ('pending', 0), ('failed', 1), ('failed', 2), ('pending', 2), ('dead', 3))
                    v (status, losses), generate_series(1, 20);
           INSERT INTO pgworkd.jobs (queue, status, worker_id, attempts)
               SELECT name, 'running', id, 1 FROM pgworkd.workers;
           TRUNCATE pgworkd.audit"""
    )
    kept = await db.fetchval("INSERT INTO pgworkd.jobs (queue) VALUES ('mine') RETURNING id")
    code, said = await ended(bench(start, dsn, "--clean"))
    assert (code, said) == (0, "")
    assert await db.fetchval("SELECT array_agg(id) FROM pgworkd.jobs") == [kept]
    assert await db.fetchval(ROWS) == 1
