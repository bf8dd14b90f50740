"""All parts of maintenance: a row that refuses, by a trigger or foreign key of others, does not delay other rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from tests.kits import batches, verbs
from tests.kits import verbs as v
from tests.kits.sessions import refuse, refused_rows
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")

DAY = 86_400
MOST = 3
Maintain = Callable[[], Awaitable[object]]
Scene = tuple[Maintain, object, tuple[str, object]]
"""What to call, which returns what is left; its last return value; what is recorded as refused."""


# Each scene has MOST rows, of which the first refuses, and a limit of one where there is a limit.


async def _expire(db: Db) -> Scene:
    ids = [await v.one(db, expires_at=v.at(-9 + n)) for n in range(MOST)]
    await refuse(db, ids[0])

    async def ended() -> list[str | None]:
        await db.fetch("SELECT * FROM pgworkd.expire_jobs(1)")
        return await v.statuses(db, ids)

    return ended, ["pending", "expired", "expired"], ("expire_jobs", ids[0])


async def _free_keys(db: Db) -> Scene:
    ids = [await v.one(db, dedupe_key=f"k{n}", dedupe_until=v.at(9 + n)) for n in range(MOST)]
    assert await v.claim_ids(db, await v.worker(db)) == ids
    await v.complete(db, ids)
    await v.clock(60, db)
    await refuse(db, ids[0])

    async def left() -> list[object]:
        await db.fetch("SELECT * FROM pgworkd.expire_jobs(1)")
        return [row[0] for row in await db.fetch("SELECT id FROM pgworkd.jobs")]

    return left, [ids[0]], ("free_keys", ids[0])


async def _prune_dead(db: Db) -> Scene:
    ids = await v.insert_running(db, MOST)
    await v.fail(db, ids, permanent=True)
    await v.clock(31 * DAY, db)
    await db.execute("SELECT pgworkd.ensure_partitions()")
    await refuse(db, ids[0])

    async def left() -> list[object]:
        await db.execute("SELECT pgworkd.prune(7, 30, 1)")
        return [row[0] for row in await db.fetch("SELECT id FROM pgworkd.jobs")]

    return left, [ids[0]], ("prune", ids[0])


async def _prune_batches(db: Db) -> Scene:
    ids = []
    for n in range(MOST):
        await v.clock(n, db)
        batch_id, jobs = await batches.sealed(db, 1, f"b{n}")
        await v.cancel(db, *jobs)
        ids.append(batch_id)
    await db.execute("CREATE TABLE public.orders (batch_id uuid REFERENCES pgworkd.batches (id))")
    await db.execute("INSERT INTO public.orders VALUES ($1)", ids[0])
    await v.clock(8 * DAY, db)

    async def left() -> list[object]:
        await db.execute("SELECT pgworkd.prune(7, 30, 1)")
        return [row[0] for row in await db.fetch("SELECT id FROM pgworkd.batches")]

    return left, [ids[0]], ("prune", ids[0])


async def _forget_kept(db: Db) -> Scene:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 60)")
    ids = await v.insert(db, MOST)
    for job_id in ids:
        await v.cancel(db, job_id)
    await refuse(db, ids[0], table="finished_jobs", when="DELETE")
    await v.clock(DAY, db)
    at_t0 = v.T0.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    async def left() -> list[object]:
        await db.execute("SELECT pgworkd.prune(7, 30, 1)")
        return [row[0] for row in await db.fetch("SELECT id FROM pgworkd.finished_jobs")]

    return left, [ids[0]], ("forget_rows", f"{ids[0]} {at_t0}")


async def _forget_audit(db: Db) -> Scene:
    await db.execute("DELETE FROM pgworkd.audit")
    ids = [await v.one(db) for _ in range(MOST)]
    await v.cancel(db, *ids)
    notes = [row[0] for row in await db.fetch("SELECT id FROM pgworkd.audit ORDER BY id")]
    await refuse(db, notes[0], table="audit", when="DELETE")
    await v.clock(8 * DAY, db)

    async def left() -> list[object]:
        await db.execute("SELECT pgworkd.prune(7, 30, 1)")
        return [row[0] for row in await db.fetch("SELECT id FROM pgworkd.audit")]

    return left, [notes[0]], ("forget_rows", notes[0])


async def _forget_tokens(db: Db) -> Scene:
    ids = [f"{n:012}" for n in range(MOST)]
    sql = "INSERT INTO pgworkd.tokens (id, name, sha256, scopes, expires_at) SELECT $1, $1, sha256(''), '{}', $2"
    await db.executemany(sql, [(each, v.at(n)) for n, each in enumerate(ids)])
    await refuse(db, ids[0], table="tokens", when="DELETE")
    await v.clock(8 * DAY, db)

    async def left() -> list[object]:
        await db.execute("SELECT pgworkd.prune(7, 30, 1)")
        return [row[0] for row in await db.fetch("SELECT id FROM pgworkd.tokens")]

    return left, [ids[0]], ("forget_rows", ids[0])


async def _forget_calls(db: Db) -> Scene:
    for n in range(MOST):
        await v.clock(n, db)
        await db.execute("SELECT pgworkd.begin_once('c', $1, '')", f"k {n}")
    await refuse(db, "k 0", table="idempotent_calls", column="key", when="DELETE")
    await v.clock(2 * DAY, db)

    async def left() -> list[object]:
        await db.execute("SELECT pgworkd.prune(7, 30, 1)")
        return [row[0] for row in await db.fetch("SELECT key FROM pgworkd.idempotent_calls")]

    return left, ["k 0"], ("forget_rows", '["c", "k 0"]')


async def _mend_batches(db: Db) -> Scene:
    made = [await batches.sealed(db, 1, f"b{n}") for n in range(MOST)]
    await db.execute("DELETE FROM pgworkd.jobs")  # by hand: so no settle finishes them
    ids = [batch_id for batch_id, _ in made]
    await refuse(db, ids[0], table="batches", when="UPDATE")

    async def ended() -> list[object]:
        await db.execute("SELECT pgworkd.unblock()")
        return [row[0] for row in await db.fetch("SELECT finished_at IS NULL FROM pgworkd.batches ORDER BY id")]

    return ended, [True, False, False], ("mend_batches", ids[0])


async def _unblock_cancelled(db: Db) -> Scene:
    batch_id, ids = await batches.sealed(db, MOST)
    await refuse(db, ids[0])
    await db.execute("UPDATE pgworkd.batches SET cancelled_at = pgworkd.clock() WHERE id = $1", batch_id)

    async def ended() -> list[str | None]:
        await db.execute("SELECT pgworkd.unblock()")
        return await v.statuses(db, ids)

    return ended, ["pending", "cancelled", "cancelled"], ("unblock", ids[0])


async def _unblock_lines(db: Db) -> Scene:
    ids = [await v.one(db, serialize_key=f"k{n}") for n in range(MOST)]
    await db.execute("UPDATE pgworkd.jobs SET status = 'blocked'")  # their keys are free
    await refuse(db, ids[0])

    async def ended() -> list[str | None]:
        await db.execute("SELECT pgworkd.unblock()")
        return await v.statuses(db, ids)

    return ended, ["blocked", "pending", "pending"], ("unblock", '["q", "k0"]')


async def _effects_of_ends(db: Db) -> Scene:
    parents = await v.insert(db, MOST)
    ids = [await batches.after(db, parent) for parent in parents]
    for parent in parents:
        await db.execute("INSERT INTO pgworkd.pending_effects (job_id, completed) VALUES ($1, true)", parent)
    await refuse(db, ids[0])

    async def ended() -> list[str | None]:
        await db.execute("SELECT pgworkd.apply_effects(1)")
        return await v.statuses(db, ids)

    return ended, ["blocked", "pending", "pending"], ("apply_effects", ids[0])


async def _effects_of_keys(db: Db) -> Scene:
    ids = [await v.one(db, serialize_key=f"k{n}") for n in range(MOST)]
    await db.execute("UPDATE pgworkd.jobs SET status = 'blocked'")
    put = "INSERT INTO pgworkd.pending_effects (queue, serialize_key) VALUES ('q', $1) RETURNING id"
    effects = [await db.fetchval(put, f"k{n}") for n in range(MOST)]
    await refuse(db, ids[0])

    async def ended() -> list[str | None]:
        await db.execute("SELECT pgworkd.apply_effects(1)")
        return await v.statuses(db, ids)

    return ended, ["blocked", "pending", "pending"], ("apply_effects", effects[0])


async def _effects_of_batches(db: Db) -> Scene:
    made = [await batches.sealed(db, 1, f"b{n}") for n in range(MOST)]
    for batch_id, (job_id,) in made:
        await db.execute("DELETE FROM pgworkd.jobs WHERE id = $1", job_id)
        await db.execute("SELECT pgworkd.put_off(ARRAY[ROW($1::uuid, 'completed', false, $2::uuid, NULL, NULL, NULL,"
                         " NULL)::pgworkd.ended_job])", batch_id, job_id)  # fmt: skip
    await refuse(db, made[0][0], table="batches", when="UPDATE")

    async def ended() -> list[object]:
        await db.execute("SELECT pgworkd.apply_effects(1)")
        return [row[0] for row in await db.fetch("SELECT completed FROM pgworkd.batches ORDER BY id")]

    return ended, [0, 1, 1], ("apply_effects", made[0][0])


async def _mend_dependencies(db: Db) -> Scene:
    (parent,) = await v.insert_running(db)
    ids = [await batches.after(db, parent, on_failed="run") for _ in range(MOST)]
    await db.execute(
        "UPDATE pgworkd.jobs SET status = 'dead', worker_id = NULL, failed_at = $2 WHERE id = $1", parent, v.T0
    )
    await refuse(db, ids[0])

    async def ended() -> list[str | None]:
        await batches.mend(db)
        return await v.statuses(db, ids)

    return ended, ["blocked", "pending", "pending"], ("mend_dependencies", ids[0])


async def _mend_doomed(db: Db) -> Scene:
    (parent,) = await v.insert_running(db)
    ids = [await batches.after(db, parent, on_failed="cancel") for _ in range(MOST)]
    await v.fail(db, [parent], permanent=True)
    await refuse(db, ids[0])

    async def ended() -> list[str | None]:
        await batches.mend(db)
        return await v.statuses(db, ids)

    return ended, ["blocked", "cancelled", "cancelled"], ("mend_dependencies", ids[0])


async def _occurrences(db: Db) -> Scene:
    names = [f"s{n}" for n in range(MOST)]
    for name in names:
        await verbs.put_schedule(db, name)
    await refuse(db, names[0], column="schedule", when="INSERT")
    instant = v.T0 + timedelta(minutes=1)

    async def added() -> list[object]:
        await db.execute("SELECT pgworkd.restore_occurrences($1, $2, $3)", names, [instant] * MOST, [1] * MOST)
        return [row[0] for row in await db.fetch("SELECT schedule FROM pgworkd.jobs ORDER BY 1")]

    return added, [*names[1:]], ("restore_occurrences", names[0])


@pytest.mark.parametrize(
    "scene",
    [
        _expire,
        _free_keys,
        _prune_dead,
        _prune_batches,
        _forget_kept,
        _forget_audit,
        _forget_tokens,
        _forget_calls,
        _mend_batches,
        _unblock_cancelled,
        _unblock_lines,
        _effects_of_ends,
        _effects_of_keys,
        _effects_of_batches,
        _mend_dependencies,
        _mend_doomed,
        _occurrences,
    ],
)
async def test_a_row_that_refuses_does_not_delay_the_others(db: Db, scene: Callable[[Db], Awaitable[Scene]]) -> None:
    maintain, expected, (what, key) = await scene(db)
    for _ in range(MOST - 1):
        await maintain()
    assert await maintain() == expected
    assert await refused_rows(db) == {what: {str(key)}}
