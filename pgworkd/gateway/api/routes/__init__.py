"""The routes, by what they are about. Each asks for a scope, and calls a verb."""

from __future__ import annotations

from pgworkd.gateway.api.routes import (
    assignments,
    batches,
    bulk,
    endpoints,
    events,
    fleet,
    jobs,
    operate,
    operations,
    queues,
    schedules,
    tokens,
    workers,
)

_AFTER_BULK = (jobs, batches, operate, operations, queues, schedules, fleet, events, endpoints, tokens)
ROUTERS = (bulk.router, bulk.stream_router, *(module.router for module in _AFTER_BULK))
"""All routers below /v1; those of `service` stand beside."""
WORKER_ROUTERS = (assignments.router, workers.router, assignments.bulk_router, workers.bulk_router)
"""The routers that remote workers call, also below /v1; the most frequent first."""
