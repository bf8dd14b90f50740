"""The settings of a queue in a row of `queues`: their bounds, rates as text, and the effective settings.

The columns have constraints of their own, for every client; the checks here give better errors, before the round trip.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pgworkd.core.backoff import Backoff
from pgworkd.core.durations import UNITS_S, seconds_of
from pgworkd.errors import DELAY_S_MAX, UsageError
from pgworkd.settings.file import CONCURRENCY_MAX, quoted

LIMIT_MAX = 1_000_000
PERIOD_S_MIN = 0.001
_INT4_MAX = 2**31 - 1


class NumberBounds(NamedTuple):
    """The allowed range of a number."""

    low: float
    high: float
    whole: bool

    def __str__(self) -> str:
        return f"{'a whole number' if self.whole else 'a number'} from {self.low:.10g} to {self.high:.10g}"


class QueueSetting(NamedTuple):
    """A setting of a queue, and the option of `pgworkd queues set` that changes it."""

    help: str
    takes: NumberBounds | type
    metavar: str = "N"
    is_rate: bool = False
    """True if a second column has the period."""


_LIMIT, _PERIOD = NumberBounds(1, LIMIT_MAX, whole=True), NumberBounds(PERIOD_S_MIN, DELAY_S_MAX, whole=False)
_KEEP, _DELAY = NumberBounds(0, _INT4_MAX, whole=True), NumberBounds(0, DELAY_S_MAX, whole=False)
_ATTEMPTS = NumberBounds(1, 1000, whole=True)
_KEEP_HELP = "How long to keep jobs that finish from now on, up to keep_days; 0: no history."
SETTINGS = {
    "concurrency": QueueSetting("Maximum running jobs per daemon.", NumberBounds(1, CONCURRENCY_MAX, whole=True)),
    "max_running": QueueSetting("Maximum running jobs in the whole fleet.", _LIMIT),
    "limit_per_key": QueueSetting("Maximum running jobs per limit_key.", _LIMIT),
    "rate": QueueSetting("Job starts: 10/s, 100/min, 5/30s.", _LIMIT, "N/PERIOD", is_rate=True),
    "rate_burst": QueueSetting("Maximum job starts at one instant.", _LIMIT),
    "rate_per_key": QueueSetting("Job starts per limit_key.", _LIMIT, "N/PERIOD", is_rate=True),
    "rate_per_key_burst": QueueSetting("Maximum starts at once per limit_key.", _LIMIT),
    "fair": QueueSetting("Round-robin between the limit_keys, or by due time.", bool),
    "keep_s": QueueSetting(_KEEP_HELP, _KEEP, "DURATION"),
    "backoff_s": QueueSetting("Delay before the first retry; overrides the handlers'.", _DELAY, "DURATION"),
    "backoff_factor": QueueSetting("Factor of the delay for each further retry.", NumberBounds(1, 1000, whole=False)),
    "backoff_cap_s": QueueSetting("Maximum delay before a retry.", _DELAY, "DURATION"),
    "max_attempts": QueueSetting(
        "Attempts of jobs that have no max_attempts of their own; overrides the handlers'; 1: at most once.",
        _ATTEMPTS,
    ),
    "timeout_s": QueueSetting("Time limit of their attempts; overrides the handlers'.", _PERIOD, "DURATION"),
    "max_losses": QueueSetting("Lost attempts after which a job is dead; default: 3.", _ATTEMPTS),
    "serialize_scope": QueueSetting("Share serialize keys with all queues of this scope.", str, "NAME"),
    "endpoint": QueueSetting("Send its jobs to this endpoint by HTTP.", str, "NAME"),
}
"""Every setting by its public name, in the order in which they are shown: a rate includes its period."""
_COLUMNS: dict[str, NumberBounds | type] = {}
for _name, _setting in SETTINGS.items():
    _COLUMNS |= {_name: _setting.takes} | ({f"{_name}_period_s": _PERIOD} if _setting.is_rate else {})
BOUNDS = {name: takes for name, takes in _COLUMNS.items() if isinstance(takes, NumberBounds)}
"""Every numeric setting, by the name of its column."""
COLUMN_TYPES: dict[str, type] = {
    name: takes if isinstance(takes, type) else int if takes.whole else float for name, takes in _COLUMNS.items()
}
"""The type of each column of `queues` that is a setting, or the period of a rate."""
REMEDIES = {
    "queue_endpoint_must_exist": "there is no such endpoint: add it first (pgworkd endpoints add)",
    "serialize_scope_must_stay_while_used": "serialize_scope must stay while the queue has jobs with a serialize key, "
    "dead ones too: wait until they have ended, or take another queue",
    "rate_needs_a_period": "a rate needs a period: give both, as in 10/s",
    "rate_per_key_needs_a_period": "a rate per key needs a period: give both, as in 10/s",
    "rate_burst_needs_a_rate": "rate_burst needs a rate, and the queue has none: give rate as well",
    "rate_per_key_burst_needs_a_rate": "rate_per_key_burst needs a rate_per_key, and the queue has none: give both",
}
"""The remedies for violated constraints that relate settings to one another, or to an endpoint."""

_RATE = re.compile(r"(\d{1,9})\s*/\s*(\d{1,9}(?:\.\d{1,9})?)?\s*([a-z]+)")
_BACKOFF = {"backoff_s": Backoff().base_s, "backoff_factor": Backoff().factor, "backoff_cap_s": Backoff().cap_s}
"""What applies to handlers that declare no backoff, and where no row overrides it."""
_BY_CODE: dict[str, float | None] = {**_BACKOFF, "max_attempts": 3, "timeout_s": None}
"""What applies to handlers that do not say it themselves, where no row overrides it."""
_WORDS = {1: "s", 60: "min", 3600: "h", 86_400: "d"}


def number(name: str, value: object, what: str) -> int | float:
    """`value`, a number or its text, for the setting `name`; UsageError, naming it `what`, if it is out of bounds.

    The text of a time may have a unit: 10m.
    """
    bounds = BOUNDS[name]
    found = math.nan
    if isinstance(value, str) and name.endswith("_s"):
        length_s = seconds_of(value)
        found = math.nan if length_s is None else length_s
    elif isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            found = float(value)
    if not bounds.low <= found <= bounds.high or (bounds.whole and found != int(found)):  # NaN is not, either
        raise UsageError(f"{what} {quoted(value)}: give {bounds}")
    return int(found) if bounds.whole else found


def rate(name: str, text: str, what: str) -> dict[str, object]:
    """The columns for a rate written as 10/s, 100/min or 5/30s; UsageError, naming it `what`, if it is not a rate."""
    match = _RATE.fullmatch(text.strip().lower())
    if match is None or match[3] not in UNITS_S:
        lacks = "has no period" if text.strip().isdecimal() else "is not a rate"
        raise UsageError(f"{what} {quoted(text)} {lacks}: write starts per period, as 10/s, 100/min or 5/30s")
    starts = number(name, match[1], what)
    period_s = float(match[2] or 1) * UNITS_S[match[3]]
    bounds = BOUNDS[f"{name}_period_s"]
    if not bounds.low <= period_s <= bounds.high:
        raise UsageError(f"{what} {quoted(text)}: give a period of {bounds.low:g} s to 366 days")
    return {name: starts, f"{name}_period_s": period_s}


def columns_of(name: str, value: object, what: str) -> dict[str, object]:
    """The columns for a setting as the command line has it; UsageError, naming it `what`, for an invalid value."""
    if SETTINGS[name].is_rate:
        return rate(name, str(value), what)
    return {name: number(name, value, what) if name in BOUNDS else value}


def rate_text(starts: float, period_s: float) -> str:
    """A rate written as 10/s."""
    word = next((word for seconds, word in _WORDS.items() if seconds == period_s), f"{period_s:.10g}s")
    return f"{starts:.10g}/{word}"


def unset(names: Sequence[str], what: str) -> dict[str, object]:
    """The columns to set to NULL so that these settings ("all": every one) have their defaults from code again."""
    columns: dict[str, object] = {}
    for given in names:
        name = given.strip().lower().replace("-", "_")
        if name != "all" and name not in SETTINGS:
            raise UsageError(f"{what} {quoted(given)}: give one of {', '.join(SETTINGS)}, or all")
        for each in SETTINGS if name == "all" else (name,):
            columns |= dict.fromkeys((each, f"{each}_period_s", f"{each}_burst") if SETTINGS[each].is_rate else (each,))
    return columns


def checked(changes: Mapping[str, object]) -> dict[str, object]:
    """Changes of columns, validated (None: the default from code); UsageError for an unknown name or invalid value."""
    known: dict[str, object] = {}
    for name, value in changes.items():
        if name in BOUNDS:
            known[name] = None if value is None else number(name, value, name)
        elif name in COLUMN_TYPES and (value is None or isinstance(value, COLUMN_TYPES[name])):
            known[name] = value
        else:
            raise UsageError(f"{name} {quoted(value)}: a queue has no such setting, or the value has the wrong type")
    return known


class EffectiveSetting(NamedTuple):
    """A setting as it is in effect; `source` is row, code, settings (of the daemon) or default."""

    name: str
    value: Any
    """The value in effect; None: not set; a list: daemons differ."""
    source: str
    code: Sequence[int] = ()
    """The values that the running daemons would use without the row, for the concurrency."""

    @property
    def own(self) -> str:
        """The value of the row as text, as `columns_of` takes it; "" if it comes from elsewhere."""
        return _shown(self.value) if self.source == "row" else ""

    def __str__(self) -> str:
        """Returns the setting as text: `10 (row; default from code: 4)`."""
        if self.value is None and self.name in _BY_CODE:  # each handler may have its own, so no one value is in effect
            own = "its own backoff" if self.name in _BACKOFF else "its own"
            return f"{_shown(_BY_CODE[self.name])}, unless the handler declares {own} ({self.source})"
        shown = " or ".join(map(_shown, self.value if isinstance(self.value, list) else [self.value]))
        code = " or ".join(map(_shown, self.code))
        return f"{shown} ({self.source}{f'; default from code: {code}' if self.source == 'row' and code else ''})"


def effective_settings(row: Mapping[str, Any], code: Sequence[tuple[int, str]]) -> list[EffectiveSetting]:
    """Every setting of a queue, from its row in `queues` ({}: none) and the concurrencies in the daemons' code."""
    found = [_concurrency(row, code), _paused(row)]
    for name, setting in list(SETTINGS.items())[1:]:
        value = row.get(name)
        if value is not None and setting.is_rate:
            value = rate_text(value, row[f"{name}_period_s"])
        if name == "fair":
            value = bool(value)
            found.append(EffectiveSetting(name, value, "row" if value else "default"))
        else:
            source = "code" if name in _BY_CODE else "default"
            found.append(EffectiveSetting(name, value, source if value is None else "row"))
    return found


def _paused(row: Mapping[str, Any]) -> EffectiveSetting:
    if not row.get("paused"):
        return EffectiveSetting("paused", value=False, source="default")
    end = str(row["paused_until"])
    return EffectiveSetting("paused", "until resumed" if end == "infinity" else f"until {end}", "row")


def _concurrency(row: Mapping[str, Any], code: Sequence[tuple[int, str]]) -> EffectiveSetting:
    found = sorted({concurrency for concurrency, _ in code})
    if (value := row.get("concurrency")) is not None:
        return EffectiveSetting("concurrency", value, "row", found)
    sources = {source for _, source in code}
    if len(found) == 1:
        return EffectiveSetting("concurrency", found[0], sources.pop() if len(sources) == 1 else "code", found)
    return EffectiveSetting("concurrency", found or None, "code; daemons differ" if found else "default", found)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:.10g}" if isinstance(value, (int, float)) else str(value)
