"""The answer to a request that fails: whatever is raised, the caller gets a problem."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from pgworkd import log
from pgworkd.errors import PgworkdError
from pgworkd.gateway.api.request import problems
from pgworkd.gateway.api.request.answers import problem_answer
from pgworkd.gateway.api.request.names import plain
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.process.redaction import redact

_FRAMEWORKS = HTTPException.__mro__[1]
"""The exception that routes of the framework itself raise: no route of that name, no such method."""
_CLEARER = {
    "extra_forbidden": "There is no such member",
    "dict_type": "A JSON object is needed",
    "model_attributes_type": "A JSON object is needed",
    "string_unicode": "It holds a lone surrogate (half a character)",
}
"""Texts in place of those of pydantic that speak of Python."""


def answer_to(error: Exception, scope: Any) -> Response | None:
    """The answer to a failed request; None: nobody will read it."""
    problem = problem_of(error, scope)
    return None if problem is None else problem_answer(problem, scope.get("root_path", ""))


def problem_of(error: Exception, scope: Any) -> Problem | None:
    """What an error is to the caller; None: there is none any more. An error that nobody has foreseen is logged."""
    if isinstance(error, ClientDisconnect):
        return None
    if isinstance(error, RequestValidationError):
        problem = _invalid(error)
    elif isinstance(error, PgworkdError | _FRAMEWORKS):
        problem = problems.of(error)
        if problem.slug == "method-not-allowed":
            problem.headers = {"Allow": ", ".join(sorted(_methods(scope)))}
    else:
        request_id = scope.get("pgworkd.request_id", "")
        # As text: an application may have a log that shows the variables of a traceback, tokens among them.
        said = redact("".join(traceback.format_exception(error)))
        log.logger().error("http.failed", request_id=request_id, exception=said)
        problem = Problem("internal", f"see the log of the gateway for request {request_id}")
    return problem


def clearer(kind: str, said: str) -> str:
    """The text for an error of pydantic of that type, in our words."""
    return _CLEARER.get(kind) or said.removeprefix("Value error, ")


def _methods(scope: Any) -> set[str]:
    """The methods that the path has."""
    routes = [route for route in scope["app"].router.routes if isinstance(route, Route)]
    return {method for route in routes if route.matches(scope)[0] != Match.NONE for method in route.methods or ()}


def misfit(error: ValidationError) -> Problem:
    """The problem for a value that is not of the form that it must have."""
    return Problem("invalid", errors=[_fault(("body", *each["loc"]), each) for each in error.errors()[:100]])


def _invalid(error: RequestValidationError) -> Problem:
    return Problem("invalid", errors=[_fault(each["loc"], each) for each in error.errors()[:100]])


def _fault(place: Sequence[int | str], error: Mapping[str, Any]) -> dict[str, str]:
    where, *steps = place
    said = clearer(error["type"], str(error["msg"]))
    if where == "body" and not steps and error["type"] == "missing":
        said = "The body is empty: send a JSON object"
    named = "".join("/" + plain(str(step)).replace("~", "~0").replace("/", "~1") for step in steps)
    return {"pointer": named, "detail": said} if where == "body" else {"in": f"{where}{named}", "detail": said}
