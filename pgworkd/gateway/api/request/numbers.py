"""What a gateway counts of requests, and what its metrics and health show."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from pgworkd.core.histogram import Histogram
from pgworkd.metrics.daemon import MemberSource
from pgworkd.metrics.samples import Samples, durations

if TYPE_CHECKING:
    from pgworkd.gateway.api.request.gateway import Gateway

NO_ROUTE = "none"
"""Route and method of requests for paths, or with methods, that there are not."""
METHOD_NOT_ALLOWED = 405


class RequestCounters:
    """Requests by method, route and status. Written in the loop, read from any thread."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, str, str]] = Counter()
        self.took_s: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)

    def count(self, scope: Any, status: int, began_s: float) -> None:
        """Counts a request, after its answer; `scope`: as the routes have left it. Status 0: there was no answer."""
        method, route = scope["method"], getattr(scope.get("route"), "path_format", NO_ROUTE)
        if route == NO_ROUTE or status == METHOD_NOT_ALLOWED:  # else any text that a caller sends were a label
            method = route = NO_ROUTE
        self.answered[method, route, str(status)] += 1
        self.took_s[method, route].observe(time.monotonic() - began_s)


class GatewaySource(MemberSource):
    """Shows one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        super().__init__(gateway.remote, gateway.remote.workers.slots_in_use)

    def samples(self) -> Samples:
        """The values now."""
        gateway, requests = self._gateway, self._gateway.requests
        waiting = {"claims": gateway.claims, "others": gateway.waits, "streams": gateway.streams}
        database = gateway.database
        return {
            **super().samples(),
            "pgworkd_requests_total": dict(list(requests.answered.items())),
            "pgworkd_request_seconds": {key: durations(each) for key, each in list(requests.took_s.items())},
            "pgworkd_requests_waiting": {(what,): shares.taken for what, shares in waiting.items()},
            "pgworkd_request_connections": {("used",): database.used, ("most",): database.connections_max},
        }
