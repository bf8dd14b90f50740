"""What a caller of the gateway may do: scopes, each for all queues or for some; and the text of a token."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, Self

from pgworkd.core.validation import closest, counted, text
from pgworkd.errors import UsageError

SCOPES = {
    "enqueue": "create jobs and batches, cancel jobs",
    "work": "register workers, claim and settle jobs",
    "read": "see jobs, batches, queues, workers, schedules and the audit, without payloads and results",
    "payload": "see payloads, results and tracebacks",
    "operate": "retry, cancel, discard and edit jobs, see their stacks; change queues, schedules and workers",
    "metrics": "see metrics, and the depth of queues",
    "admin": "add and revoke tokens, say where jobs are pushed to, see stacks and profiles of gateways",
}
"""Every scope, and what it allows. No scope includes another."""
QUEUES_MAX = 100
"""Patterns of queues per scope."""
_WILD = re.compile(r"[*?\[]")
_TEXT = re.compile(r"pgw_([a-z0-9]{8,32})_([A-Za-z0-9_-]{20,100})")
_ID_CHARS = "abcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, slots=True)
class Access:
    """What a caller may do. `name`: who it is, as the audit records it.

    `scopes`: each scope with the queues that it is for (patterns, as in a shell: "mail", "report-*"); None: all.
    Raises UsageError for an unknown scope and for a pattern that is empty or too long.
    """

    name: str
    scopes: Mapping[str, Sequence[str] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text(self.name, "the name", 200)
        for scope, queues in self.scopes.items():
            if scope not in SCOPES:
                found = closest(scope, SCOPES)
                hint = f"did you mean {found!r}?" if found else f"give one of {', '.join(SCOPES)}"
                raise UsageError(f"unknown scope {scope[:40]!r}: {hint}")
            if isinstance(queues, str):
                raise UsageError(f"scope {scope} has the queues {queues[:40]!r}: give a list, as in [{queues[:40]!r}]")
            if queues is not None and not 1 <= len(queues) <= QUEUES_MAX:
                raise UsageError(
                    f"scope {scope} has {counted(len(queues), 'queue')}: give 1 to {QUEUES_MAX}, or none for all"
                )
            for queue in queues or ():
                text(queue, f"a queue of scope {scope}", 200)

    @classmethod
    def full(cls, name: str) -> Self:
        """An access that may do everything, in all queues."""
        return cls(name, dict.fromkeys(SCOPES))

    def allows(self, scope: str, queue: str | None = None) -> bool:
        """Whether the caller has the scope, for this queue; None: for all queues."""
        if scope not in self.scopes:
            return False
        patterns = self.scopes[scope]
        if patterns is None:
            return True
        return queue is not None and any(fnmatchcase(queue, pattern) for pattern in patterns)

    def covers(self, other: Access) -> bool:
        """Whether all that the other access may do is allowed here, too.

        A pattern with wildcards is covered by itself, by `*`, and by all queues: whether another one covers it is not
        looked at.
        """
        for scope, queues in other.scopes.items():
            ours = self.scopes.get(scope, ())
            if ours is not None and (queues is None or not all(_covered(queue, ours) for queue in queues)):
                return False
        return True

    def has(self, scope: str) -> bool:
        """Whether the caller has the scope, for whatever queues."""
        return scope in self.scopes


def _covered(queue: str, patterns: Sequence[str]) -> bool:
    if queue in patterns or "*" in patterns:
        return True
    return not _WILD.search(queue) and any(fnmatchcase(queue, pattern) for pattern in patterns)


class TokenText(NamedTuple):
    """A token as its holder sends it: pgw_<id>_<secret>."""

    id: str
    secret: str

    @classmethod
    def new(cls) -> Self:
        """A token that nobody has yet: 256 random bits."""
        return cls("".join(secrets.choice(_ID_CHARS) for _ in range(12)), secrets.token_urlsafe(32))

    @classmethod
    def parse(cls, value: str) -> Self | None:
        """The token that a text is; None if it is none."""
        found = _TEXT.fullmatch(value)
        return None if found is None else cls(*found.groups())

    @property
    def sha256(self) -> bytes:
        """The digest of the secret, for the database. The secret has 256 random bits: no slower hash is needed."""
        return hashlib.sha256(self.secret.encode()).digest()

    def __str__(self) -> str:
        return f"pgw_{self.id}_{self.secret}"
