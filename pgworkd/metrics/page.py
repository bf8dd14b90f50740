"""The page /metrics: Prometheus' text format 0.0.4, or OpenMetrics 1.0.0.

Written here and not by prometheus_client, which needs about 15 us a line: the page of 200 kinds has 30,000 lines, and
every moment that it takes, it takes from the handlers, as Python runs one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Protocol

from pgworkd.core.histogram import BOUNDS_S
from pgworkd.metrics.families import FAMILIES, Family
from pgworkd.metrics.samples import Labels, Samples

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEMPLATES_MAX = 50_000
_EOF = b"# EOF\n"
_BOUNDS = (*(repr(bound) for bound in BOUNDS_S), "+Inf")
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class More(Protocol):
    """Writes further metrics, in one of the two formats."""

    def __call__(self, *, openmetrics: bool) -> bytes:
        """The text, with or without the last line of OpenMetrics."""


class MetricsPage:
    """Writes pages. Remembers the text around the numbers of each series, which is nine tenths of the work."""

    def __init__(self) -> None:
        self._templates: dict[tuple[str, Labels], str] = {}

    def write(self, samples: Samples, *, openmetrics: bool = False, more: More | None = None) -> bytes:
        """The page with these values, and more in the same format. May be called from several threads."""
        if len(self._templates) > TEMPLATES_MAX:
            self._templates = {}
        templates, parts = self._templates, list[str]()
        for family in FAMILIES:
            rows = samples.get(family.name)
            if not rows:
                continue
            parts.append(_head(family, openmetrics=openmetrics))
            for labels, value in rows.items():
                template = templates.get((family.name, labels))
                if template is None:
                    template = templates[family.name, labels] = _template(family, labels)
                if isinstance(value, tuple):
                    counts = [*accumulate(value[0])]
                    parts.append(template % (*counts, value[1], counts[-1]))
                else:
                    parts.append(template % value)
        text, others = "".join(parts).encode("utf-8", "backslashreplace"), b""
        if more is not None:
            others = more(openmetrics=openmetrics).removesuffix(_EOF)
        return text + others + (_EOF if openmetrics else b"")


def accepts_openmetrics(accept: Iterable[str]) -> bool:
    """Whether the values of Accept prefer OpenMetrics 1.0.0 to plain text."""
    best = {OPENMETRICS: 0.0, TEXT: 0.0}
    for choice in ",".join(accept).split(","):
        media, *parameters = (each.strip().lower() for each in choice.split(";"))
        given = dict(each.partition("=")[::2] for each in parameters)
        if media == "application/openmetrics-text" and given.get("version", "1.0.0").strip('"') == "1.0.0":
            kind = OPENMETRICS
        elif media in ("text/plain", "text/*", "*/*"):
            kind = TEXT
        else:
            continue
        try:
            best[kind] = max(best[kind], float(given.get("q", "1")))
        except ValueError:
            continue
    return best[OPENMETRICS] > best[TEXT]


def _head(family: Family, *, openmetrics: bool) -> str:
    name = family.name
    if openmetrics and family.kind == "counter":
        name = name.removesuffix("_total")
    return f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"


def _template(family: Family, labels: Labels) -> str:
    pairs = ",".join(f'{n}="{_escaped(v)}"' for n, v in zip(family.labels, labels, strict=True))
    name, braces = family.name, f"{{{pairs}}}" if pairs else ""
    if family.kind != "histogram":
        return f"{name}{braces} %s\n"
    start = f"{name}_bucket{{{pairs}," if pairs else f"{name}_bucket{{"
    buckets = "".join(f'{start}le="{bound}"}} %d\n' for bound in _BOUNDS)
    return f"{buckets}{name}_sum{braces} %s\n{name}_count{braces} %d\n"


def _escaped(value: str) -> str:
    """Text as the formats want it, and with the % of a template doubled."""
    return value.translate(_ESCAPES).replace("%", "%%")
