"""Answers: JSON whose payloads and results are the text that the database has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from fastapi import Response

from pgworkd.core.json_text import JsonText
from pgworkd.gateway.api.models.jobs import ProblemOut
from pgworkd.gateway.api.request.problems import CONTENT_TYPE, PROBLEMS, Problem


class Json(Response):
    """A value as compact JSON; JsonText in it (as a member of an object, at any level) is not quoted."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encodes the value; Starlette's hook."""
        return as_bytes(to_json(content))


class PlainJson(Json):
    """A value without JsonText in it as compact JSON, at a fraction of the cost of `Json`."""

    def render(self, content: Any) -> bytes:
        """Encodes the value; Starlette's hook."""
        return as_bytes(_dumps(content))


def to_json(value: Any) -> str:
    """The text of a value."""
    if isinstance(value, JsonText):
        return str(value)
    if isinstance(value, dict | Mapping):
        return "{" + ",".join(f"{_dumps(str(name))}:{to_json(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple | Sequence) and not isinstance(value, str | bytes):
        return "[" + ",".join(map(to_json, value)) + "]"
    return _dumps(value)


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain).encode


def as_bytes(text: str) -> bytes:
    """JSON as UTF-8; a lone surrogate, which has no UTF-8, becomes its escape."""
    return text.encode(errors="backslashreplace")


def problem_answer(problem: Problem, prefix: str = "") -> Response:
    """The answer that says what is wrong."""
    return Json(problem.body(prefix), problem.status_code, problem.headers, CONTENT_TYPE)


def documented(*slugs: str) -> dict[int | str, dict[str, Any]]:
    """The description of a route's errors: the problems that it may answer with, beside those of all routes."""
    found: dict[int | str, dict[str, Any]] = {}
    for slug in dict.fromkeys((*slugs, *EVERYWHERE)):
        kind = PROBLEMS[slug]
        one = found.setdefault(kind.status, {"model": ProblemOut, "description": ""})
        one["description"] = "; ".join(filter(None, (one["description"], f"{slug}: {kind.title}")))
        one["content"] = {CONTENT_TYPE: {}}
    return found


BODY = ("not-json", "not-json-type", "body-too-large", "body-too-slow")
"""The problems of routes that have a body."""
EVERYWHERE = """
    unauthenticated forbidden wrong-host too-many-requests headers-too-large unavailable busy outcome-unknown
    authorization-unavailable timeout invalid cross-site internal not-found
""".split()
"""The problems of all routes."""
