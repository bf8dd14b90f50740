"""Log lines for a terminal: clock time, event, queue and job first, short facts, in 80 columns where they fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pgworkd.process.redaction import escaped

_TRACES = ("stack", "exception")
_FIRST = ("queue", "job_id", "duration_s")
"""The facts that are shown first, in this order and without their names."""
_ITEMS_MAX = 3
_COLORS = {"debug": 2, "warning": 33, "error": 31, "critical": 31}


def renderer(*, colors: bool) -> Callable[[Any, str, Mapping[str, Any]], str]:
    """A renderer for structlog, behind whatever escapes control sequences. `colors`: by level."""

    def render(_logger: Any, _method: str, facts: Mapping[str, Any]) -> str:
        line = {name: value for name, value in facts.items() if value is not None}
        traces = [str(line.pop(name)) for name in _TRACES if name in line]
        at, level, event = line.pop("timestamp", ""), str(line.pop("level", "info")), str(line.pop("event", ""))
        if line.get("kind") == line.get("queue"):
            line.pop("kind", None)
        if "attempt" in line and "job_id" in line and (attempt := line.pop("attempt")) != 1:
            line["job_id"] = f"{line['job_id']} #{attempt}"
        shown = event if level not in _COLORS or level == "debug" else f"{level.upper()} {event}"
        if colors and level in _COLORS:
            shown = f"\x1b[{_COLORS[level]}m{shown}\x1b[0m"
        elif colors:
            shown = f"\x1b[1m{shown}\x1b[0m"
        first = [_fact("", name, line.pop(name)) for name in _FIRST if name in line]
        others = [_fact(f"{_bare(name, value)}=", name, value) for name, value in line.items()]
        return "\n".join([" ".join([at, shown, *first, *others]), *traces])

    return render


def _is_time(name: str, value: Any) -> bool:
    return name.endswith("_s") and isinstance(value, (int, float)) and not isinstance(value, bool)


def _bare(name: str, value: Any) -> str:
    return name.removesuffix("_s") if _is_time(name, value) else name


def _fact(prefix: str, name: str, value: Any) -> str:
    if _is_time(name, value):
        return prefix + duration(value)
    if isinstance(value, Mapping):
        text = _few([f"{key}:{each}" for key, each in value.items()])
    elif isinstance(value, (list, tuple)):
        text = _few(list(map(str, value)))
    else:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return prefix + escaped(f'"{text}"' if prefix and " " in text else text)


def _few(items: list[str]) -> str:
    return ",".join(items[:_ITEMS_MAX]) + (f",+{len(items) - _ITEMS_MAX}" if len(items) > _ITEMS_MAX else "")


def duration(seconds: float) -> str:
    """A duration for people: 47us, 1.2ms, 3.5s, 30min."""
    if seconds == 0:
        return "0s"
    for limit, factor, unit in ((0.001, 1e6, "us"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if abs(seconds) < limit:
            return f"{seconds * factor:.3g}{unit}"
    return f"{seconds / 60:.3g}min"
