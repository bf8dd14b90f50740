"""The system: what doctor finds, the server, tables, who holds back vacuum; and tokens."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response

from pgworkd.admin.admin import Admin
from pgworkd.admin.examination import examine
from pgworkd.admin.findings import Finding
from pgworkd.core.access import SCOPES, TokenText
from pgworkd.core.address import listed
from pgworkd.dashboard import render
from pgworkd.dashboard.app import dashboard_of
from pgworkd.dashboard.once import made_once
from pgworkd.dashboard.reads import Questions
from pgworkd.dashboard.route import PageRoute, back, form_of, shown
from pgworkd.gateway.api.request.access import need
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.gateway.api.routes.visible import PathName

router = APIRouter(route_class=PageRoute, include_in_schema=False)
TOKENS = 100
DAYS = {"30": "30 days", "90": "90 days", "365": "a year", "": "never"}
"""How long a token may be valid."""
_ORDER = ("bad", "warn", "ok")


@router.get("/system")
async def system(request: Request) -> Response:
    """The findings of doctor whole, and the facts behind them; for who may add them, the tokens."""
    access = need(request, "read")
    dsn, environment = dashboard_of(request).options.dsn, gateway_of(request).options.environment

    async def read(reads: Questions) -> dict[str, Any]:
        findings = list[Finding]()

        async def examined(admin: Admin) -> None:
            await examine(admin, findings, dsn, "the database", environment, only_reads=True)

        await reads.of("all findings", examined)
        found = {
            "server": await reads.of("the server", lambda admin: admin.server()),
            "schema": await reads.of("the schema", lambda admin: admin.schema_version()),
            "holders": await reads.of("who holds back vacuum", lambda admin: admin.holders()) or [],
            "tables": await reads.of("tables", lambda admin: admin.tables()) or [],
            "tokens": await reads.of("tokens", lambda admin: admin.tokens.find(TOKENS))
            if access.allows("admin")
            else None,
        }
        findings.sort(key=lambda each: _ORDER.index(each.level))
        return {"findings": findings, "ours": version("pgworkd"), "scopes": SCOPES, "days": DAYS, **found}

    return await shown(request, "system.html", read)


@router.post("/system/tokens")
async def add(request: Request) -> Response:
    """Adds a token. Only this answer has its text."""
    access = need(request, "admin")
    form = await form_of(request)
    if (days := form.one("days")) not in DAYS:
        raise Problem("invalid", f"days: give {', '.join(filter(None, DAYS))}, or nothing for a token that stays")
    queues = list(listed(form.one("queues"))) or None
    expires_at = datetime.now(UTC) + timedelta(days=int(days)) if days else None
    token: TokenText | None = None

    async def make(admin: Admin) -> dict[str, Any]:
        nonlocal token
        token = await admin.tokens.add(form.one("name"), dict.fromkeys(form.all("scope"), queues), expires_at)
        return {"id": token.id}

    made, before = await made_once(request, form, make)
    signs_in = dashboard_of(request).callers.by_tokens
    context: dict[str, Any] = {"access": access, "signs_in": signs_in, "name": form.one("name"), "id": made["id"]}
    return render.page(request, "token.html", status=200 if before else 201, token=token, **context)


@router.post("/system/tokens/{token_id}/revoke")
async def revoke(request: Request, token_id: PathName) -> Response:
    """Revokes a token: gateways refuse it within ten seconds."""
    access = need(request, "admin")
    form = await form_of(request)
    async with gateway_of(request).admin(access.name) as admin:
        if not await admin.tokens.revoke(token_id):
            raise Problem("not-found", "there is no live token of this id")
    return back(request, form.one("back", "/system"), f"token {token_id} is revoked")
