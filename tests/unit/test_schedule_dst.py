"""Due times against a second calculation, which steps through every minute of UTC and reads the local time."""

from bisect import bisect_right
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from pgworkd.core.recurrence import Recurrence

pytestmark = pytest.mark.slow("every minute of the days on which clocks change")

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
AROUND = timedelta(days=4)  # of a change: reaches the 1st of a month for some, and all fall on a Sunday

# Shifts of one hour at night, of 30 minutes, of one hour at midnight (Santiago); Kolkata has none.
ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "Asia/Kolkata"]
FOLLOW_WALL_CLOCK = [
    "30 2 * * *",
    "0 7 * * *",
    "15,45 1-3 * * *",
    "59 23 * * 0",
    "0 0 1 * *",
    "0 0 * * *",
    "30 0 * * 0",
    "0 2-3 * * *",
    "0-59 0-3 * * *",
]
FOLLOW_REAL_TIME = [
    "0 * * * *",
    "*/15 * * * *",
    "*/15 2 * * *",
    "0 */2 * * *",
    "* 3 * * *",
    "*/15 0 * * 0",
    "*/20 1 * * *",
    "* * * * *",
]


def utc(*fields: int) -> datetime:
    return datetime(*fields, tzinfo=UTC)  # type: ignore[misc, arg-type]


# --- the second calculation ---------------------------------------------------------------------------------


def field_set(field: str, low: int, high: int) -> set[int]:
    values: set[int] = set()
    for term in field.split(","):
        span, _, stride = term.partition("/")
        first, _, last = (f"{low}-{high}" if span == "*" else span).partition("-")
        values.update(range(int(first), int(last or first) + 1, int(stride or 1)))
    return values


def matching(cron: str, walls: list[datetime]) -> set[datetime]:
    minute, hour, day, month, weekday = cron.split()
    minutes, hours = field_set(minute, 0, 59), field_set(hour, 0, 23)
    days, months, weekdays = field_set(day, 1, 31), field_set(month, 1, 12), field_set(weekday, 0, 6)
    return {
        wall
        for wall in walls
        if wall.minute in minutes
        and wall.hour in hours
        and wall.day in days
        and wall.month in months
        and wall.isoweekday() % 7 in weekdays
    }


@cache
def offset_changes(zone: str) -> list[datetime]:
    """The changes of 2026 and 2027; for a zone without any, days on which other zones change."""
    hours = [utc(2026, 1, 1) + timedelta(minutes=30 * n) for n in range(2 * 365 * 48)]
    offsets = [hour.astimezone(ZoneInfo(zone)).utcoffset() for hour in hours]
    found = [later for later, (a, b) in zip(hours[1:], pairwise(offsets), strict=True) if a != b]
    return found or [utc(2026, 3, 29, 1), utc(2027, 10, 31, 1)]


@cache
def clock(zone: str, change: datetime, around: timedelta) -> list[tuple[datetime, datetime]]:
    """(UTC, naive local time) of every minute around a change."""
    minutes = [change - around + n * MINUTE for n in range(2 * around // MINUTE + 1)]
    return [(minute, minute.astimezone(ZoneInfo(zone)).replace(tzinfo=None)) for minute in minutes]


def due_minutes(cron: str, zone: str, change: datetime, around: timedelta = AROUND) -> list[datetime]:
    ticks = clock(zone, change, around)
    first, last = min(wall for _, wall in ticks), max(wall for _, wall in ticks)
    matches = matching(cron, [first + n * MINUTE for n in range((last - first) // MINUTE + 1)])
    if any(field.startswith("*") for field in cron.split()[:2]):
        return [instant for instant, wall in ticks if wall in matches]
    due, seen = [], first - MINUTE
    for instant, wall in ticks:
        # All local minutes that this tick passes for the first time: none in a second pass,
        # many at the end of a gap, one otherwise.
        passed = [seen + n * MINUTE for n in range(1, (wall - seen) // MINUTE + 1)]
        if not matches.isdisjoint(passed):
            due.append(instant)
        seen = max(seen, wall)
    return due


# --- daylight saving ----------------------------------------------------------------------------------------


def test_the_time_zone_data_has_the_expected_changes() -> None:
    assert [len(offset_changes(zone)) for zone in ZONES] == [4, 4, 4, 4, 2]
    assert utc(2026, 3, 29, 1) in offset_changes("Europe/Berlin")
    assert utc(2026, 4, 4, 15) in offset_changes("Australia/Lord_Howe")


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("cron", [*FOLLOW_WALL_CLOCK, *FOLLOW_REAL_TIME])
def test_occurrences_agree_with_local_time_through_every_change(cron: str, zone: str) -> None:
    recurrence = Recurrence.parse(cron, zone)
    latest = Recurrence.parse(cron, zone, "once")
    for change in offset_changes(zone):
        expected = due_minutes(cron, zone, change)
        # One chain over the days around the change (fewer of them where it is due each minute).
        reach = AROUND if len(expected) < 800 else timedelta(hours=5)
        chain, instant = [], change - reach - SECOND
        while (instant := recurrence.next_after(instant)) <= change + reach:
            chain.append(instant)
        assert chain == [due for due in expected if abs(due - change) <= reach]
        # From instants around the gap and the repeated hour, in both directions.
        for n in range(-150, 151, 10):
            minute = change + n * MINUTE
            for instant in (minute - SECOND, minute, minute + SECOND / 2):
                position = bisect_right(expected, instant)
                if position < len(expected):
                    assert recurrence.next_after(instant) == expected[position]
                    assert recurrence.next_after(instant.astimezone(ZoneInfo(zone))) == expected[position]
                if position > 0:
                    assert latest.follow(change - AROUND - SECOND, instant) == expected[position - 1]


def occurrences(every: str, zone: str, start: datetime, end: datetime) -> list[str]:
    recurrence, found = Recurrence.parse(every, zone), []
    while (start := recurrence.next_after(start)) < end:
        found.append(start.astimezone(ZoneInfo(zone)).strftime("%H:%M:%S%z")[:-2])
    return found


@pytest.mark.parametrize(
    ("every", "due_in_spring", "due_in_autumn"),
    [
        ("30 2 * * *", ["03:00:00+02"], ["02:30:00+02"]),
        ("0 30 2 * * *", ["03:00:00+02"], ["02:30:00+02"]),
        ("0,59 59 2 * * *", ["03:00:00+02"], ["02:59:00+02", "02:59:59+02"]),
        ("0 2-3 * * *", ["03:00:00+02"], ["02:00:00+02", "03:00:00+01"]),
        ("0 */2 * * *", ["04:00:00+02"], ["02:00:00+02", "02:00:00+01", "04:00:00+01"]),
        ("*/30 2 * * *", [], ["02:00:00+02", "02:30:00+02", "02:00:00+01", "02:30:00+01"]),
        ("*/30 0 2 * * *", [], ["02:00:00+02", "02:00:30+02", "02:00:00+01", "02:00:30+01"]),
    ],
)
def test_occurrences_in_berlin_match_hand_computed_times(
    every: str, due_in_spring: list[str], due_in_autumn: list[str]
) -> None:
    berlin = "Europe/Berlin"
    assert occurrences(every, berlin, utc(2026, 3, 29, 0), utc(2026, 3, 29, 2, 30)) == due_in_spring
    assert occurrences(every, berlin, utc(2026, 10, 24, 23), utc(2026, 10, 25, 3, 30)) == due_in_autumn


def test_the_second_pass_of_a_repeated_hour_does_not_fire_again() -> None:
    recurrence = Recurrence.parse("30 2 * * *", "Europe/Berlin")
    local = datetime(2026, 10, 25, 2, 10, tzinfo=ZoneInfo("Europe/Berlin"))
    assert recurrence.next_after(local) == utc(2026, 10, 25, 0, 30)
    assert recurrence.next_after(local.replace(fold=1)) == utc(2026, 10, 26, 1, 30)


def test_follow_distinguishes_both_passes_of_a_repeated_hour() -> None:
    recurrence = Recurrence.parse("*/15 * * * *", "Europe/Berlin")
    first_pass = datetime(2026, 10, 25, 2, 45, tzinfo=ZoneInfo("Europe/Berlin"))
    second_pass = first_pass.replace(minute=10, fold=1)
    assert second_pass < first_pass  # in local time, which is how Python compares within a zone
    assert recurrence.follow(first_pass, second_pass) == utc(2026, 10, 25, 1, 15)


def test_a_distant_occurrence_is_found_in_the_first_pass() -> None:
    # From winter time to winter time, across all of summer time.
    assert Recurrence.parse("*/30 2 25 10 *", "Europe/Berlin").next_after(utc(2026, 1, 1)) == utc(2026, 10, 25)


def test_occurrences_skipped_by_one_gap_count_as_one_missed() -> None:
    recurrence = Recurrence.parse("15,45 1-3 * * *", "Europe/Berlin", "all")
    previous, now = (
        utc(2026, 3, 1),
        utc(2026, 3, 29, 2),
    )  # 04:00 local; due at 03:45, 03:15, 03:00, 01:45, 01:15
    assert recurrence.follow(previous, now, 3) == utc(2026, 3, 29, 1)
    assert recurrence.follow(previous, now, 4) == utc(2026, 3, 29, 0, 45)


def test_an_occurrence_on_a_skipped_day_is_due_at_the_days_end() -> None:
    apia = Recurrence.parse("0 12 * * *", "Pacific/Apia")  # had no 30 December 2011
    assert apia.next_after(utc(2011, 12, 29, 22)) == utc(2011, 12, 30, 10)
    assert apia.next_after(utc(2011, 12, 30, 10)) == utc(2011, 12, 30, 22)
