"""A whole daemon under the role `worker`, with jobs from the role `enqueuer`; and what a worker must not do."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from pgworkd import App, Job
from pgworkd.admin import Admin
from pgworkd.client import batch, enqueue
from pgworkd.core import events
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.maintenance import Periods
from pgworkd.errors import JobFailed, PermanentError, UsageError
from pgworkd.results import Results
from tests.kits.daemon import running, status, until, waits_for_status
from tests.kits.schema import Roles, denied
from tests.kits.verbs import T0, Db, at, claim_ids, clock, complete, heartbeat, one, rescue, worker

pytestmark = pytest.mark.slow("daemons as each role")


def flow() -> App:
    """An application with many kinds."""
    app = App()
    app.handler("ok", concurrency=20)(_ok)

    @app.handler("once", backoff=0.01)
    async def once(job: Job) -> str:
        if job.attempt == 1:
            raise ValueError("not yet")
        return "then"

    @app.handler("never")
    async def never() -> None:
        raise PermanentError("no")

    @app.handler("tick", every=1)
    async def tick() -> None: ...

    @app.handler("writes")
    async def writes(job: Job) -> None:
        async with job.transaction() as connection:
            await enqueue(connection, "ok", {"by": "a handler"}, dedupe_key="by a handler")

    return app


async def _ok(payload: dict[str, Any], job: Job) -> dict[str, Any]:
    job.progress(0.5, "half")
    return payload


CHORES = Periods(rescue_s=0.1, expire_s=0.1, schedules_s=0.1, orphans_s=0.1, partitions_s=0.1, prune_s=0.1)


async def test_a_daemon_as_worker_runs_everything_an_enqueuer_inserts(db: Db, roles: Roles) -> None:
    await db.execute(f"GRANT {roles.name('reader')} TO {roles.name('enqueuer')}")  # waiting for results needs both
    app = flow()
    async with (
        roles.session("enqueuer") as conn,
        running(app, roles.dsn("worker"), periods=CHORES) as (_, seen),
        Results(roles.dsn("enqueuer"), poll_s=0.1) as results,
    ):
        plain = await conn.fetchval(
            "INSERT INTO pgworkd.jobs (queue, payload) VALUES ('ok', '{\"n\": 1}') RETURNING id"
        )
        assert await results.result(plain, timeout_s=10) == {"n": 1}
        assert await results.result(await enqueue(conn, "once"), timeout_s=10) == "then"
        dead = await enqueue(conn, "never")
        with pytest.raises(JobFailed):
            await results.result(dead, timeout_s=10)
        async with conn.transaction():
            first = await enqueue(conn, "ok", {"n": 2}, serialize_key="line", limit_key="tenant")
            second = await enqueue(conn, "ok", {"n": 3}, serialize_key="line", after=[first])
        assert await results.result(second, timeout_s=10) == {"n": 3}
        async with conn.transaction(), batch(conn, "root", kind="ok", on_complete={"queue": "ok"}) as root:
            await root.child("below", queue="ok", stream=True)
            await root.add({"n": n} for n in range(3))
            await conn.execute("INSERT INTO pgworkd.jobs (queue, batch_id) VALUES ('ok', $1)", root.id)
        await until(lambda: db.fetchval("SELECT tree_finished_at FROM pgworkd.batches WHERE id = $1", root.id))
        assert [(p.name, p.state, p.done) for p in await root.progress()] == [
            ("root", "completed", 4),
            ("below", "completed", 4),
        ]
        assert len([found async for found in results.of_batch(root.id)]) == 4
        await enqueue(conn, "writes")
        await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.all_jobs WHERE dedupe_key = 'by a handler'"))
        await seen.wait(events.JOB_COMPLETED, count=2, kind="tick")
        assert seen.all(events.MAINTENANCE_FAILED) == []
    assert await status(db, dead) == "dead"


async def test_queues_with_limits_and_keys_as_a_worker(db: Db, roles: Roles) -> None:
    app = flow()
    options = ConnectionOptions(roles.dsn("worker"), by="someone")
    limits = {"max_running": 2, "limit_per_key": 1, "rate": 1000, "rate_period_s": 1, "fair": True}
    async with roles.session("enqueuer") as conn, Admin(options) as admin:
        await admin.queues.set("ok", limits)
        await conn.execute(
            "INSERT INTO pgworkd.jobs (queue, serialize_key, limit_key, yields) "
            "SELECT 'ok', 's' || n % 3, 'l' || n % 2, n % 4 = 0 FROM generate_series(1, 12) n"
        )
        async with running(app, roles.dsn("worker"), periods=CHORES) as (_, seen):
            await seen.wait(events.JOB_COMPLETED, count=12, kind="ok")
            assert seen.all(events.MAINTENANCE_FAILED) == []
    assert await db.fetch("SELECT DISTINCT who FROM pgworkd.audit") == [("someone",)]


async def test_rescue_expire_and_prune_as_a_worker(db: Db, roles: Roles) -> None:
    async with roles.acting("worker") as ours, roles.acting("enqueuer") as conn:
        await clock(0, ours, conn)
        lost, rescuer = await worker(ours), await worker(ours)
        insert = (
            "INSERT INTO pgworkd.jobs (queue, expires_at, dedupe_key, dedupe_until) "
            "VALUES ('q', $1, $2, $3) RETURNING id"
        )
        running_id = await conn.fetchval(insert, None, "a", at(20))
        assert await claim_ids(ours, lost) == [running_id]
        await db.execute("UPDATE pgworkd.jobs SET worker_id = 999")  # an unknown worker, as after a DELETE
        late = await conn.fetchval(insert, at(5), "b", at(20))
        for seconds in (10, 20, 30, 40, 50, 60, 70):
            await clock(seconds, ours)
            assert await heartbeat(ours, rescuer) is not None
            await rescue(ours, rescuer)
        assert await status(db, running_id) == "failed"
        assert await ours.fetchval("SELECT pgworkd.expire()") == 1
        assert await status(db, late) == "expired"
        for verb in ("unblock()", "mend_dependencies()", "ensure_partitions(2)", "sign_off(1, NULL)"):
            await ours.fetchval(f"SELECT pgworkd.{verb}")
        owners = "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class WHERE relname ~ '^finished_jobs_2100'"
        assert [row[0] for row in await db.fetch(owners)] == [roles.names["owner"]]
        await clock(10 * 86_400, ours)
        assert await ours.fetchval("SELECT rows_deleted > 0 FROM pgworkd.prune(1, 1)")
        assert await ours.fetchval("SELECT pgworkd.drop_partition(1)") is not None
    assert await status(db, late) is None


async def test_a_worker_cannot_prune_the_last_days_of_the_history(db: Db, roles: Roles) -> None:
    """With no argument, and with no clock of its own."""
    async with roles.session("worker") as ours:
        job_id = await one(db)
        assert await claim_ids(ours, await worker(ours)) == [job_id]
        await complete(ours, [job_id])
        await ours.execute("SELECT pgworkd.set_queue('q', '{\"keep_s\": 60}')")
        before = await db.fetch("SELECT relname FROM pg_class WHERE relname ~ '^finished_jobs_2' ORDER BY 1")
        for instant in (T0, T0.replace(year=2199), datetime(1971, 1, 1, tzinfo=UTC)):
            await ours.execute("SELECT set_config('pgworkd.clock', $1, false)", str(instant))
            await ours.fetch("SELECT * FROM pgworkd.prune(1, 1)")
            assert await ours.fetchval("SELECT pgworkd.drop_partition(1)") is None
            await ours.fetchval("SELECT pgworkd.ensure_partitions(3)")
    assert await status(db, job_id) == "completed"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.audit") == 1
    after = await db.fetch("SELECT relname FROM pg_class WHERE relname ~ '^finished_jobs_2' ORDER BY 1")
    assert after == before


async def test_a_worker_cannot_create_partitions_beyond_a_year(roles: Roles) -> None:
    async with roles.session("worker") as ours:
        assert 300 < await ours.fetchval("SELECT pgworkd.ensure_partitions(1000000)") <= 367


FORBIDDEN = [
    "DROP TABLE pgworkd.jobs",
    "DROP FUNCTION pgworkd.clock",
    "DROP SCHEMA pgworkd CASCADE",
    "ALTER TABLE pgworkd.jobs ADD COLUMN mine int",
    "ALTER TABLE pgworkd.jobs DISABLE TRIGGER ALL",
    "ALTER FUNCTION pgworkd.clock() OWNER TO CURRENT_USER",
    "CREATE TABLE pgworkd.mine (id int)",
    "CREATE INDEX mine ON pgworkd.jobs (payload)",
    "CREATE FUNCTION pgworkd.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE OR REPLACE FUNCTION pgworkd.who(p_by text DEFAULT NULL) RETURNS text LANGUAGE sql AS 'SELECT $1'",
    "CREATE TRIGGER mine BEFORE INSERT ON pgworkd.jobs FOR EACH ROW EXECUTE FUNCTION pgworkd.queue_dated()",
    *(f"TRUNCATE pgworkd.{table}" for table in ("jobs", "finished_jobs", "queues", "audit", "workers", "batches")),
    "UPDATE pgworkd.audit SET who = 'nobody'",
    "DELETE FROM pgworkd.audit",
    "UPDATE pgworkd.finished_jobs SET result = NULL",
    "DELETE FROM pgworkd.finished_jobs",
    "DELETE FROM pgworkd.finished_jobs_other",
    "UPDATE pgworkd.schema_version SET version = 2",
    "INSERT INTO pgworkd.batches (name, queue) VALUES ('b', 'q')",
    "INSERT INTO pgworkd.job_dependencies VALUES (gen_random_uuid(), gen_random_uuid())",
    "SELECT pgworkd.move(NULL, now(), 1)",
    "SELECT pgworkd.check_dependencies()",
    "CREATE ROLE pgworkd_mine",
]


async def test_statements_refused_to_a_worker(roles: Roles) -> None:
    async with roles.session("worker") as ours:
        for sql in FORBIDDEN:
            await denied(ours, sql)


async def test_a_worker_cannot_migrate(roles: Roles) -> None:
    with pytest.raises(UsageError, match="permission denied"):
        await schema.migrate(ConnectionOptions(roles.dsn("worker")))


async def test_an_operator_uses_the_worker_role(db: Db, roles: Roles) -> None:
    async with roles.session("enqueuer") as conn, Admin(ConnectionOptions(roles.dsn("worker"))) as admin:
        ids = [await enqueue(conn, "q") for _ in range(4)]
        root = await batch(conn, "b", queue="q")
        await root.add([{}])
        async with conn.transaction():
            waiting = await enqueue(conn, "q", after=ids[:1])
        await admin.verify()
        assert (await admin.queues.pause("q"), await admin.queues.resume("q")) == (None, True)
        assert await admin.jobs.edit(ids[0], priority=3) == ["priority"]
        assert await admin.jobs.undepend([waiting]) == {waiting}
        await db.execute("UPDATE pgworkd.jobs SET status = 'dead', failed_at = now() WHERE id = ANY ($1)", ids[1:3])
        assert (await admin.jobs.retry(ids[1:2])).changed == ids[1:2]
        assert await admin.jobs.discard(ids[2:3]) == 1
        assert await admin.jobs.cancel(ids[3:]) == {ids[3]: "cancelled"}
        assert await admin.batches.seal(root.id)
        assert (await admin.batches.cancel(root.id)).cancelled == 1
        assert await admin.batches.delete(root.id) == 1
        kept = await enqueue(conn, "q", dedupe_key="k", dedupe_for=3600)
        assert await admin.jobs.cancel([kept]) == {kept: "cancelled"}
        assert [row.id for row in await admin.keys.find()] == [kept]
        assert await admin.keys.free("q", "k")
        assert not await admin.keys.free_of_batch("b", "k")
        assert len(await admin.audit()) == 11
        assert await admin.queues.find()
        assert await admin.doctor()
        await admin._connection.fetch("DELETE FROM pgworkd.schedules")
    await until(waits_for_status(db, ids[3], "cancelled"))
