"""Schedule rules: their occurrences, missed occurrences, and what is rejected."""

import pickle
import time
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from typing import Any, get_args
from zoneinfo import ZoneInfo

import pytest
from croniter import croniter  # type: ignore[import-untyped]
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgworkd.core.recurrence import ALIASES, BadSchedule, Missed, Recurrence
from pgworkd.errors import UsageError
from tests.unit.test_schedule_dst import (
    FOLLOW_REAL_TIME,
    FOLLOW_WALL_CLOCK,
    SECOND,
    ZONES,
    utc,
)

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
RECURRENCES = st.one_of(
    st.builds(Recurrence.parse, CRONS, st.sampled_from([*ZONES, "UTC"]), st.sampled_from(get_args(Missed))),
    st.builds(Recurrence.parse, INTERVALS_S, st.just("UTC"), st.sampled_from(get_args(Missed))),
)


# --- properties ---------------------------------------------------------------------------------------------


@given(recurrence=RECURRENCES, instant=UTC_INSTANTS)
@settings(deadline=None)
def test_next_after_is_later_in_whole_seconds_and_in_utc(recurrence: Recurrence, instant: datetime) -> None:
    chain = [instant]
    for _ in range(5):
        chain.append(recurrence.next_after(chain[-1]))
    assert all(earlier < later for earlier, later in pairwise(chain))
    assert all(due.tzinfo is UTC and due.microsecond == 0 for due in chain[1:])


@given(recurrence=RECURRENCES, instant=UTC_INSTANTS, fraction=st.floats(0, 1, exclude_max=True))
@settings(deadline=None)
def test_next_after_is_the_earliest_occurrence(recurrence: Recurrence, instant: datetime, fraction: float) -> None:
    following = recurrence.next_after(instant)
    between = instant + (following - instant) * fraction
    assert recurrence.next_after(min(between, following - SECOND / 1000)) == following
    # Walking back from just before it finds nothing later than the instant.
    latest = Recurrence(recurrence.cron, recurrence.every_s, recurrence.timezone, "once")
    assert latest.follow(instant, following - SECOND) == following
    assert latest.follow(instant, following) == following


@given(every_s=INTERVALS_S, instant=UTC_INSTANTS)
def test_intervals_are_aligned_to_the_epoch(every_s: int, instant: datetime) -> None:
    due_s = (Recurrence.parse(every_s).next_after(instant) - utc(1970, 1, 1)) / SECOND
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
def test_follow_agrees_with_its_definition(
    recurrence: Recurrence, previous: datetime, outage: timedelta, on_the_grid: bool, missed_max: int
) -> None:
    if on_the_grid:
        previous = recurrence.next_after(previous)
    now = previous + outage
    missed: list[datetime] = []
    while len(missed) < 300 and (due := recurrence.next_after(missed[-1] if missed else previous)) <= now:
        missed.append(due)
    if len(missed) == 300:  # enough: measure from the 300th on
        now = missed[-1]
    following = recurrence.follow(previous, now, missed_max)
    assert following > previous
    if recurrence.missed == "skip" or not missed:
        assert following == recurrence.next_after(max(previous, now))
    else:
        assert following == missed[-1 if recurrence.missed == "once" else -min(missed_max, len(missed))]


@given(recurrence=RECURRENCES)
@settings(deadline=None)
def test_parse_round_trips_stored_rules(recurrence: Recurrence) -> None:
    again = Recurrence.parse(recurrence.cron or recurrence.every_s or 0, recurrence.timezone, recurrence.missed)
    assert again == recurrence
    assert pickle.loads(pickle.dumps(recurrence)) == recurrence  # noqa: S301


@given(cron=CRONS.filter(lambda cron: len(cron.split()) == 5), instant=UTC_INSTANTS)
@example(cron="0 0 29 2 *", instant=utc(2096, 3, 1))
@settings(deadline=None)
def test_occurrences_agree_with_croniter_in_zones_without_dst(cron: str, instant: datetime) -> None:
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
@pytest.mark.parametrize("every", ["* * * * *", "0-59 0-23 * * *", "* * * * * *", "0 7 * * *", "0 0 29 2 *", 1])
def test_a_year_of_outage_is_cheap(every: Any, missed: Missed) -> None:
    recurrence = Recurrence.parse(every, "Europe/Berlin" if isinstance(every, str) else "UTC", missed)
    best_s = 1.0
    for _ in range(3):  # the best of three, for a machine that is busy with something else
        started_s = time.perf_counter()
        recurrence.follow(utc(2025, 6, 1), utc(2026, 6, 1, 0, 0, 30))
        best_s = min(best_s, time.perf_counter() - started_s)
    assert best_s < 0.05


def test_follow_rejects_a_maximum_below_one() -> None:
    with pytest.raises(ValueError, match="occurrences_missed_max"):
        Recurrence.parse(60).follow(PREVIOUS, NOW, 0)


# --- what is accepted and what is rejected ------------------------------------------------------------------


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
        ("0 0 */15 2 MON#5", "cron"),  # the 1st and 16th are no fifth Monday; only cronsim accepts it
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
def test_an_invalid_rule_is_rejected_naming_the_field(every: Any, field: str) -> None:
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
def test_an_invalid_time_zone_is_rejected(zone: Any) -> None:
    for every in ("0 7 * * *", 60):
        with pytest.raises(BadSchedule, match=r"timezone .*; give an IANA name"):
            Recurrence.parse(every, zone)


@pytest.mark.parametrize("zone", ["UTC", "Etc/GMT+5", "America/Port-au-Prince", "America/Argentina/Ushuaia"])
def test_every_form_of_zone_name_is_accepted(zone: str) -> None:
    assert Recurrence.parse("0 7 * * *", zone).timezone == zone


@pytest.mark.parametrize("missed", ["", "SKIP", "none", None, 1, []])
def test_an_invalid_missed_policy_is_rejected(missed: Any) -> None:
    with pytest.raises(BadSchedule, match="missed"):
        Recurrence.parse(60, missed=missed)


@pytest.mark.parametrize(
    ("cron", "every_s"),
    [(None, None), ("0 7 * * *", 60), ("@daily", None), (7, None), (None, 1.0), (None, True)],
)
def test_the_constructor_validates_like_parse(cron: Any, every_s: Any) -> None:
    with pytest.raises(BadSchedule, match=r"cron|every_s"):
        Recurrence(cron, every_s)


def test_bad_schedule_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(BadSchedule, UsageError)
    assert issubclass(BadSchedule, ValueError)


@pytest.mark.parametrize("every", ["0 7 * * *", "* * * * *", 60, "0 0 29 2 *"])
def test_nothing_is_due_from_2200_on(every: Any) -> None:
    recurrence = Recurrence.parse(every, "Europe/Berlin" if isinstance(every, str) else "UTC")
    for instant in (utc(2199, 12, 31, 23, 59, 59), utc(2200, 1, 1), datetime.max.replace(tzinfo=UTC)):
        with pytest.raises(BadSchedule, match="2200"):
            recurrence.next_after(instant)


@pytest.mark.parametrize("every", ["0 7 * * *", "* * * * *", 60])
def test_the_limits_of_datetime_are_handled(every: Any) -> None:
    east, west = timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))
    recurrence = Recurrence.parse(every, "Europe/Berlin" if isinstance(every, str) else "UTC", "all")
    assert recurrence.next_after(datetime.min.replace(tzinfo=east)).year == 1970
    with pytest.raises(BadSchedule):
        recurrence.next_after(datetime.max.replace(tzinfo=west))
    ends = datetime.min.replace(tzinfo=east), datetime.max.replace(tzinfo=west)
    assert recurrence.follow(*ends).year == 2199


def test_the_first_representable_second_can_be_due() -> None:
    assert Recurrence.parse(60).next_after(utc(1969, 12, 31)) == utc(1970, 1, 1)
    assert Recurrence.parse("0 0 1 1 *").next_after(utc(1900, 1, 1)) == utc(1970, 1, 1)


def test_naive_datetimes_are_rejected() -> None:
    naive = datetime(2026, 6, 1)
    with pytest.raises(ValueError, match="aware"):
        Recurrence.parse(60).next_after(naive)
    with pytest.raises(ValueError, match="aware"):
        Recurrence.parse(60).follow(naive, NOW)
    with pytest.raises(ValueError, match="aware"):
        Recurrence.parse(60).follow(PREVIOUS, naive)
