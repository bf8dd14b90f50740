"""Files that pages load."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from pgworkd.dashboard import render
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import OpenRoute

router = APIRouter(route_class=OpenRoute, include_in_schema=False)


@router.get("/static/{name}")
async def static(name: str, *, v: Annotated[str, Query()] = "") -> Response:
    """A file; one that is asked for by its version never changes."""
    return _file(name, v)


@router.get("/static/vendor/{name}")
async def vendored(name: str, *, v: Annotated[str, Query()] = "") -> Response:
    """A file that others have written."""
    return _file(f"vendor/{name}", v)


def _file(name: str, version: str) -> Response:
    found = render.file(name)
    if found is None:
        raise Problem("not-found", "there is no such file")
    kept = "public, max-age=31536000, immutable" if version == found.version else "no-cache"
    return Response(found.content, headers={"Cache-Control": kept}, media_type=found.media_type)
