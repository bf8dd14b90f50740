"""Who looks at the pages, and what they may do: the holder of a token, of a one-time address, or whom a proxy names."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict

from fastapi import Request

from pgworkd.core.access import Access, TokenText
from pgworkd.gateway.api.request.caller import FROM_PROXY
from pgworkd.gateway.api.request.gateway import Gateway
from pgworkd.gateway.api.request.problems import Problem

TOKEN_COOKIE, SESSION_COOKIE = "pgworkd_token", "pgworkd_session"
ONCE_S = 600.0
"""How long a one-time address can be used."""
SESSION_S = 12 * 3600.0
"""How long a session by a one-time address lasts."""
SESSIONS_MAX = 1000


class Callers:
    """Finds out who calls. A token is in a cookie that no script can read, and is checked as each program's is."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._once: tuple[bytes, float] | None = None
        """The secret of the one-time address, and until when it can be used."""
        self._sessions: OrderedDict[str, float] = OrderedDict()
        """The end of each session."""

    def once(self) -> str:
        """A new secret for a one-time address; the one before is worth nothing any more."""
        secret = secrets.token_urlsafe(24)
        self._once = secret.encode(), time.monotonic() + ONCE_S
        return secret

    def session(self, secret: str) -> str | None:
        """A session for the secret of a one-time address, which is worth nothing after it; None: wrong, or too old."""
        if self._once is None or not secrets.compare_digest(secret.encode(), self._once[0]):
            return None
        until, self._once = self._once[1], None
        if time.monotonic() > until:
            return None
        name = secrets.token_urlsafe(24)
        self._sessions[name] = time.monotonic() + SESSION_S
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return name

    def end(self, request: Request) -> None:
        """Ends the session of a request, if it has one."""
        self._sessions.pop(request.cookies.get(SESSION_COOKIE, ""), None)

    @property
    def by_tokens(self) -> bool:
        """Whether callers sign in here; else all may do everything, or the application around the gateway checks."""
        return self._gateway.by_tokens

    async def access(self, request: Request) -> Access:
        """What the caller may do. Raises Problem unauthenticated, or too-many-requests."""
        if not self.by_tokens:
            return await self._gateway.access(request)
        user = request.headers.get(self._gateway.options.user_header or "", "")
        if user and request.scope.get(FROM_PROXY):
            return Access(user[:200], self._gateway.options.user_scopes)
        if self._sessions.get(request.cookies.get(SESSION_COOKIE, ""), 0.0) > time.monotonic():
            return Access.full("operator")
        if (token := request.cookies.get(TOKEN_COOKIE)) is not None:
            return await self.by_token(request, token)
        return await self._gateway.access(request)  # a program may read pages, too

    async def by_token(self, request: Request, token: str) -> Access:
        """What the holder of a token may do. Raises Problem unauthenticated for a wrong one."""
        if TokenText.parse(token) is None:
            raise Problem("unauthenticated", "this is no token of pgworkd")
        headers = [each for each in request.scope["headers"] if each[0] != b"authorization"]
        headers.append((b"authorization", b"Bearer " + token.encode()))
        return await self._gateway.access(Request({**request.scope, "headers": headers}))
