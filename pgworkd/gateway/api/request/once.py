"""Calls that are done at most once: those with the header Idempotency-Key, whose answers are kept for a day."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Header, Request, Response

from pgworkd.core.json_text import JsonText
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.request.answers import Json
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        description="A text of yours, as a UUID: the same call with it again, within a day, is answered as before",
    ),
]
UNDER_WAY_S = 2.0
"""How long a call waits for another one with its key, in seconds."""
_BEGIN = "SELECT is_new, same, answer FROM pgworkd.begin_once($1, $2, $3)"
_END = "SELECT pgworkd.end_once($1, $2, $3)"


class OneCall:
    """What a call does, on `connection`, in one transaction; `earlier`: its answer, if it was done before."""

    def __init__(self, connection: Any, caller: str, key: str | None) -> None:
        self.connection = connection
        self.earlier: Response | None = None
        self._caller, self._key = caller, key
        self._streamed = ""

    async def begin(self, request: Request) -> None:
        """Finds out whether the call was done before. Raises Problem for a key of another call, or of one under way."""
        if self._key is None:
            return
        of = f"{request.method} {request.url.path}?{request.url.query}\n".encode()
        digest = hashlib.sha256(of + getattr(request, "_body", b"")).digest()  # a stream has not been read
        try:
            begun = await self.connection.fetchrow(_BEGIN, self._caller, self._key, digest, timeout=UNDER_WAY_S)
        except TimeoutError:  # it has a connection for as long as it waits
            raise Problem("key-in-use") from None
        is_new, same, answer = begun
        if is_new:
            return
        if not same or answer is None:
            raise _reused()
        status, location, body, self._streamed = json.loads(answer)
        self.earlier = Json(JsonText(body), status, {"Location": location} if location else None)

    async def answered(
        self, content: Any, status: int = 201, location: str | None = None, *, streamed: str = ""
    ) -> Response:
        """The answer of a call that is done now, or was; `streamed`: the digest of a body that came meanwhile."""
        if self.earlier is not None:
            if streamed != self._streamed:
                raise _reused()
            return self.earlier
        answer = Json(content, status, {"Location": location} if location else None)
        if self._key is not None:
            kept = json.dumps([status, location, bytes(answer.body).decode(), streamed])
            await self.connection.execute(_END, self._caller, self._key, kept)
        return answer


def _reused() -> Problem:
    return Problem("key-reused", "method, path and body are to be the same")


@contextlib.asynccontextmanager
async def once(request: Request, key: str | None, by: str = "") -> AsyncIterator[OneCall]:
    """A transaction in which a call is done, unless it was before; `by`: who, for the audit. Raises Problem."""
    async with gateway_of(request).database.transaction(by) as connection:
        call = OneCall(connection, access_of(request).name, key)
        await call.begin(request)
        yield call
