"""Deaths: each is noted with the transaction in which the job died, and counted once, in its group of errors."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from tests.kits.alerts import count, dead, die, group_of, mute
from tests.kits.batches import add, batch, run
from tests.kits.schema import Roles, denied
from tests.kits.sessions import refuse, refused_rows
from tests.kits.verbs import T0, Db, at, claim_ids, clock, fail, insert_running, rescue, retry, steady, worker

pytestmark = pytest.mark.usefixtures("t0")


async def deaths(db: Db) -> list[tuple[uuid.UUID, int]]:
    return [(r[0], r[1]) for r in await db.fetch("SELECT job_id, attempt FROM pgworkd.deaths ORDER BY at, job_id")]


async def test_a_death_is_noted_in_its_transaction(db: Db, other: Db) -> None:
    (job_id,) = await insert_running(db)
    transaction = db.transaction()
    await transaction.start()
    assert await fail(db, [job_id], permanent=True) == {job_id: "dead"}
    assert await deaths(db) == [(job_id, 1)]
    assert await deaths(other) == []
    await transaction.rollback()
    assert await deaths(db) == []
    await fail(db, [job_id], permanent=True)
    assert await deaths(other) == [(job_id, 1)]


async def test_a_failure_that_is_retried_is_no_death(db: Db) -> None:
    (job_id,) = await insert_running(db)
    assert await fail(db, [job_id]) == {job_id: "failed"}
    assert await deaths(db) == []


async def test_each_death_of_a_job_counts(db: Db) -> None:
    """Dead, retried, and dead again: two deaths of one group, of which one job is dead now."""
    (job_id,) = await die(db, "it broke at 7")
    assert await count(db) == 1
    await retry(db, job_id)
    assert await dead(db) == []
    await clock(60, db)
    assert await claim_ids(db, await worker(db)) == [job_id]
    await fail(db, [job_id], 2, permanent=True, message="it broke at 8")
    assert await count(db) == 1
    (group,) = await db.fetch("SELECT * FROM pgworkd.error_groups")
    assert (group["deaths"], group["first_at"], group["last_at"]) == (2, T0, at(60))
    (found,) = await dead(db)
    assert (found["dead"], found["first_at"], found["pattern"]) == (1, at(60), "it broke at <n>")


async def test_a_job_lost_for_good_is_a_death(db: Db) -> None:
    lost, living = await worker(db, name="web-7f9c"), await worker(db, name="other")
    await db.execute("INSERT INTO pgworkd.jobs (queue, max_attempts) VALUES ('q', 1), ('q', 1)")
    ids = await claim_ids(db, lost)
    await steady(db, living)
    assert set((await rescue(db, living)).values()) == {"dead"}
    assert sorted(i for i, _ in await deaths(db)) == sorted(ids)
    await count(db)
    (found,) = await dead(db)
    assert (found["dead"], found["error_type"]) == (2, "lost")
    assert found["pattern"] == "lost: worker <name> (id <n>, pid <n>) did not renew its lease"


async def test_a_job_lost_and_run_again_is_no_death(db: Db) -> None:
    lost, living = await worker(db), await worker(db)
    await db.execute("INSERT INTO pgworkd.jobs (queue, max_attempts) VALUES ('q', 1), ('q', 9)")
    ids = await claim_ids(db, lost)
    await steady(db, living)
    statuses = await rescue(db, living)
    assert sorted(statuses.values())[0] == "dead"
    assert len(set(statuses.values())) == 2
    assert [i for i, _ in await deaths(db)] == [i for i in ids if statuses[i] == "dead"]


async def test_a_job_too_large_to_be_streamed_is_a_death(db: Db) -> None:
    root = await batch(db, "payroll", kind="calculate")
    await batch(db, "cheques", "r", parent=root, stream=True)
    await add(db, root, 1, {"x": "a" * 1_040_000})
    await run(db, await worker(db), 1, result='{"y": "%s"}' % ("b" * 1_500_000))
    assert await count(db) == 1
    (found,) = await dead(db)
    assert (found["queue"], found["error_type"], found["dead"]) == ("r", "too large", 1)
    assert found["pattern"] == "input and result of job <uuid> are larger than <n> MiB together: let it return less"


async def test_a_death_counts_once_whoever_counts(db: Db, other: Db) -> None:
    """One session counts; another one, meanwhile, learns that, and finds what is left afterwards."""
    await die(db, "one", 3)
    transaction = db.transaction()
    await transaction.start()
    assert await count(db) == 3
    assert await count(other) is None
    await transaction.rollback()
    assert await db.fetchval("SELECT count(*) FROM pgworkd.error_groups") == 0, (
        "the session was killed: nothing is lost"
    )
    assert await count(other) == 3
    assert await count(db) == 0
    assert await db.fetchval("SELECT deaths FROM pgworkd.error_groups") == 3


async def test_many_sessions_count_each_death_once(db: Db, connect: Callable[[], Any]) -> None:
    for n in range(6):
        await die(db, f"cause {'abcdef'[n]}", 40, queue=f"q{n % 2}")
    sessions = [await connect() for _ in range(4)]
    seen: Counter[str] = Counter()

    async def counts(session: Db) -> None:
        while (found := await count(session, 7)) != 0:
            seen["counted"] += found or 0
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        for session in sessions:
            tasks.start_soon(counts, session)
    assert seen["counted"] == 240
    rows = await db.fetch("SELECT deaths FROM pgworkd.error_groups")
    assert [row[0] for row in rows] == [40] * 6


async def test_a_death_that_commits_late_is_not_skipped(db: Db, other: Db) -> None:
    (early,) = await insert_running(other)
    transaction = other.transaction()
    await transaction.start()
    await fail(other, [early], permanent=True, message="early")
    await clock(60, db)
    await die(db, "late")
    assert await count(db) == 1
    await transaction.commit()
    assert await count(db) == 1
    assert sorted(row["pattern"] for row in await dead(db)) == ["early", "late"]


async def test_groups_say_what_is_dead_now(db: Db) -> None:
    """Discarded and retried jobs are in no group; the sums are those of the table, also of what is not counted yet."""
    first = await die(db, "no such user 'ann'", 3)
    await die(db, "no such user 'bob'", 2, queue="r")
    await count(db)
    await clock(100, db)
    await die(db, "no such user 'eve'", 1)  # not counted yet
    found = {(row["queue"], row["group_id"] is None): row["dead"] for row in await dead(db)}
    assert found == {("q", False): 3, ("q", True): 1, ("r", False): 2}
    await count(db)
    assert {row["queue"]: row["dead"] for row in await dead(db)} == {"q": 4, "r": 2}
    assert {row["queue"]: row["dead"] for row in await dead(db, at(50))} == {"q": 1}
    assert [row["queue"] for row in await dead(db, None, None, "r")] == ["r"]
    assert {row["is_new"] for row in await dead(db, None, at(50))} == {False}
    assert {row["is_new"] for row in await dead(db, None, T0)} == {True}
    await db.execute("SELECT pgworkd.discard($1)", first[:1])
    await retry(db, first[1])
    assert {row["queue"]: row["dead"] for row in await dead(db)} == {"q": 2, "r": 2}


async def test_jobs_that_died_before_deaths_were_noted_are_grouped_too(db: Db) -> None:
    await die(db, "no such user 7", 3)
    await die(db, "no such user 8", 2)
    await die(db, "another", 1)
    await db.execute("DELETE FROM pgworkd.deaths")
    found = sorted((row["pattern"], row["dead"], row["group_id"]) for row in await dead(db))
    assert found == [("another", 1, None), ("no such user <n>", 5, None)]


async def test_retention_forgets_old_deaths_but_not_of_jobs_that_are_dead(db: Db) -> None:
    kept, gone = await die(db, "kept"), await die(db, "gone")
    muted = await die(db, "muted")
    await count(db)
    await mute(db, await group_of(db, "muted"), at(100 * 86_400))
    await db.execute("SELECT pgworkd.discard($1)", [*gone, *muted])
    forget = "SELECT pgworkd.forget_deaths(30, 100)"
    assert await db.fetchval(forget) == 0
    await clock(31 * 86_400, db)
    assert await db.fetchval(forget) == 2
    assert await deaths(db) == [(kept[0], 1)]
    patterns = "SELECT array_agg(pattern ORDER BY pattern) FROM pgworkd.error_groups"
    assert await db.fetchval(patterns) == ["kept", "muted"]
    await clock(101 * 86_400, db)
    await db.fetchval("SELECT pgworkd.prune(7, 30, 100)")
    await db.fetchval(forget)
    assert await db.fetchval(patterns) is None
    assert await deaths(db) == []


async def test_muting_is_audited(db: Db) -> None:
    await die(db, "it broke")
    await count(db)
    group = await group_of(db, "it broke")
    assert await mute(db, group, at(60))
    assert await mute(db, group, None)
    assert not await mute(db, group + 1, at(60))
    rows = await db.fetch("SELECT who, what, queue, after ->> 'muted_until' AS until FROM pgworkd.audit ORDER BY id")
    assert [(row["who"], row["what"], row["queue"], row["until"] is None) for row in rows] == [
        ("ann", "mute", "q", False),
        ("ann", "mute", "q", True),
    ]


@pytest.mark.slow("5,000 groups of errors")
async def test_five_thousand_groups_are_counted_and_listed_in_seconds(db: Db) -> None:
    await db.execute(
        """INSERT INTO pgworkd.jobs (queue, status, attempts, failures, failed_at, error, errors)
           SELECT 'q', 'dead', 1, 1, pgworkd.clock(),
                  'cause ' || translate(n::text, '0123456789', 'abcdefghij') || ' at ' || m, '[{"type": "E"}]'
           FROM generate_series(1, 5000) n, generate_series(1, 2) m"""
    )
    await db.execute("SELECT pgworkd.note_deaths(ARRAY(SELECT id FROM pgworkd.jobs))")
    with anyio.fail_after(30):
        while await count(db, 2000):
            pass
    with anyio.fail_after(5):
        rows = await dead(db)
    assert (len(rows), sum(row["dead"] for row in rows)) == (5000, 10_000)


async def test_a_row_that_refuses_keeps_its_death_for_later(db: Db) -> None:
    """A trigger of the owner's refuses the change: nothing is half counted, and the others are."""
    (job_id,) = await die(db, "it broke")
    await die(db, "it broke")
    await refuse(db, job_id, table="deaths", column="job_id")
    assert await count(db) == 1
    assert await refused_rows(db) == {"count_deaths": {f"{job_id} 1"}}
    await db.execute("DELETE FROM public.kept; DELETE FROM pgworkd.refused_rows")
    assert await count(db) == 1
    assert await db.fetchval("SELECT deaths FROM pgworkd.error_groups") == 2


async def test_a_worker_may_count_and_mute_and_a_reader_may_look(db: Db, roles: Roles) -> None:
    await die(db, "it broke")
    async with roles.session("worker") as ours:
        assert await count(ours) == 1
        await ours.execute("""SELECT pgworkd.declare_alerts('[{"name": "a", "queue": "alerts", "kind": "k",
            "on_new": true, "within_s": 600, "cooldown_s": 60}]')""")
        await ours.execute("SELECT pgworkd.forget_deaths(30, 10)")
        assert await mute(ours, await group_of(db, "it broke"), at(60))
    async with roles.session("reader") as ours:
        assert [row["dead"] for row in await dead(ours)] == [1]
        await denied(ours, "SELECT pgworkd.count_deaths(1)")
        await denied(ours, "SELECT pgworkd.mute_errors(1, NULL, NULL)")
