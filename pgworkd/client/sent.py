"""How many jobs this process has sent to the database since it started, by queue; committed or not.

What OpenTelemetry's conventions call `messaging.client.sent.messages`: each job counts when its statement is sent.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

QUEUES_MAX = 200
"""Queues that are counted apart: a program that makes a queue per customer must not fill a metric."""
OTHER = "other"
"""The queue that stands for all further queues."""
UNNAMED = ""
"""The name in place of the queue of a batch that another process has created: it is known to the database only."""

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def count(queue: str | None, jobs: int = 1) -> None:
    """Counts jobs of one queue; None: of a batch's own."""
    name = UNNAMED if queue is None else queue
    with _lock:
        if name not in _counts and len(_counts) >= QUEUES_MAX:
            name = OTHER
        _counts[name] += jobs


def count_each(queues: Iterable[str]) -> None:
    """Counts a job for each queue given."""
    for queue, jobs in Counter(queues).items():
        count(queue, jobs)


def counts() -> dict[str, int]:
    """The jobs sent, by queue; may be called from any thread."""
    with _lock:
        return dict(_counts)
