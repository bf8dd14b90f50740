"""The assignments that this worker holds: each from its claim until its settle was answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from pgworkd.core.registration import token_of

Attempt = tuple[UUID, int]
"""A job's id, and the number of the attempt."""


class Assignments:
    """Written in the daemon's loop; the heartbeat thread reads it. Each access is one step of a dict."""

    def __init__(self) -> None:
        self._texts: dict[Attempt, tuple[str, UUID | None]] = {}
        self._attempts: dict[str, Attempt] = {}
        self._open: dict[int, None] = {}
        self._last_claim = 0

    def begin_claim(self) -> int:
        """The number of a claim that is about to be sent."""
        self._last_claim += 1
        self._open[self._last_claim] = None
        return self._last_claim

    def end_claim(self, claim_id: int) -> None:
        """The answer to a claim was read, and all that it brought was added; or it never will be."""
        del self._open[claim_id]

    @property
    def claim_id(self) -> int:
        """The last claim that has ended, as all before it have. To be read before `listed`."""
        last = self._last_claim
        return min(list(self._open), default=last + 1) - 1

    def add(self, job_id: UUID, attempt: int, worker_id: int, text: str) -> None:
        """A claim was answered with it."""
        self._attempts[text] = (job_id, attempt)
        self._texts[job_id, attempt] = (text, token_of(worker_id))

    def remove(self, attempts: Iterable[Attempt]) -> None:
        """Removes attempts that are settled, or not ours any more."""
        for attempt in attempts:
            if (found := self._texts.pop(attempt, None)) is not None:
                self._attempts.pop(found[0], None)

    def text(self, job_id: UUID, attempt: int) -> str | None:
        """What that attempt is settled by; None: it is not held."""
        found = self._texts.get((job_id, attempt))
        return None if found is None else found[0]

    def listed(self, worker_id: int) -> list[str]:
        """All that a registration of this worker holds."""
        ours = token_of(worker_id)
        return [text for text, token in list(self._texts.values()) if token == ours]

    def attempts(self, texts: Sequence[str]) -> list[Attempt]:
        """The attempts that these stand for, as far as they are held."""
        return [found for text in texts if (found := self._attempts.get(text)) is not None]
