"""Charts show what the statistics say, also where only a part of them is read, and to nobody more than he may see."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

import pytest

from pgworkd.admin import throughput
from pgworkd.admin.admin import Admin
from pgworkd.core.histogram import BOUNDS_S
from pgworkd.dashboard.draw import charts
from pgworkd.dashboard.draw.charts import Steps
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import UsageError
from tests.kits import verbs as v
from tests.kits.pages import viewing
from tests.kits.verbs import Db

PLACES = len(BOUNDS_S) + 1
INSERT = """INSERT INTO pgworkd.queue_minutes (at, period_s, queue, kind, worker, started, completed, failed, dead,
    released, waits, runs, wait_s, run_s) VALUES ($1, $2, $3, $4, 'w', $5, $5, $6, $7, 0, $8, $9, 1, 1)"""
COLUMNS = """extract(epoch FROM at)::float8, started, completed, failed, dead, cancelled, expired,
    wait_p50_s, wait_p95_s, run_p50_s, run_p95_s"""
NOW = datetime(2024, 3, 4, 11, 59, 30, tzinfo=UTC)


def histogram(dice: random.Random) -> list[int]:
    return [dice.choice((0, 0, 0, dice.randrange(1000))) for _ in range(PLACES)]


async def ended(db: Db, ago_s: float, queue: str = "q", period_s: int = 10, **counts: int) -> None:
    """One row of statistics; as old ones stand where their period began."""
    at = datetime.now(UTC).timestamp() - ago_s
    at = at // period_s * period_s if period_s > 10 else at
    numbers = [counts.get(name, 0) for name in ("completed", "failed", "dead")]
    some = [0] * 30 + [counts.get("completed", 0)] + [0] * (PLACES - 31)
    await db.execute(INSERT, datetime.fromtimestamp(at, UTC), period_s, queue, "k", *numbers, some, some)


@pytest.mark.parametrize("queue", ["a", None])
async def test_the_numbers_are_those_of_throughput_in_sql(dsn: str, db: Db, queue: str | None) -> None:
    dice, rows = random.Random(7), []  # noqa: S311 - to be repeatable
    for _ in range(200):
        period_s = dice.choice((10, 60, 3600))
        at = NOW.timestamp() - dice.random() * 40 * 86_400
        at = at // period_s * period_s if period_s > 10 else at
        numbers = [dice.randrange(9) for _ in range(3)]
        histograms = [histogram(dice), histogram(dice)]
        rows.append(
            (datetime.fromtimestamp(at, UTC), period_s, dice.choice("ab"), dice.choice("kl"), *numbers, *histograms)
        )
    await db.executemany(INSERT, rows)
    async with Admin(ConnectionOptions(dsn)) as admin:
        for step_s, number in ((60, 60), (1800, 48), (10_800, 56), (43_200, 60)):
            steps = Steps.until(NOW, step_s, number)
            found = await admin.queues.throughput(steps.since, steps.end, step_s, queue)
            sql = f"SELECT {COLUMNS} FROM pgworkd.throughput($1, $2, $3, $4)"  # noqa: S608
            wanted = await db.fetch(sql, steps.since, steps.end, step_s, queue)
            assert [(each.at.timestamp(), *each[1:-1]) for each in found] == [
                pytest.approx(tuple(row), nan_ok=True) if None not in row else tuple(row) for row in wanted
            ]
            assert {each.share for each in found} <= {1.0}
    assert len(found) > 30


@pytest.mark.parametrize(("period_s", "step_s", "number"), [(60, 1800, 4), (3600, 43_200, 4), (60, 10_800, 4)])
async def test_a_part_of_many_stands_for_the_whole(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch, period_s: int, step_s: int, number: int
) -> None:
    steps = Steps.until(NOW, step_s, number)
    count = step_s * number // period_s
    some = [0] * 30 + [4] + [0] * (PLACES - 31)
    for place in range(count):
        at = steps.since + timedelta(seconds=period_s * place)
        for queue, completed in (("q", 4), ("r", 6)):
            await db.execute(INSERT, at, period_s, queue, "k", completed, 2, 1, some, some)
    whole = step_s // period_s
    for rows_max in (throughput.COUNTED_ROWS, count, count // 2):
        monkeypatch.setattr(throughput, "COUNTED_ROWS", rows_max)
        monkeypatch.setattr(throughput, "HISTOGRAM_ROWS", rows_max // 2)
        async with Admin(ConnectionOptions(dsn)) as admin:
            found = await admin.queues.throughput(steps.since, steps.end, step_s)
            last_hour = await admin.queues.activity(steps.since, steps.end, step_s, ["q", "r"])
        counts = {(each.completed, each.failed, each.dead) for each in found}
        assert (len(found), counts) == (number, {(10 * whole, 4 * whole, 2 * whole)}), "evenly spread, so it is exact"
        assert all(
            each.share <= max(rows_max / (2 * count), period_s / step_s) + 0.05 or each.share == 1 for each in found
        )
        assert {(each.queue, each.completed, each.failed) for each in last_hour} == {
            ("q", 4 * whole, 3 * whole),
            ("r", 6 * whole, 3 * whole),
        }
        assert {round(each.wait_p95_s or 0, 2) for each in found} == {0.99}
    assert {each.share < 1 for each in found} == {True}


async def test_a_part_of_a_step_that_is_not_over_stands_for_what_has_passed(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps.until(datetime.now(UTC), 43_200, 2)
    minutes = int((datetime.now(UTC) - steps.since).total_seconds() // 60) + 1  # the last has begun
    some = [0] * PLACES
    rows = [(steps.since + timedelta(minutes=place), 60, "q", "k", 4, 0, 0, some, some) for place in range(minutes)]
    await db.executemany(INSERT, rows)
    monkeypatch.setattr(throughput, "COUNTED_ROWS", minutes // 4)
    async with Admin(ConnectionOptions(dsn)) as admin:
        first, last = await admin.queues.throughput(steps.since, steps.end, 43_200)
    passed = minutes - 720
    assert first.completed == 4 * 720
    assert last.completed == pytest.approx(4 * passed, rel=0.05, abs=8), passed


async def test_depths_are_the_most_of_each_step_and_unknown_without_a_sample(dsn: str, db: Db) -> None:
    steps = Steps.until(NOW, 60, 60)
    for minute, due in ((1, 5), (1, 9), (2, None), (50, 2)):
        at = steps.at(minute) + timedelta(seconds=due or 0)
        await db.execute("INSERT INTO pgworkd.samples (at, took_s) VALUES ($1, 0)", at)
        if due:
            await db.execute("INSERT INTO pgworkd.queue_samples VALUES ($1, 'q', $2, 0, 0, 0, 0, 0, 1.5)", at, due)
    async with Admin(ConnectionOptions(dsn)) as admin:
        found = await admin.queues.depths(steps.since, steps.end, 60, "q")
    assert [(steps.place(each.at), each.due) for each in found] == [
        (1, 9),
        (2, 0),
        (50, 2),
    ]


@pytest.mark.parametrize(
    "wrong", [(NOW, NOW, 60), (NOW, NOW + timedelta(days=9), 60), (NOW, NOW + timedelta(hours=1), 7)]
)
async def test_spans_without_steps_or_with_too_many_are_refused(dsn: str, wrong: Any) -> None:
    async with Admin(ConnectionOptions(dsn)) as admin:
        with pytest.raises(UsageError):
            await admin.queues.throughput(*wrong)


async def test_a_page_draws_each_number_and_says_it_in_a_table(dsn: str, db: Db) -> None:
    await v.one(db, "q")
    await ended(db, 200, completed=120, failed=3, dead=1)
    await ended(db, 200, "other", completed=1000)
    async with viewing(dsn) as client:
        for path, completed in (("/queues/q", 120), ("/queues/q?span=7d", 120), ("/", 1120), ("/?span=30d", 1120)):
            page = (await client.get(path)).text
            assert f"<td>{completed:,}</td><td>3</td><td>1</td>" in page, path
            assert f"{completed:,} completed, 3 failed, 1 dead" in page
            for kind in ("completed", "failed", "dead"):
                assert f'<path class="{kind}" d="M' in page, (path, kind)
        assert page.count('<a href="/?span=') == 4
        assert 'span=30d" aria-current="true"' in page
        wrong = await client.get("/queues/q?span=2h")
        assert (wrong.status_code, "span" in wrong.text) == (422, True)


async def test_who_may_see_some_queues_sees_what_ended_in_those(dsn: str, db: Db) -> None:
    for queue, completed in (("mine", 41), ("theirs", 97_531)):
        await v.one(db, queue)
        await ended(db, 200, queue, completed=completed)
    async with viewing(dsn, {"read": None}) as client:
        assert "97,572" in (await client.get("/")).text
    async with viewing(dsn, {"read": ["mine"]}) as client:
        for path in ("/", "/queues", "/queues/mine", "/?span=30d"):
            page = (await client.get(path)).text
            assert "41 completed" in page, path
            assert "97,5" not in page, path
            assert "theirs" not in page, path
        assert (await client.get("/queues/theirs?span=24h")).status_code == 403


async def test_sparklines_of_all_shown_queues_are_one_question_and_say_their_numbers(dsn: str, db: Db) -> None:
    for number, queue in enumerate(("a", "b", "c")):
        await v.one(db, queue)
        await ended(db, 1000, queue, completed=10 * number, failed=number)
    async with viewing(dsn) as client:
        for path in ("/", "/queues"):
            page = unescape((await client.get(path)).text)
            said = re.findall(r"<title>in the last hour: (.*?)</title>", page)
            assert said == [f"{10 * n} completed, {n} failed" for n in range(3)], path


async def test_what_was_read_is_not_read_again_at_once(dsn: str, db: Db) -> None:
    await v.one(db, "q")
    async with viewing(dsn) as client:
        before = (await client.get("/queues/q?span=30d")).text
        await ended(db, 200, completed=33)
        assert "33 completed" not in (await client.get("/queues/q?span=30d")).text
        assert "33 completed" in (await client.get("/queues/q?span=24h")).text, "it was not asked before"
    assert "nothing in this time" in before


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (0.0042, "4.2 ms"),
        (0.0994, "99 ms"),
        (0.0999, "0.1 s"),
        (0.5, "0.5 s"),
        (12.4, "12 s"),
        (119.0, "119 s"),
        (900.0, "15 min"),
        (7300.0, "2 h"),
        (2e5, "2 d"),
    ],
)
def test_durations_are_short(seconds: float, says: str) -> None:
    assert charts.duration(seconds) == says


@pytest.mark.parametrize(
    ("number", "length_s", "says"),
    [(1_200_000, 60, "20,000/s"), (90, 60, "1.5/s"), (7, 1800, "14/h"), (1, 43_200, "0.0833/h"), (359, 3600, "359/h")],
)
def test_rates_are_short(number: int, length_s: float, says: str) -> None:
    assert charts.rate(number, length_s) == says


def test_bars_are_as_high_as_their_numbers_and_lines_break_where_nothing_is_known() -> None:
    steps = Steps.until(NOW, 60, 4)
    drawn = charts.stacked(
        "x", steps, [("completed", "completed", [0, 30, 60, 10]), ("failed", "failed", [0, 30, 0, 10])]
    )
    heights = {each.kind: [float(each) for each in re.findall(r"v([\d.]+)", each.path)] for each in drawn.bars}
    whole = charts.BOTTOM - charts.TOP
    assert heights == {
        "completed": [pytest.approx(whole * share, abs=0.1) for share in (1 / 2, 1, 1 / 6)],
        "failed": [pytest.approx(whole * share, abs=0.1) for share in (1 / 2, 1 / 6)],
    }
    tops = [float(each) for each in re.findall(r"M[\d.]+ ([\d.]+)", drawn.bars[1].path)]
    assert tops[0] == charts.TOP, "they stand on each other"
    assert [each.label for each in drawn.y_ticks] == ["0", "30", "60"]
    assert [row[1:] for row in drawn.rows] == [["30", "30", "1/s"], ["60", "0", "1/s"], ["10", "10", "so far"]]
    lines = charts.durations("x", steps, [("p50", "p50", [0.1, None, 0.1, 10.0])]).lines
    assert lines[0].path.count("M") == 2
    assert f" {charts.TOP}.0" in lines[0].path
    assert f" {charts.BOTTOM}.0" in lines[0].path
