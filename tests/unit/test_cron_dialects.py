"""Cron expressions beyond the plainest: what they mean here, and which ones of other dialects are refused."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgworkd.core.recurrence import BadSchedule, Recurrence
from tests.unit.test_schedule_dst import utc

UTC_INSTANTS = st.datetimes(datetime(1995, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC))


@given(
    place=st.integers(0, 4), value=st.integers(1, 7), step=st.integers(1, 9), padded=st.booleans(), instant=UTC_INSTANTS
)
@settings(deadline=None)
def test_a_range_of_one_value_with_a_step_is_that_value(
    place: int, value: int, step: int, padded: bool, instant: datetime
) -> None:
    """As in Vixie's cron; not from there to the end of the field, as `a/n` would be."""
    fields = ["0", "0", "*", "*", "*"]
    first = f"0{value}" if padded else f"{value}"
    ranged, plain = [*fields], [*fields]
    ranged[place], plain[place] = f"{first}-{value}/{step}", f"{value}"
    assert Recurrence.parse(" ".join(ranged)).next_after(instant) == Recurrence.parse(" ".join(plain)).next_after(
        instant
    )


@pytest.mark.parametrize(("cron", "same"), [("0 0 * * MON-mon/2", "0 0 * * MON"), ("0 0 * JAN-Jan/3 *", "0 0 * JAN *")])
def test_so_is_one_of_names(cron: str, same: str) -> None:
    assert Recurrence.parse(cron).next_after(utc(2026, 6, 1, 10)) == Recurrence.parse(same).next_after(
        utc(2026, 6, 1, 10)
    )


@pytest.mark.parametrize("every", [60, timedelta(days=1)])
def test_an_interval_in_a_time_zone_is_refused(every: Any) -> None:
    """It would run at midnight UTC, whatever the zone."""
    with pytest.raises(BadSchedule, match=r"^timezone 'America/New_York': .* give a cron expression"):
        Recurrence.parse(every, "America/New_York")


@pytest.mark.parametrize(
    ("cron", "same"), [("@midnight", "@daily"), ("@annually", "@yearly"), ("@Midnight", "0 0 * * *")]
)
def test_every_alias_of_cron_is_known(cron: str, same: str) -> None:
    assert Recurrence.parse(cron) == Recurrence.parse(same)


@pytest.mark.parametrize(
    ("cron", "due"),
    [
        ("0 0 L * *", utc(2026, 1, 31)),
        ("0 0 LW * *", utc(2026, 1, 30)),
        ("0 0 * * 5L", utc(2026, 1, 30)),
        ("0 0 * * 1#2", utc(2026, 1, 12)),
    ],
)
def test_what_is_documented_beyond_the_standard(cron: str, due: datetime) -> None:
    assert Recurrence.parse(cron).next_after(utc(2026, 1, 6)) == due


@pytest.mark.parametrize("cron", ["0 0 15W * *", "0 0 ? * *", "0 5-1 * * *", "@reboot", "0 0 * * 5#6", "0 0 1-1/0 * *"])
def test_what_other_dialects_know_is_refused(cron: str) -> None:
    with pytest.raises(BadSchedule, match="; give 5 fields"):
        Recurrence.parse(cron)
