"""pgworkd: an asyncio worker daemon for Postgres. Insert a row, it runs.

from pgworkd import App, Job, PermanentError

app = App()

@app.handler("embedding", concurrency=10, max_attempts=5, timeout_s=60)
async def embed(note: Note, job: Job) -> dict: ...
"""

from .app import App, DeadJob
from .backoff import Backoff
from .errors import LeaseLost, PermanentError, PgworkdError, RetryAfter, Snooze, UsageError
from .job import Job

__all__ = [
    "App",
    "Backoff",
    "DeadJob",
    "Job",
    "LeaseLost",
    "PermanentError",
    "PgworkdError",
    "RetryAfter",
    "Snooze",
    "UsageError",
]
