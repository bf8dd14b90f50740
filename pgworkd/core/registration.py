"""A worker's identity: its id, and the token that distinguishes its registration from others of that id."""

from __future__ import annotations

from uuid import UUID

SESSIONS_MIN = 5
"""Sessions of the database that a daemon always has: listen, claim, settle, maintenance, lease."""


class Registration(int):
    """A worker's id that carries the token of its registration."""

    token: UUID

    @classmethod
    def of(cls, worker_id: int, token: UUID) -> Registration:
        """A registration of this id and token."""
        registration = cls(worker_id)
        registration.token = token
        return registration


def token_of(worker_id: int | None) -> UUID | None:
    """The token of a worker's id; for a plain number None, which the database does not check."""
    return worker_id.token if isinstance(worker_id, Registration) else None
