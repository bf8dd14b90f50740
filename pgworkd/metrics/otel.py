"""Metrics through OpenTelemetry, if the program has set a MeterProvider of its own.

Asynchronous instruments, which the provider's reader calls when it collects, so nothing is added to the way of a job.
A histogram cannot be observed asynchronously (OpenTelemetry's specification has no such instrument): each becomes two
counters, of its observations and of their seconds, from which averages and rates follow; its buckets are only on the
page /metrics. Attributes are named as labels are. Some instruments have the names of the semantic conventions for
messaging, with `messaging.system` pgworkd: https://opentelemetry.io/docs/specs/semconv/messaging/messaging-metrics/
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pgworkd.client import sent
from pgworkd.metrics.families import FAMILIES, Family
from pgworkd.metrics.samples import Samples, Source, Value

SHARED_S = 0.5
"""All instruments of one collection are answered from one reading, if it takes no longer than this."""
SYSTEM = {"messaging.system": "pgworkd"}
PROCESSED = SYSTEM | {"messaging.operation.name": "process"}
_UNITS = {"seconds": "s", "bytes": "By"}
_COUNTED = re.compile("job|slot|claim|fence|process|request|connection|worker|transaction|row|answer")
Callback = Callable[[CallbackOptions], Iterable[Observation]]


def observe(source: Source, provider: metrics.MeterProvider | None = None) -> None:
    """Makes the instruments, at the provider given or at the program's own. Once for each source of a process.

    Those of what the source does not show stay without values.
    """
    meter = _meter(provider)
    read = _Reading(source)
    for family in FAMILIES:
        if family.is_ours:
            _make(meter, family, read)
    _messaging(meter, read)
    observe_sent(provider)


def observe_sent(provider: metrics.MeterProvider | None = None) -> None:
    """Makes the instrument for the jobs that this process enqueues; for programs that only do that, such as a site."""
    _meter(provider).create_observable_counter(
        "messaging.client.sent.messages",
        [_sent],
        unit="{message}",
        description="Jobs whose insert was sent to the database, committed or not.",
    )


def _meter(provider: metrics.MeterProvider | None) -> Meter:
    return metrics.get_meter("pgworkd", version("pgworkd"), provider)


def _sent(_: CallbackOptions) -> Iterator[Observation]:
    for queue, jobs in sent.counts().items():
        place = {} if queue == sent.UNNAMED else {"messaging.destination.name": queue}
        yield Observation(jobs, SYSTEM | {"messaging.operation.name": "enqueue"} | place)


class _Reading:
    """The values, read once for all instruments of a collection."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._at = -SHARED_S
        self._samples: Samples = {}

    def __call__(self) -> Samples:
        with self._lock:
            if time.monotonic() - self._at >= SHARED_S:
                self._samples, self._at = self._source.samples(), time.monotonic()
            return self._samples


def _name(family: Family) -> str:
    """The name of a metric as OpenTelemetry has it: with dots, without unit and `_total`, which exporters add."""
    plain = family.name.removeprefix("pgworkd_").removesuffix("_total").removesuffix("_seconds").removesuffix("_bytes")
    return f"pgworkd.{plain}"


def _unit(family: Family) -> str:
    """The unit as UCUM has it: of seconds, of bytes, of what is counted; "": none, as exporters call 1 a ratio."""
    if (unit := _UNITS.get(family.name.rpartition("_")[2])) is not None:
        return unit
    counted = _COUNTED.findall(family.name)
    return f"{{{counted[-1]}}}" if counted else ""


def _make(meter: Meter, family: Family, read: Callable[[], Samples]) -> None:
    unit = _unit(family)
    if family.kind == "gauge":
        make = meter.create_observable_gauge
        make(_name(family), [_callback(family, read, _plain)], unit=unit, description=family.help)
        return
    if family.kind == "counter":
        make_counter = meter.create_observable_counter
        make_counter(_name(family), [_callback(family, read, _plain)], unit=unit, description=family.help)
        return
    for end, value, unit in (("count", _count, ""), ("sum", _sum_s, "s")):
        description = f"{family.help} ({'how many' if end == 'count' else 'seconds in total'})"
        meter.create_observable_counter(
            f"{_name(family)}.{end}", [_callback(family, read, value)], unit=unit, description=description
        )


def _callback(
    family: Family, read: Callable[[], Samples], value: Callable[[Value], float], name: Mapping[str, str] | None = None
) -> Callback:
    keys = [(name or {}).get(label, label) for label in family.labels]

    def observe(_: CallbackOptions) -> Iterator[Observation]:
        for labels, found in list(read().get(family.name, {}).items()):
            attributes: dict[str, Any] = dict(zip(keys, labels, strict=True))
            yield Observation(value(found), attributes if name is None else attributes | PROCESSED)

    return observe


def _plain(value: Value) -> float:
    return 0.0 if isinstance(value, tuple) else value


def _count(value: Value) -> float:
    return sum(value[0]) if isinstance(value, tuple) else 0.0


def _sum_s(value: Value) -> float:
    return value[1] if isinstance(value, tuple) else 0.0


def _messaging(meter: Meter, read: Callable[[], Samples]) -> None:
    """The metrics of the semantic conventions: what was consumed, and how long that took in all (count and seconds)."""
    by_name = {family.name: family for family in FAMILIES}
    started, runs = by_name["pgworkd_jobs_started_total"], by_name["pgworkd_job_run_seconds"]
    names = {"queue": "messaging.destination.name", "kind": "pgworkd.job.kind"}
    meter.create_observable_counter(
        "messaging.client.consumed.messages",
        [_callback(started, read, _plain, names)],
        unit="{message}",
        description=started.help,
    )
    for end, value, unit in (("count", _count, ""), ("sum", _sum_s, "s")):
        meter.create_observable_counter(
            f"messaging.process.duration.{end}", [_callback(runs, read, value, names)], unit=unit, description=runs.help
        )
