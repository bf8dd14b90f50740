"""Signing in and out; and how the pages look."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from pgworkd.dashboard import render
from pgworkd.dashboard.app import dashboard_of
from pgworkd.dashboard.callers import SESSION_COOKIE, TOKEN_COOKIE
from pgworkd.dashboard.route import OpenPage, back, form_of
from pgworkd.gateway.api.request.caller import IS_HEAD
from pgworkd.gateway.api.request.problems import Problem

router = APIRouter(route_class=OpenPage, include_in_schema=False)
KEPT_S = 30 * 86_400
"""How long a browser keeps a token."""


@router.get("/sign-in")
async def sign_in(
    request: Request, *, following: Annotated[str, Query(alias="next")] = "/", once: Annotated[str, Query()] = ""
) -> Response:
    """The form for a token; or, by a one-time address, a session."""
    if IS_HEAD in request.scope:  # of a preview: the address is for who opens it
        once = ""
    if once and (session := dashboard_of(request).callers.session(once)) is not None:
        answer = back(request, "/")
        render.set_cookie(request, answer, SESSION_COOKIE, session)
        return answer
    fault = "This address has been used, or is too old: start pgworkd again, and it prints a new one." if once else ""
    return render.page(request, "sign_in.html", status=401 if fault else 200, following=following, fault=fault)


@router.post("/sign-in")
async def signed_in(request: Request) -> Response:
    """Keeps a token that is right in the browser."""
    form = await form_of(request)
    token, following = form.one("token").strip(), form.one("next", "/")
    try:
        await dashboard_of(request).callers.by_token(request, token)
    except Problem as problem:
        fault = str(problem.detail)
        return render.page(request, "sign_in.html", status=problem.status_code, following=following, fault=fault)
    answer = back(request, following)
    render.set_cookie(request, answer, TOKEN_COOKIE, token, KEPT_S)
    return answer


@router.post("/sign-out")
async def sign_out(request: Request) -> Response:
    """Has the browser forget who it was."""
    dashboard_of(request).callers.end(request)
    answer = back(request, "/sign-in")
    for name in (TOKEN_COOKIE, SESSION_COOKIE):
        render.delete_cookie(request, answer, name)
    return answer


@router.post("/theme")
async def theme(request: Request) -> Response:
    """Keeps how the pages look: as the system has it, light or dark."""
    form = await form_of(request)
    wanted = form.one("theme")
    if wanted not in render.THEMES:
        raise Problem("invalid", f"a theme is one of {', '.join(render.THEMES)}")
    answer = back(request, form.one("back", "/"))
    render.set_cookie(request, answer, render.THEME_COOKIE, wanted, KEPT_S * 12)
    return answer
