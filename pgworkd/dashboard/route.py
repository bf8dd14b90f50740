"""How pages are answered: who looks, what is shown, errors as pages; and acts, which are forms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from fastapi import Request
from fastapi.responses import RedirectResponse
from starlette.responses import Response

from pgworkd.core.access import Access
from pgworkd.dashboard import render
from pgworkd.dashboard.app import dashboard_of
from pgworkd.dashboard.reads import Questions
from pgworkd.errors import DatabaseUnavailable, PgworkdError
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.request.bodies import JsonRequest
from pgworkd.gateway.api.request.failures import problem_of
from pgworkd.gateway.api.request.live_lists import Row, viewer
from pgworkd.gateway.api.request.names import as_sent
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route
from pgworkd.gateway.api.request.streams import EventStream, Tell

FORM_BYTES_MAX = 256 * 1024
Read = Callable[[Questions], Awaitable[dict[str, Any]]]
"""Questions what a page shows: the members of its template."""


class FormRequest(JsonRequest):
    """A request whose body is a form."""

    bytes_max = FORM_BYTES_MAX


class PageRoute(Route):
    """A route whose answers, errors too, are pages. Who has not signed in is asked to."""

    request_class = FormRequest
    reads_itself = True

    async def _access(self, request: Request) -> Access:
        return await dashboard_of(request).callers.access(request)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        began, scope = False, scope | {"query_string": _given(scope["query_string"])}

        async def sent(message: Any) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await super()._answer(scope, receive, sent)
        except Exception as error:
            if began or (problem := problem_of(error, scope)) is None:
                raise
            await _failed(Request(scope), problem)(scope, receive, send)


def _given(query: bytes) -> bytes:
    """A query without what a form has left empty."""
    if not query.endswith(b"=") and b"=&" not in query:
        return query
    return urlencode(parse_qsl(query.decode("latin-1"))).encode()


class OpenPage(PageRoute):
    """A page for those who have not signed in."""

    is_authorized = False


def _failed(request: Request, problem: Problem) -> Response:
    is_page = "text/event-stream" not in request.headers.get("accept", "")  # else one that is open, which is told
    if is_page and problem.slug == "unauthenticated" and dashboard_of(request).callers.by_tokens:
        return back(request, "/sign-in?next=" + quote(_place(request), safe=""))
    access = getattr(request.state, "access", None)
    body = problem.body("")
    return render.page(request, "problem.html", access=access, status=problem.status_code, problem=body)


def _place(request: Request) -> str:
    """The page that a request is about, below the gateway's own path; of an act: the one with its form."""
    if request.method != "GET":
        return "/"
    path = str(request.scope["path"]).removeprefix(request.scope.get("root_path", ""))
    query = request.scope["query_string"].decode("latin-1")
    return as_sent(path) + f"?{query}" * bool(query)


def back(request: Request, place: str, said: str = "") -> Response:
    """Leads the browser to another page of the dashboard, which then says this."""
    is_ours = place.startswith("/") and not place.startswith(("//", "/\\"))
    answer = RedirectResponse(request.scope.get("root_path", "") + (place if is_ours else "/"), 303)
    if said:
        render.set_cookie(request, answer, render.SAID_COOKIE, quote(said[:500]), 60)
    return answer


async def shown(request: Request, template: str, read: Read) -> Response:
    """A page; or, for one that is open already, the stream of what changes on it."""
    if "text/event-stream" not in request.headers.get("accept", ""):
        found = await _content(request, read)
        signs_in = dashboard_of(request).callers.by_tokens
        return render.page(request, template, access=access_of(request), signs_in=signs_in, **found)
    dashboard = dashboard_of(request)

    async def rows() -> list[Row]:
        try:
            return [{"html": render.main_of(request, template, await _content(request, read))}]
        except Exception as error:  # of one page: others go on
            problem = problem_of(error, request.scope)
            raise PgworkdError("" if problem is None else str(problem.detail)) from error

    async def tell(to: Tell) -> None:
        place = (request.url.path, request.url.query, viewer(access_of(request)))
        async with aclosing(dashboard.lists.follow(place, rows, dashboard.tasks)) as changes:
            async for found in changes:
                if isinstance(found, PgworkdError):
                    await to("failed", str(found))
                else:
                    await to("", found[0]["html"])

    scopes = access_of(request)
    return EventStream(request, [tell], access=dashboard.callers.access, may_follow=partial(_still_may, scopes))


def _still_may(had: Access, has: Access) -> bool:
    return viewer(had) == viewer(has)


async def _content(request: Request, read: Read) -> dict[str, Any]:
    dashboard = dashboard_of(request)
    reads = Questions(dashboard.pool, dashboard.kept)
    found = await read(reads)
    if reads.failures and not reads.answered:  # an open page stays as it was
        raise DatabaseUnavailable(reads.failures[0])
    return found | {"failures": reads.failures}


class Form:
    """The fields of a form."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        self._fields = fields

    def all(self, name: str) -> list[str]:
        """All values of a field."""
        return [value for field, value in self._fields if field == name]

    def one(self, name: str, otherwise: str = "") -> str:
        """The value of a field that is there once."""
        return next(iter(self.all(name)), otherwise)


async def form_of(request: Request) -> Form:
    """The form that a browser has sent. Raises Problem for what is none."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/x-www-form-urlencoded":
        raise Problem("invalid", "a form is needed: application/x-www-form-urlencoded")
    body = await request.body()
    try:
        return Form(parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=5000))
    except ValueError as error:
        raise Problem("invalid", f"the form cannot be read: {error}") from None
