"""A job that something refuses to have claimed is set aside; claims of all sorts go on with the others."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from tests.kits.sessions import NO_STATISTICS, blocks, refuse, refused_rows
from tests.kits.verbs import Db, claim, claim_ids, clock, complete, insert, live, one, set_pool, statuses, token, worker

pytestmark = pytest.mark.usefixtures("t0")

KEPT = "27000"
_CAREFUL = "SELECT id FROM pgworkd.claim(CASE WHEN pgworkd.carefully() THEN $1::int END, 'q', $2) WHERE id IS NOT NULL"
_FOR = """SELECT worker, id FROM pgworkd.claim_for(CASE WHEN pgworkd.carefully() THEN ARRAY[$1::int] END,
    ARRAY[$2::uuid], ARRAY[$3::int], ARRAY[$4::real], $5, $6, 'q') WHERE id IS NOT NULL"""


async def careful(db: Db, worker_id: int, limit: int = 10) -> list[uuid.UUID]:
    """A claim that passes over what is set aside."""
    return [row[0] for row in await db.fetch(_CAREFUL, worker_id, limit)]


async def set_aside(db: Db, worker_id: int, error: str | None = None, code: str | None = None) -> int | None:
    """Sets aside what refuses such a claim; how many. None: a lock on all jobs holds up claims."""
    sql = "SELECT pgworkd.refuse_claims($1, 'q', '{}', '{}', '{}', '{}', '{}', $2, '{}', '{}', 0, NULL, $3, $4)"
    found: int | None = await db.fetchval(sql, worker_id, await token(db, worker_id), code, error)
    return found


async def keep(db: Db, ids: Sequence[uuid.UUID], body: str) -> None:
    """A trigger that does this to updates of these rows, without an error."""
    await db.execute(
        "CREATE TABLE IF NOT EXISTS public.kept (id uuid PRIMARY KEY);"
        "CREATE OR REPLACE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF EXISTS (SELECT FROM public.kept k WHERE k.id = OLD.id) THEN {body} END IF;"
        " RETURN NEW; END $$;"
        "CREATE TRIGGER a_keep BEFORE UPDATE ON pgworkd.jobs FOR EACH ROW EXECUTE FUNCTION public.keep()"
    )
    await db.executemany("INSERT INTO public.kept VALUES ($1)", [(each,) for each in ids])


@pytest.mark.parametrize(
    ("columns", "settings"),
    [
        ({}, None),
        ({"serialize_key": "own"}, None),
        ({"limit_key": "own"}, "limit_per_key = 1, fair = true"),
        ({"limit_key": "own"}, "rate_per_key = 100, rate_per_key_period_s = 1"),
        ({}, "max_running = 100"),
        ({"priority": 7}, None),
        ({"losses": 2}, None),
    ],
)
async def test_claims_go_on_with_the_others(db: Db, columns: dict[str, Any], settings: str | None) -> None:
    """Those with keys or limits, suspects, and each priority: the first jobs refuse."""
    if settings is not None:
        await db.execute("INSERT INTO pgworkd.queues (name) VALUES ('q')")
        await db.execute(f"UPDATE pgworkd.queues SET {settings}")  # noqa: S608 - above
    ids = []
    for number in range(5):
        own = {name: f"k{number}" if value == "own" else value for name, value in columns.items()}
        ids.append(await one(db, **own))
    await refuse(db, *ids[:2])
    first, second = await worker(db), await worker(db)  # a worker runs one suspect at a time
    with pytest.raises(asyncpg.RaiseError, match="this one stays as it is"):
        await claim(db, first)
    while await set_aside(db, first):
        pass
    taken = [*await careful(db, first), *await careful(db, second)]
    expected = ids[2:4] if columns.get("losses") else ids[2:]
    assert sorted(taken) == sorted(expected)
    assert await refused_rows(db) == {"claim": {str(each) for each in ids[:2]}}
    await db.execute("DELETE FROM public.kept")
    await clock(10, db)
    taken = [*await careful(db, await worker(db)), *await careful(db, await worker(db))]
    assert sorted(taken) == sorted(ids[:2])


@pytest.mark.parametrize(
    "body",
    [
        "RETURN NULL;",
        "RETURN OLD;",
        "NEW.status := 'pending'; NEW.worker_id := NULL;",
        "NEW.worker_id := 77;",
    ],
)
async def test_a_job_that_a_trigger_keeps_is_refused_too(db: Db, body: str) -> None:
    """Else it would stay the first one for ever, or run under nobody's lease."""
    ids = await insert(db, 3)
    await keep(db, ids[:1], body)
    worker_id = await worker(db)
    with pytest.raises(asyncpg.PostgresError) as raised:
        await claim(db, worker_id)
    assert raised.value.sqlstate == KEPT
    assert await set_aside(db, worker_id) == 1
    assert await careful(db, worker_id) == ids[1:]
    assert await statuses(db, ids) == ["pending", "running", "running"]
    assert (await live(db, ids[0]))["attempts"] == 0
    assert tuple(await db.fetchrow("SELECT sqlstate, key FROM pgworkd.refused_rows")) == (KEPT, str(ids[0]))


async def test_a_job_that_refuses_to_be_parked_holds_up_no_others(db: Db) -> None:
    first, *behind = await insert(db, 3, serialize_key="k")
    others = await insert(db, 2, serialize_key="other") + await insert(db, 1)
    await refuse(db, behind[0])
    worker_id = await worker(db)
    with pytest.raises(asyncpg.RaiseError):
        await claim(db, worker_id)
    await set_aside(db, worker_id)
    assert await careful(db, worker_id) == [first, others[0], others[2]]
    assert await statuses(db, behind) == ["pending", "blocked"]
    await complete(db, [first])
    await db.execute("DELETE FROM public.kept; DELETE FROM pgworkd.refused_rows")
    assert await claim_ids(db, worker_id) == behind[:1], "the line is kept"


@pytest.mark.parametrize("lease_s", [None, 60.0])
async def test_claims_for_remote_workers_go_on_with_the_others(db: Db, lease_s: float | None) -> None:
    ids = await insert(db, 4)
    await refuse(db, ids[0])
    remote = await worker(db)
    await db.execute("UPDATE pgworkd.workers SET kind = 'remote'")
    standing, _ = await db.fetchrow("SELECT * FROM pgworkd.standing_worker()")
    args = (remote, await token(db, remote), 2, lease_s, standing, uuid.uuid4())
    with pytest.raises(asyncpg.RaiseError):
        await db.fetch(_FOR, *args)
    assert await set_aside(db, remote) == 1
    assert [row["id"] for row in await db.fetch(_FOR, *args)] == ids[1:3]


async def test_a_deferred_constraint_counts_as_refusal(db: Db) -> None:
    ids = await insert(db, 3)
    await refuse(db, ids[0])
    await db.execute(
        "DROP TRIGGER a_refuse ON pgworkd.jobs; CREATE CONSTRAINT TRIGGER a_refuse AFTER UPDATE ON pgworkd.jobs"
        " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.refuse('id')"
    )
    worker_id = await worker(db)
    assert await set_aside(db, worker_id) == 1
    assert await careful(db, worker_id) == ids[1:]


async def test_an_error_that_is_no_row_s_fault_sets_nothing_aside(db: Db) -> None:
    ids = await insert(db, 2)
    await keep(db, ids, "RAISE EXCEPTION 'busy' USING ERRCODE = 'lock_not_available';")
    worker_id = await worker(db)
    with pytest.raises(asyncpg.LockNotAvailableError):
        await set_aside(db, worker_id)
    assert await refused_rows(db) == {}
    until = "SELECT extract(epoch FROM until - pgworkd.clock())::int FROM pgworkd.refused_rows"
    assert await set_aside(db, worker_id, "it waited", "57014") == 1, "unless the claim has said so twice"
    assert await db.fetchval(until) == 10, "a lock may have been the reason, and be gone"
    await db.execute("UPDATE pgworkd.refused_rows SET until = pgworkd.clock()")
    await set_aside(db, worker_id, "it waited", "57014")
    assert await db.fetchval(until) == 20, "a server that is slow for a minute delays no job for ten"


async def test_nothing_is_set_aside_while_a_lock_on_all_jobs_is_waited_for(db: Db, other: Db) -> None:
    await insert(db, 2)
    worker_id = await worker(db)
    await other.execute("BEGIN; LOCK TABLE pgworkd.jobs IN SHARE ROW EXCLUSIVE MODE")
    assert await set_aside(db, worker_id, "it waited", "57014") is None
    await other.execute("ROLLBACK")
    assert await refused_rows(db) == {}


async def test_a_job_whose_claim_waited_for_too_long_before_is_not_tried_again(db: Db) -> None:
    """The trial would take as long."""
    waits, good = await insert(db, 2)
    await keep(db, [waits], "RAISE EXCEPTION 'busy' USING ERRCODE = 'lock_not_available';")
    worker_id = await worker(db)
    await set_aside(db, worker_id, "it waited", "57014")
    await clock(10, db)
    assert await set_aside(db, worker_id) == 1
    assert await careful(db, worker_id) == [good]


async def test_a_thousand_refused_jobs_are_set_aside_at_once_and_passed_over(db: Db) -> None:
    await db.execute(NO_STATISTICS)
    ids = await insert(db, 1000)
    good = await insert(db, 3)
    await refuse(db, *ids)
    worker_id = await worker(db)
    assert [await set_aside(db, worker_id) for _ in range(3)] == [500, 500, 0]
    assert await careful(db, worker_id) == good


async def test_other_claims_read_no_refused_rows(db: Db) -> None:
    """What is set aside costs only those that look for it."""
    worker_id = await worker(db)
    await set_pool(db, worker_id)
    await insert(db, 5)
    sql = "SELECT * FROM pgworkd.claim($1, 'q', 10)"
    before = await blocks(db, sql, worker_id)
    await db.execute(
        "INSERT INTO pgworkd.refused_rows (what, key, sqlstate, error, until)"
        " SELECT 'claim', pgworkd.new_id()::text, '', '', 'infinity' FROM generate_series(1, 5000)"
    )
    assert await blocks(db, sql, worker_id) <= before + 2
