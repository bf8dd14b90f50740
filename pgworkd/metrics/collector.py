"""A collector for prometheus_client (extra `metrics`), for programs that have a registry and a page of their own."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pgworkd.core.histogram import BOUNDS_S
from pgworkd.engine.life.daemon import Daemon
from pgworkd.metrics.daemon import DaemonSource
from pgworkd.metrics.families import FAMILIES, Family
from pgworkd.metrics.samples import Labels, Source, Value

_BOUNDS = (*(repr(bound) for bound in BOUNDS_S), "+Inf")


class DaemonCollector(Collector):
    """The metrics of a daemon in the same process: `REGISTRY.register(DaemonCollector(daemon))`.

    The page of `--metrics-listen` has the same numbers, and is written some ten times as fast.
    """

    def __init__(self, daemon: Daemon | None = None, *, source: Source | None = None) -> None:
        """Makes a collector of a daemon, or of any other source."""
        if source is None and daemon is not None:
            source = DaemonSource(daemon)
        if source is None:
            raise TypeError("give a daemon or a source")
        self._source = source

    def describe(self) -> Iterable[Metric]:
        """The families without values: a registration needs no scrape."""
        return [_metric(family, {}) for family in FAMILIES if family.source == "process" and family.is_ours]

    def collect(self) -> Iterable[Metric]:
        """The families with their values now."""
        samples = self._source.samples()
        return [_metric(family, rows) for family in FAMILIES if family.is_ours and (rows := samples.get(family.name))]


def _metric(family: Family, rows: dict[Labels, Value]) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, value in rows.items():
            if isinstance(value, tuple):
                buckets = list(zip(_BOUNDS, map(float, accumulate(value[0])), strict=True))
                histogram.add_metric(labels, buckets, value[1])
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in rows.items():
        if not isinstance(value, tuple):
            metric.add_metric(labels, value)
    return metric
