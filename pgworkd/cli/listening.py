"""Metrics and health of the process that a command runs: on its port, or to the parent that has the port."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pgworkd import log
from pgworkd.metrics import REPORT_TO

if TYPE_CHECKING:
    from pgworkd.metrics.samples import Source
    from pgworkd.settings.config import Settings

_report_to = os.environ.pop(REPORT_TO, None)
"""Taken out at the start: what handlers start must not report in the place of this process."""


def wanted(settings: Settings) -> bool:
    """Whether anyone asks for metrics of this process."""
    return settings.metrics_listen is not None or _report_to is not None


def observe(source: Callable[[], Source]) -> None:
    """Tells the MeterProvider of OpenTelemetry of the metrics of this process, if the program has imported it."""
    if "opentelemetry.metrics" in sys.modules:
        from pgworkd.metrics import otel

        otel.observe(source())


@contextlib.contextmanager
def listening(settings: Settings, source: Callable[[], Source]) -> Iterator[None]:
    """Serves metrics and health while the block lasts, if they are wanted; nothing is imported if not.

    `source` is called only then. Raises UsageError if it cannot listen on the address.
    """
    if not wanted(settings):
        yield
        return
    from pgworkd.core.address import parse_address
    from pgworkd.metrics import endpoint
    from pgworkd.metrics.server import listen

    if _report_to is not None:
        with endpoint.reporting(source(), _report_to):
            yield
        return
    listener = listen(
        parse_address(settings.metrics_listen or ""), f"metrics_listen ({settings.origin('metrics_listen')})"
    )
    log.logger().info("metrics.listening", address=str(endpoint.bound(listener)))
    with endpoint.served(source(), listener):
        yield
