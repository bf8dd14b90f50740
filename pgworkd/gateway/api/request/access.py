"""Who calls, and whether they may: tokens from the database, checked at most a few seconds ago."""

from __future__ import annotations

import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import NamedTuple

import anyio
from fastapi import Request
from starlette.exceptions import HTTPException

from pgworkd.admin.tokens import Known, TokenOperations
from pgworkd.core.access import SCOPES, Access, TokenText
from pgworkd.database.requests import RequestPool
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.process.redaction import redact

Authorize = Callable[[Request], Access | Awaitable[Access]]
"""Says what the caller of a request may do, or raises `Problem("unauthenticated")`: in the place of the tokens."""

CHECKED_S = 5.0
"""A token is looked up again after this many seconds: so soon a revocation takes effect."""
TOKENS_MAX = 10_000
HEADER_CHARS = 100
FAILURES_MAX, FAILURES_PER_S = 20, 0.2
"""Failed logins per address: at once, and regained per second."""
ADDRESSES_MAX = 10_000
_NOBODY = bytes(32)
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="pgworkd"'}


class Rate:
    """Meters per key, by the generic cell rate algorithm: `burst` at once, then `per_s`. Keys are forgotten in order.

    https://en.wikipedia.org/wiki/Generic_cell_rate_algorithm
    """

    def __init__(self, per_s: float, burst: int, keys_max: int) -> None:
        self._step_s = 1 / per_s
        self._slack_s = self._step_s * burst
        self._keys_max = keys_max
        self._full_at: OrderedDict[str, float] = OrderedDict()
        """When each key is back at its full burst."""

    def wait_s(self, key: str) -> float:
        """Seconds until one more call of the key is allowed; 0: now."""
        return max(0.0, self._full_at.get(key, 0.0) + self._step_s - self._slack_s - time.monotonic())

    def count(self, key: str) -> None:
        """Counts a call of the key."""
        now = time.monotonic()
        self._full_at[key] = max(now, self._full_at.get(key, now)) + self._step_s
        self._full_at.move_to_end(key)
        while len(self._full_at) > self._keys_max:
            self._full_at.popitem(last=False)


class _Checked(NamedTuple):
    known: Known | None
    until: float


class _LookUp:
    """One question for the tokens that have come while the question before was answered."""

    def __init__(self, token_id: str) -> None:
        self.ids = {token_id}
        self.answered = anyio.Event()
        self.error: PgworkdError | None = None


class Tokens:
    """`Authorize` by the tokens of the database.

    All tokens that wait to be looked up are one question, and there is one at a time: so a flood of wrong ones costs
    the database little, and a right one waits for two questions at most, whoever else calls from its address.
    """

    def __init__(self, database: RequestPool) -> None:
        """`database`: connections that nothing else may use up."""
        self._tokens = TokenOperations(database.lookups())
        self._checked: OrderedDict[str, _Checked] = OrderedDict()
        self._right: OrderedDict[str, _Checked] = OrderedDict()
        """By header: tokens that were right: each is read and hashed once in CHECKED_S. How long this takes says
        nothing of a secret: texts are compared only if their hashes, with a key of this process, are equal."""
        self._next: _LookUp | None = None
        self._asking = anyio.Lock()
        self._failures = Rate(FAILURES_PER_S, FAILURES_MAX, ADDRESSES_MAX)

    async def __call__(self, request: Request) -> Access:
        """The access by the request's token. Problem unauthenticated; after many failures too-many-requests instead."""
        header = request.headers.get("authorization", "")
        right = self._right.get(header)
        if right is not None and right.known is not None and right.until > time.monotonic():
            return right.known.access
        scheme, _, value = header.partition(" ")
        if not scheme:
            raise Problem("unauthenticated", headers=_CHALLENGE)
        token = TokenText.parse(value.strip()) if scheme.lower() == "bearer" else None
        sha256 = _NOBODY if token is None else token.sha256
        checked = _Checked(None, 0.0) if token is None else await self._known(token.id)
        known = checked.known
        is_right = hmac.compare_digest(sha256, _NOBODY if known is None else known.sha256)
        if token is None or known is None or not is_right:
            raise self._refusal(request, token)
        if len(header) < HEADER_CHARS:  # else it is padded, and would be kept as long as it is
            self._right[header] = checked
        while len(self._right) > TOKENS_MAX:
            self._right.popitem(last=False)
        return known.access

    def _refusal(self, request: Request, token: TokenText | None) -> Problem:
        """The answer to a wrong token: it says so, until too many have come from its address."""
        address = request.client.host if request.client is not None else ""
        was_right = request.headers.get("authorization", "") in self._right  # it is revoked: that is no guess
        if not was_right and (wait_s := self._failures.wait_s(address)) > 0:
            said = "too many requests with a wrong token came from this address"
            return Problem("too-many-requests", said, headers={"Retry-After": str(math.ceil(wait_s))})
        if not was_right:
            self._failures.count(address)
        said = "this token is unknown, expired or revoked" if token is not None else "this is no token of pgworkd"
        return Problem("unauthenticated", said, headers=_CHALLENGE)

    async def _known(self, token_id: str) -> _Checked:
        while (checked := self._checked.get(token_id)) is None or checked.until <= time.monotonic():
            if (look_up := self._next) is not None:
                look_up.ids.add(token_id)
                await look_up.answered.wait()
            else:
                look_up = self._next = _LookUp(token_id)
                await self._look_up(look_up)
            if look_up.error is not None:
                raise look_up.error
        return checked

    async def _look_up(self, look_up: _LookUp) -> None:
        try:
            async with self._asking:
                self._next, until = None, time.monotonic() + CHECKED_S
                known = await self._tokens.known(look_up.ids)
                for token_id in look_up.ids:
                    self._checked[token_id] = _Checked(known.get(token_id), until)
                    self._checked.move_to_end(token_id)
                while len(self._checked) > TOKENS_MAX:
                    self._checked.popitem(last=False)
        except PgworkdError as error:
            look_up.error = error
        finally:
            self._next = None if self._next is look_up else self._next
            look_up.answered.set()


def anyone(_: Request) -> Access:
    """`Authorize` for a gateway that only programs on this host reach: everything is allowed."""
    return Access.full("gateway")


async def authorized(authorize: Authorize, request: Request) -> Access:
    """The access by `authorize`, sync or async. Raises Problem, or AuthorizeError for the application's mistake."""
    if isinstance(authorize, Tokens):
        return await authorize(request)
    try:
        found = authorize(request)
        if not isinstance(found, Access) and isawaitable(found):
            found = await found
    except HTTPException as error:
        if isinstance(error, Problem):
            raise
        if (slug := CHECKS.get(error.status_code)) is None:
            raise AuthorizeError(f"authorize raised {type(error).__name__}({error.status_code})") from error
        raise Problem(slug, redact(str(error.detail)), headers=error.headers) from error
    except UsageError as error:
        raise AuthorizeError(f"authorize raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Access):
        raise AuthorizeError(f"authorize returned {type(found).__name__}: an Access is needed")
    return found


class AuthorizeError(Exception):
    """An application's own check of callers does what it must not; its request is answered with 500, and logged."""


CHECKS = {401: "unauthenticated", 403: "forbidden", 429: "too-many-requests", 503: "authorization-unavailable"}
"""Problems that an application's own check may answer with, in its own words."""


def access_of(request: Request) -> Access:
    """The access of a request's caller, as the route's class has found out."""
    found: Access = request.state.access
    return found


def need(request: Request, scope: str, queue: str | None = None) -> Access:
    """The caller's access; Problem forbidden unless it has the scope for the queue (None: for all queues)."""
    access = access_of(request)
    if not access.allows(scope, queue):
        where = "all queues" if queue is None else f"queue {queue!r}"
        mine = ", ".join(map(repr, access.scopes.get(scope) or ())) if queue is None else ""
        hint = f"; you have it for {mine}: name one, where the call takes a queue" if mine else ""
        raise Problem("forbidden", f"this needs the scope {scope} ({SCOPES[scope]}) for {where}{hint}", scope=scope)
    return access
