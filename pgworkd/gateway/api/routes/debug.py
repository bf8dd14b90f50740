"""What this gateway's process does now: for who asks why it is slow, or hangs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from pgworkd.core import stacks
from pgworkd.gateway.api.request.access import need
from pgworkd.gateway.api.request.answers import as_bytes, documented
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route

router = APIRouter(prefix="/v1/debug", tags=["gateway"], route_class=Route)
Seconds = Annotated[int, Query(ge=1, le=30, description="How long to take samples")]


@router.get("/stacks", response_class=PlainTextResponse, responses=documented())
async def get_stacks(request: Request) -> Response:
    """The stack of each thread and asyncio task of this gateway, without values; scope `admin`."""
    await _note(request, "stacks")
    return _text(stacks.all_stacks(asyncio.get_running_loop()))


@router.get("/profile", response_class=PlainTextResponse, responses=documented("conflict"))
async def get_profile(request: Request, seconds: Seconds = 10) -> Response:
    """How often each stack was seen: a profile for flamegraph.pl or speedscope, one at a time; scope `admin`."""
    await _note(request, "profile")
    found: str | None = ""

    async def take() -> None:
        nonlocal found
        found = await stacks.profile(seconds)

    await gateway_of(request).waited(request, take, contextlib.nullcontext())
    if found is None:
        raise Problem("conflict", "another profile of this gateway is being taken: wait until that is done")
    return _text(found)


async def _note(request: Request, what: str) -> None:
    access, gateway = need(request, "admin"), gateway_of(request)
    async with gateway.admin(access.name) as admin:
        await admin.note_debug(what, gateway.options.name)


def _text(text: str) -> Response:
    return Response(as_bytes(text), media_type=PlainTextResponse.media_type)
