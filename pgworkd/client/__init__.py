"""What application code calls, on the connection it has, in the transaction it is in; see `enqueueing`.

`Results`, which waits for what jobs return and needs connections of its own, is `pgworkd.results`.
"""

from __future__ import annotations

from pgworkd.client.batches import Batch, Progress, batch
from pgworkd.client.enqueueing import Enqueued, OnDuplicate, enqueue, enqueue_many
from pgworkd.client.new_job import NewJob, OnFailedDependency
from pgworkd.client.workflow import Workflow

__all__ = [
    "Batch",
    "Enqueued",
    "NewJob",
    "OnDuplicate",
    "OnFailedDependency",
    "Progress",
    "Workflow",
    "batch",
    "enqueue",
    "enqueue_many",
]
