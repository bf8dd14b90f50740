"""When a recurring job is due: cron expressions and intervals, as pure functions of an instant.

Daylight saving time is handled as in Debian's cron. A cron whose minute and hour fields (and seconds, when given) do
not start with `*` follows the wall clock: skipped times fire at the first instant after the gap, together with each
other and with any occurrence due then; a repeated time fires the first time only. Any other cron follows real time: it
fires whenever the wall clock matches, so in both passes of a repeated hour, and not at all in a skipped one.

cronsim only matches fields, on plain wall times. Its own time zone support confuses the passes of a repeated hour,
loses matches where the shift is not a full hour (Lord Howe), and treats six fields unlike five.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from typing import Literal, Self, get_args
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from pgworkd.errors import BadSchedule as BadSchedule

Missed = Literal["skip", "once", "all"]

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
EVERY_S_MAX = 366 * 86_400
MISSED_GRACE_S = 60.0
"""An occurrence due at most this many seconds before workers began to serve its queue is late, not missed."""
_CRON_TEXT = re.compile(r"[ -~]{0,200}")
_RANGE_WITH_STEP = re.compile(r"\b(\w+)-(\w+)/0*[1-9]\d*\b")
# Excludes the host's names for its own zone, and the zones that count leap seconds.
_ZONE_NAME = re.compile(r"(?!(posix|right)/|(localtime|posixrules)$)[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_END = datetime(2200, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurring rule: a cron expression in a time zone, or an interval; exactly one of the two is set.

    `cron` has 5 fields (minute, hour, day of month, month, day of week) or 6 with seconds first.
    `every_s` is 1 second to 366 days, counted from the Unix epoch: 7 means the multiples of 7 s.
    `timezone` is an IANA name, UTC with an interval. `missed` determines which occurrences missed during an outage
    `follow` returns; with 'skip', a waiting one is skipped as well if it was due more than `missed_grace_s` seconds
    before workers began to serve its queue. Occurrences are whole seconds from 1970 to the end of 2199. Raises
    BadSchedule for invalid values.
    """

    cron: str | None
    every_s: int | None
    timezone: str = "UTC"
    missed: Missed = "skip"
    missed_grace_s: float = MISSED_GRACE_S

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.every_s is None):
            raise BadSchedule("cron, every_s: set exactly one of the two")
        if self.missed not in get_args(Missed):
            raise BadSchedule("missed: must be 'skip', 'once' or 'all'")
        grace = self.missed_grace_s
        if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 <= grace <= EVERY_S_MAX:
            raise BadSchedule(f"missed_grace_s: give seconds from 0 to {EVERY_S_MAX} (366 days)")
        _check_timezone(self.timezone)
        if self.cron is not None:
            _check_cron(self.cron)
            # Raises if it is never due (31 February). From a fixed instant, so that a valid row stays valid.
            self.next_after(datetime(2000, 1, 1, tzinfo=UTC))
        elif type(self.every_s) is not int or not 1 <= self.every_s <= EVERY_S_MAX:
            raise BadSchedule(f"every_s: give whole seconds from 1 to {EVERY_S_MAX} (366 days)")
        elif self.timezone != "UTC":
            raise BadSchedule(
                f"timezone {self.timezone!r}: an interval counts from 1970 in UTC; give a cron expression, "
                "such as '0 0 * * *' for every midnight there"
            )

    @classmethod
    def parse(
        cls,
        every: str | float | timedelta,
        timezone: str = "UTC",
        missed: Missed = "skip",
        missed_grace_s: float = MISSED_GRACE_S,
    ) -> Self:
        """Reads a cron (or @hourly to @yearly, kept as cron), seconds or a timedelta. Raises BadSchedule."""
        if isinstance(every, str):
            cron = " ".join(every.split())
            return cls(ALIASES.get(cron.lower(), cron), None, timezone, missed, missed_grace_s)
        every = every / _SECOND if isinstance(every, timedelta) else every
        if isinstance(every, bool) or not isinstance(every, int | float):
            raise BadSchedule("cron, every_s: give a cron expression, or seconds as a number or timedelta")
        # Fractions and values out of bounds become 0, which __post_init__ rejects.
        every_s = int(every) if 1 <= every <= EVERY_S_MAX and every == int(every) else 0
        return cls(None, every_s, timezone, missed, missed_grace_s)

    def next_after(self, instant: datetime) -> datetime:
        """Returns the first occurrence strictly after an aware datetime, in UTC.

        Raises BadSchedule when there is none before 2200, ValueError for a naive datetime.
        """
        if (occurrence := next(self._walk(_utc(instant)), _END)) < _END:
            return occurrence
        field = f"cron {self.cron!r}" if self.cron else f"every_s {self.every_s}"
        raise BadSchedule(f"{field}: never due between {instant} and the year 2200; choose one that is")

    def follow(self, previous: datetime, now: datetime, occurrences_missed_max: int = 100) -> datetime:
        """Returns the occurrence to insert once the one of `previous` is settled at `now`, in UTC.

        Always later than `previous`. Of the occurrences in (previous, now], 'skip' takes none, 'once' the latest, 'all'
        the first, but not further back than the `occurrences_missed_max` latest (each takes some 20 us to find). If
        there are none, all three take the first after `now`.
        Raises BadSchedule when there is none before 2200, ValueError for a naive datetime or a maximum < 1.
        """
        if occurrences_missed_max < 1:
            raise ValueError("occurrences_missed_max: must be at least 1")
        # Compare in UTC: two datetimes of one zone compare by wall clock, ignoring the fold.
        previous, now = _utc(previous), _utc(now)
        following = None
        if self.missed != "skip":
            wanted = 1 if self.missed == "once" else occurrences_missed_max
            for occurrence in islice(self._walk(now, backwards=True), wanted):
                if occurrence <= previous:
                    break
                following = occurrence
        return following or self.next_after(max(previous, now))

    def _walk(self, instant: datetime, *, backwards: bool = False) -> Iterator[datetime]:
        """Yields the occurrences after `instant`, or backwards those up to and including it."""
        step = -_SECOND if backwards else _SECOND
        first = instant if backwards else instant + step
        if self.cron is None:
            every = timedelta(seconds=self.every_s or 1)
            nearest = (first - _EPOCH) // every if backwards else -((_EPOCH - first) // every)
            return (_EPOCH + number * every for number in count(nearest, -1 if backwards else 1))
        wildcard = any(field.startswith("*") for field in self.cron.split()[:-3])
        return (_walk_real_time if wildcard else _walk_wall)(self.cron, ZoneInfo(self.timezone), first, step)


def _walk_wall(cron: str, zone: ZoneInfo, bound: datetime, step: timedelta) -> Iterator[datetime]:
    backwards = step < timedelta(0)
    local = (bound - step).astimezone(zone)
    # In the second pass of a repeated hour the clock has shown later times than now: backwards, include them.
    offset = (local.replace(fold=0) if backwards else local).utcoffset() or timedelta(0)
    for wall in _matching(cron, (bound - step + offset).replace(tzinfo=None), backwards=backwards):
        occurrence = wall.replace(tzinfo=zone).astimezone(UTC)
        if occurrence.astimezone(zone).replace(tzinfo=None) != wall:
            # In a gap: fold=0 uses the offset before the change, and fold=1 the one after it.
            before = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
            occurrence = _offset_change(zone, before, occurrence) or occurrence
        # Times in one gap share an instant, and the forward walk from a second pass starts within the first.
        if occurrence <= bound if backwards else occurrence >= bound:
            yield occurrence
            bound = occurrence + step


def _walk_real_time(cron: str, zone: ZoneInfo, here: datetime, step: timedelta) -> Iterator[datetime]:
    while _EPOCH <= here <= _END:
        # Between two changes of the offset, wall time is real time shifted: match there, stop at the change.
        # The wall time is passed as if it were UTC, which cronsim does not convert.
        offset = _offset(here, zone)
        if (due := next(_matching(cron, here - step + offset, backwards=step < timedelta(0)), None)) is None:
            return
        if (change := _offset_change(zone, here, due - offset)) is None:
            yield due - offset
        here = change or due - offset + step


def _offset_change(zone: ZoneInfo, here: datetime, end: datetime) -> datetime | None:
    """Returns the first second from `here` towards `end`, in either direction, with another UTC offset."""
    offset, step = _offset(here, zone), _SECOND if end > here else -_SECOND
    while here != end:
        # Day by day, as every offset lasts longer: a longer stride could miss a change and its reversal.
        stride_s = min(86_400, (end - here) // step)
        if _offset(here + stride_s * step, zone) != offset:
            changed = bisect_left(range(stride_s), 1, key=lambda n: offset != _offset(here + n * step, zone))
            return here + changed * step
        here += stride_s * step
    return None


def _offset(instant: datetime, zone: ZoneInfo) -> timedelta:
    return instant.astimezone(zone).utcoffset() or timedelta(0)


def _utc(instant: datetime) -> datetime:
    if instant.utcoffset() is None:
        raise ValueError("instant: must be aware, a naive datetime has no time zone")
    # Clamped before conversion: the first and last datetimes cannot be converted to UTC.
    return min(max(instant, _EPOCH - _SECOND), _END).astimezone(UTC).replace(microsecond=0)


def _matching(cron: str, start: datetime, *, backwards: bool = False) -> CronSim:
    """The wall times that match. A range of one value with a step (5-5/10) is that value only, as in Vixie's cron."""
    cron = _RANGE_WITH_STEP.sub(lambda found: found[1] if _is_one(found[1], found[2]) else found[0], cron)
    return CronSim(cron, start, reverse=backwards)


def _is_one(first: str, last: str) -> bool:
    return first.lower().lstrip("0") == last.lower().lstrip("0")


def _check_cron(cron: str) -> None:
    try:
        if not _CRON_TEXT.fullmatch(cron):
            raise CronSimError("Not 200 characters or fewer of printable ASCII")
        _matching(cron, _EPOCH)
    except (TypeError, CronSimError) as error:
        remedy = "give 5 fields (minute hour day month weekday), or 6 with seconds first, such as '0 7 * * *'"
        raise BadSchedule(f"cron {str(cron)[:60]!r}: {str(error).lower()}; {remedy}") from None


def _check_timezone(name: str) -> None:
    try:
        if not _ZONE_NAME.fullmatch(name):
            raise ValueError
        ZoneInfo(name)
    except (TypeError, LookupError, ValueError, OSError):
        remedy = "give an IANA name such as 'UTC' or 'Europe/Berlin'"
        raise BadSchedule(f"timezone {str(name)[:60]!r}: not known; {remedy}") from None
