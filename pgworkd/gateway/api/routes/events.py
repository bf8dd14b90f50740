"""Live lists: queues, workers, dead jobs and the audit, told again whenever they change (server-sent events)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import anyio
from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.core.access import Access
from pgworkd.errors import PgworkdError
from pgworkd.gateway.api.request import problems
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.answers import documented, to_json
from pgworkd.gateway.api.request.gateway import Gateway, gateway_of
from pgworkd.gateway.api.request.live_lists import LiveList, Row
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route
from pgworkd.gateway.api.routes import fleet, queues
from pgworkd.gateway.api.routes.visible import needed_any

router = APIRouter(prefix="/v1", tags=["operators"], route_class=Route)
CHECK_S = 5.0
"""How often a stream checks whether its caller may still read."""
DEAD_SINCE_S = 86_400.0
List = Literal["queues", "workers", "dead", "audit"]


class _ListKind(NamedTuple):
    """A list: how it is read, and what of it a caller sees."""

    read: Callable[[Admin], Awaitable[list[Row]]]
    shown: Callable[[Access, list[Row]], list[Row]]


async def _workers(admin: Admin) -> list[Row]:
    return [row._asdict() for row in await admin.workers()]


async def _dead(admin: Admin) -> list[Row]:
    return [row._asdict() for row in (await admin.dead.find(DEAD_SINCE_S, None, 100)).rows]


async def _audit(admin: Admin) -> list[Row]:
    return [row._asdict() for row in await admin.audit(None, None, 100)]


def _all(_: Access, rows: list[Row]) -> list[Row]:
    return rows


KINDS: dict[str, _ListKind] = {
    "queues": _ListKind(queues.read_queues, queues.visible_queues),
    "workers": _ListKind(_workers, _all),
    "dead": _ListKind(_dead, _all),
    "audit": _ListKind(_audit, fleet.shown_entries),
}


def live_lists(gateway: Gateway) -> dict[str, LiveList]:
    """The lists of a gateway."""

    async def read(kind: _ListKind) -> list[Row]:
        async with gateway.admin() as admin:
            return await kind.read(admin)

    return {name: LiveList(partial(read, kind)) for name, kind in KINDS.items()}


@router.get(
    "/events",
    response_class=Response,
    responses={
        200: {"description": "An event per list and change: `data` is an array", "content": {"text/event-stream": {}}},
        **documented("too-many-waiters"),
    },
)
async def events(
    request: Request,
    *,
    of: Annotated[list[List], Query(min_length=1, max_length=4, description="Which lists; several may be given")],
    for_s: Annotated[float, Query(gt=0, le=86_400, description="The stream ends after this time")] = 3600.0,
) -> Response:
    """Follow lists: each is sent at once, and again when it has changed, as GET of the same name answers it.

    `dead` has the groups of the last 24 h. An event `problem` tells that a list cannot be read for now.
    """
    needed_any(request, "read")
    if set(of) != {"queues"}:
        need(request, "read")
    return _Events(request, frozenset(of), for_s)


def _text(shown: Callable[[Access, list[Row]], list[Row]], access: Access, rows: list[Row]) -> str:
    return to_json(shown(access, rows))


class _Events(Response):
    """The answer with the stream of events."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, names: frozenset[str], for_s: float) -> None:
        super().__init__()
        self._request, self._names, self._for_s = request, names, for_s
        self._gateway = gateway_of(request)
        self._one_at_a_time = anyio.Lock()
        self._began = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the stream; Starlette's hook."""
        place = self._gateway.waits.place(access_of(self._request).name)
        await self._gateway.waited(self._request, partial(self._stream, send), place, checked=False)
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
                for name in self._names:
                    tasks.start_soon(self._tell, name, send)

    async def _tell(self, name: str, send: Any) -> None:
        shown, followed = KINDS[name].shown, self._gateway.lists[name]
        async with aclosing(followed.follow()) as changes:
            async for found in changes:
                if isinstance(found, PgworkdError):
                    event, data = "problem", to_json(problems.of(found).body(""))
                else:
                    access = access_of(self._request)
                    viewer = tuple((scope, queues and tuple(queues)) for scope, queues in access.scopes.items())
                    event, data = name, followed.text(found, viewer, partial(_text, shown, access))
                async with self._one_at_a_time:
                    text = f"event: {event}\ndata: {data}\n\n"
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def _until_forbidden(self, scope: anyio.CancelScope) -> None:
        """Waits until the caller's token is revoked or has expired, which ends the stream."""
        while True:
            await anyio.sleep(CHECK_S)
            try:
                access = await self._gateway.access(self._request)
            except Problem as problem:
                if problem.slug in ("unauthenticated", "forbidden"):
                    scope.cancel()
            except PgworkdError:
                continue  # the database does not answer: the lists say so
            else:
                self._request.state.access = access
                if not (access.allows("read") or (access.has("read") and self._names == {"queues"})):
                    scope.cancel()
