"""The gateway itself: whether it lives and works, metrics of the database, and the pages of problems."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from pgworkd.gateway.api.request.access import need
from pgworkd.gateway.api.request.answers import Json, documented
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import PROBLEMS, Problem
from pgworkd.gateway.api.request.route import OpenRoute, Route
from pgworkd.metrics import page

router = APIRouter(tags=["gateway"], route_class=OpenRoute)
metered = APIRouter(tags=["gateway"], route_class=Route)
ROUTERS = (router, metered)


@router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> Response:
    """The process lives."""
    return PlainTextResponse("ok\n")


@router.get("/readyz", responses={503: {"description": "A check fails"}})
async def readyz(request: Request) -> Response:
    """The database answers, and its schema fits."""
    _, checks = await gateway_of(request).metrics()
    ok = all(check.ok for check in checks)
    return Json({"ok": ok, "checks": [check._asdict() for check in checks]}, 200 if ok else 503)


@metered.get("/metrics", response_class=PlainTextResponse, responses=documented())
async def metrics(request: Request) -> Response:
    """The families of the database, for Prometheus; scope `metrics`."""
    need(request, "metrics")
    samples, _ = await gateway_of(request).metrics()
    wants = page.accepts_openmetrics(request.headers.getlist("accept"))
    text = gateway_of(request).page.write(samples, openmetrics=wants)
    return Response(text, media_type=page.OPENMETRICS if wants else page.TEXT)


@router.get("/v1/problems/{slug}", response_class=PlainTextResponse, responses={404: documented("not-found")[404]})
async def problem(slug: str) -> Response:
    """What a problem means, and what to do."""
    if (kind := PROBLEMS.get(slug)) is None:
        raise Problem("not-found", f"there is no problem {slug[:100]!r}")
    return PlainTextResponse(f"{slug} ({kind.status})\n\n{kind.title}.\n\n{kind.remedy}\n")
