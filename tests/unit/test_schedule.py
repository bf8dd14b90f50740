"""Due times against a second calculation: walk every real minute and look at the clock on the wall."""

import pickle
import time
from bisect import bisect_right
from datetime import UTC, datetime, timedelta, timezone
from functools import cache
from itertools import pairwise
from typing import Any, get_args
from zoneinfo import ZoneInfo

import pytest
from croniter import croniter  # type: ignore[import-untyped]
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgworkd.errors import UsageError
from pgworkd.schedule import ALIASES, BadSchedule, Missed, Recurrence

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

UTC_INSTANTS = st.datetimes(datetime(1995, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC))
CRONS = st.one_of(
    st.sampled_from([*FOLLOW_WALL_CLOCK, *FOLLOW_REAL_TIME, *ALIASES.values(), "0 0 29 2 *", "0 0 L * *"]),
    st.builds("{} {} {} {} {}".format, *[
        st.one_of(
            st.just("*"),
            st.integers(low, high).map(str),
            st.lists(st.integers(low, high), min_size=2, max_size=2, unique=True).map(
                lambda ends: f"{min(ends)}-{max(ends)}"
            ),
            st.integers(1, 9).map("*/{}".format),
            st.lists(st.integers(low, high), min_size=1, max_size=4).map(lambda v: ",".join(map(str, v))),
        )
        for low, high in [(0, 59), (0, 23), (1, 28), (1, 12), (0, 7)]
    ]),
    st.sampled_from(["*/10 * * * * *", "30 15 2 * * *", "0,59 59 23 * * *", "0 */7 1-2 * * *"]),
)  # fmt: skip
INTERVALS_S = st.one_of(st.integers(1, 100), st.integers(1, 366 * 86_400))
RECURRENCES = st.builds(
    Recurrence.parse,
    st.one_of(CRONS, INTERVALS_S),
    st.sampled_from([*ZONES, "UTC"]),
    st.sampled_from(get_args(Missed)),
)


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
def clock(zone: str, change: datetime) -> list[tuple[datetime, datetime]]:
    """(UTC, naive wall) of every real minute around a change."""
    minutes = [change - AROUND + n * MINUTE for n in range(2 * AROUND // MINUTE + 1)]
    return [(minute, minute.astimezone(ZoneInfo(zone)).replace(tzinfo=None)) for minute in minutes]


def due_minutes(cron: str, zone: str, change: datetime) -> list[datetime]:
    ticks = clock(zone, change)
    first, last = min(wall for _, wall in ticks), max(wall for _, wall in ticks)
    matches = matching(cron, [first + n * MINUTE for n in range((last - first) // MINUTE + 1)])
    if any(field.startswith("*") for field in cron.split()[:2]):
        return [instant for instant, wall in ticks if wall in matches]
    due, seen = [], first - MINUTE
    for instant, wall in ticks:
        # All wall minutes the clock passes with this tick and never showed before: none in a second pass,
        # many at the end of a gap, one otherwise.
        passed = [seen + n * MINUTE for n in range(1, (wall - seen) // MINUTE + 1)]
        if not matches.isdisjoint(passed):
            due.append(instant)
        seen = max(seen, wall)
    return due


# --- daylight saving ----------------------------------------------------------------------------------------


def test_the_zones_change_as_this_file_supposes() -> None:
    assert [len(offset_changes(zone)) for zone in ZONES] == [4, 4, 4, 4, 2]
    assert utc(2026, 3, 29, 1) in offset_changes("Europe/Berlin")
    assert utc(2026, 4, 4, 15) in offset_changes("Australia/Lord_Howe")


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("cron", [*FOLLOW_WALL_CLOCK, *FOLLOW_REAL_TIME])
def test_agrees_with_the_clock_on_the_wall_through_every_change(cron: str, zone: str) -> None:
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
        # From instants within the gap's and the repeated hour's neighbourhood, in both directions.
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
def test_berlin_by_hand(every: str, due_in_spring: list[str], due_in_autumn: list[str]) -> None:
    berlin = "Europe/Berlin"
    assert occurrences(every, berlin, utc(2026, 3, 29, 0), utc(2026, 3, 29, 2, 30)) == due_in_spring
    assert occurrences(every, berlin, utc(2026, 10, 24, 23), utc(2026, 10, 25, 3, 30)) == due_in_autumn


def test_the_second_pass_of_a_repeated_hour_does_not_fire_again() -> None:
    recurrence = Recurrence.parse("30 2 * * *", "Europe/Berlin")
    local = datetime(2026, 10, 25, 2, 10, tzinfo=ZoneInfo("Europe/Berlin"))
    assert recurrence.next_after(local) == utc(2026, 10, 25, 0, 30)
    assert recurrence.next_after(local.replace(fold=1)) == utc(2026, 10, 26, 1, 30)


def test_follow_tells_the_two_passes_apart_when_both_instants_are_local() -> None:
    recurrence = Recurrence.parse("*/15 * * * *", "Europe/Berlin")
    first_pass = datetime(2026, 10, 25, 2, 45, tzinfo=ZoneInfo("Europe/Berlin"))
    second_pass = first_pass.replace(minute=10, fold=1)
    assert second_pass < first_pass  # by the clock on the wall, which is how Python compares within a zone
    assert recurrence.follow(first_pass, second_pass) == utc(2026, 10, 25, 1, 15)


def test_a_far_occurrence_is_found_in_the_first_pass() -> None:
    # From winter time to winter time, with all of summer time to be noticed in between.
    assert Recurrence.parse("*/30 2 25 10 *", "Europe/Berlin").next_after(utc(2026, 1, 1)) == utc(
        2026, 10, 25
    )


def test_what_was_skipped_together_counts_as_one_missed_occurrence() -> None:
    recurrence = Recurrence.parse("15,45 1-3 * * *", "Europe/Berlin", "all")
    previous, now = (
        utc(2026, 3, 1),
        utc(2026, 3, 29, 2),
    )  # 04:00 local; due at 03:45, 03:15, 03:00, 01:45, 01:15
    assert recurrence.follow(previous, now, 3) == utc(2026, 3, 29, 1)
    assert recurrence.follow(previous, now, 4) == utc(2026, 3, 29, 0, 45)


def test_a_day_that_a_zone_skipped_is_due_at_its_end() -> None:
    apia = Recurrence.parse("0 12 * * *", "Pacific/Apia")  # had no 30 December 2011
    assert apia.next_after(utc(2011, 12, 29, 22)) == utc(2011, 12, 30, 10)
    assert apia.next_after(utc(2011, 12, 30, 10)) == utc(2011, 12, 30, 22)


# --- properties ---------------------------------------------------------------------------------------------


@given(recurrence=RECURRENCES, instant=UTC_INSTANTS)
@settings(deadline=None)
def test_next_after_is_later_whole_and_in_utc(recurrence: Recurrence, instant: datetime) -> None:
    chain = [instant]
    for _ in range(5):
        chain.append(recurrence.next_after(chain[-1]))
    assert all(earlier < later for earlier, later in pairwise(chain))
    assert all(due.tzinfo is UTC and due.microsecond == 0 for due in chain[1:])


@given(recurrence=RECURRENCES, instant=UTC_INSTANTS, fraction=st.floats(0, 1, exclude_max=True))
@settings(deadline=None)
def test_next_after_is_the_least(recurrence: Recurrence, instant: datetime, fraction: float) -> None:
    following = recurrence.next_after(instant)
    between = instant + (following - instant) * fraction
    assert recurrence.next_after(min(between, following - SECOND / 1000)) == following
    # Walking back from just before it finds nothing later than the instant.
    latest = Recurrence(recurrence.cron, recurrence.every_s, recurrence.timezone, "once")
    assert latest.follow(instant, following - SECOND) == following
    assert latest.follow(instant, following) == following


@given(every_s=INTERVALS_S, instant=UTC_INSTANTS)
def test_intervals_are_multiples_since_the_epoch(every_s: int, instant: datetime) -> None:
    due_s = (Recurrence.parse(every_s, "Asia/Kolkata").next_after(instant) - utc(1970, 1, 1)) / SECOND
    assert due_s % every_s == 0
    assert 0 < due_s - instant.timestamp() <= every_s


@given(
    recurrence=RECURRENCES,
    previous=UTC_INSTANTS,
    outage=st.timedeltas(timedelta(days=-2), timedelta(days=40)),
    on_the_grid=st.booleans(),
    missed_max=st.integers(1, 5),
)
@settings(deadline=None)
def test_follow_against_its_definition(
    recurrence: Recurrence, previous: datetime, outage: timedelta, on_the_grid: bool, missed_max: int
) -> None:
    if on_the_grid:
        previous = recurrence.next_after(previous)
    now = previous + outage
    missed: list[datetime] = []
    while len(missed) < 300 and (due := recurrence.next_after(missed[-1] if missed else previous)) <= now:
        missed.append(due)
    if len(missed) == 300:  # enough to know: measure from the 300th on
        now = missed[-1]
    following = recurrence.follow(previous, now, missed_max)
    assert following > previous
    if recurrence.missed == "skip" or not missed:
        assert following == recurrence.next_after(max(previous, now))
    else:
        assert following == missed[-1 if recurrence.missed == "once" else -min(missed_max, len(missed))]


@given(recurrence=RECURRENCES)
@settings(deadline=None)
def test_parse_reads_back_what_it_stored(recurrence: Recurrence) -> None:
    again = Recurrence.parse(
        recurrence.cron or recurrence.every_s or 0, recurrence.timezone, recurrence.missed
    )
    assert again == recurrence
    assert pickle.loads(pickle.dumps(recurrence)) == recurrence  # noqa: S301


@given(cron=CRONS.filter(lambda cron: len(cron.split()) == 5), instant=UTC_INSTANTS)
@example(cron="0 0 29 2 *", instant=utc(2096, 3, 1))
@settings(deadline=None)
def test_agrees_with_croniter_where_no_clock_changes(cron: str, instant: datetime) -> None:
    minute, hour, day, month, weekday = cron.split()
    if "*" not in (day, weekday):  # cron fires on either, and the two differ on whether "*/2" is a star
        weekday = "*"
    cron = f"{minute} {hour} {day} {month} {weekday}"
    for zone in ("UTC", "Asia/Kolkata"):  # no change since 1945
        theirs = croniter(cron, instant.astimezone(ZoneInfo(zone))).get_next(datetime)
        assert Recurrence.parse(cron, zone).next_after(instant) == theirs.astimezone(UTC)


# --- missed occurrences -------------------------------------------------------------------------------------

PREVIOUS, NOW = utc(2026, 6, 1, 10), utc(2026, 6, 1, 13, 30)


@pytest.mark.parametrize(
    ("missed", "previous", "now", "following"),
    [
        ("skip", PREVIOUS, NOW, utc(2026, 6, 1, 14)),
        ("once", PREVIOUS, NOW, utc(2026, 6, 1, 13)),
        ("all", PREVIOUS, NOW, utc(2026, 6, 1, 11)),
        ("skip", PREVIOUS, utc(2026, 6, 1, 13), utc(2026, 6, 1, 14)),
        ("once", PREVIOUS, utc(2026, 6, 1, 13), utc(2026, 6, 1, 13)),
        ("once", utc(2026, 6, 1, 13), NOW, utc(2026, 6, 1, 14)),
        ("all", utc(2026, 6, 1, 13), NOW, utc(2026, 6, 1, 14)),
        ("skip", NOW, PREVIOUS, utc(2026, 6, 1, 14)),
        ("once", NOW, PREVIOUS, utc(2026, 6, 1, 14)),
        ("all", NOW, PREVIOUS, utc(2026, 6, 1, 14)),
        ("all", utc(2026, 1, 1), NOW, utc(2026, 5, 28, 10)),  # 100 hours up to 13:00
    ],
)
@pytest.mark.parametrize("every", ["0 * * * *", 3600])
def test_follow(every: Any, missed: Missed, previous: datetime, now: datetime, following: datetime) -> None:
    assert Recurrence.parse(every, missed=missed).follow(previous, now) == following


@pytest.mark.parametrize("missed", get_args(Missed))
@pytest.mark.parametrize(
    "every", ["* * * * *", "0-59 0-23 * * *", "* * * * * *", "0 7 * * *", "0 0 29 2 *", 1]
)
def test_a_year_of_outage_is_cheap(every: Any, missed: Missed) -> None:
    recurrence = Recurrence.parse(every, "Europe/Berlin", missed)
    best_s = 1.0
    for _ in range(3):  # the best of three, for a machine that is busy with something else
        started_s = time.perf_counter()
        recurrence.follow(utc(2025, 6, 1), utc(2026, 6, 1, 0, 0, 30))
        best_s = min(best_s, time.perf_counter() - started_s)
    assert best_s < 0.05


def test_follow_refuses_a_maximum_below_one() -> None:
    with pytest.raises(ValueError, match="occurrences_missed_max"):
        Recurrence.parse(60).follow(PREVIOUS, NOW, 0)


# --- what is taken and what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "cron", "every_s"),
    [
        ("@hourly", "0 * * * *", None),
        ("@daily", "0 0 * * *", None),
        ("@Weekly", "0 0 * * 0", None),
        (" @monthly ", "0 0 1 * *", None),
        ("@yearly", "0 0 1 1 *", None),
        ("  0\t7  * * mon-fri\n", "0 7 * * mon-fri", None),
        ("0 0 L * *", "0 0 L * *", None),
        ("30 0 7 * * *", "30 0 7 * * *", None),
        (60, None, 60),
        (60.0, None, 60),
        (timedelta(hours=1), None, 3600),
        (1, None, 1),
        (timedelta(days=366), None, 366 * 86_400),
    ],
)
def test_parse(every: Any, cron: str | None, every_s: int | None) -> None:
    assert Recurrence.parse(every) == Recurrence(cron, every_s, "UTC", "skip")


def test_a_range_may_be_one_value() -> None:
    # croniter reads "1-1" as all twelve months.
    assert Recurrence.parse("0 0 2-2 1-1 *").next_after(utc(2026, 1, 2)) == utc(2027, 1, 2)


def test_six_fields_have_seconds_first() -> None:
    assert Recurrence.parse("30 0 7 * * *").next_after(utc(2026, 6, 1)) == utc(2026, 6, 1, 7, 0, 30)


@pytest.mark.parametrize(
    ("every", "field"),
    [
        ("", "cron"),
        ("   ", "cron"),
        ("7", "cron"),
        ("* * * *", "cron"),
        ("* * * * * * *", "cron"),
        ("60 * * * *", "cron"),
        ("0 0 30 2 *", "cron"),
        ("0 0 31 4,6 *", "cron"),
        ("0 0 */15 2 MON#5", "cron"),  # the 1st and 16th are no fifth Monday; cronsim alone takes it
        ("a b c d e", "cron"),
        ("5-1 * * * *", "cron"),
        ("*/0 * * * *", "cron"),
        ("-1 * * * *", "cron"),
        ("@reboot", "cron"),
        ("0 7 * * \u0661", "cron"),
        ("0 7 * * \x00", "cron"),
        ("0 7 * * \ud800", "cron"),
        pytest.param("9" * 5000 + " * * * *", "cron", id="5000 digits"),
        pytest.param("0," * 5000 + "0 * * * *", "cron", id="5000 terms"),
        (0, "every_s"),
        (-1, "every_s"),
        (0.5, "every_s"),
        (1.5, "every_s"),
        (float("nan"), "every_s"),
        (float("inf"), "every_s"),
        (10**12, "every_s"),
        pytest.param(10**5000, "every_s", id="10**5000"),
        (366 * 86_400 + 1, "every_s"),
        (timedelta(0), "every_s"),
        (timedelta(seconds=1, microseconds=1), "every_s"),
        (timedelta.max, "every_s"),
        (True, "every_s"),
        (None, "every_s"),
        (b"0 7 * * *", "every_s"),
    ],
)
def test_refuses_a_bad_rule_and_names_the_field(every: Any, field: str) -> None:
    with pytest.raises(BadSchedule, match=field) as refusal:
        Recurrence.parse(every)
    assert len(str(refusal.value)) < 300
    assert str(refusal.value).isprintable()
    assert "give" in str(refusal.value) or "choose" in str(refusal.value)


@pytest.mark.parametrize(
    "zone",
    [
        "", " ", "Mars/Olympus", "Europe", "Europe/", "/etc/localtime", "../../etc/passwd", "Europe/../UTC",
        "localtime", "posixrules", "right/UTC", "posix/UTC", "tzdata.zi", "zone.tab", "UTC\n", "UTC\x00",
        "\ud800", pytest.param("Z" * 5000, id="5000 chars"), None, 1, b"UTC", UTC,
    ],
)  # fmt: skip
def test_refuses_a_bad_zone(zone: Any) -> None:
    for every in ("0 7 * * *", 60):
        with pytest.raises(BadSchedule, match=r"timezone .*; give an IANA name"):
            Recurrence.parse(every, zone)


@pytest.mark.parametrize("zone", ["UTC", "Etc/GMT+5", "America/Port-au-Prince", "America/Argentina/Ushuaia"])
def test_takes_every_form_of_zone_name(zone: str) -> None:
    assert Recurrence.parse("0 7 * * *", zone).timezone == zone


@pytest.mark.parametrize("missed", ["", "SKIP", "none", None, 1, []])
def test_refuses_a_bad_rule_for_missed_ones(missed: Any) -> None:
    with pytest.raises(BadSchedule, match="missed"):
        Recurrence.parse(60, missed=missed)


@pytest.mark.parametrize(
    ("cron", "every_s"),
    [(None, None), ("0 7 * * *", 60), ("@daily", None), (7, None), (None, 1.0), (None, True)],
)
def test_the_constructor_checks_as_parse_does(cron: Any, every_s: Any) -> None:
    with pytest.raises(BadSchedule, match=r"cron|every_s"):
        Recurrence(cron, every_s)


def test_bad_schedule_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(BadSchedule, UsageError)
    assert issubclass(BadSchedule, ValueError)


@pytest.mark.parametrize("every", ["0 7 * * *", "* * * * *", 60, "0 0 29 2 *"])
def test_nothing_is_due_from_2200_on(every: Any) -> None:
    recurrence = Recurrence.parse(every, "Europe/Berlin")
    for instant in (utc(2199, 12, 31, 23, 59, 59), utc(2200, 1, 1), datetime.max.replace(tzinfo=UTC)):
        with pytest.raises(BadSchedule, match="2200"):
            recurrence.next_after(instant)


@pytest.mark.parametrize("every", ["0 7 * * *", "* * * * *", 60])
def test_the_ends_of_datetime_are_no_trouble(every: Any) -> None:
    east, west = timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))
    recurrence = Recurrence.parse(every, "Europe/Berlin", "all")
    assert recurrence.next_after(datetime.min.replace(tzinfo=east)).year == 1970
    with pytest.raises(BadSchedule):
        recurrence.next_after(datetime.max.replace(tzinfo=west))
    ends = datetime.min.replace(tzinfo=east), datetime.max.replace(tzinfo=west)
    assert recurrence.follow(*ends).year == 2199


def test_the_first_second_of_all_can_be_due() -> None:
    assert Recurrence.parse(60).next_after(utc(1969, 12, 31)) == utc(1970, 1, 1)
    assert Recurrence.parse("0 0 1 1 *").next_after(utc(1900, 1, 1)) == utc(1970, 1, 1)


def test_refuses_naive_datetimes() -> None:
    naive = datetime(2026, 6, 1)
    with pytest.raises(ValueError, match="aware"):
        Recurrence.parse(60).next_after(naive)
    with pytest.raises(ValueError, match="aware"):
        Recurrence.parse(60).follow(naive, NOW)
    with pytest.raises(ValueError, match="aware"):
        Recurrence.parse(60).follow(PREVIOUS, naive)
