"""The application: routes, errors and description put together. For a server, or mounted below another application.

gateway = asgi("postgresql://...", authorize=check)      # authorize(request) -> Access

@contextlib.asynccontextmanager
async def lifespan(app):
    async with gateway.running():
        yield

app = FastAPI(lifespan=lifespan)
app.mount("/jobs", gateway)
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI

from pgworkd.gateway.api.description import describe
from pgworkd.gateway.api.request import spans
from pgworkd.gateway.api.request.access import Authorize
from pgworkd.gateway.api.request.bounds import Bounds
from pgworkd.gateway.api.request.gateway import Gateway, GatewayOptions
from pgworkd.gateway.api.routes import ROUTERS, WORKER_ROUTERS, debug, events, service
from pgworkd.options import gateway_options
from pgworkd.settings.config import Settings, load

if TYPE_CHECKING:
    from pgworkd.dashboard.app import Dashboard

_DESCRIPTION = "Jobs in Postgres: create, watch and operate them. Errors are problems (RFC 9457)."


class Application:
    """An ASGI application that works within `running()`; a server that runs its lifespan enters that by itself."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        log: Callable[[dict[str, object]], None] | None = None,
        log_bodies: bool = False,
    ) -> None:
        """`log`: called after each request with its facts, and with the bodies if asked to."""
        self.gateway = gateway
        self.dashboard = _dashboard(gateway) if gateway.options.dashboard else None
        self.api = _api(gateway, self)
        self._app = Bounds(self._routed, gateway.options.hosts, self._count, log, bodies=log_bodies)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request."""
        with spans.of_request(scope):
            await self._app(scope, receive, send)

    def _count(self, scope: Any, status: int, began_s: float) -> None:
        self.gateway.requests.count(scope, status, began_s)
        spans.answered(scope, status)

    async def _routed(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request to the routes: FastAPI's layers around them cost more than they, and do nothing for ours."""
        scope["app"], scope["pgworkd.gateway"] = self.api, self.gateway
        await self.api.router(scope, receive, send)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the gateway within the block, for the lifespan of the application that mounts this one."""
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.gateway.running())
            if self.dashboard is not None:
                await stack.enter_async_context(self.dashboard.running())
            yield


def asgi(
    database: str | Settings | GatewayOptions,
    *,
    authorize: Authorize | None = None,
    hosts: tuple[str, ...] | None = None,
) -> Application:
    """The gateway as an application. `database`: a DSN, settings (`pgworkd.settings.config.load()`), or options.

    With a DSN, all other settings come from PGWORKD_... and pgworkd.toml, as for `pgworkd serve`: so `keep_days` is the
    same for all processes that have the same environment. UsageError for one that is invalid.
    authorize: `authorize(request) -> Access`, sync or async, says what the caller may do, or raises FastAPI's
    HTTPException, or `Problem("unauthenticated")`; None: the tokens in the database. hosts: names by which it may be
    called, without a port; None: any, where the application around it checks that, or where all callers have tokens.
    """
    if isinstance(database, str):
        database = load(dsn=database)
    options = gateway_options(database) if isinstance(database, Settings) else database
    return Application(Gateway(replace(options, hosts=hosts), authorize))


def _dashboard(gateway: Gateway) -> Dashboard:
    """The dashboard, which needs what others do not: it is imported only where it is served."""
    from pgworkd.dashboard.app import Dashboard

    return Dashboard(gateway)


def _api(gateway: Gateway, application: Application) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with application.running():
            yield

    api = FastAPI(
        title="pgworkd",
        version=version("pgworkd"),
        description=_DESCRIPTION,
        openapi_url="/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    gateway.lists = events.live_lists(gateway)
    # Workers' first: they are looked up in this order. Routes, not routers, which a first request would have to unfold.
    parts: tuple[tuple[bool, tuple[APIRouter, ...]], ...] = (
        (gateway.options.workers, WORKER_ROUTERS),
        (gateway.options.api, ROUTERS),
        (True, (*service.ROUTERS, debug.router)),
    )
    if application.dashboard is not None:
        from pgworkd.dashboard.pages import ROUTERS as PAGES

        api.state.dashboard = application.dashboard
        parts += ((True, PAGES),)
    for router in (each for is_wanted, routers in parts if is_wanted for each in routers):
        api.router.routes.extend(router.routes)
    api.openapi = partial(describe, api)  # type: ignore[method-assign]
    return api
