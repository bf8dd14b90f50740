"""Attempts that a callback may end: they are passed to the standing worker before the request is sent.

So a callback that comes before the answer, or after this daemon has been killed, finds its attempt.
"""

from __future__ import annotations

from uuid import uuid4

from pgworkd.core.assignment import sealed
from pgworkd.core.events import Events
from pgworkd.core.registration import Registration
from pgworkd.database.endpoint_store import EndpointStore
from pgworkd.database.reconnect import Outage
from pgworkd.engine.attempts import Attempt
from pgworkd.errors import DatabaseUnavailable, LeaseLost
from pgworkd.push.endpoint import Endpoint
from pgworkd.push.message import CallbackOffer

PATH = "/v1/assignments/"
"""The path of callbacks, below the address of a gateway."""


class Callbacks:
    """Passes attempts on to the standing worker, so that callbacks may end them."""

    def __init__(self, store: EndpointStore, events_: Events, address: str) -> None:
        """`address`: the gateways' address, as receivers reach them; "": there is none."""
        self.address = address.rstrip("/")
        self._store = store
        self._outage = Outage("callbacks", events_)
        self._standing: Registration | None = None

    async def prepare(self, attempt: Attempt, endpoint: Endpoint) -> CallbackOffer:
        """Passes the attempt to the standing worker; how it may be ended. Waits through outages.

        Raises LeaseLost if it is no longer ours.
        """
        nonce = uuid4()
        while True:
            try:
                standing = await self._standing_worker()
                lease_s = endpoint.timeout_s + endpoint.callback_timeout_s
                job = attempt.claimed
                if not await self._store.hand_over(attempt.fence, standing, lease_s, nonce):
                    self._standing = None  # the database may be another one (a restored dump)
                    raise LeaseLost(f"attempt {job.attempt} of job {job.id} is no longer ours; nothing was sent")
            except DatabaseUnavailable as error:
                await self._outage.wait(error)
                continue
            self._outage.passed()
            attempt.worker_id, attempt.handed_over = standing, True
            text = sealed(attempt.fence._replace(nonce=nonce))
            return CallbackOffer(f"{self.address}{PATH}{text}", endpoint.callback_timeout_s)

    async def _standing_worker(self) -> Registration:
        if self._standing is None:
            self._standing = await self._store.standing_worker()
        return self._standing
