"""pgworkd: an asyncio worker daemon for Postgres. Insert a row, it runs.

from pgworkd import App, Job, PermanentError

app = App()

@app.handler("embedding", concurrency=10, max_attempts=5, timeout_s=60)
async def embed(note: Note, job: Job) -> dict: ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgworkd.app import App
    from pgworkd.core.backoff import Backoff
    from pgworkd.core.job import Job
    from pgworkd.database.connection import ConnectionOptions
    from pgworkd.engine.life.daemon import Daemon, DaemonOptions
    from pgworkd.engine.life.maintenance import Periods
    from pgworkd.engine.registry import DeadJob
    from pgworkd.errors import (
        JobStopped,
        LeaseLost,
        OutcomeUnknown,
        PermanentError,
        PgworkdError,
        RetryAfter,
        Snooze,
        UsageError,
    )

# Imported when first asked for: the daemon's signal handlers stand before anything slow is loaded.
_HOMES = {
    "App": "app",
    "Backoff": "core.backoff",
    "ConnectionOptions": "database.connection",
    "Daemon": "engine.life.daemon",
    "DeadJob": "engine.registry",
    "Job": "core.job",
    "JobStopped": "errors",
    "LeaseLost": "errors",
    "DaemonOptions": "engine.life.daemon",
    "OutcomeUnknown": "errors",
    "Periods": "engine.life.maintenance",
    "PermanentError": "errors",
    "PgworkdError": "errors",
    "RetryAfter": "errors",
    "Snooze": "errors",
    "UsageError": "errors",
}

__all__ = [
    "App",
    "Backoff",
    "ConnectionOptions",
    "Daemon",
    "DaemonOptions",
    "DeadJob",
    "Job",
    "JobStopped",
    "LeaseLost",
    "OutcomeUnknown",
    "Periods",
    "PermanentError",
    "PgworkdError",
    "RetryAfter",
    "Snooze",
    "UsageError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pgworkd' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pgworkd.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
