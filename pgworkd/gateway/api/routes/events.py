"""Live lists: queues, workers, dead jobs and the audit, told again whenever they change (server-sent events)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Annotated, Literal, NamedTuple

from fastapi import APIRouter, Query, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.core.access import Access
from pgworkd.errors import PgworkdError
from pgworkd.gateway.api.request import problems
from pgworkd.gateway.api.request.access import access_of, need
from pgworkd.gateway.api.request.answers import documented, to_json
from pgworkd.gateway.api.request.gateway import Gateway, gateway_of
from pgworkd.gateway.api.request.live_lists import LiveList, Row, viewer
from pgworkd.gateway.api.request.route import Route
from pgworkd.gateway.api.request.streams import EventStream, Tell
from pgworkd.gateway.api.routes import fleet, queues
from pgworkd.gateway.api.routes.visible import needed_any

router = APIRouter(prefix="/v1", tags=["operators"], route_class=Route)
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

    def may_follow(access: Access) -> bool:
        return access.allows("read") or (access.has("read") and set(of) == {"queues"})

    parts = [partial(_tell, request, name) for name in dict.fromkeys(of)]
    return EventStream(request, parts, access=gateway_of(request).access, may_follow=may_follow, for_s=for_s)


async def _tell(request: Request, name: str, tell: Tell) -> None:
    shown, followed = KINDS[name].shown, gateway_of(request).lists[name]
    async with aclosing(followed.follow()) as changes:
        async for found in changes:
            if isinstance(found, PgworkdError):
                await tell("problem", to_json(problems.of(found).body("")))
            else:
                access = access_of(request)
                await tell(name, followed.text(found, viewer(access), partial(_text, shown, access)))


def _text(shown: Callable[[Access, list[Row]], list[Row]], access: Access, rows: list[Row]) -> str:
    return to_json(shown(access, rows))
