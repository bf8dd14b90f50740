"""Who a worker is: its id, and the token that tells its registration from others of that id."""

from __future__ import annotations

from uuid import UUID


class Registration(int):
    """A worker's id, with the token of its registration, which goes wherever the id goes."""

    token: UUID

    @classmethod
    def of(cls, worker_id: int, token: UUID) -> Registration:
        """The two together."""
        registration = cls(worker_id)
        registration.token = token
        return registration


def token_of(worker_id: int | None) -> UUID | None:
    """The token that goes with a worker's id; None, and no check in the database, for a plain number."""
    return worker_id.token if isinstance(worker_id, Registration) else None
