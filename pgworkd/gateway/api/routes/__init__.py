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
    queues,
    schedules,
    tokens,
    workers,
)

ROUTERS = (
    *(bulk.router, bulk.stream_router, jobs.router, batches.router, operate.router),
    *(queues.router, schedules.router, fleet.router, events.router, endpoints.router, tokens.router),
)
"""All of them below /v1; those of `service` stand beside."""
WORKER_ROUTERS = (assignments.router, workers.router, assignments.bulk_router)
"""Those that remote workers call, also below /v1; the most frequent first."""
