"""A remote worker as a test plays it: each call by itself, so that any may be left out, repeated or late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.kits.gateway import Caller


@dataclass
class Worker:
    """One registered worker."""

    call: Caller
    id: int
    secret: str
    queues: list[str]
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Of its claims; the same of one worker at several gateways."""
    open: set[int] = field(default_factory=set)
    """The claims that are under way."""
    read: set[int] = field(default_factory=set)

    @property
    def headers(self) -> dict[str, str]:
        """Those of its calls."""
        return {"Pgworkd-Secret": self.secret}

    async def claim(self, most: int = 1, wait_s: float = 0, **more: Any) -> list[dict[str, Any]]:
        """The assignments that a claim gets."""
        found: list[dict[str, Any]] = (await self.claimed(most, wait_s, **more))["assignments"]
        return found

    async def claimed(self, most: int = 1, wait_s: float = 0, **more: Any) -> dict[str, Any]:
        """The whole answer to a claim."""
        number = next(self.numbers)
        body = {"worker": self.id, "queues": self.queues, "claim_id": number, "max": most, "wait_s": wait_s} | more
        self.open.add(number)
        try:
            found: dict[str, Any] = await self.call.ok("POST", "/v1/claims", body, headers=self.headers)
        finally:
            self.open.remove(number)
            self.read.add(number)
        return found

    async def beat(self, *assignments: Mapping[str, Any], listed: bool = True, **more: Any) -> dict[str, Any]:
        """The answer to a beat that lists these assignments."""
        done = min(self.open, default=max(self.read, default=0) + 1) - 1
        body: dict[str, Any] = {"assignments": [each["assignment"] for each in assignments]} if listed else {}
        body |= {"claim_id": done or None}
        path = f"/v1/workers/{self.id}/beat"
        found: dict[str, Any] = await self.call.ok("POST", path, body | more, headers=self.headers)
        return found

    async def settle(self, assignment: Mapping[str, Any], how: str = "complete", **body: Any) -> dict[str, Any]:
        """The answer to a settle."""
        path = f"/v1/assignments/{assignment['assignment']}/{how}"
        found: dict[str, Any] = await self.call.ok("POST", path, body)
        return found

    async def sign_off(self, claim_id: int | None = None) -> int:
        """Signs off, and names its last claim if that is given; how many jobs went back."""
        known = "" if claim_id is None else f"?claim_id={claim_id}"
        answer = await self.call.ok("DELETE", f"/v1/workers/{self.id}{known}", headers=self.headers)
        return int(answer["given_back"])


async def registered(call: Caller, queues: Mapping[str, int] | None = None, **more: Any) -> Worker:
    """A new worker, for queue q with ten slots if none are given."""
    body = {"name": "w", "queues": dict(queues or {"q": 10})} | more
    made = await call.ok("POST", "/v1/workers", body)
    return Worker(call, made["worker"], made["secret"], list(body["queues"]))
