"""Streams of server-sent events: each lasts while its caller may follow, and holds a place among those who wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import anyio
from fastapi import Request, Response

from pgworkd.core.access import Access
from pgworkd.errors import PgworkdError
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem

CHECK_S = 5.0
"""How often a stream checks whether its caller may still follow."""
Tell = Callable[[str, str], Awaitable[None]]
"""Sends an event: its name ("": none), and its data, of one line or several."""


class EventStream(Response):
    """The answer with a stream of events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        parts: Sequence[Callable[[Tell], Coroutine[Any, Any, None]]],
        *,
        access: Callable[[Request], Awaitable[Access]],
        may_follow: Callable[[Access], bool],
        for_s: float = 3600.0,
    ) -> None:
        """`parts`: what is told, each at its own pace; `access`: who calls; the stream ends after `for_s` seconds."""
        super().__init__()
        self._request, self._parts, self._for_s = request, parts, for_s
        self._access, self._may_follow = access, may_follow
        self._one_at_a_time = anyio.Lock()
        self._began = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the stream; Starlette's hook."""
        gateway = gateway_of(self._request)
        place = gateway.waits.place(access_of(self._request).name)
        await gateway.waited(self._request, partial(self._stream, send), place, checked=False)
        if not self._began:  # the gateway stops
            await self._begin(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Any) -> None:
        self._began = True
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _stream(self, send: Any) -> None:
        await self._begin(send)
        with anyio.move_on_after(self._for_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._until_forbidden, tasks.cancel_scope)
                for part in self._parts:
                    tasks.start_soon(part, partial(self._tell, send))

    async def _tell(self, send: Any, event: str, data: str) -> None:
        lines = [f"event: {event}"] * bool(event) + [f"data: {line}" for line in data.split("\n")]
        body = ("\n".join(lines) + "\n\n").encode()
        async with self._one_at_a_time:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _until_forbidden(self, scope: anyio.CancelScope) -> None:
        """Waits until the caller's token is revoked or has expired, which ends the stream."""
        while True:
            await anyio.sleep(CHECK_S)
            try:
                access = await self._access(self._request)
            except Problem as problem:
                if problem.slug in ("unauthenticated", "forbidden"):
                    scope.cancel()
            except PgworkdError:
                continue  # the database does not answer: what is told says so
            else:
                self._request.state.access = access
                if not self._may_follow(access):
                    scope.cancel()
