"""What a daemon that pushes asks of the database beyond what each daemon does, on a connection of its own."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from uuid import UUID

from pgworkd.core.fence import Fence
from pgworkd.core.registration import Registration
from pgworkd.database.connection import Connection, ConnectionOptions

QUEUES_MAX = 1_000
"""Queues that one daemon serves."""
_ROUTES = """SELECT q.name::text, jsonb_build_object('name', e.name, 'url', e.url, 'mode', e.mode,
        'timeout_s', e.timeout_s, 'callback_timeout_s', e.callback_timeout_s, 'headers', e.headers,
        'secret_name', e.secret_name, 'unsigned', e.unsigned, 'allow_private', e.allow_private,
        'strict_results', e.strict_results)::text
    FROM pgworkd.queues q JOIN pgworkd.endpoints e ON e.name = q.endpoint
    WHERE e.disabled_at IS NULL AND ($1::text[] IS NULL OR q.name = ANY ($1)) ORDER BY q.name LIMIT $2"""


_STANDING = "SELECT id, token FROM pgworkd.standing_worker($1)"
_HAND_OVER = """SELECT $1::uuid = ANY (pgworkd.hand_over(ARRAY[$1::uuid], ARRAY[$2::int], $3, $4, ARRAY[$5::int],
        ARRAY[$6::real], $7))
    OR EXISTS (SELECT FROM pgworkd.jobs j WHERE j.id = $1 AND j.attempts = $2 AND j.assignment_id = $7)"""
PUSH_WORKER = "push"
"""The name of the standing worker of callbacks."""


class EndpointRoute(NamedTuple):
    """A queue that is sent to an endpoint, and the columns of that endpoint's row."""

    queue: str
    endpoint: dict[str, Any]


class EndpointStore:
    """Calls about endpoints, on one connection. Raises PgworkdError."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._connection = Connection(options, "endpoints")

    async def routes(self, queues: list[str] | None) -> list[EndpointRoute]:
        """Where these queues (None: all) are sent, unless that is disabled; at most QUEUES_MAX + 1."""
        rows = await self._connection.fetch(_ROUTES, queues, QUEUES_MAX + 1)
        return [EndpointRoute(queue, json.loads(endpoint)) for queue, endpoint in rows]

    async def standing_worker(self) -> Registration:
        """The worker under which attempts run that a callback is to end."""
        ((worker_id, token),) = await self._connection.fetch(_STANDING, PUSH_WORKER)
        return Registration.of(worker_id, token)

    async def hand_over(self, fence: Fence, to: int, lease_s: float, nonce: UUID) -> bool:
        """Passes an attempt to the standing worker `to`, under a lease of its own of `lease_s` seconds at first.

        False: it is no longer that worker's. May be repeated with the same `nonce` until there is an answer.
        """
        args = (fence.job_id, fence.attempt, fence.worker_id, fence.token, to, lease_s, nonce)
        return bool(await self._connection.value(_HAND_OVER, *args))

    async def pause(self, endpoint: str, for_s: float, why: str) -> bool:
        """Pauses an endpoint and its queues for `for_s` seconds at least; False: there is none, or it is disabled."""
        return (
            await self._connection.value("SELECT pgworkd.pause_endpoint($1, $2, $3)", endpoint, for_s, why) is not None
        )

    async def disable(self, endpoint: str, why: str) -> bool:
        """Disables an endpoint, and pauses its queues until it is enabled; False: there is none, or it is already."""
        return bool(await self._connection.value("SELECT pgworkd.disable_endpoint($1, $2, $3)", endpoint, why, "push"))

    async def warn(self, endpoint: str, why: str) -> None:
        """Notes for operators that an endpoint has answered with a result that cannot be stored."""
        await self._connection.value("SELECT pgworkd.warn_of($1, $2)", endpoint, why)

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()
