"""Tokens: who may call."""

from __future__ import annotations

from fastapi import APIRouter, Path, Request, Response

from pgworkd.gateway.api.models.operators import Revoked, TokenIn, TokenMade, TokensOut
from pgworkd.gateway.api.request.access import need
from pgworkd.gateway.api.request.answers import BODY, Json, documented
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.request.route import Route

router = APIRouter(prefix="/v1", tags=["tokens"], route_class=Route)


@router.get("/tokens", response_model=TokensOut, responses=documented())
async def list_tokens(request: Request) -> Response:
    """The newest 1,000 tokens, without their secrets."""
    need(request, "admin")
    async with gateway_of(request).admin() as admin:
        rows = await admin.tokens.find(1000)
    return Json({"tokens": [row._asdict() for row in rows]})


@router.post("/tokens", status_code=201, response_model=TokenMade, responses=documented(*BODY))
async def add_token(request: Request, body: TokenIn) -> Response:
    """Add a token. Only this answer has its text."""
    access = need(request, "admin")
    async with gateway_of(request).admin(access.name) as admin:
        made = await admin.tokens.add(body.name, body.scopes, body.expires_at)
    return Json({"id": made.id, "token": str(made)}, 201)


@router.delete("/tokens/{token_id}", response_model=Revoked, responses=documented("not-found"))
async def revoke_token(request: Request, token_id: str = Path(max_length=40)) -> Response:
    """Revoke a token: gateways refuse it within ten seconds."""
    access = need(request, "admin")
    async with gateway_of(request).admin(access.name) as admin:
        if not await admin.tokens.revoke(token_id):
            raise Problem("not-found", "there is no live token of this id")
    return Json({"id": token_id, "revoked": True})
