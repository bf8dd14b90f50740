"""Values of the families at one moment: how those of several processes become one, and how they travel as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias

from pgworkd.core.histogram import Histogram
from pgworkd.engine.counters import OTHER
from pgworkd.metrics.families import FAMILIES

Durations: TypeAlias = "tuple[list[int], float]"
"""Counts by `histogram.BOUNDS_S`, not cumulative, and the sum in seconds."""
Value: TypeAlias = "float | Durations"
Labels: TypeAlias = "tuple[str, ...]"
"""Values of labels, in the order of the family's labels."""
Samples: TypeAlias = "dict[str, dict[Labels, Value]]"
"""Values by the family's name; of `database` families and `process` families alike."""

BY_NAME = {family.name: family for family in FAMILIES}
ADDITIVE = frozenset(family.name for family in FAMILIES if family.kind != "gauge")
"""Kinds of metrics that add up, counters and histograms: what a process had counted stays counted when it is gone."""
KEPT_MAX = 4_000
"""Series of one family that are kept of processes that are gone; the kinds of further ones are counted as OTHER."""


class Check(NamedTuple):
    """One condition of readiness. `says`: the finding, for people."""

    name: str
    ok: bool
    says: str


class Source(Protocol):
    """A source of metrics and health. All may be called from any thread, also while the event loop is blocked."""

    def samples(self) -> Samples:
        """The values now."""

    def checks(self) -> list[Check]:
        """The conditions of readiness now."""

    def sick(self) -> str:
        """Why a restart would help, for people; empty: it would not."""


def durations(histogram: Histogram) -> Durations:
    """A copy of the histogram, which another thread may be writing."""
    return list(histogram.counts), histogram.sum_s


def merged(parts: Iterable[Samples]) -> Samples:
    """The values of several processes as one, by the `merge` of each family; unknown families are left out."""
    total: Samples = {}
    for samples in parts:
        for name, rows in samples.items():
            if name in BY_NAME:
                _add(BY_NAME[name].merge, total.setdefault(name, {}), rows)
    return total


def _add(how: str, total: dict[Labels, Value], rows: dict[Labels, Value]) -> None:
    for labels, value in rows.items():
        before = total.get(labels)
        if before is None:
            total[labels] = value
        elif isinstance(before, tuple) and isinstance(value, tuple):
            total[labels] = [a + b for a, b in zip(before[0], value[0], strict=True)], before[1] + value[1]
        elif not isinstance(before, tuple) and not isinstance(value, tuple):
            total[labels] = before + value if how == "sum" else min(before, value) if how == "min" else max(
                before, value
            )  # fmt: skip


def counted(samples: Samples) -> Samples:
    """The values that stay true when the process is gone."""
    return {name: rows for name, rows in samples.items() if name in ADDITIVE}


def bounded(samples: Samples) -> Samples:
    """Values with at most KEPT_MAX series per family: a program that makes kinds without end must not fill memory."""
    found: Samples = {}
    for name, rows in samples.items():
        family = BY_NAME[name]
        if len(rows) <= KEPT_MAX or "kind" not in family.labels:
            found[name] = rows
            continue
        place = family.labels.index("kind")
        into = found[name] = dict(list(rows.items())[: KEPT_MAX // 2])
        for labels, value in list(rows.items())[KEPT_MAX // 2 :]:
            _add("sum", into, {(*labels[:place], OTHER, *labels[place + 1 :]): value})
    return found


def dumped(identity: str, samples: Samples, checks: Iterable[Check]) -> bytes:
    """A snapshot as JSON. `identity`: of the process, another one after each start."""
    table = {name: [[*labels, value] for labels, value in rows.items()] for name, rows in samples.items()}
    return json.dumps({"id": identity, "samples": table, "checks": list(checks)}, separators=(",", ":")).encode()


def loaded(data: bytes) -> tuple[str, Samples, list[Check]]:
    """The snapshot that `dumped` made; ValueError, KeyError or TypeError if it is anything else."""
    snapshot: Any = json.loads(data)
    samples: Samples = {}
    for name, rows in snapshot["samples"].items():
        samples[name] = {tuple(row[:-1]): tuple(v) if isinstance(v := row[-1], list) else v for row in rows}
    return str(snapshot["id"]), samples, [Check(*check) for check in snapshot["checks"]]
