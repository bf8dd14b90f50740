"""How a route is answered: who calls, what it is called with, and the call. FastAPI declares, checks and describes it.

Of what FastAPI can do for a route, ours need parameters, one body and the request, and answer with a response of their
own. What it does beyond that for each request took longer than all of ours.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, get_origin

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams

from pgworkd.core.access import Access
from pgworkd.core.validation import closest
from pgworkd.gateway.api.request.access import CHECKED_S
from pgworkd.gateway.api.request.bodies import BulkRequest, JsonRequest, apart, parse
from pgworkd.gateway.api.request.gateway import gateway_of
from pgworkd.gateway.api.request.problems import Problem

_NO_QUERY = QueryParams()


class Route(APIRoute):
    """A route that finds out who calls before it reads a body, and reads it as `bodies` does."""

    request_class: type[JsonRequest] = JsonRequest
    is_authorized = True
    reads_itself = False
    """True: the route's function reads the body."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        is_change = bool({"POST", "PUT", "PATCH"}.intersection(self.methods or ()))
        self._is_bodiless = is_change and self.body_field is None and not self.reads_itself
        self._arguments = _Arguments(self.dependant, strict=self.is_authorized)
        self._call: Callable[..., Awaitable[Response]] = self.endpoint
        self.app = self._answer

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        request = self.request_class(scope, receive, send)
        if self.is_authorized:
            request.state.access = await self._access(request)
        began_s = time.monotonic()
        if self._is_bodiless:
            await _check_no_body(request)
        arguments = await self._arguments.of(request)
        if self.is_authorized and time.monotonic() - began_s > CHECKED_S:  # the body took its time
            await gateway_of(request).still_allowed(request)
        response = await self._call(**arguments)
        await response(scope, receive, send)

    async def _access(self, request: Request) -> Access:
        """The access of the caller. Raises Problem unless it is known who calls."""
        return await gateway_of(request).access(request)


class BulkRoute(Route):
    """A route that reads large bodies."""

    request_class = BulkRequest


class StreamRoute(Route):
    """A route whose function reads the body as it comes."""

    reads_itself = True


class OpenRoute(Route):
    """A route that anyone may call."""

    is_authorized = False


class _Arguments:
    """The arguments of a route's function, as its signature says; `dependant`: FastAPI's reading of that."""

    def __init__(self, dependant: Any, *, strict: bool) -> None:
        """`strict`: a parameter of the query that is not known is an error; probes may have what they like."""
        if dependant.dependencies or dependant.cookie_params or len(dependant.body_params) > 1:
            raise TypeError(f"{dependant.path}: a route takes parameters, one body and the request")
        self._request: str | None = dependant.request_param_name
        self._path, self._headers = dependant.path_params, dependant.header_params
        self._query, self._strict = dependant.query_params, strict
        self._queries = {str(field.alias) for field in self._query}
        self._lists = {str(field.alias) for field in self._query if get_origin(field.field_info.annotation) is list}
        self._body = dependant.body_params[0] if dependant.body_params else None

    async def of(self, request: JsonRequest) -> dict[str, Any]:
        """The arguments of one call. Raises RequestValidationError, or Problem for what is no request at all."""
        found: dict[str, Any] = {}
        errors: list[Any] = []
        if self._request is not None:
            found[self._request] = request
        query = _NO_QUERY
        if request.scope["query_string"]:
            query = request.query_params
            if self._strict:
                _check_query(query, self._queries, self._lists)
        if self._body is not None:
            await self._read(request, await request.body(), found, errors)
        for field in self._path:
            _add(found, errors, field, ("path", field.alias), request.path_params[field.alias], given=True)
        for field in self._query:
            value = query.getlist(field.alias) if field.alias in self._lists else query.get(field.alias)
            _add(found, errors, field, ("query", field.alias), value, given=field.alias in query)
        for field in self._headers:
            value = request.headers.get(field.alias)
            _add(found, errors, field, ("header", field.alias), value, given=value is not None)
        if errors:
            raise RequestValidationError(errors)
        return found

    async def _read(self, request: JsonRequest, body: bytes, found: dict[str, Any], errors: list[Any]) -> None:
        def read() -> None:
            _add(found, errors, self._body, ("body",), _value(request, body) if body else ..., given=bool(body))

        await apart(read, request)


def _add(found: dict[str, Any], errors: list[Any], field: Any, at: tuple[str, ...], value: Any, *, given: bool) -> None:
    """Adds the value of one argument, or what is wrong with it."""
    if given:
        found[field.name], wrong = field.validate(value, loc=at)
        errors.extend(wrong)
    elif field.field_info.is_required():
        errors.append({"type": "missing", "loc": at, "msg": "Field required", "input": None})
    else:
        found[field.name] = field.default


async def _check_no_body(request: JsonRequest) -> None:
    """Raises Problem for a body that nobody would read: who sends one wants something that would not be done."""
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return
    if (await request.body()).strip() not in (b"", b"{}", b"null"):
        raise Problem("invalid", "this route takes no body: leave it out, or send {}")


def _value(request: JsonRequest, body: bytes) -> Any:
    """The value of a body. Raises Problem unless it is JSON, and declared to be."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json" and not (declared.startswith("application/") and declared.endswith("+json")):
        raise Problem("not-json-type")
    try:
        return parse(body)
    except Problem:
        if (coding := request.headers.get("content-encoding", "identity")).lower() != "identity":
            said = f"the body is not read with Content-Encoding: {coding[:20]}: send it as it is"
            raise Problem("not-json-type", said) from None
        raise


def _check_query(query: QueryParams, known: set[str], lists: set[str]) -> None:
    """Raises Problem for an unknown parameter: `?dryrun=true` must not do what `?dry_run=true` counts.

    And for one that is given twice, of which two readers may take different ones.
    """
    if twice := [name for name in query if name not in lists and len(query.getlist(name)) > 1]:
        raise Problem(
            "invalid", errors=[{"in": f"query/{twice[0][:100]}", "detail": "it is given twice: give it once"}]
        )
    unknown = [name for name in query if name not in known]
    if unknown:
        name = unknown[0][:100]
        found = closest(name, known)
        hint = f"did you mean {found}?" if found else f"it takes {', '.join(sorted(known))}" if known else "remove it"
        raise Problem(
            "invalid", errors=[{"in": f"query/{name}", "detail": f"this route has no such parameter: {hint}"}]
        )
