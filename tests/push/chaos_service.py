"""The service of the chaos run: it answers with every line of the table at random, and notes what it said."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from standardwebhooks.webhooks import Webhook

from tests.kits.downstream import answer_of, headers_of, message_of

SECRET = "whsec_Y2hhb3MsIGFuZCBrZXlzIHRoYXQgYXJlIG5vIHNlY3JldHM="
TIMEOUT_S, CALLBACK_S = 2.0, 10.0
SYNC = {
    200: 60,
    201: 4,
    204: 4,
    302: 1,
    400: 1,
    401: 1,
    404: 1,
    408: 1,
    422: 1,
    500: 3,
    503: 3,
    "fail": 2,
    "dead": 1,
    "release": 2,
    "hang": 1,
    "break": 2,
    "garbage": 1,
    410: 0.05,
    429: 0.1,
}
"""What a request is answered with, and how often."""
LATER = {"complete": 70, "fail": 5, "dead": 2, "release": 4, "extend": 4, "never": 1}
"""How an accepted request is ended."""
DEAD = {400, 422, "dead"}


@dataclass
class Run:
    """One request, and what became of it. Times are monotonic."""

    job: str
    attempt: int
    queue: str
    at: float
    said: object = None
    """The line of the table; for a callback ("later", how)."""
    said_at: float = 0.0
    acknowledged: str = ""
    """The status with which a gateway answered the callback."""
    held_until: float = 0.0
    """A callback may end it until then."""


@dataclass
class Seen:
    """All that has happened."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    kills: list[float] = field(default_factory=list)
    """When a daemon was killed."""
    violations: list[str] = field(default_factory=list)
    lines: Counter[object] = field(default_factory=Counter)


class Service:
    """Takes jobs and answers at random."""

    def __init__(self, seen: Seen, chance: random.Random, gateways: list[int]) -> None:
        self.seen, self.chance, self.gateways = seen, chance, gateways
        self.calm = False
        """No more trouble: what is left shall end."""
        self._later: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(20)
        self.client = httpx.AsyncClient(timeout=5, trust_env=False)

    async def take(self, request: bytes) -> bytes:
        """The answer to a request."""
        content = request.partition(b"\r\n\r\n")[2]
        Webhook(SECRET).verify(content, headers_of(request))
        message = message_of(request)
        job = message["data"]
        run = Run(job["id"], job["attempt"], job["queue"], time.monotonic())
        self.seen.runs.setdefault(run.job, []).append(run)
        await asyncio.sleep(self.chance.expovariate(50))
        if "callback" in message:
            return self._accept(run, message["callback"]["url"])
        run.said = 200 if self.calm else self._chosen(SYNC)
        self.seen.lines[run.said] += 1
        run.said_at = time.monotonic()
        return await self._answer(run)

    def _chosen(self, table: dict[Any, float]) -> Any:
        return self.chance.choices(list(table), list(table.values()))[0]

    async def _answer(self, run: Run) -> bytes:
        match run.said:
            case "hang":
                await asyncio.sleep(3600)
            case "break":
                raise ConnectionError
            case "garbage":
                return b"SSH-2.0-x\r\n\r\n"
            case "fail" | "dead" | "release":
                return answer_of(200, {"attempt": run.attempt}, pgworkd_outcome=str(run.said), retry_after="0")
            case int(status):
                again = {"retry_after": "0"} if status >= 400 else {}
                return answer_of(status, {"attempt": run.attempt}, **again)
        raise AssertionError(run.said)

    def _accept(self, run: Run, url: str) -> bytes:
        how = "complete" if self.calm else self._chosen(LATER)
        run.said, run.said_at = ("later", how), time.monotonic()
        run.held_until = run.at + TIMEOUT_S + CALLBACK_S
        self.seen.lines[run.said] += 1
        task = asyncio.get_running_loop().create_task(self._call_back(run, url, how))
        self._later.add(task)
        task.add_done_callback(self._later.discard)
        return answer_of(202, {})

    async def _call_back(self, run: Run, url: str, how: str) -> None:
        await asyncio.sleep(self.chance.expovariate(2))
        path = url.partition("/v1/")[2]
        if how == "never":
            return
        if how == "extend":
            if await self._called(f"{path}/extend", {"lease_s": 20}) == "extended":
                run.held_until = max(run.held_until, time.monotonic() + 20)
            how = "complete"
            await asyncio.sleep(self.chance.expovariate(1))
        body: dict[str, Any] = {"result": {"attempt": run.attempt}} if how == "complete" else {}
        if how in ("fail", "dead"):
            body = {"type": "Chaos", "message": how, "retryable": how == "fail", "retry_in_s": 0}
        run.acknowledged = await self._called(f"{path}/{ {'dead': 'fail'}.get(how, how) }", body)

    async def _called(self, path: str, body: dict[str, Any]) -> str:
        """The status, through whichever gateway answers. stale: the attempt had ended; perhaps: by a call before."""
        is_lost = False
        while True:
            try:
                port = self.chance.choice(self.gateways)
                async with self._turns:  # with hundreds of requests httpx does little but look after them
                    answer = await self.client.post(f"http://127.0.0.1:{port}/v1/{path}", json=body)
                if answer.status_code == 200:
                    return str(answer.json().get("status", "extended"))
                if answer.status_code == 409:
                    return "perhaps" if is_lost else "stale"
                if answer.status_code != 503:
                    self.seen.violations.append(f"a callback was answered with {answer.status_code} {answer.text}")
                    return "refused"
            except httpx.ConnectError:
                pass
            except httpx.HTTPError:  # the gateway was killed, perhaps after it had done it
                is_lost = True
            await asyncio.sleep(0.1)

    async def finished(self) -> None:
        """All callbacks have been made."""
        while self._later:
            await asyncio.wait(self._later)
        await self.client.aclose()
