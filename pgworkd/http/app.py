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
from importlib.metadata import version
from typing import Any

import structlog
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import PgworkdError
from pgworkd.http.request import problems
from pgworkd.http.request.access import Authorize
from pgworkd.http.request.answers import problem_answer
from pgworkd.http.request.bounds import SLASH, Bounds
from pgworkd.http.request.gateway import Gateway, GatewayOptions
from pgworkd.http.request.problems import Problem
from pgworkd.http.routes import ROUTERS, WORKER_ROUTERS, events, service

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
        self.api = _api(gateway)
        self._app = Bounds(self.api, gateway.options.hosts, log, bodies=log_bodies)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request."""
        await self._app(scope, receive, send)

    def running(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Works while the block lasts: to be entered in the lifespan of the application that mounts this one."""
        return self.gateway.running()


def asgi(
    database: str | GatewayOptions | ConnectionOptions,
    *,
    authorize: Authorize | None = None,
    hosts: tuple[str, ...] | None = None,
) -> Application:
    """The gateway as an application. `database`: a DSN, or options.

    authorize: `authorize(request) -> Access`, sync or async, says what the caller may do, or raises
    `Problem("unauthenticated")`; None: the tokens in the database. hosts: names by which it may be called, without a
    port; None: any, where the application around it checks that, or where all callers have tokens.
    """
    if isinstance(database, str):
        database = ConnectionOptions(database)
    options = GatewayOptions(database) if isinstance(database, ConnectionOptions) else database
    return Application(Gateway(replace(options, hosts=hosts), authorize))


def _api(gateway: Gateway) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
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
    api.state.gateway = gateway
    gateway.lists = events.followed(gateway)
    # Workers' first: they are looked up in this order. Routes, not routers, which a first request would have to unfold.
    parts = ((gateway.options.workers, WORKER_ROUTERS), (gateway.options.api, ROUTERS), (True, service.ROUTERS))
    for router in (each for is_wanted, routers in parts if is_wanted for each in routers):
        api.router.routes.extend(router.routes)
    api.add_exception_handler(PgworkdError, _known)
    api.add_exception_handler(HTTPException.__mro__[1], _known)
    api.add_exception_handler(RequestValidationError, _invalid)
    api.add_exception_handler(ClientDisconnect, _gone)
    api.add_exception_handler(Exception, _unknown)
    return api


async def _known(request: Request, error: Exception) -> Response:
    problem = problems.of(error)
    if problem.slug == "method-not-allowed":
        problem.headers = {"Allow": ", ".join(sorted(_methods(request)))}
    return problem_answer(problem, request.scope.get("root_path", ""))


def _methods(request: Request) -> set[str]:
    """Those that the path has."""
    routes = [route for route in request.app.router.routes if isinstance(route, Route)]
    return {
        method for route in routes if route.matches(request.scope)[0] != Match.NONE for method in route.methods or ()
    }


async def _gone(_: Request, error: Exception) -> Response:
    """Nobody will read this."""
    return Response(status_code=400)


async def _unknown(request: Request, error: Exception) -> Response:
    request_id = request.scope.get("pgworkd.request_id", "")
    structlog.get_logger("pgworkd").error("http.failed", request_id=request_id, exc_info=error)
    problem = Problem("internal", f"see the log of the gateway for request {request_id}")
    return problem_answer(problem, request.scope.get("root_path", ""))


async def _invalid(request: Request, error: Exception) -> Response:
    found = error.errors() if isinstance(error, RequestValidationError) else []
    if found and found[0]["loc"] == ("body",) and isinstance(found[0].get("input"), bytes):
        return problem_answer(Problem("not-json-type"), request.scope.get("root_path", ""))
    errors = []
    for each in found[:100]:
        where, *steps = each["loc"]
        said = str(each["msg"]).removeprefix("Value error, ")
        place = "".join("/" + str(step).replace(SLASH, "/").replace("~", "~0").replace("/", "~1") for step in steps)
        errors.append({"pointer": place, "detail": said} if where == "body" else {"in": where + place, "detail": said})
    return problem_answer(Problem("invalid", errors=errors), request.scope.get("root_path", ""))
