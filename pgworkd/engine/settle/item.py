"""An outcome on its way to the database."""

from __future__ import annotations

from pgworkd.engine.attempts import Attempt
from pgworkd.words.fence import Fence
from pgworkd.words.job import Outcome


class Item:
    """One attempt that has ended, and how: a `Settling`."""

    __slots__ = ("attempt", "began", "delays", "fence", "outcome", "queue", "size", "unsure")

    attempt: Attempt | None
    """As it was claimed; None: by somebody else, and it is not known here (yet)."""

    def __init__(self, fence: Fence, outcome: Outcome, attempt: Attempt | None) -> None:
        self.fence, self.outcome = fence, outcome
        self.delays = 0
        """How often its settle was delayed: the row was locked, or the database rejected it."""
        self.unsure = True
        """It may have been settled before: the answer to a COMMIT, or to its settle, was lost."""
        self.queue = ""
        self.began: float | None = None
        error = outcome.error
        self.size = len(outcome.result or "") + (0 if error is None else len(str(error.get("traceback", ""))))
        """About how many bytes its settle sends or copies; most of them have been kept in memory since it ran."""
        self.attempt = None
        if attempt is not None:
            self.size += len(attempt.claimed.payload or "")
            self.belongs_to(attempt)

    def belongs_to(self, attempt: Attempt) -> None:
        """It is how this attempt has ended."""
        self.attempt, self.queue, self.began = attempt, attempt.queue, attempt.started
