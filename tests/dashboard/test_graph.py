"""Jobs that wait for each other are found whatever connects them, up to a bound, and drawn after what they wait for."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from uuid import UUID

import pytest

from pgworkd.admin import batches as statements
from pgworkd.admin.admin import Admin
from pgworkd.admin.batches import ConnectedJob
from pgworkd.dashboard.draw import graph as draw
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import UsageError
from tests.kits import batches as b
from tests.kits import verbs as v
from tests.kits.pages import NASTY, viewing
from tests.kits.verbs import Db


async def diamond(db: Db, queue: str = "q") -> list[UUID]:
    """A job, two that wait for it, and one that waits for both."""
    first = await v.one(db, queue)
    middle = [await b.after(db, first, queue=queue) for _ in range(2)]
    return [first, *middle, await b.after(db, *middle, queue=queue)]


async def test_all_connected_jobs_are_found_from_each_of_them(dsn: str, db: Db) -> None:
    ids = await diamond(db)
    other = await diamond(db)
    async with Admin(ConnectionOptions(dsn)) as admin:
        for job_id in ids:
            found = await admin.batches.connected(job_id=job_id)
            assert {each.id: sorted(each.after) for each in found.rows} == {
                ids[0]: [],
                ids[1]: [ids[0]],
                ids[2]: [ids[0]],
                ids[3]: sorted(ids[1:3]),
            }
            assert not found.more
        assert not {each.id for each in (await admin.batches.connected(job_id=other[0])).rows} & set(ids)
        worker_id = await v.worker(db, 3600)
        await v.claim(db, worker_id)
        await v.complete(db, [ids[0]])
        await db.execute("SELECT pgworkd.apply_effects()")
        found = await admin.batches.connected(job_id=ids[3])
        assert {each.id: each.status for each in found.rows} == {
            ids[1]: "pending",
            ids[2]: "pending",
            ids[3]: "blocked",
        }


async def test_a_batch_shows_what_its_jobs_wait_for_and_at_most_so_many(dsn: str, db: Db) -> None:
    root = await b.batch(db)
    outside = await v.one(db, "other")
    chain = [outside]
    for _ in range(30):
        chain.append(await b.after(db, chain[-1], batch_id=root))
    async with Admin(ConnectionOptions(dsn)) as admin:
        found = await admin.batches.connected(root)
        assert ({each.id for each in found.rows}, found.more) == (set(chain), False)
        for most in (1, 7, 30):
            found = await admin.batches.connected(root, most=most)
            assert (len(found.rows), found.more) == (most, True)
        assert (await admin.batches.connected(await b.batch(db))).rows == []
    sql = statements._CONNECTED.replace("$1", "NULL").replace("$2", f"'{outside}'").replace("$3", "7")
    (ran,) = json.loads(await db.fetchval("EXPLAIN (ANALYZE, FORMAT JSON) " + sql))
    (reached,) = [each for each in ran["Plan"]["Plans"] if each.get("Subplan Name") == "CTE reached"]
    assert reached["Actual Rows"] <= 8, "it ends when it has found enough"
    async with Admin(ConnectionOptions(dsn)) as admin:
        with pytest.raises(UsageError):
            await admin.batches.connected(root, most=501)


async def test_thousands_that_wait_for_one_are_bounded_and_read_by_indexes(dsn: str, db: Db) -> None:
    first = await v.one(db)
    await v.insert(db, 20_000)
    await db.execute("""INSERT INTO pgworkd.jobs (queue, status, waiting_on) SELECT 'q', 'blocked', 1
        FROM generate_series(1, 20000)""")
    await db.execute(
        """INSERT INTO pgworkd.job_dependencies (job_id, depends_on)
        SELECT j.id, $1 FROM pgworkd.jobs j WHERE j.status = 'blocked'""",
        first,
    )
    await db.execute(
        """INSERT INTO pgworkd.job_dependencies (job_id, depends_on)
        SELECT gen_random_uuid(), gen_random_uuid() FROM generate_series(1, 20000)"""
    )
    await db.execute("ANALYZE pgworkd.jobs, pgworkd.job_dependencies")
    async with Admin(ConnectionOptions(dsn)) as admin:
        found = await admin.batches.connected(job_id=first)
        assert (len(found.rows), found.more) == (500, True)
    sql = statements._CONNECTED.replace("$1", f"'{first}'").replace("$2", f"'{first}'").replace("$3", "500")
    plan = json.dumps(json.loads(await db.fetchval("EXPLAIN (FORMAT JSON) " + sql)))
    read = set(re.findall(r'"Node Type": "Seq Scan"[^{}]*?"Relation Name": "(\w+)"', plan))
    assert read == set()


async def test_pages_draw_the_graph_with_links_and_say_it_as_a_list(dsn: str, db: Db) -> None:
    root = await b.batch(db)
    first = await v.one(db, "q", kind=NASTY)
    second = await b.after(db, first, queue="q", kind="load", batch_id=root)
    alone = await v.one(db)
    async with viewing(dsn, {"read": None}) as client:
        for path in (f"/batches/{root}", f"/jobs/{first}", f"/jobs/{second}"):
            page = (await client.get(path)).text
            assert page.count('class="edge"') == 1, path
            for job_id in (first, second):
                assert page.count(f'<a href="/jobs/{job_id}"') >= 2, path
            assert f'waits for <a href="/jobs/{first}"' in page
            assert "<script>alert" not in page
            assert "There are more jobs" not in page
        assert "wait for each other" not in (await client.get(f"/jobs/{alone}")).text


async def test_a_graph_names_no_job_that_may_not_be_seen(dsn: str, db: Db) -> None:
    theirs = await v.one(db, "theirs")
    mine = await b.after(db, theirs, queue="mine")
    next_one = await b.after(db, mine, queue="mine")
    async with viewing(dsn, {"read": ["mine"]}) as client:
        page = (await client.get(f"/jobs/{mine}")).text
        assert page.count('class="edge"') == 1
        assert str(next_one) in page
        assert str(theirs) not in page


def ids(count: int) -> list[UUID]:
    return [UUID(int=number) for number in range(count)]


def jobs(after: dict[UUID, list[UUID]]) -> list[ConnectedJob]:
    return [ConnectedJob(job_id, "q", "k", "blocked", others) for job_id, others in after.items()]


@pytest.mark.parametrize("seed", range(5))
def test_each_job_stands_right_of_all_it_waits_for_and_none_on_another(seed: int) -> None:
    dice, names = random.Random(seed), ids(100)  # noqa: S311 - to be repeatable
    after = {each: dice.sample(names[:place], min(place, dice.randrange(4))) for place, each in enumerate(names)}
    found = draw.graph(jobs(after))
    place = {node.id: (node.x, node.y) for node in found.nodes}
    assert len(place) == len(set(place.values())) == 100
    assert all(place[other][0] < place[each][0] for each, others in after.items() for other in others)
    assert len(found.edges) == sum(map(len, after.values()))
    for node in found.nodes:
        assert 0 <= node.x <= found.width - draw.NODE_WIDTH
        assert 0 <= node.y <= found.height - draw.NODE_HEIGHT
    columns = sorted({node.x for node in found.nodes})
    assert {b - a for a, b in pairwise(columns)} == {draw.NODE_WIDTH + draw.GAP_X}


def test_no_line_goes_behind_a_job_that_it_does_not_belong_to() -> None:
    names = ids(4)
    after = {names[0]: [], names[1]: [names[0]], names[2]: [names[1]], names[3]: [names[2], names[0], names[1]]}
    found = draw.graph(jobs(after))
    passes = [float(y) for path in found.edges for y in re.findall(r" ([\d.]+)H", path)]
    assert len(passes) == 3
    for y in passes:
        assert not [node for node in found.nodes if node.y <= y <= node.y + draw.NODE_HEIGHT and 100 < node.x < 500]


def test_a_chain_of_500_and_a_fan_of_500_and_a_circle_are_drawn() -> None:
    names = ids(500)
    chain = {each: names[place - 1 : place] for place, each in enumerate(names)}
    assert len({node.x for node in draw.graph(jobs(chain)).nodes}) == 500
    fan = {each: names[:1] * (each != names[0]) for each in names}
    assert len({node.x for node in draw.graph(jobs(fan)).nodes}) == 2
    circle = {names[0]: [names[1]], names[1]: [names[0]]}
    assert len(draw.graph(jobs(circle)).edges) == 2


def test_lines_that_need_not_cross_do_not() -> None:
    names = ids(6)
    after = {**{each: [] for each in names[:3]}, names[3]: [names[2]], names[4]: [names[1]], names[5]: [names[0]]}
    place = {node.id: node.y for node in draw.graph(jobs(after)).nodes}
    assert [place[each] for each in names[:3]] == [place[each] for each in names[:2:-1]]
