"""The API for application code, on the application's own connection, in its own transaction.

enqueueing   enqueue, enqueue_once, enqueue_many   new_job      NewJob: a job's fields and their validation
batches      batch, Batch: trees of jobs           workflow     Workflow: jobs that depend on each other
results      Results (as `pgworkd.results`): waits for what jobs return, on connections of its own
connections  asyncpg, psycopg, SQLAlchemy, Django: runs `statements` on any of them
"""

from __future__ import annotations

from pgworkd.client.batch_types import Progress
from pgworkd.client.batches import Batch, batch
from pgworkd.client.enqueueing import Enqueued, EnqueuedOnce, enqueue, enqueue_many, enqueue_once
from pgworkd.client.new_job import NewJob, OnDuplicate, OnFailedDependency
from pgworkd.client.workflow import Workflow

__all__ = [
    "Batch",
    "Enqueued",
    "EnqueuedOnce",
    "NewJob",
    "OnDuplicate",
    "OnFailedDependency",
    "Progress",
    "Workflow",
    "batch",
    "enqueue",
    "enqueue_many",
    "enqueue_once",
]
