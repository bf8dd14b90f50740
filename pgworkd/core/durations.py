"""Lengths of time as text: 90s, 10m, 1h, 1h30m, 7d; a number alone is seconds. And for people: 5 min."""

from __future__ import annotations

import math
import re

UNITS_S = {
    **dict.fromkeys(("ms",), 0.001),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}
FORM = "seconds, or a duration such as 90s, 10m, 1h or 7d"
"""How a length of time is written, for errors and help."""
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*([a-z]+)\s*")


def seconds_of(text: str) -> float | None:
    """The length in seconds; None if the text is none. A number alone may be negative: its bounds are the caller's."""
    text = text.strip().lower()
    try:
        number = float(text)
    except ValueError:
        total, at = 0.0, 0
        while (part := _PART.match(text, at)) is not None and part[2] in UNITS_S:
            total, at = total + float(part[1]) * UNITS_S[part[2]], part.end()
        return total if at == len(text) and text else None
    return number if math.isfinite(number) else None


def spelled(duration_s: float) -> str:
    """A length of time for people, rounded, in the largest unit of which there are two: 90 s, 5 min, 2 h, 3 days."""
    for unit_s, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if duration_s >= 2 * unit_s:
            return f"{duration_s / unit_s:,.0f} {name}"
    return f"{max(1.0, duration_s):.0f} s"
