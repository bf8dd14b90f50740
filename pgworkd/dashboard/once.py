"""Forms that make something: one that is sent twice, as by a double press, makes it once."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from uuid import UUID

from fastapi import Request

from pgworkd.admin.admin import Admin
from pgworkd.dashboard.route import Form
from pgworkd.gateway.api.request.access import access_of
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.once import once
from pgworkd.gateway.api.request.problems import Problem

FIELD = "once"
"""The field with the id of a form. It is another one each time that the form is shown."""
_SAYS = {
    "key-reused": "this form was sent before, and filled in otherwise: what it made is there; send it again for more",
    "key-in-use": "this form is being sent already: send it again to see what has become of it",
}


class Made(NamedTuple):
    """What a form has made, as JSON can hold it; `before`: it had been sent before, and has made nothing now."""

    what: dict[str, Any]
    before: bool


async def made_once(request: Request, form: Form, make: Callable[[Admin], Awaitable[dict[str, Any]]]) -> Made:
    """What `make` returns, in one transaction with a note of it; what it returned when this form was sent before.

    A form without an id may be sent again and again. Raises Problem for one that was sent with other values.
    """
    key = form.one(FIELD)
    try:
        key = str(UUID(key)) if key else ""
    except ValueError:
        raise Problem("invalid", f"{FIELD}: the id of a form is a UUID: load the page again") from None
    try:
        async with once(request, key or None, access_of(request).name) as call:
            if call.earlier is not None:
                return Made(json.loads(bytes(call.earlier.body)), before=True)
            made = await make(gateway_of(request).admin_on(call.connection))
            await call.answered(made)
    except Problem as problem:
        if problem.slug not in _SAYS:
            raise
        raise Problem("conflict" if problem.slug == "key-reused" else problem.slug, _SAYS[problem.slug]) from None
    return Made(made, before=False)
