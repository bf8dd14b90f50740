"""A request that waits: it ends when its caller goes, or may not call any more."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import anyio
from fastapi import Request

from pgworkd.errors import PgworkdError
from pgworkd.gateway.api.request.access import CHECKED_S
from pgworkd.gateway.api.request.caller import IS_CLOSING, ON_CLOSING
from pgworkd.gateway.api.request.problems import Problem


class RequestWait:
    """A request that waits."""

    def __init__(self, request: Request, *, checked: bool = True, has_arrived: bool = True) -> None:
        self._request, self._checked, self._has_arrived = request, checked, has_arrived
        self.scope = anyio.CancelScope()
        """The scope of the wait."""
        self.refused: Exception | None = None
        """Set when the caller may not call any more."""
        self._watch: anyio.CancelScope | None = None
        self._is_over = False

    async def watch(self, still_allowed: Callable[[Request], Awaitable[None]]) -> None:
        """Ends the wait when the caller goes, or may not call any more; returns when it has ended."""
        if self._is_over:
            return
        async with anyio.create_task_group() as tasks:
            self._watch = tasks.cancel_scope
            if self._has_arrived:  # else the body is read meanwhile, which also tells when the caller goes
                if IS_CLOSING in self._request.scope and self._request.scope[IS_CLOSING]():
                    self.scope.cancel()
                self._request.scope.get(ON_CLOSING, []).append(self.scope.cancel)
                tasks.start_soon(self._until_gone)
            if self._checked:
                tasks.start_soon(self._until_refused, still_allowed)

    def unwatch(self) -> None:
        """Notes that the wait has ended."""
        self._is_over = True
        if self._watch is not None:
            self._watch.cancel()

    async def _until_gone(self) -> None:
        with contextlib.suppress(Exception):  # of a server around us, which will not read an answer either
            while (await self._request.receive())["type"] != "http.disconnect":
                pass
        self.scope.cancel()

    async def _until_refused(self, still_allowed: Callable[[Request], Awaitable[None]]) -> None:
        """Waits until a token is refused: it is revoked or has expired, or allows less than before."""
        while self.refused is None:
            await anyio.sleep(CHECKED_S)
            try:
                await still_allowed(self._request)
            except Exception as error:  # noqa: BLE001 - of an application's own check; this request alone fails
                if isinstance(error, Problem) or not isinstance(error, PgworkdError):
                    self.refused = error
                    self.scope.cancel()
                # else of the database: then nothing is given to anybody
