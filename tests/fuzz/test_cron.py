"""Any rule in any zone: its occurrences are in order and computed quickly, or it is rejected by name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import available_timezones

from hypothesis import given
from hypothesis import strategies as st

from pgworkd.core.recurrence import ALIASES, Recurrence
from pgworkd.errors import BadSchedule
from tests.kits.models import FUZZ, in_time, nowhere

__all__ = ["nowhere"]  # a fixture

NUMBER = st.integers(0, 70).map(str)
WORDS = ["L", "LW", "mon", "SUN", "jan", "?", "", "-1", "6#5", "1#6", "LW-1", "W", "٣"]
ATOM = st.one_of(st.just("*"), NUMBER, st.sampled_from(WORDS))
PART = st.one_of(
    ATOM,
    st.tuples(ATOM, st.sampled_from(["-", "/", "#"]), ATOM).map("".join),
    st.tuples(ATOM, st.just("-"), ATOM, st.just("/"), ATOM).map("".join),
)
FIELD = st.one_of(st.just("*"), PART, st.lists(PART, min_size=1, max_size=3).map(",".join))
CRON = st.one_of(
    st.text(),
    st.sampled_from([*ALIASES, "@reboot", "0 0 31 2 *", "0 0 29 2 1#1", "59 23 31 12 L", "* * * * * *"]),
    st.lists(FIELD, min_size=4, max_size=7).map(" ".join),
    st.lists(FIELD, min_size=5, max_size=5).map(" ".join),
)
ODD_ZONES = ["UTC", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kathmandu", "Africa/Monrovia", "America/St_Johns"]
BAD_ZONES = ["../../etc/passwd", "/etc/localtime", "", ".", "posix/UTC", "right/UTC", "Europe", "x" * 5000, "u\0"]
ZONE = st.one_of(
    st.sampled_from(ODD_ZONES),
    st.sampled_from(sorted(available_timezones())),
    st.text(),
    st.sampled_from(BAD_ZONES),
)
INSTANT = st.datetimes(datetime(1960, 1, 1), datetime(2210, 1, 1), timezones=st.just(UTC))


@FUZZ
@given(CRON, ZONE, INSTANT, st.sampled_from(["skip", "once", "all"]), st.timedeltas(timedelta(0), timedelta(days=4000)))
def test_any_cron_rule_is_accepted_or_rejected_by_name(
    cron: str, zone: str, at: datetime, missed: str, outage: timedelta
) -> None:
    with in_time():
        try:
            rule = Recurrence.parse(cron, zone, missed)  # type: ignore[arg-type]
        except BadSchedule as error:
            assert str(error).startswith(("cron ", "timezone "))
            return
    with in_time():
        try:
            first = rule.next_after(at)
            second = rule.next_after(first)
            followed = rule.follow(first, first + outage)
        except BadSchedule as error:
            assert "never due between" in str(error)
            return
    assert at < first < second
    assert followed > first
    assert first.microsecond == 0
    assert Recurrence(rule.cron, None, zone, rule.missed) == rule


@FUZZ
@given(st.one_of(st.integers(), st.floats(), st.timedeltas(), st.booleans(), st.none(), st.binary()), INSTANT)
def test_any_interval_is_accepted_or_rejected_by_name(every: object, at: datetime) -> None:
    with in_time():
        try:
            rule = Recurrence.parse(every)  # type: ignore[arg-type]
        except BadSchedule as error:
            assert "every_s" in str(error)
            return
    assert rule.every_s is not None
    try:
        first = rule.next_after(at)
    except BadSchedule as error:
        assert "never due between" in str(error)
        return
    assert at < first
    assert first.timestamp() % rule.every_s == 0
