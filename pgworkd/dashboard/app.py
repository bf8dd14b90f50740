"""What all pages share: connections that only read, pages that are open, who calls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
from anyio.abc import TaskGroup
from fastapi import Request

from pgworkd.core.address import frame_origin
from pgworkd.core.masks import Masks
from pgworkd.dashboard.callers import Callers
from pgworkd.dashboard.reads import Kept
from pgworkd.database.requests import RequestPool
from pgworkd.errors import UsageError
from pgworkd.gateway.api.request.gateway import Gateway
from pgworkd.gateway.api.request.live_lists import LiveLists

CONNECTIONS_MAX = 4
STATEMENT_S = 2.5
"""How long the server has for a statement of a page, in seconds: it gives up at four fifths of this."""


class Dashboard:
    """The dashboard of a gateway; it works within `running()`."""

    def __init__(self, gateway: Gateway) -> None:
        self.callers = Callers(gateway)
        self.masks = Masks(gateway.options.mask)
        """What no page shows of payloads, results and metadata."""
        self.frame_url = gateway.options.frame_url
        """A page that the overview embeds."""
        self.frame_origin = None if self.frame_url is None else _origin(self.frame_url)
        database = gateway.options.dashboard_database or gateway.options.database
        self.options = replace(database, command_timeout_s=STATEMENT_S, any_server=True)
        self.pool = RequestPool(self.options, CONNECTIONS_MAX, only_reads=True)
        self.lists = LiveLists()
        self.kept: Kept = Kept()
        """What pages have read, and need not read again each second."""
        self._tasks: TaskGroup | None = None

    @property
    def tasks(self) -> TaskGroup:
        """Where open pages are read again."""
        if self._tasks is None:
            raise RuntimeError("the dashboard is not running: enter gateway.running() in your application's lifespan")
        return self._tasks

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the dashboard while the block lasts."""
        try:
            async with anyio.create_task_group() as self._tasks:
                try:
                    yield
                finally:
                    self._tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
            await self.pool.close()


def _origin(url: str) -> str:
    try:
        return frame_origin(url)
    except ValueError as error:
        raise UsageError(f"frame_url {error}") from None


def dashboard_of(request: Request) -> Dashboard:
    """The dashboard of this application."""
    found: Dashboard = request.scope["app"].state.dashboard
    return found
